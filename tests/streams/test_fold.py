"""The fold, pure: records of a partition in, steps for the index out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranklog import RankLog, prompt, runs

from kvledger_index.enginehash import Scheme
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_index.units import NEVER, Bind, Clear, Drop, Now, Put, Stamp, Step
from kvledger_streams import fold as folding
from kvledger_streams.errors import UnreadableState
from kvledger_streams.fold import NOTES_MAX, PartitionState, Tally, fold, fresh, resume
from kvledger_streams.ops import MIXED_GROUPS, card_of, groups_of, stamp_of
from kvledger_wire import accept as accepting
from kvledger_wire import records as wire
from kvledger_wire.accept import RankState
from kvledger_wire.partition import record_key

TOPIC = "topic-1"
ENTRY = ModelEntry(model="m", groups=(GroupSpec(0, "full_attention", 16),))
PROMPTS = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9)]
KEYS = PROMPTS[0]

Log = list[tuple[bytes | None, bytes | None]]


def nonces() -> Callable[[], bytes]:
    numbers = itertools.count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def state_at(restart: int = 0, *, partitions: int = 1) -> PartitionState:
    return fresh(0, partitions=partitions, topic_id=TOPIC, restart=restart, broker_ms=0)


def steps_of(
    log: Log, state: PartitionState | None = None, *, start: int = 0, tally: Tally | None = None
) -> list[Step]:
    """Fold a whole log, offset i appended at 1000 + i ms."""
    records = [(start + i, 1000 + start + i, key, value) for i, (key, value) in enumerate(log)]
    return list(fold(state or state_at(start), records, end=start + len(log), nonce=nonces(), tally=tally or Tally()))


def opened_rank(**entry: Any) -> tuple[RankLog, Log]:
    log: Log = []
    rank = RankLog(log, entry=msgspec.structs.replace(ENTRY, **entry))
    rank.open()
    return rank, log


def key_of(rank: RankLog, group: int | str | None = "*") -> bytes:
    return record_key(rank.replica, rank.rank, group)


def put_run(rank: RankLog, run: wire.Run, *, op: int = wire.STORED, medium: int = 0, group: Any = 0) -> None:
    rank.events(wire.Change(op, medium, 1, 0.0, (run,)), group=group)


# -- what records become ---------------------------------------------------------------------------------------------


def test_an_opened_binds_and_describes_the_rank() -> None:
    _, log = opened_rank(hash_block_size=16, alignment=32, full_reports=True)
    (step,) = steps_of(log)
    (unit,) = step.units

    assert (unit.rank, unit.model, unit.before, unit.after) == ("pod-a/0", "m", NEVER, Stamp(1, 1, 1, 0))
    assert (unit.ops, unit.broker_ms) == ((Bind(),), 1000)
    assert unit.card is not None
    assert (unit.card.loaded, unit.card.partition, unit.card.stride) == (True, 0, 16)
    assert (unit.card.hash_block_size, unit.card.alignment, unit.card.full_reports) == (16, 32, True)
    assert (step.restart_before, step.restart, step.read, step.at_end) == (0, 1, 1, True)


def test_a_store_becomes_a_put_per_run_with_effective_bits_only() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 3))
    rank.batch((0, "gpu", "store", KEYS, 0, 18))
    _, _, (put, tail) = unit_ops(log)

    assert put == Put(
        add=True, medium="gpu", lane=0, row=KEYS[0], position=0, parent=0, keys=tuple(KEYS[:16]), mask=0xFFF8
    )
    assert tail == Put(
        add=True, medium="gpu", lane=0, row=KEYS[16], position=0, parent=0, keys=tuple(KEYS[16:18]), mask=3
    )


def unit_ops(log: Log) -> tuple[Any, Any, tuple[Any, ...]]:
    """(Bind, first Put, the rest) of a log of one rank."""
    (step,) = steps_of(log)
    bind, first, *rest = step.units[0].ops
    assert bind == Bind()
    return bind, first, tuple(rest)


def test_path_keys_before_an_effective_one_stay_and_those_after_go() -> None:
    rank, log = opened_rank()
    (run,) = runs(KEYS, 2, 8, {KEYS[4]})
    put_run(rank, run)
    _, put, _ = unit_ops(log)

    assert (put.position, put.parent, put.keys, put.mask) == (2, KEYS[1], tuple(KEYS[2:5]), 0b100)


def test_a_change_that_is_not_effective_puts_nothing() -> None:
    rank, log = opened_rank()
    (run,) = runs(KEYS, 0, 4, set())
    put_run(rank, run)
    (step,) = steps_of(log)

    assert step.units[0].ops == (Bind(),)
    assert step.units[0].after.n == 1


def test_groups_and_media_name_lanes() -> None:
    rank, log = opened_rank()
    rank.batch(
        (None, "cpu", "store", KEYS, 0, 1), (254, "gpu", "remove", KEYS, 0, 1), (3, "storage", "store", KEYS, 0, 1)
    )
    (step,) = steps_of(log)
    puts = [op for op in step.units[0].ops if isinstance(op, Put)]

    assert [(put.lane, put.medium, put.add) for put in puts] == [(255, "cpu", True), (3, "storage", True)]


def test_a_clear_is_one_new_slot() -> None:
    rank, log = opened_rank()
    rank.clear("cpu")
    (step,) = steps_of(log)

    assert step.units[0].ops == (Bind(), Clear("cpu"))


def test_all_that_happened_to_dead_slots_is_left_out() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 16))
    rank.gap()
    (dropped,) = steps_of(log)
    rank.open()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    (reopened,) = steps_of(log)

    assert dropped.units[0].ops == (Drop(),)
    assert [type(op) for op in reopened.units[0].ops] == [Bind, Put]


def test_a_batch_of_one_rank_is_one_unit_from_first_to_last() -> None:
    rank, log = opened_rank()
    state = state_at()
    steps_of(log, state)
    rank.beat()
    rank.beat()
    (step,) = steps_of(log[1:], state, start=1)
    (unit,) = step.units

    assert (unit.before.n, unit.after.n, unit.ops, unit.card, unit.broker_ms) == (0, 2, (), None, 1002)


def test_now_carries_sequence_and_unplaced_hashes_per_lane() -> None:
    rank, log = opened_rank()
    rank.seq = 41
    rank.events(group=None, unplaced=((0, 3), (1, 1)), opaque=((0, 2),))
    (step,) = steps_of(log)

    assert step.units[0].now == Now(1, 1, 1, 1, seq=41, unplaced=((255, 0, 3), (255, 1, 1)), opaque=((255, 0, 2),))


@pytest.mark.parametrize(
    ("known", "found", "told"),
    [(None, None, None), (Scheme(), None, Scheme()), (Scheme(), Scheme("xxhash"), Scheme("xxhash"))],
)
def test_the_card_tells_how_the_engine_hashes(known: Scheme | None, found: Scheme | None, told: Scheme | None) -> None:
    """What was found out on the wire counts; until then the operator's word."""
    rank, log = opened_rank(hash_scheme=known)
    rank.events(scheme=found)
    (step,) = steps_of(log)

    assert step.units[0].card is not None
    assert step.units[0].card.scheme == told


def test_a_fence_alone_is_kept_so_that_a_reader_after_us_knows_the_owner() -> None:
    log: Log = []
    RankLog(log).take_over(7)
    (step,) = steps_of(log)
    (unit,) = step.units

    assert (unit.before, unit.after) == (NEVER, Stamp(7, -1, 0, -1))
    assert (unit.model, unit.card, unit.ops) == ("", None, ())


def test_a_card_comes_only_when_it_changed() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    state = state_at()
    steps_of(log, state)
    done = len(log)
    rank.batch((0, "gpu", "store", KEYS, 0, 2))
    (same,) = steps_of(log[done:], state, start=done)
    done = len(log)
    rank.suspend()
    (changed,) = steps_of(log[done:], state, start=done)

    assert same.units[0].card is None
    assert changed.units[0].card is not None
    assert changed.units[0].card.suspended


def test_duplicates_and_lower_owners_make_no_unit() -> None:
    rank, log = opened_rank()
    rank.beat()
    state = state_at()
    steps_of(log, state)
    (step,) = steps_of(log, state, start=2)

    assert step.units == ()
    assert (step.restart_before, step.restart, step.read) == (2, 4, 4)


HASHES = (7).to_bytes(8, "big") + (2**63 + 1).to_bytes(8, "big") + (9).to_bytes(8, "big")


@pytest.mark.parametrize(
    ("op", "origin", "add"),
    [
        (wire.STORED, wire.LIVE, True),
        (wire.REMOVED, wire.LIVE, False),
        (wire.STORED, wire.REPLAYED, True),
        (wire.STORED, wire.ATTACHED, False),
        (wire.REMOVED, wire.ATTACHED, True),
    ],
)
def test_a_hash_without_a_key_stands_under_itself_until_it_gets_one(op: int, origin: int, add: bool) -> None:
    """ADR 5; an attached change moves it from itself to its key (stored) or back (removed)."""
    rank, log = opened_rank()
    rank.events(wire.Change(op, 1, 1, 0.0, (), HASHES, origin, b"\x06"), group=3)
    (step,) = steps_of(log)

    assert step.units[0].ops[1:] == tuple(
        Put(add=add, medium="cpu", lane=3, row=name, position=0, parent=0, keys=(name,), mask=1)
        for name in (2**63 + 1, 9)
    )


@pytest.mark.parametrize(("hashes", "bits"), [(HASHES, b"\x0e"), (HASHES[:-1], b"\x01"), (b"", b"\x01")])
def test_bits_of_hashes_that_are_not_there_are_a_hole(hashes: bytes, bits: bytes) -> None:
    rank, log = opened_rank()
    rank.events(wire.Change(wire.STORED, 0, 1, 0.0, (), hashes, wire.LIVE, bits))

    assert steps_of(log)[0].units[0].ops == (Drop(),)


def test_a_lower_tier_that_never_announces_a_removal_is_told_with_its_silence() -> None:
    """Offsets are log time here: 1000 ms and one more per record."""
    rank, log = opened_rank(expire_seconds=30.0)
    state = state_at()
    seen: list[tuple[tuple[int, int, int], ...]] = []

    def told() -> None:
        (step,) = steps_of(log[state.read :], state, start=state.read)
        seen.append(step.units[0].now.silent)

    rank.batch((0, "gpu", "store", KEYS, 0, 1), (None, "storage", "store", KEYS, 0, 1), (0, "cpu", "store", KEYS, 0, 1))
    told()
    rank.beat()
    rank.beat()
    told()
    rank.batch((0, "cpu", "remove", KEYS, 0, 1))
    told()
    rank.clear("storage")
    told()

    assert seen == [((255, 2, 0), (0, 1, 0)), ((255, 2, 2), (0, 1, 2)), ((255, 2, 3),), ()]
    assert card_of(state.ranks[rank.id], 0).expire_seconds == 30.0  # type: ignore[union-attr]  # it was opened


def test_what_lower_tiers_did_outlives_a_worker_and_ends_with_the_life() -> None:
    rank, log = opened_rank()
    rank.batch((0, "storage", "store", KEYS, 0, 1))
    (step,) = steps_of(log)
    (unit,) = step.units
    stored = {unit.rank: (unit.after, unit.state)}
    state = resume(0, partitions=1, topic_id=TOPIC, restart=len(log), broker_ms=0, stored=stored)
    rank.beat()
    (later,) = steps_of(log[2:], state, start=2)
    rank.open()
    (reopened,) = steps_of(log[3:], state, start=3)

    assert later.units[0].now.silent == ((0, 2, 1),)
    assert reopened.units[0].now.silent == ()


# -- progress --------------------------------------------------------------------------------------------------------


def test_an_unfinished_unit_holds_the_restart_offset_back() -> None:
    """An unfinished unit is read again from its first record, whoever goes on.

    offset   0       1           2        3      4
    pod-a    opened  part                        part, end
    pod-b                        opened   beat
    """
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    rank.events(spec=GroupSpec(0, "full_attention", 16), end=False)
    other.open()
    other.beat()
    state = state_at()
    (before,) = steps_of(log, state)
    rank.events()
    (after,) = steps_of(log[4:], state, start=4)

    assert (before.restart, before.read) == (1, 4)
    assert (after.restart_before, after.restart, after.read) == (1, 5, 5)
    assert before.units[0].after == Stamp(1, 1, 1, 0)
    assert after.units[0].after == Stamp(1, 1, 1, 2)


def test_what_is_stored_of_a_rank_knows_no_unfinished_unit() -> None:
    rank, log = opened_rank()
    rank.events(end=False)
    state = state_at()
    (step,) = steps_of(log, state)
    (unit,) = step.units
    again = resume(
        0,
        partitions=1,
        topic_id=TOPIC,
        restart=step.restart,
        broker_ms=0,
        stored={unit.rank: (unit.after, unit.state)},
    )

    assert state.ranks["pod-a/0"].tail
    assert again.ranks["pod-a/0"] == msgspec.structs.replace(state.ranks["pod-a/0"], tail=(), tail_from=-1)
    assert (again.restart, again.read, again.tails) == (1, 1, {})


def test_no_records_make_one_empty_step_that_says_alive() -> None:
    state = state_at(5)
    (at_end,) = fold(state, (), end=5, nonce=nonces(), tally=Tally())
    (behind,) = fold(state, (), end=6, nonce=nonces(), tally=Tally())

    assert (at_end.units, at_end.at_end, at_end.restart_before, at_end.restart) == ((), True, 5, 5)
    assert not behind.at_end


def test_records_below_the_read_offset_are_skipped() -> None:
    _, log = opened_rank()
    tally = Tally()
    (step,) = steps_of(log, state_at(1), tally=tally)

    assert (step.units, tally.records) == ((), 0)


def test_steps_stay_within_their_limits_and_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 4)
    rank, log = opened_rank()
    for stop in range(1, 30):
        rank.batch((0, "gpu", "store", KEYS, stop - 1, stop))
    steps = steps_of(log)

    assert [sum(len(unit.ops) for unit in step.units) for step in steps] == [4] * 7 + [2]
    assert [step.restart_before for step in steps[1:]] == [step.restart for step in steps[:-1]]
    assert [step.at_end for step in steps] == [False] * 7 + [True]
    assert [unit.before for step in steps[1:] for unit in step.units] == [
        unit.after for step in steps[:-1] for unit in step.units
    ]
    assert len({step.nonce for step in steps}) == len(steps)


def test_a_step_holds_a_bounded_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "RANKS_PER_STEP_MAX", 3)
    log: Log = []
    for number in range(8):
        RankLog(log, f"pod-{number}").open()

    assert [len(step.units) for step in steps_of(log)] == [3, 3, 2]


def test_a_unit_is_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 2)
    rank, log = opened_rank()
    rank.batch(*((group, "gpu", "store", KEYS, 0, 40) for group in range(5)))
    steps = steps_of(log)

    assert [sum(len(unit.ops) for unit in step.units) for step in steps] == [1, 15, 0]


def test_a_step_of_several_ranks_never_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that would carry it over waits for the next step, and its rank stands before it in this one."""
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 6)
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    other.open()
    other.batch((0, "gpu", "store", KEYS, 0, 40))
    rank.batch((0, "gpu", "store", KEYS, 0, 40))
    rank.beat()
    steps = steps_of(log)

    assert [[(unit.rank, len(unit.ops), unit.after.n) for unit in step.units] for step in steps] == [
        [("pod-a/0", 1, 0), ("pod-b/0", 4, 1)],
        [("pod-a/0", 3, 2)],
    ]
    assert (steps[0].read, steps[0].restart) == (3, 3)


def test_the_newest_log_time_is_the_partitions_not_the_ranks() -> None:
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    other.open()
    rank.beat()
    state = state_at()
    records = [(0, 500, *log[0]), (1, 900, *log[1]), (2, 700, *log[2])]
    (step,) = fold(state, records, end=3, nonce=nonces(), tally=Tally())

    assert (step.broker_ms, [unit.broker_ms for unit in step.units]) == (900, [700, 900])


# -- what cannot be used ---------------------------------------------------------------------------------------------


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


# -- groups ----------------------------------------------------------------------------------------------------------


def heard(entry: tuple[GroupSpec, ...] = (), wired: tuple[GroupSpec, ...] = (), **facts: Any) -> RankState:
    return RankState(owner=1, life=(1, 1), n=1, entry=ModelEntry(model="m", groups=entry), groups=wired, **facts)


def test_the_entry_wins_field_by_field_where_it_says_something() -> None:
    state = heard(
        (GroupSpec(0, None, None, window=512, eagle=True), GroupSpec(1, "full_attention")),
        (GroupSpec(0, "sliding_window", 16, window=1024, chunk=7), GroupSpec(1, "mamba", 32)),
        heard=(0, 1),
        heard_gpu=(0, 1),
    )

    assert groups_of(state) == (
        GroupSpec(0, "sliding_window", 16, window=512, chunk=7, eagle=True),
        GroupSpec(1, "full_attention", 32),
    )


def test_numbered_events_take_the_numbered_groups_of_the_entry_and_those_heard() -> None:
    state = heard((GroupSpec(None, "mamba"), GroupSpec(2, "full_attention", 16)), heard=(0, None), heard_gpu=(0,))

    assert groups_of(state) == (GroupSpec(0), GroupSpec(2, "full_attention", 16))


def test_events_without_a_group_take_the_entrys_null_group() -> None:
    state = heard(
        (GroupSpec(None, "sliding_window", window=64), GroupSpec(0, "full_attention")),
        (GroupSpec(None, None, 16),),
        heard=(None,),
        heard_gpu=(None,),
    )

    assert groups_of(state) == (GroupSpec(None, "sliding_window", 16, window=64),)


def test_events_without_a_group_are_full_attention_where_nobody_says_else() -> None:
    state = heard((GroupSpec(0, "mamba"),), (GroupSpec(None, None, 32),), heard=(None,), heard_gpu=(None,))

    assert groups_of(state) == (GroupSpec(None, "full_attention", 32),)


def test_offload_events_without_a_group_do_not_decide() -> None:
    """Hybrid engines publish CPU copies without a group beside GPU events with one."""
    state = heard((), (GroupSpec(0, "full_attention", 16),), heard=(None, 0), heard_gpu=(0,))

    assert groups_of(state) == (GroupSpec(0, "full_attention", 16),)


@pytest.mark.parametrize(
    ("entry", "groups"),
    [
        ((), ()),
        ((GroupSpec(1, "full_attention"),), (GroupSpec(1, "full_attention"),)),
        ((GroupSpec(None, "mamba"),), (GroupSpec(None, "mamba"),)),
    ],
)
def test_before_the_first_gpu_event_the_entry_speaks_alone(
    entry: tuple[GroupSpec, ...], groups: tuple[GroupSpec, ...]
) -> None:
    assert groups_of(heard(entry)) == groups


def test_a_rank_that_mixes_both_is_uncertain() -> None:
    card = card_of(heard(heard=(None, 0), heard_gpu=(None, 0)), 0)

    assert card is not None
    assert card.uncertain == (MIXED_GROUPS,)
    assert [group.group for group in card.groups] == [0]


# -- properties ------------------------------------------------------------------------------------------------------


def partition_log(seed: int, length: int, ranks: int = 3) -> tuple[list[RankLog], Log]:
    """Several ranks' valid records, interleaved; junk and unreadable keys in between."""
    rnd = random.Random(seed)
    log: Log = []
    writers = [RankLog(log, f"pod-{i}", owner=3) for i in range(ranks)]
    for writer in writers:
        writer.take_over(3)
    for _ in range(length):
        roll = rnd.random()
        writer = rnd.choice(writers)
        if roll < 0.03:
            writer.take_over(writer.owner + 1)
            writer.open()
        elif roll < 0.05:
            log.append((b"junk", b"junk"))
        elif roll < 0.06 and writer.loaded:
            log.append((key_of(writer, 0), b"junk"))
            writer.open()  # a bridge does not know; but the log goes on with a life that counts
        else:
            writer.act(rnd, PROMPTS, groups=(0, 1, None))
    return writers, log


async def claims(index: MemoryIndex) -> set[tuple[str, int | None, str, int]]:
    return {(claim.rank, claim.group, claim.medium, claim.key) async for claim in index.dump()}


def truth(writers: list[RankLog]) -> set[tuple[str, int | None, str, int]]:
    return {(writer.id, *claim) for writer in writers for claim in writer.held}


async def assigned(index: MemoryIndex, end: int) -> PartitionState:
    """What a worker does before it reads: load, seek, resume."""
    stored = await index.load(0)
    restart = stored.progress.restart if stored.progress else 0
    await index.seek(0, TOPIC, restart, end, drop=stored.progress is None)
    return resume(0, partitions=1, topic_id=TOPIC, restart=restart, broker_ms=0, stored=stored.ranks)


def batches(log: Log, start: int, rnd: random.Random) -> Iterator[list[tuple[int, int, bytes | None, bytes | None]]]:
    while start < len(log):
        stop = rnd.randint(start + 1, min(len(log), start + 9))
        yield [(offset, offset, *log[offset]) for offset in range(start, stop)]
        start = stop


@given(st.integers(0, 10_000), st.integers(1, 60))
async def test_an_index_folded_in_any_batches_equals_the_truth(seed: int, length: int) -> None:
    writers, log = partition_log(seed, length)
    index = MemoryIndex()
    state = await assigned(index, len(log))
    for batch in batches(log, 0, random.Random(seed)):
        for step in fold(state, batch, end=len(log), nonce=nonces(), tally=Tally()):
            assert (await index.apply(step)).verdict == "applied"

    assert await claims(index) == truth(writers)
    assert {rank: stamp_of(each) for rank, each in state.ranks.items()} == {
        rank: stamp for rank, (stamp, _) in (await index.load(0)).ranks.items()
    }


@given(st.integers(0, 10_000), st.integers(1, 60))
async def test_kills_zombies_and_rollbacks_change_nothing(seed: int, length: int) -> None:
    """Workers that die anywhere, workers that write late, an index that loses its newest writes."""
    writers, log = partition_log(seed, length)
    rnd = random.Random(seed)
    index = MemoryIndex()
    snapshots = [index.snapshot()]
    late: list[Step] = []
    fresh_nonce = nonces()
    for _ in range(6):
        state = await assigned(index, len(log))
        for batch in batches(log, state.read, rnd):
            fate = rnd.random()
            steps = list(fold(state, batch, end=len(log), nonce=fresh_nonce, tally=Tally()))
            if fate < 0.1:
                late += steps
                break
            refused = any([(await index.apply(step)).verdict == "refused" for step in steps])
            if refused or fate < 0.2:
                break
            if fate < 0.3:
                snapshots.append(index.snapshot())
            elif fate < 0.4:
                index.restore(rnd.choice(snapshots))
            elif fate < 0.5 and late:
                await index.apply(rnd.choice(late))
    state = await assigned(index, len(log))
    for batch in batches(log, state.read, rnd):
        for step in fold(state, batch, end=len(log), nonce=fresh_nonce, tally=Tally()):
            assert (await index.apply(step)).verdict == "applied"

    assert await claims(index) == truth(writers)


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 8), st.integers(1, 3))
def test_limits_do_not_change_what_is_written(seed: int, length: int, ops: int, ranks: int) -> None:
    _, log = partition_log(seed, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "OPS_PER_STEP_MAX", ops)
        patch.setattr(folding, "RANKS_PER_STEP_MAX", ranks)
        small = steps_of(log)
    (large,) = steps_of(log)
    last = {unit.rank: unit for step in small for unit in step.units}

    assert all(len(step.units) <= 1 or sum(len(unit.ops) for unit in step.units) <= ops for step in small)
    assert (small[-1].read, small[-1].restart) == (large.read, large.restart)
    assert {rank: unit.state for rank, unit in last.items()} == {unit.rank: unit.state for unit in large.units}
