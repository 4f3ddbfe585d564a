"""Checkpoints and the accept function: what a reader that is not loaded makes of them, and one that is ignores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranklog import NO_PARENT, RankLog
from test_accept import ENTRY, PROMPTS, Log, Model, events, kinds, loaded, opened

from kvledger_index.enginehash import Scheme
from kvledger_index.model import GroupSpec
from kvledger_wire import accept as accepting
from kvledger_wire.accept import NO_LIFE, Applied, Dropped, Loading, Opening, RankState, accept
from kvledger_wire.records import (
    ATTACHED,
    REMOVED,
    STORED,
    Change,
    Checkpoint,
    Closed,
    EventRecord,
    Events,
    Fence,
    Heartbeat,
    Held,
    Resumed,
    Run,
    Suspended,
    decode_event,
)

KEY = b"k" * 8
RUN = Run(KEY, 0, NO_PARENT, KEY, blocks=1, effective=1, hashes=b"h" * 8)
HELD = Held(0, Change(STORED, 0, 7, 0.0, (RUN,)))


def part(
    n: int,
    number: int = 0,
    *,
    owner: int = 1,
    life: tuple[int, int] = (1, 1),
    last: bool = False,
    lanes: tuple[Held, ...] = (HELD,),
    **more: Any,
) -> Checkpoint:
    facts: dict[str, Any] = {"partial": False, "suspended": False} | more
    return Checkpoint(0, owner, life, n, number, last, ENTRY, 16, 7, b"c", lanes=lanes, **facts)


def loading(parts: int = 1, **facts: Any) -> RankState:
    """A reader that was given the first parts of a checkpoint and nothing before; record n of the life at offset n."""
    state = RankState()
    for number in range(parts):
        accept(state, "*", part(10 + number, number, **facts), 10 + number)
    return state


def test_a_loaded_reader_takes_nothing_but_the_number_of_a_checkpoint() -> None:
    state = loaded(2)
    accept(state, 0, events(3, unplaced=((0, 2),), spec=GroupSpec(0, "mamba")), 3)
    before = msgspec.structs.replace(state)

    assert accept(state, "*", part(4), 4) == []
    assert accept(state, "*", part(5, 1, last=True), 5) == []
    assert state == msgspec.structs.replace(before, n=5, at=5, seq=7, digest=b"c")


def test_the_first_part_begins_a_load_and_the_last_ends_it() -> None:
    state = RankState()
    effects = accept(state, "*", part(10), 10)

    assert kinds(effects) == [Loading, Applied]
    assert (state.loaded, state.load, state.life, state.n, state.at) == (False, 1, (1, 1), 10, 10)
    assert kinds(accept(state, "*", part(11, 1), 11)) == [Applied]
    assert (state.loaded, state.load) == (False, 2)
    assert kinds(accept(state, "*", part(12, 2, last=True), 12)) == [Applied]
    assert (state.loaded, state.load, state.n) == (True, 0, 12)
    assert kinds(accept(state, 0, events(13), 13)) == [Applied]


def test_a_checkpoint_of_one_part_loads_at_once() -> None:
    state = RankState()

    assert kinds(accept(state, "*", part(10, last=True), 10)) == [Loading, Applied]
    assert (state.loaded, state.load) == (True, 0)


def test_a_load_knows_what_the_checkpoint_restates() -> None:
    facts: dict[str, Any] = {
        "partial": True,
        "suspended": True,
        "uncertain": ("odd",),
        "engine_version": "0.33",
        "process": "p",
        "groups": (GroupSpec(0, "mamba"),),
        "heard": (0, 1),
        "heard_gpu": (0,),
        "scheme": Scheme("sha256"),
        "unplaced": ((0, 0, 3),),
        "opaque": ((0, 0, 1),),
        "veiled": ((0, 0, 2),),
    }
    state = loading(last=True, **facts)

    assert facts == {name: getattr(state, name) for name in facts}
    assert (state.entry, state.stride, state.seq, state.digest, state.owner) == (ENTRY, 16, 7, b"c", 1)


def test_a_load_leaves_nothing_of_what_was_known() -> None:
    """A former life's counts and reasons, and that it was closed, are not those of the checkpoint's."""
    state = loaded(2)
    accept(state, 0, events(3, uncertain=("odd",), unplaced=((0, 2),), scheme=Scheme("sha256")), 3)
    bare = Change(STORED, 0, 4, 0.0, unplaced=KEY)  # of an older bridge, so the lane is noted as unlisted
    accept(state, 0, Events(0, 1, (1, 1), 4, 4, b"d", True, (bare,), unplaced=((0, 3),)), 4)
    accept(state, "*", Closed(0, 1, (1, 1), 5, "gone"), 5)
    accept(state, "*", part(9, last=True), 9)

    assert state == msgspec.structs.replace(loading(last=True), n=9, at=9)


def test_every_hash_of_a_lane_is_held_marked_or_not() -> None:
    change = Change(STORED, 0, 7, 0.0, unplaced=bytes(8 * 9))
    marked = msgspec.structs.replace(change, unplaced_effective=b"\xff\x01")
    taken = [accept(RankState(), "*", part(3, lanes=(Held(2, each),)), 3) for each in (change, marked)]

    assert taken[0][1:] == taken[1][1:] == [Applied(2, (marked,))]


@pytest.mark.parametrize(
    "change",
    [
        Change(REMOVED, 0, 7, 0.0, (RUN,)),
        Change(STORED, 0, 7, 0.0, (RUN,), origin=ATTACHED),
        Change(STORED, 0, 7, 0.0, (msgspec.structs.replace(RUN, effective=0),)),
    ],
)
def test_a_part_that_does_not_say_what_is_held_loads_nothing(change: Change) -> None:
    state, first = loading(), RankState()
    lanes = (HELD, Held(0, change))

    assert kinds(accept(state, "*", part(11, 1, last=True, lanes=lanes), 11)) == [Dropped]
    assert accept(first, "*", part(10, last=True, lanes=lanes), 10) == []
    assert [state.loaded, state.load, first.loaded, first.load] == [False, 0, False, 0]


@pytest.mark.parametrize(
    ("group", "record"),
    [
        (0, events(11)),
        ("*", Heartbeat(0, 1, (1, 1), 11, 7, b"c")),
        ("*", Suspended(0, 1, (1, 1), 11, "lost")),
        ("*", Fence(0, 1, "b", "v", "again")),
        ("*", Fence(0, 2, "b", "v", "other")),
        ("*", part(11, 2, last=True)),
        ("*", part(12, 1, last=True)),
        ("*", part(11, 1, last=True, owner=2)),
        ("*", part(11, 1, last=True, life=(1, 2))),
        (0, events(11, count=2)),
        (0, None),
    ],
)
def test_any_record_but_the_next_part_ends_a_load(group: int | str, record: EventRecord | None) -> None:
    state = loading()

    assert kinds(accept(state, group, record, 20)) == [Dropped]
    assert (state.loaded, state.load) == (False, 0)
    accept(state, "*", part(11, 1, last=True), 21)
    assert not state.loaded


@pytest.mark.parametrize(
    ("record", "offset"),
    [
        (part(10), 20),
        (part(9), 9),
        (events(8), 8),
        (events(1, owner=0), 20),
        (Fence(0, 1, "b", "v", "read again"), 2),
        (None, 4),
        (opened(), 5),
    ],
)
def test_what_does_not_count_does_not_end_a_load(record: EventRecord | None, offset: int) -> None:
    """Duplicates, records of lower owners and what is read again: a reader may restart in the middle of a load."""
    state = loading(2)

    assert accept(state, "*", record, offset) == []
    assert kinds(accept(state, "*", part(12, 2, last=True), 21)) == [Applied]
    assert state.loaded


def test_another_first_part_over_an_unfinished_load_begins_anew() -> None:
    state = loading(2)

    assert kinds(accept(state, "*", part(12), 12)) == [Loading, Applied]
    assert state.load == 1
    accept(state, "*", part(13, 1, last=True), 13)
    assert state.loaded


def test_opened_over_an_unfinished_load_is_a_new_life() -> None:
    state = loading()

    assert kinds(accept(state, "*", opened(count=2), 20)) == [Opening]
    assert (state.loaded, state.load, state.n) == (True, 0, 0)


def test_a_hole_that_ends_at_a_checkpoint_is_loaded_from_it() -> None:
    state = loaded(2)

    assert kinds(accept(state, "*", part(6), 20)) == [Loading, Applied]
    accept(state, "*", part(7, 1, last=True), 21)
    assert (state.loaded, state.n) == (True, 7)


def test_a_hole_within_a_checkpoint_unloads_a_reader_that_was_loaded() -> None:
    state = loaded(2)
    accept(state, "*", part(3), 3)

    assert kinds(accept(state, "*", part(5, 2, last=True), 4)) == [Dropped]
    assert not state.loaded


def test_an_unloaded_rank_comes_back_with_the_next_checkpoint_of_its_life() -> None:
    state = loaded(2)
    accept(state, 0, None, 3)
    accept(state, 0, events(4), 4)

    assert accept(state, "*", part(2, last=True), 5) == []  # at or below what was applied: a duplicate
    assert kinds(accept(state, "*", part(5, last=True), 6)) == [Loading, Applied]
    assert state.loaded


def test_a_restored_bridge_goes_on_in_the_life_of_the_one_before() -> None:
    """The life keeps its number, its records name who writes them.

    owner 1:  0 1 2
    owner 4:         Fence  3 Resumed  4        all of life (1, 1)
    """
    state = loaded(2)
    accept(state, "*", Fence(0, 4, "b", "v", "start"), 3)
    assert (state.suspended, state.loaded) == (True, True)
    accept(state, "*", Resumed(0, 4, (1, 1), 3, "replay"), 4)
    assert not state.suspended

    assert kinds(accept(state, 0, events(4, owner=4, life_owner=1), 5)) == [Applied]
    assert accept(state, 0, events(5), 6) == []  # the earlier owner is fenced, whatever its numbers
    assert (state.owner, state.life, state.n) == (4, (1, 1), 4)


def test_a_higher_owner_over_an_unloaded_rank_may_restate_any_life() -> None:
    """What life it was is of no use any more; the owner alone keeps the order."""
    state = loaded(2)
    accept(state, "*", opened(count=2), 3)
    accept(state, 0, None, 4)
    accept(state, "*", Fence(0, 5, "b", "v", "start"), 5)
    assert (state.owner, state.life, state.n) == (5, NO_LIFE, -1)

    assert kinds(accept(state, "*", part(9, owner=5, last=True), 6)) == [Loading, Applied]
    assert (state.loaded, state.life, state.suspended) == (True, (1, 1), False)


def test_a_higher_owner_whose_fence_was_not_read_may_restate_a_lower_life() -> None:
    """A reader that starts behind a Fence may take up what its victim still wrote; the checkpoint puts that right."""
    state = RankState()
    accept(state, "*", opened(owner=5), 11)

    assert kinds(accept(state, "*", part(9, owner=7, last=True), 12)) == [Loading, Applied]
    assert (state.owner, state.life, state.loaded) == (7, (1, 1), True)


def test_an_owner_does_not_go_back_to_a_lower_life() -> None:
    """The stamps of an index only grow, so such a rank waits for the owner's next life."""
    state = loaded()
    accept(state, "*", opened(count=3), 5)

    assert kinds(accept(state, "*", part(9, life=(1, 2), last=True), 6)) == [Dropped]
    assert (state.loaded, state.life) == (False, (1, 3))


def test_an_engine_process_that_is_alive_proves_no_batch() -> None:
    state = loaded(1)
    accept(state, "*", Heartbeat(0, 1, (1, 1), 2, 9, b"e", ("odd",), alive=True), 2)

    assert (state.n, state.seq, state.digest, state.uncertain) == (2, 1, b"d", ("odd",))


def test_a_state_within_a_load_survives_storage_and_older_states_are_read() -> None:
    state = loading(2)
    older = msgspec.msgpack.encode({"owner": 1, "life": (1, 1), "n": 3, "loaded": True})

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RankState) == state
    assert msgspec.msgpack.decode(older, type=RankState) == RankState(owner=1, life=(1, 1), n=3, loaded=True)


# -- properties ----------------------------------------------------------------------------------------------------


def checkpointed_log(seed: int, length: int) -> tuple[RankLog, Log]:
    """What restoring bridges write: lives that go on under new owners, checkpoints anywhere, some broken off."""
    rnd = random.Random(seed)
    log: Log = []
    rank = RankLog(log, owner=3)
    rank.take_over(3)
    for _ in range(length):
        roll = rnd.random()
        if not rank.loaded or roll < 0.7:
            rank.act(rnd, PROMPTS)
        elif roll < 0.85:
            rank.checkpoint(rnd.randint(1, 3))
        elif roll < 0.90:
            rank.part(0, last=False, lanes=rank.holdings()[:1])
        else:
            rank.take_over(rank.owner + rnd.randint(1, 3))
            if roll < 0.97:
                rank.resume()
            else:
                rank.open()
    return rank, log


def pictures(log: Log, start: int = 0) -> Iterator[tuple[bool, Any]]:
    """After each record from ``start`` on: whether the rank is loaded, and all that is then said of it."""
    reader = Model()
    for offset in range(start, len(log)):
        reader.take(offset, *log[offset])
        state = reader.state
        said = (state.owner, state.life, state.n, state.seq, state.partial, state.suspended, state.tail, state.entry)
        yield state.loaded, (said, frozenset(reader.claims))


def complete_from(log: Log, start: int) -> int:
    """Behind which offset a reader from ``start`` must be loaded whenever one from zero is: the first Opened or whole
    checkpoint that lies behind it; the log's length where there is none.
    """
    due = None
    for offset in range(start, len(log)):
        record = decode_event(log[offset][1])
        if isinstance(record, Checkpoint):
            due = record.part + 1 if record.part in {0, due} else None
        if getattr(record, "n", -1) == 0 or (due is not None and isinstance(record, Checkpoint) and record.last):
            return offset
        if not isinstance(record, Checkpoint):
            due = None
    return len(log)


def agree_from(log: Log, start: int) -> bool:
    """A reader from ``start`` equals one from zero once it is loaded, and is loaded as soon as it can be."""
    whole, loaded_from = list(pictures(log)), complete_from(log, start)
    for offset, (is_loaded, said) in enumerate(pictures(log, start), start):
        if is_loaded and whole[offset] != (True, said):
            return False
        if offset >= loaded_from and is_loaded != whole[offset][0]:
            return False
    return True


@given(st.integers(0, 10_000), st.integers(1, 40), st.data())
def test_a_reader_from_anywhere_equals_the_one_from_zero_or_is_not_loaded(
    seed: int, length: int, data: st.DataObject
) -> None:
    """Retention takes the log's head; where it cuts must not matter once an Opened or a whole checkpoint was read."""
    _, log = checkpointed_log(seed, length)

    assert agree_from(log, data.draw(st.integers(0, len(log) - 1)))


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_a_reader_from_zero_ends_in_the_truth_whatever_checkpoints_lie_between(seed: int, length: int) -> None:
    rank, log = checkpointed_log(seed, length)
    reader = Model()
    for offset, row in enumerate(log):
        reader.take(offset, *row)

    assert (reader.claims, reader.state.loaded) == (rank.held, rank.loaded)


@given(st.integers(0, 10_000), st.integers(1, 40), st.data())
def test_restarts_within_loads_change_nothing(seed: int, length: int, data: st.DataObject) -> None:
    """From a cut on: read, be killed anywhere, read again from any offset that is not above the unfinished unit."""
    _, log = checkpointed_log(seed, length)
    start = data.draw(st.integers(0, len(log) - 1))
    once, often = Model(), Model()
    for offset in range(start, len(log)):
        once.take(offset, *log[offset])
    at = start
    for _ in range(data.draw(st.integers(0, 5))):
        stop = data.draw(st.integers(at, len(log)))
        for offset in range(at, stop):
            often.take(offset, *log[offset])
        tail = often.restart()
        at = data.draw(st.integers(start, stop if tail < 0 else tail))
    for offset in range(at, len(log)):
        often.take(offset, *log[offset])

    assert (once.state, once.claims) == (often.state, often.claims)


@given(st.integers(0, 10_000), st.integers(2, 40), st.data())
def test_lost_records_and_checkpoints_claim_nothing_wrong(seed: int, length: int, data: st.DataObject) -> None:
    rank, log = checkpointed_log(seed, length)
    lost = data.draw(st.sets(st.integers(0, len(log) - 1), min_size=1, max_size=4))
    reader = Model()
    for offset, row in enumerate(log):
        if offset not in lost:
            reader.take(offset, *row)
    state = reader.state
    behind = state.life != rank.life or state.n + len(state.tail) < rank.n or state.owner < rank.owner

    assert behind or not state.loaded or reader.claims == rank.held


# -- canaries: each rule switched off is caught --------------------------------------------------------------------


def caught(monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> bool:
    """Whether some of 40 logs, cut at any of their places, shows that the rule is off."""
    monkeypatch.setattr(accepting, name, instead)
    for seed in range(40):
        _, log = checkpointed_log(seed, 30)
        if not all(agree_from(log, start) for start in range(0, len(log), 7)):
            return True
    return False


def blind(*_: Any) -> list[Any]:
    return []


RULES: dict[str, tuple[str, Any, Callable[[], None]]] = {
    "a fence ends a load": (
        "_end_load",
        blind,
        lambda: test_any_record_but_the_next_part_ends_a_load("*", Fence(0, 1, "b", "v", "again")),
    ),
    "events end a load": ("unload", blind, lambda: test_any_record_but_the_next_part_ends_a_load(0, events(11))),
    "a life that nobody holds is void to a higher owner": (
        "_is_void",
        lambda state, record: state.loaded and isinstance(record, Checkpoint),
        test_a_higher_owner_over_an_unloaded_rank_may_restate_any_life,
    ),
    "a life opened behind a fence is void to its owner": (
        "_is_void",
        lambda state, _: not state.loaded,
        test_a_higher_owner_whose_fence_was_not_read_may_restate_a_lower_life,
    ),
    "a part names residents only": (
        "_is_whole",
        lambda _: True,
        lambda: test_a_part_that_does_not_say_what_is_held_loads_nothing(Change(REMOVED, 0, 7, 0.0, (RUN,))),
    ),
    "every hash of a lane is held": (
        "_resident",
        lambda held: held.change,
        test_every_hash_of_a_lane_is_held_marked_or_not,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_canary_a_rule_that_is_switched_off_fails_its_test(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, instead, test = RULES[rule]
    test()
    monkeypatch.setattr(accepting, name, instead)

    with pytest.raises(AssertionError):
        test()


def test_canary_a_load_that_is_complete_with_its_first_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load = accepting._load

    def hasty(state: RankState, record: Checkpoint, offset: int, hole: str | None) -> list[Any]:
        return load(state, msgspec.structs.replace(record, last=True), offset, hole)

    assert caught(monkeypatch, "_load", hasty)


def test_canary_a_checkpoint_that_is_not_loaded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(state: RankState, record: Checkpoint, offset: int, hole: str | None) -> list[Any]:
        return accepting.unload(state, offset, hole or "no checkpoints here")

    assert caught(monkeypatch, "_load", never)


@pytest.mark.parametrize("fact", ["suspended", "partial"])
def test_canary_a_fact_that_is_not_restated_is_caught(monkeypatch: pytest.MonkeyPatch, fact: str) -> None:
    restate = accepting._restate

    def forgetful(state: RankState, record: Checkpoint) -> None:
        restate(state, record)
        setattr(state, fact, False)

    assert caught(monkeypatch, "_restate", forgetful)


def test_canary_a_load_without_its_first_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load = accepting._load

    def careless(state: RankState, record: Checkpoint, offset: int, hole: str | None) -> list[Any]:
        first = state.load == 0 and not state.loaded
        return load(state, msgspec.structs.replace(record, part=0) if first else record, offset, hole)

    assert caught(monkeypatch, "_load", careless)
