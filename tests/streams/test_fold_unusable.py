"""Records that the fold cannot use: they cost their rank, never the partition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from foldlog import KEYS, TOPIC, Log, key_of, opened_rank, put_run, state_at, steps_of
from ranklog import RankLog, runs

from kvledger_index.units import NEVER, Drop
from kvledger_streams import fold as folding
from kvledger_streams.errors import UnreadableState
from kvledger_streams.fold import fresh, resume
from kvledger_streams.tally import NOTES_MAX, Tally
from kvledger_wire import accept as accepting
from kvledger_wire import records as wire
from kvledger_wire.accept import RankState
from kvledger_wire.partition import record_key


def test_an_unreadable_value_unloads_the_rank_that_its_key_names() -> None:
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    other.open()
    log.append((key_of(rank, 0), b"\xc1"))
    other.beat()
    tally = Tally()
    (step,) = steps_of(log, tally=tally)
    units = {unit.rank: unit for unit in step.units}

    assert units["pod-a/0"].ops == (Drop(),)
    assert units["pod-a/0"].card is not None
    assert not units["pod-a/0"].card.loaded
    assert units["pod-b/0"].after.n == 1
    assert (tally.unreadable_values, tally.unloaded) == (1, 1)


def test_an_empty_value_is_unreadable_too() -> None:
    rank, log = opened_rank()
    log.append((key_of(rank, 0), None))

    assert steps_of(log)[0].units[0].ops == (Drop(),)


def test_an_unreadable_value_of_an_unknown_rank_leaves_nothing_behind() -> None:
    state = state_at()
    (step,) = steps_of([(record_key("pod-x", 0), b"junk")], state)

    assert (step.units, state.ranks) == ((), {})


@pytest.mark.parametrize("key", [None, b"", b"no-slash", b"a/b/c", b"pod/0/\xff", b"pod/-1/0", b"/0/0"])
def test_an_unreadable_key_is_counted_and_passed(key: bytes | None) -> None:
    rank, log = opened_rank()
    log.append((key, wire.encode(wire.Fence(0, 9, "b", "0", "x"))))
    rank.beat()
    tally = Tally()
    (step,) = steps_of(log, tally=tally)

    assert (step.units[0].after.n, step.read, tally.unreadable_keys) == (1, 3, 1)


def test_a_group_beyond_the_lanes_is_a_hole_of_its_rank() -> None:
    rank, log = opened_rank()
    rank.events(group=255)
    tally = Tally()
    (step,) = steps_of(log, tally=tally)

    assert step.units[0].ops == (Drop(),)
    assert "255" in tally.notes[1].why


def test_a_rank_in_a_partition_that_is_not_its_own_is_left_alone() -> None:
    log: Log = []
    rank = RankLog(log)
    rank.open()
    home = rank.partition(4)
    tally = Tally()
    away = fresh((home + 1) % 4, partitions=4, topic_id=TOPIC, restart=0, broker_ms=0)
    (step,) = steps_of(log, away, tally=tally)

    assert (step.units, tally.misplaced, tally.notes[0].kind) == ((), 1, "misplaced")


GOOD = runs(KEYS, 0, 3)[0]
BAD_RUNS = {
    "cut key": msgspec.structs.replace(GOOD, keys=GOOD.keys[:-1]),
    "no key": msgspec.structs.replace(GOOD, keys=b""),
    "beyond the segment": msgspec.structs.replace(GOOD, position=14),
    "before the segment": msgspec.structs.replace(GOOD, position=-1),
    "bits beyond the keys": msgspec.structs.replace(GOOD, effective=0b1111),
    "negative bits": msgspec.structs.replace(GOOD, effective=-1),
    "short row": msgspec.structs.replace(GOOD, row=b"row"),
    "short parent": msgspec.structs.replace(GOOD, parent=b""),
    "first key is not the row": msgspec.structs.replace(GOOD, row=KEYS[5].to_bytes(8, "big")),
    "a parent before the first key": msgspec.structs.replace(GOOD, parent=b"\1" * 8),
}


@pytest.mark.parametrize("run", BAD_RUNS.values(), ids=BAD_RUNS.keys())
def test_a_run_that_no_bridge_writes_is_a_hole_of_its_rank(run: wire.Run) -> None:
    rank, log = opened_rank()
    put_run(rank, run)
    rank.beat()

    assert steps_of(log)[0].units[0].ops == (Drop(),)


@pytest.mark.parametrize(
    ("group", "op", "medium"),
    [(0, wire.CLEARED, 0), (0, 9, 0), (0, wire.STORED, 4), ("*", wire.STORED, 0), ("*", wire.CLEARED, -1)],
)
def test_a_change_that_no_bridge_writes_is_a_hole_of_its_rank(group: int | str, op: int, medium: int) -> None:
    rank, log = opened_rank()
    put_run(rank, GOOD, op=op, medium=medium, group=group)

    assert steps_of(log)[0].units[0].ops == (Drop(),)


def test_a_defect_of_ours_costs_the_rank_not_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    other.open()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    other.beat()

    def accept(state: RankState, group: Any, record: Any, offset: int) -> Any:
        if isinstance(record, wire.Events):
            raise LookupError("boom")  # noqa: TRY004 - any defect will do
        return accepting.accept(state, group, record, offset)

    monkeypatch.setattr(folding, "accept", accept)
    tally = Tally()
    (step,) = steps_of(log, tally=tally)
    units = {unit.rank: unit for unit in step.units}

    assert units["pod-a/0"].ops == (Drop(),)
    assert units["pod-b/0"].after.n == 1
    assert tally.notes[-1].why == "LookupError while folding"


def test_a_unit_that_the_index_would_never_take_is_a_hole_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "UNIT_OPS_MAX", 2)
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 40))
    tally = Tally()
    steps = steps_of(log, tally=tally)

    assert steps[-1].units[0].ops == (Drop(),)
    assert tally.notes[-1].why == "unit of 3 ops > 2"


def test_notes_are_bounded_and_counters_are_not() -> None:
    tally = Tally()
    steps_of([(b"junk", b"")] * (NOTES_MAX + 50), tally=tally)

    assert (len(tally.notes), tally.unreadable_keys) == (NOTES_MAX, NOTES_MAX + 50)


def test_a_stored_state_that_does_not_decode_is_refused() -> None:
    with pytest.raises(UnreadableState, match="pod-a/0"):
        resume(0, partitions=1, topic_id=TOPIC, restart=0, broker_ms=0, stored={"pod-a/0": (NEVER, b"\xc1")})


def test_a_stored_state_that_contradicts_its_stamp_is_refused() -> None:
    _, log = opened_rank()
    (step,) = steps_of(log)
    (unit,) = step.units
    wrong = unit.after._replace(n=9)
    with pytest.raises(UnreadableState, match="stands at"):
        resume(0, partitions=1, topic_id=TOPIC, restart=0, broker_ms=0, stored={unit.rank: (wrong, unit.state)})


def test_a_newer_fold_writes_every_card_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, log = opened_rank()
    (step,) = steps_of(log)
    (unit,) = step.units
    rank.beat()
    cards = []
    for version in (folding.STATE_VERSION, folding.STATE_VERSION + 1):
        monkeypatch.setattr(folding, "STATE_VERSION", version)
        stored = {unit.rank: (unit.after, unit.state)}
        state = resume(0, partitions=1, topic_id=TOPIC, restart=1, broker_ms=0, stored=stored)
        (again,) = steps_of(log[1:], state, start=1)
        cards.append(again.units[0].card)

    assert cards[0] is None
    assert cards[1] is not None
