"""The accept function: record by record, and under every way a log can reach a reader more or less than once."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranklog import RankLog, prompt

from kvledger_index.enginehash import Scheme
from kvledger_index.model import MEDIA, GroupSpec, ModelEntry
from kvledger_wire.accept import (
    UNIT_RECORDS_MAX,
    Applied,
    Dropped,
    Effect,
    Opening,
    RankState,
    accept,
    unload,
)
from kvledger_wire.partition import parse_key
from kvledger_wire.records import (
    CLEARED,
    STORED,
    Change,
    Closed,
    Events,
    Fence,
    Gap,
    Heartbeat,
    Opened,
    Resumed,
    Suspended,
    decode_event,
)

ENTRY = ModelEntry(model="m")
Log = list[tuple[bytes | None, bytes | None]]
PROMPTS = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9)]


def opened(owner: int = 1, count: int = 1, *, partial: bool = False) -> Opened:
    return Opened(0, owner, (owner, count), 0, ENTRY, 16, -1, b"", partial, "test")


def events(
    n: int,
    *,
    owner: int = 1,
    count: int = 1,
    end: bool = True,
    medium: int = 0,
    life_owner: int | None = None,
    **more: Any,
) -> Events:
    life = (owner if life_owner is None else life_owner, count)
    return Events(0, owner, life, n, n, b"d", end, (Change(STORED, medium, n, 0.0),), **more)


def clear(n: int, medium: int = 0) -> Events:
    return Events(0, 1, (1, 1), n, n, b"d", True, (Change(CLEARED, medium, n, 0.0),))


def loaded(n: int = 0) -> RankState:
    """A rank of owner 1 in its first life, having applied records up to ``n``; the last stood at offset n."""
    state = RankState()
    accept(state, "*", opened(), 0)
    for each in range(1, n + 1):
        accept(state, 0, events(each), each)
    return state


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_nothing_is_known_before_the_first_opened() -> None:
    state = RankState()

    assert accept(state, 0, events(3), 0) == []
    assert not state.loaded


def test_opened_starts_an_empty_loaded_life() -> None:
    state = RankState()

    assert kinds(accept(state, "*", opened(partial=True), 5)) == [Opening]
    assert (state.life, state.n, state.loaded, state.partial, state.at) == ((1, 1), 0, True, True, 5)


def test_opened_of_the_same_or_an_older_life_is_a_duplicate() -> None:
    state = RankState()
    accept(state, "*", opened(count=2), 0)

    assert accept(state, "*", opened(count=2), 1) == []
    assert accept(state, "*", opened(count=1), 2) == []
    assert state.life == (1, 2)


def test_opened_forgets_what_only_the_former_life_knew() -> None:
    state = loaded()
    accept(state, 3, events(1, spec=GroupSpec(3, "mamba"), uncertain=("odd",), unplaced=((0, 2),)), 1)
    accept(state, "*", Suspended(0, 1, (1, 1), 2, "why"), 2)
    assert (state.heard, state.heard_gpu, state.groups, state.uncertain) == (
        (3,),
        (3,),
        (GroupSpec(3, "mamba"),),
        ("odd",),
    )

    accept(state, "*", opened(count=2), 3)

    assert state == RankState(owner=1, life=(1, 2), n=0, loaded=True, entry=ENTRY, stride=16, at=3)


def test_records_of_a_lower_owner_do_not_count_after_a_fence() -> None:
    state = loaded(2)
    accept(state, "*", Fence(0, 4, "b", "v", "start"), 3)

    assert accept(state, 0, events(3), 4) == []
    assert accept(state, "*", opened(owner=1, count=2), 5) == []
    assert (state.n, state.owner, state.suspended, state.loaded) == (2, 4, True, True)


def test_a_higher_owner_suspends_the_rank_even_where_its_fence_is_missing() -> None:
    state = loaded(2)

    effects = accept(state, 0, events(3, owner=2, life_owner=1), 3)

    assert kinds(effects) == [Applied]
    assert (state.owner, state.suspended, state.n) == (2, True, 3)


def test_a_fence_drops_an_unfinished_unit() -> None:
    state = loaded(2)
    accept(state, 0, events(3, end=False), 3)
    accept(state, "*", Fence(0, 1, "b", "v", "again"), 4)

    assert (state.tail, state.tail_from, state.n, state.suspended) == ((), -1, 2, False)


def test_a_unit_is_applied_as_a_whole_when_its_end_arrives() -> None:
    state = loaded()

    assert accept(state, 0, events(1, end=False), 1) == []
    assert accept(state, 1, events(2, end=False), 2) == []
    assert (state.n, state.tail_from, state.at) == (0, 1, 0)
    effects = accept(state, 2, events(3), 3)

    assert [effect.group for effect in effects if isinstance(effect, Applied)] == [0, 1, 2]
    assert (state.n, state.tail, state.at) == (3, (), 3)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_number_at_or_below_is_a_duplicate(n: int) -> None:
    state = loaded(2)

    assert accept(state, 0, events(n), 3) == []
    assert (state.n, state.loaded) == (2, True)


def test_a_number_within_the_unfinished_unit_is_a_duplicate_too() -> None:
    state = loaded()
    accept(state, 0, events(1, end=False), 1)
    accept(state, 0, events(1, end=False), 2)

    assert len(state.tail) == 1


def test_a_number_above_the_next_is_a_hole_and_unloads() -> None:
    state = loaded(2)

    assert kinds(accept(state, 0, events(4), 9)) == [Dropped]
    assert (state.loaded, state.n, state.at) == (False, 2, 9)
    assert accept(state, 0, events(5), 10) == []
    assert kinds(accept(state, "*", opened(count=2), 11)) == [Opening]


def test_a_life_that_was_not_opened_unloads() -> None:
    state = loaded(2)

    assert kinds(accept(state, 0, events(1, count=2), 3)) == [Dropped]
    assert state.life == (1, 1)


def test_an_older_life_read_for_the_first_time_unloads_and_read_again_does_not() -> None:
    first, again = loaded(), loaded()
    accept(first, "*", opened(count=2), 5)
    accept(again, "*", opened(count=2), 5)

    assert kinds(accept(first, 0, events(7), 6)) == [Dropped]
    assert accept(again, 0, events(7), 5) == []
    assert again.loaded


def test_an_unreadable_record_unloads_once() -> None:
    state = loaded(2)

    assert kinds(accept(state, 0, None, 3)) == [Dropped]
    assert accept(state, 0, None, 4) == []
    assert kinds(accept(state, "*", opened(count=2), 5)) == [Opening]
    assert accept(state, 0, None, 3) == []  # read again, below what has been applied since
    assert state.loaded


def test_suspended_is_sticky() -> None:
    state = loaded()
    accept(state, "*", Suspended(0, 1, (1, 1), 1, "disconnect"), 1)
    accept(state, 0, events(2), 2)
    accept(state, "*", Heartbeat(0, 1, (1, 1), 3, 7, b"e"), 3)
    assert state.suspended

    accept(state, "*", Resumed(0, 1, (1, 1), 4, "replay"), 4)

    assert (state.suspended, state.seq, state.digest) == (False, 7, b"e")


def test_a_gap_unloads_or_marks_by_policy() -> None:
    invalid, keep = loaded(), loaded()

    assert kinds(accept(invalid, "*", Gap(0, 1, (1, 1), 1, 3, 4, "lost", "invalidate"), 1)) == [Dropped]
    assert accept(keep, "*", Gap(0, 1, (1, 1), 1, 3, 4, "lost", "keep"), 1) == []
    assert (invalid.loaded, keep.loaded, keep.uncertain) == (False, True, ("gap: lost",))


def test_closed_drops_what_was_claimed() -> None:
    state = loaded(1)

    assert kinds(accept(state, "*", Closed(0, 1, (1, 1), 2, "drained"), 2)) == [Dropped]
    assert state.closed


def test_a_gpu_clear_ends_partial_and_the_uncertainty_of_gaps() -> None:
    state = RankState()
    accept(state, "*", opened(partial=True), 0)
    accept(state, "*", Gap(0, 1, (1, 1), 1, 3, 4, "lost", "keep"), 1)
    accept(state, 0, events(2, unplaced=((0, 4), (1, 5)), uncertain=("odd tag",)), 2)
    accept(state, "*", clear(3, medium=1), 3)
    assert (state.partial, state.unplaced) == (True, ((0, 0, 4),))

    accept(state, "*", clear(4), 4)

    assert (state.partial, state.unplaced, state.uncertain) == (False, (), ("odd tag",))


def test_only_groups_heard_on_the_gpu_count_as_such() -> None:
    state = loaded()
    accept(state, 2, events(1), 1)
    accept(state, None, events(2, medium=1), 2)

    assert (state.heard, state.heard_gpu) == ((2, None), (2,))


def test_unplaced_counts_replace_those_of_their_group() -> None:
    state = loaded()
    accept(state, 1, events(1, unplaced=((0, 2),)), 1)
    accept(state, 2, events(2, unplaced=((0, 5),)), 2)
    accept(state, 1, events(3, unplaced=((0, 0),)), 3)

    assert state.unplaced == ((2, 0, 5),)


@pytest.mark.parametrize("kind", ["opaque", "veiled"])
@pytest.mark.parametrize("end", ["hole", "gap", "life"])
def test_counts_of_a_kind_go_with_those_of_unplaced_hashes(kind: str, end: str) -> None:
    state = loaded()
    some: dict[str, Any] = {kind: ((0, 1), (1, 4))}
    accept(state, 1, events(1, unplaced=((0, 2), (1, 4)), **some), 1)
    assert getattr(state, kind) == ((1, 0, 1), (1, 1, 4))

    accept(state, "*", clear(2), 2)

    assert [state.unplaced, getattr(state, kind)] == [((1, 1, 4),)] * 2
    match end:
        case "hole":
            unload(state, 3, end)
        case "gap":
            accept(state, "*", Gap(0, 1, (1, 1), 3, 1, 2, end, "invalidate"), 3)
        case _:
            accept(state, "*", opened(count=2), 3)
    assert [state.unplaced, getattr(state, kind)] == [()] * 2


def test_a_record_without_veiled_hashes_takes_back_those_of_its_group_alone() -> None:
    state = loaded()
    accept(state, 1, events(1, unplaced=((0, 2),), veiled=((0, 2),)), 1)
    accept(state, 2, events(2, unplaced=((0, 1),), veiled=((0, 1),)), 2)
    accept(state, 1, events(3, unplaced=((0, 2),)), 3)

    assert state.veiled == ((2, 0, 1),)


def test_hashes_of_a_bridge_that_does_not_list_them_are_opaque() -> None:
    """An older bridge names unplaced hashes, but not which of them became resident: the index cannot hold them."""
    state = loaded()
    listed = Change(STORED, 0, 1, 0.0, unplaced=bytes(16), unplaced_effective=b"\x03")
    bare = Change(STORED, 1, 1, 0.0, unplaced=bytes(8))
    unit = Events(0, 1, (1, 1), 1, 1, b"d", True, (listed, bare), unplaced=((0, 2), (1, 1)), opaque=((0, 1),))
    accept(state, 3, unit, 1)
    seen = [state.opaque]
    accept(state, 3, events(2, unplaced=((0, 2), (1, 4))), 2)
    seen.append(state.opaque)
    accept(state, "*", clear(3, medium=1), 3)
    accept(state, 3, events(4, unplaced=((0, 2), (1, 4))), 4)
    seen.append(state.opaque)

    assert seen == [((3, 0, 1), (3, 1, 1)), ((3, 1, 4),), ()]


def test_a_hash_scheme_is_kept_until_another_is_found_or_a_life_ends() -> None:
    state = loaded()
    accept(state, 1, events(1, scheme=Scheme("sha256")), 1)
    accept(state, 1, events(2), 2)
    assert state.scheme == Scheme("sha256")

    accept(state, 1, events(3, scheme=Scheme("xxhash_cbor")), 3)
    assert state.scheme == Scheme("xxhash_cbor")
    accept(state, "*", opened(count=2), 4)

    assert state.scheme is None


def test_a_unit_that_never_ends_unloads() -> None:
    state = loaded()
    for n in range(1, UNIT_RECORDS_MAX + 1):
        accept(state, 0, events(n, end=False), n)

    assert kinds(accept(state, 0, events(UNIT_RECORDS_MAX + 1, end=False), UNIT_RECORDS_MAX + 1)) == [Dropped]
    assert state.tail == ()


def test_unload_keeps_owner_life_and_number() -> None:
    state = loaded(2)

    assert unload(state, 7, "cannot use it") == [Dropped("cannot use it")]
    assert unload(state, 8, "again") == []
    assert (state.owner, state.life, state.n, state.at) == (1, (1, 1), 2, 8)


def test_a_state_survives_storage() -> None:
    state = loaded(2)
    accept(
        state, 5, events(3, spec=GroupSpec(5, "sliding_window", 16, window=64), unplaced=((0, 1),), opaque=((0, 1),)), 3
    )

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RankState) == state


# -- properties ----------------------------------------------------------------------------------------------------


class Model:
    """A reader of one rank: the state, and what its effects leave as claimed."""

    def __init__(self) -> None:
        self.state = RankState()
        self.claims: set[tuple[int | None, str, int]] = set()

    def take(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        group = parse_key(key).group
        for effect in accept(self.state, group, decode_event(value), offset):
            match effect:
                case Applied(group=of, changes=changes):
                    for change in changes:
                        self.change(of, change)
                case _:
                    self.claims.clear()

    def change(self, group: int | str | None, change: Change) -> None:
        medium = MEDIA[change.medium]
        if isinstance(group, str):
            self.claims = {claim for claim in self.claims if claim[1] != medium}
            return
        for run in change.runs:
            for j in range(len(run.keys) // 8):
                if run.effective >> j & 1:
                    claim = (group, medium, int.from_bytes(run.keys[8 * j : 8 * j + 8], "big"))
                    (self.claims.add if change.op == STORED else self.claims.discard)(claim)

    def restart(self) -> int:
        """Lose what is not applied, as a killed reader does; returns where reading must go on at the latest."""
        at = self.state.tail_from
        self.state = msgspec.structs.replace(self.state, tail=(), tail_from=-1)
        return at


def valid_log(seed: int, length: int) -> tuple[RankLog, Log]:
    rnd = random.Random(seed)
    log: Log = []
    rank = RankLog(log, owner=3)
    rank.take_over(3)
    for i in range(length):
        if i and rnd.random() < 0.03:
            rank.take_over(rank.owner + rnd.randint(1, 3))
            rank.open()
        rank.act(rnd, PROMPTS)
    return rank, log


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_single_delivery_ends_in_the_truth(seed: int, length: int) -> None:
    rank, log = valid_log(seed, length)
    reader = Model()
    for offset, (key, value) in enumerate(log):
        reader.take(offset, key, value)

    assert rank.held == reader.claims
    assert rank.loaded == reader.state.loaded


@given(st.integers(0, 10_000), st.integers(1, 40), st.data())
def test_redelivery_after_restarts_changes_nothing(seed: int, length: int, data: st.DataObject) -> None:
    """Read on, be killed anywhere, read again from any offset that is not above the unfinished unit."""
    _, log = valid_log(seed, length)
    once, often = Model(), Model()
    for offset, (key, value) in enumerate(log):
        once.take(offset, key, value)
    at = 0
    for _ in range(data.draw(st.integers(0, 5))):
        stop = data.draw(st.integers(at, len(log)))
        for offset in range(at, stop):
            often.take(offset, *log[offset])
        tail = often.restart()
        at = data.draw(st.integers(0, stop if tail < 0 else tail))
    for offset in range(at, len(log)):
        often.take(offset, *log[offset])

    assert (once.state, once.claims) == (often.state, often.claims)


@given(st.integers(0, 10_000), st.integers(1, 40), st.data())
def test_records_written_twice_change_nothing(seed: int, length: int, data: st.DataObject) -> None:
    """A producer may repeat what it has written since its Fence, in order: at new offsets, same owner and numbers."""
    rank, log = valid_log(seed, length)
    start = data.draw(st.integers(0, len(log) - 1))
    stop = data.draw(st.integers(start, len(log)))
    doubled = log[:stop] + log[start:]
    reader = Model()
    for offset, (key, value) in enumerate(doubled):
        reader.take(offset, key, value)

    assert reader.claims <= rank.held
    assert not reader.state.loaded or reader.claims == rank.held


@given(st.integers(0, 10_000), st.integers(2, 40), st.data())
def test_lost_records_unload_or_do_not_matter(seed: int, length: int, data: st.DataObject) -> None:
    """Whatever is missing from a log, nothing wrong is claimed by a rank that counts as loaded."""
    rank, log = valid_log(seed, length)
    lost = data.draw(st.sets(st.integers(0, len(log) - 1), min_size=1, max_size=4))
    reader = Model()
    for offset, (key, value) in enumerate(log):
        if offset not in lost:
            reader.take(offset, key, value)
    behind = reader.state.life != rank.life or reader.state.n + len(reader.state.tail) < rank.n

    assert behind or not reader.state.loaded or reader.claims == rank.held


@given(st.integers(0, 10_000), st.integers(2, 40), st.data())
def test_a_truncated_log_leaves_the_state_of_its_last_whole_unit(seed: int, length: int, data: st.DataObject) -> None:
    _, log = valid_log(seed, length)
    cut = data.draw(st.integers(0, len(log)))
    whole, part = Model(), Model()
    for offset in range(cut):
        part.take(offset, *log[offset])
    end = part.state.tail_from if part.state.tail else cut
    for offset in range(end):
        whole.take(offset, *log[offset])

    assert whole.claims == part.claims
    assert whole.state.n == part.state.n
