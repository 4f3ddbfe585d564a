"""The fold, pure: records of a partition in, steps for the index out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from foldlog import KEYS, TOPIC, Log, nonces, opened_rank, put_run, state_at, steps_of
from ranklog import RankLog, runs

from kvledger_index.enginehash import Scheme
from kvledger_index.model import GroupSpec
from kvledger_index.units import NEVER, Bind, Clear, Drop, Now, Put, Stamp
from kvledger_streams import fold as folding
from kvledger_streams.fold import fold, resume, seed
from kvledger_streams.ops import card_of
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire


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
    rank.events(group=None, unplaced=((0, 3), (1, 1)), opaque=((0, 2),), veiled=((0, 1),))
    (step,) = steps_of(log)

    assert step.units[0].now == Now(
        1, 1, 1, 1, seq=41, unplaced=((255, 0, 3), (255, 1, 1)), opaque=((255, 0, 2),), veiled=((255, 0, 1),)
    )


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
    records = [(0, 500, *log[0], None), (1, 900, *log[1], None), (2, 700, *log[2], None)]
    (step,) = fold(state, records, end=3, nonce=nonces(), tally=Tally())

    assert (step.broker_ms, [unit.broker_ms for unit in step.units]) == (900, [700, 900])


@pytest.mark.parametrize(
    ("known_ms", "unproven_ms"),
    [(None, 0), (1_764_000_009_000, 0), (1_764_000_000_500, 8_500), (1_764_000_010_000, 0), (-1, 1_764_000_009_000)],
    ids=["not said", "at once", "waited", "a clock ahead", "never whole"],
)
def test_a_record_is_as_new_as_what_it_says_and_not_as_its_arrival(known_ms: int | None, unproven_ms: int) -> None:
    """One of an older bridge, which says nothing, counts when it arrived: that is the canary."""
    rank, log = opened_rank()
    rank.beat()
    state = state_at()
    records = [(0, 1_764_000_000_000, *log[0], 1_764_000_000_000), (1, 1_764_000_009_000, *log[1], known_ms)]
    (step,) = fold(state, records, end=2, nonce=nonces(), tally=Tally())

    assert [unit.now.unproven_ms for unit in step.units] == [unproven_ms]
    assert state.heard[rank.id] == 1_764_000_009_000, "that somebody was heard is another question"


def test_a_rank_whose_records_cannot_be_used_is_told_once_until_it_is_loaded() -> None:
    """Its beginning is gone: heartbeats come, its bridge follows, and nobody would know why it is not there."""
    rank, log = opened_rank()
    for _ in range(3):
        rank.beat()
    tally = Tally()
    state = state_at(1)
    steps_of(log[1:], state, start=1, tally=tally)
    rank.open()
    steps_of(log[4:], state, start=4, tally=tally)

    told = [(note.kind, note.rank, note.offset, note.why) for note in tally.notes]
    assert told == [
        ("unusable", rank.id, 1, "no life before it is known"),
        ("opened", rank.id, 4, tally.notes[-1].why),
    ]
    assert (tally.unusable, state.told) == (3, set())


def test_late_records_of_an_owner_that_was_ended_are_told_where_nothing_else_is_known() -> None:
    rank, log = opened_rank()
    rank.beat()
    tally, state = Tally(), state_at()
    for step in seed(state, {rank.id: 9}, nonce=nonces()):
        assert step.units
    steps_of(log, state, tally=tally)

    assert [(note.kind, note.why) for note in tally.notes] == [("unusable", "owner 9 ended 1")]
    assert tally.unusable == 2
