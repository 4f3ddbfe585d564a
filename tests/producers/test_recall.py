"""A ledger recalled from its log, against the one that wrote it: recordings, made-up corners, and what is refused."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_rank import CPU, cleared, removed, stored, text
from msgspec.structs import replace
from ranklife import Life, differences
from test_ledger_recorded import ENGINE, MANAGER, entry_of, lines, name

from kvledger_bridge.decode import Batch, Event, decode_batch
from kvledger_bridge.recall import Recall
from kvledger_index.model import ModelEntry
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import SCHEMA, Closed, Events

ENTRY = ModelEntry(model="m")

NOT_RECALLED_IN_FULL = {
    # names of blocks that were computed and never announced are in checkpoints, not in the records between them
    "d2_full_mamba_partial"
}


def batches(path: Path) -> Iterator[tuple[int, Batch]]:
    for step in lines(path):
        payload = step.get("payload") or step.get("p")
        if payload:
            yield step["seq"], decode_batch(base64.b64decode(payload))


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_a_recalled_ledger_goes_on_as_the_one_that_wrote_the_log(path: Path) -> None:
    """Checkpoint and end of the log at random places; what both say of every later batch is compared.

    ledger    batches ---- checkpoint ---- batches --+-- batches ------>
    recalled                  |______________________|-- batches ------>   equal
    """
    rnd = random.Random(name(path))
    steps = list(batches(path))
    life = Life(entry_of(lines(path)[0]))
    end = rnd.randrange(len(steps) // 3, len(steps))
    at = rnd.randrange(end // 2, end)
    since = 0
    for i, step in enumerate(steps[:end]):
        life.take(*step)
        if i == at:
            since = life.checkpoint(entries_max=50)
    recalled = life.recall(since)
    less = differences(life.ledger, recalled.ledger)
    unequal = 0
    for i, step in enumerate(steps[end:]):
        unequal += life.ledger.apply(*step) != recalled.ledger.apply(*step)
        if i % 16 == 0:
            less += differences(life.ledger, recalled.ledger)
    less += differences(life.ledger, recalled.ledger)

    assert recalled.ledger.counts.removals_unknown == 0
    assert recalled.state == life.state
    if name(path) not in NOT_RECALLED_IN_FULL:
        assert (less, unequal) == ([], 0)


def test_what_the_log_does_not_tell_is_claimed_less_and_counted_the_same() -> None:
    """A recording whose blocks are named by chains, some of them before they are announced."""
    path = next(each for each in MANAGER if name(each) in NOT_RECALLED_IN_FULL)
    steps = list(batches(path))
    life = Life(entry_of(lines(path)[0]))
    for step in steps[:74]:
        life.take(*step)
    recalled = life.recall()
    less: list[str] = []
    for step in steps[74:]:
        life.ledger.apply(*step)
        recalled.ledger.apply(*step)
        less += differences(life.ledger, recalled.ledger)

    assert less
    assert recalled.ledger.counts.removals_unknown == 0


_add: Any = Recall._add
_restate: Any = Recall._restate
_named: Any = Recall._named

FORGOTTEN: dict[str, tuple[str, Any]] = {
    "copies": ("_add", lambda self, lane, block, _copies: _add(self, lane, block, 1)),
    "removals": ("_remove", lambda _self, _lane, _block: None),
    "digests": ("_named", lambda self, run, **how: _named(self, _without(run, "digests"), **how)),
}


def _nothing_but_lanes(self: Recall, part: Any) -> None:
    _restate(self, replace(part, parents=(), weak=(), ambiguous=b""))


def _without(value: Any, field: str) -> Any:
    return replace(value, **{field: type(getattr(value, field))()})


def noticed(path: Path) -> bool:
    try:
        test_a_recalled_ledger_goes_on_as_the_one_that_wrote_the_log(path)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_recall_that_forgets_something_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: some recording shows it."""
    method, instead = FORGOTTEN[what]
    monkeypatch.setattr(Recall, method, instead)

    assert any(noticed(path) for path in reversed([*MANAGER, *ENGINE]))


# -- made-up corners --------------------------------------------------------------------------------------------------


class Two:
    """A life that is written, recalled, and goes on in both ledgers."""

    def __init__(self, *batches: tuple[Event, ...], checkpoint: bool, **entry: Any) -> None:
        self.life = Life(ModelEntry(model="m", **entry))
        self.seq = -1
        for events in batches:
            self.seq += 1
            self.life.take(self.seq, Batch(1.5, 0, events))
        since = self.life.checkpoint(entries_max=2) if checkpoint else 0
        self.recalled = self.life.recall(since)

    def equal(self, *events: Event) -> bool:
        """Whether both say the same of one batch more."""
        self.seq += 1
        batch = Batch(1.5, 0, events)
        return self.life.ledger.apply(self.seq, batch) == self.recalled.ledger.apply(self.seq, batch)


either = pytest.mark.parametrize("checkpoint", [True, False])


@either
def test_the_last_of_several_copies_is_the_effective_one(checkpoint: bool) -> None:
    one = stored([1, 2], text(2))
    two = Two((one,), (one,), (removed(1),), checkpoint=checkpoint)

    assert two.equal(removed(2))
    assert two.equal(removed(2))
    assert two.equal(removed(1))
    assert two.recalled.ledger.resident(0) == {}


@either
def test_evicted_parents_still_name_their_children(checkpoint: bool) -> None:
    two = Two((stored([1, 2, 3], text(3)),), (removed(1, 2, 3),), checkpoint=checkpoint)

    assert two.equal(stored([4], text(4)[48:], 3))
    assert list(two.recalled.ledger.placed(0)) == [4]


@either
def test_a_hash_that_stood_for_two_prefixes_stays_unplaced(checkpoint: bool) -> None:
    two = Two((stored([1], text(1)),), (stored([1], text(1, salt=2)),), checkpoint=checkpoint)

    assert two.recalled.ledger.unplaced(0) == {1: 2}
    assert two.equal(stored([1], text(1)))
    assert two.recalled.ledger.placed(0) == {}


def test_a_hash_that_lost_its_prefix_while_it_was_away_stays_unplaced() -> None:
    """Nobody held it when it became doubtful, so the log shows only that it then came without a key."""
    two = Two((stored([1], text(1)),), (removed(1),), (stored([1], text(1, salt=2)),), checkpoint=False)

    assert two.recalled.ledger.unplaced(0) == {1: 1}
    assert two.equal(stored([1], text(1)))


@either
def test_orphans_stay_unplaced_when_their_parent_comes_as_their_tokens_are_gone(checkpoint: bool) -> None:
    two = Two((stored([3], text(3)[32:], 2),), checkpoint=checkpoint)

    assert not two.equal(stored([1, 2], text(2)))
    assert two.life.ledger.placed(0).keys() == {1, 2, 3}
    assert two.recalled.ledger.placed(0).keys() == {1, 2}
    assert two.recalled.ledger.unplaced(0) == {3: 1}


@either
def test_an_orphan_that_was_attached_is_recalled_with_its_key(checkpoint: bool) -> None:
    two = Two((stored([3], text(3)[32:], 2),), (stored([1, 2], text(2)),), checkpoint=checkpoint)

    assert two.recalled.ledger.placed(0) == two.life.ledger.placed(0)
    assert two.equal(removed(3))


@either
def test_names_of_lower_tiers_serve_lower_tiers_only(checkpoint: bool) -> None:
    two = Two((stored([1], text(1), medium="CPU"),), checkpoint=checkpoint)

    assert two.equal(stored([1], (), size=0))
    assert two.recalled.ledger.unplaced(0, "gpu") == {1: 1}
    assert two.equal(stored([1], text(1)))
    assert two.equal(removed(1, medium="CPU"))


@either
def test_a_block_with_several_names_is_removed_by_each_of_them(checkpoint: bool) -> None:
    two = Two(
        (stored([1], text(1), medium="CPU", group_idx=None),),
        (stored([9], text(1)),),
        (stored([9], (), size=0, medium="CPU"),),
        checkpoint=checkpoint,
    )

    assert two.equal(removed(1, medium="CPU", group=None))
    assert two.equal(removed(9, medium="CPU"))
    assert two.equal(removed(9))
    assert not any(lane.copies for lane in two.recalled.ledger.lanes)


@either
def test_a_block_of_lower_tiers_is_removed_by_each_of_its_names(checkpoint: bool) -> None:
    two = Two(
        (stored([1], text(1), medium="CPU"), stored([2], text(1), medium="CPU")),
        checkpoint=checkpoint,
    )

    assert two.equal(removed(2, medium="CPU"))
    assert two.equal(removed(1, medium="CPU"))
    assert not any(lane.copies for lane in two.recalled.ledger.lanes)


@either
def test_a_weak_name_that_gave_way_to_a_strong_one_is_recalled_as_that(checkpoint: bool) -> None:
    two = Two((stored([1], text(1), medium="CPU"),), (stored([1], text(1, salt=3)),), checkpoint=checkpoint)

    assert two.recalled.ledger.placed(0, "cpu") == two.life.ledger.placed(0, "cpu")
    assert two.equal(removed(1, medium="CPU"))
    assert two.equal(stored([2], text(2, salt=3)[16:], 1))


@either
def test_a_clear_leaves_what_it_leaves(checkpoint: bool) -> None:
    two = Two(
        (stored([1], text(1)), stored([2], text(2)[16:], 1, medium="STORAGE"), stored([7], (), size=0)),
        (cleared(),),
        checkpoint=checkpoint,
    )

    assert {(lane.code, len(lane.copies), len(lane.unplaced)) for lane in two.recalled.ledger.lanes if lane.copies} == {
        (2, 1, 0)
    }
    assert two.equal(stored([3], text(3)[32:], 2))


@pytest.mark.parametrize("copies", ["counted", "last"])
@either
def test_engines_that_announce_only_last_copies_are_recalled_so(copies: str, checkpoint: bool) -> None:
    one = stored([1, 5], (*text(1), *text(1, salt=5)))
    two = Two((one,), (one,), checkpoint=checkpoint, copies=copies)

    assert two.equal(removed(1))
    assert (1 in two.recalled.ledger.placed(0)) == (copies == "counted")


CORNERS = {
    "parents": test_evicted_parents_still_name_their_children,
    "weak": test_a_block_of_lower_tiers_is_removed_by_each_of_its_names,
    "ambiguous": test_a_hash_that_stood_for_two_prefixes_stays_unplaced,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_a_recall_of_nothing_but_residents_is_noticed(corner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary."""
    monkeypatch.setattr(Recall, "_restate", _nothing_but_lanes)

    with pytest.raises(AssertionError):
        CORNERS[corner](True)


def test_more_copies_than_the_log_can_say_are_told_as_many_as_it_can() -> None:
    life = Life(ENTRY)
    life.take(0, Batch(0.0, 0, (stored([1], text(1)),)))
    [lane] = life.ledger.lanes
    lane.copies[next(iter(lane.copies))] = 70_000
    since = life.checkpoint()

    assert life.recall(since).ledger.resident(0) == {1: 65_535}


def test_opaque_hashes_are_told_one_by_one_in_checkpoints() -> None:
    lookahead = stored([1], text(1), lookahead_token_ids=(1,))
    two = Two((lookahead, stored([2], text(3)[32:], 9)), checkpoint=True)
    [lane] = two.recalled.ledger.lanes

    assert (lane.opaque, set(lane.unplaced)) == ({1}, {1, 2})


def test_where_only_a_count_says_which_are_opaque_all_are() -> None:
    lookahead = stored([1], text(1), lookahead_token_ids=(1,))
    two = Two((lookahead, stored([2], text(3)[32:], 9)), checkpoint=False)
    [lane] = two.recalled.ledger.lanes

    assert lane.opaque == {1, 2}


@either
@pytest.mark.parametrize("mixed", [True, False])
def test_veiled_hashes_are_told_one_by_one_in_checkpoints_and_by_count_where_all_are(
    mixed: bool, checkpoint: bool
) -> None:
    """A child follows a parent that is known to be veiled, and only such a one."""
    events = [stored([1], text(3)[32:], 8, lora_name="a"), *([stored([2], text(3)[32:], 9)] if mixed else [])]
    two = Two(tuple(events), checkpoint=checkpoint)
    [lane] = two.recalled.ledger.lanes

    assert lane.veiled == ({1} if checkpoint or not mixed else set())
    assert two.equal(stored([3], text(3)[32:], 1)) == bool(lane.veiled)
    assert two.equal(cleared())


def test_an_empty_ledger_is_a_checkpoint_of_one_part() -> None:
    life = Life(ENTRY)
    since = life.checkpoint()

    assert len(life.log) == since + 1
    assert life.recall(since).ledger.lanes == []


# -- what is refused --------------------------------------------------------------------------------------------------


def _written() -> Life:
    life = Life(ENTRY)
    life.take(0, Batch(0.0, 0, (stored([1, 2], text(2)),)))
    life.take(1, Batch(0.0, 0, (removed(1),)))
    return life


def test_a_log_without_a_beginning_is_refused() -> None:
    assert _written().read(since=2).why == "no whole life is in the log"


def test_an_unreadable_record_is_refused_and_a_later_checkpoint_heals_it() -> None:
    life = _written()
    life.log[2] = (0, None)

    assert life.read().why == "no whole life is in the log"
    life.checkpoint()
    assert life.read().why == ""


def test_a_closed_rank_is_refused() -> None:
    life = _written()
    life.write(RANK_WIDE, Closed(SCHEMA, 7, (7, 1), life.state.n + 1, "drained"))

    assert life.read().why == "the rank was closed"


def test_a_life_under_another_model_entry_is_refused() -> None:
    """Its keys may be of another model, or of strides of another length."""
    assert "model entry" in _written().read(entry=ModelEntry(model="m", hash_block_size=32)).why


def test_a_log_of_a_bridge_that_told_no_segments_is_refused_until_a_checkpoint() -> None:
    life = _written()
    change = life.log[2][1].changes[0]
    old = replace(change.runs[0], segment=-1)
    life.replace(2, changes=(replace(change, runs=(old,)),))

    assert "where on its path" in life.read().why
    assert life.read(since=life.checkpoint()).why == ""


def _events(life: Life, **fields: Any) -> None:
    change = replace(life.log[3][1].changes[0], **fields)
    life.write(0, Events(SCHEMA, 7, (7, 1), life.state.n + 1, 2, b"d" * 16, end=True, changes=(change,)))


@pytest.mark.parametrize(
    "fields", [{}, {"origin": 2}, {"medium": CPU}, {"runs": (), "unplaced": b"\0" * 8}, {"op": 1, "origin": 2}]
)
def test_a_log_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    """Removed twice, retracted, in another tier, without a key, attached: nothing of it was there."""
    life = _written()
    _events(life, **fields)

    assert "there" in life.read().why


def test_changes_of_the_whole_rank_are_clears() -> None:
    life = _written()
    life.log[3] = (RANK_WIDE, life.log[3][1])

    assert life.read().why == "changes of group * that are no clear"
