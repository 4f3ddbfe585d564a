"""Checkpoints in the fold: loads in parts, what is served meanwhile, restarts in the middle; signs of life."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from foldlog import KEYS, PROMPTS, Log, nonces, opened_rank, state_at, steps_of
from hypothesis import given
from hypothesis import strategies as st
from ranklog import NO_PARENT, RankLog
from test_accept_checkpoints import checkpointed_log
from test_fold_properties import assigned, batches, claims

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Bind, Drop, Put
from kvledger_streams import fold as folding
from kvledger_streams.fold import PIECE_OPS_MAX, UNIT_OPS_MAX, LogRecord, fold
from kvledger_streams.ops import ops_of
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire
from kvledger_wire.accept import RankState, accept

PART_BYTES_MAX = 512 * 1024
"""What bridges keep their records below."""


def checkpoint_alone(parts: int, *, medium: str = "gpu", held: int = 20) -> tuple[RankLog, Log]:
    """A rank whose log begins with a checkpoint: retention took what was before."""
    rank, log = opened_rank()
    rank.batch((0, medium, "store", KEYS, 0, held))
    log.clear()
    rank.checkpoint(parts)
    return rank, log


def test_a_load_is_one_new_life_and_is_not_served_before_its_last_part() -> None:
    rank, log = checkpoint_alone(3)
    tally = Tally()
    state = state_at()
    seen = []
    for offset in range(3):
        (step,) = steps_of(log[offset : offset + 1], state, start=offset, tally=tally)
        (unit,) = step.units
        seen.append(([type(op) for op in unit.ops][:1], unit.after.n, state.ranks[rank.id].loaded, unit.card))

    assert [kinds for kinds, _, _, _ in seen] == [[Bind], [Put], [Put]]
    assert [n for _, n, _, _ in seen] == [2, 3, 4]
    assert [loaded for _, _, loaded, _ in seen] == [False, False, True]
    assert [card.loaded if card else None for _, _, _, card in seen] == [False, None, True]
    assert (tally.loaded, [note.kind for note in tally.notes]) == (1, ["loaded"])


async def test_an_index_loaded_from_a_checkpoint_holds_what_the_rank_holds() -> None:
    rank, log = checkpoint_alone(3)
    rank.batch((0, "gpu", "remove", KEYS, 4, 8), (0, "gpu", "store", PROMPTS[2], 0, 9))
    index = MemoryIndex()
    state = await assigned(index, len(log))
    for step in fold(state, enumerated(log), end=len(log), nonce=nonces(), tally=Tally()):
        await index.apply(step)

    assert await claims(index) == {(rank.id, *claim) for claim in rank.held}


def enumerated(log: Log) -> list[LogRecord]:
    return [(offset, 1000 + offset, *row, None) for offset, row in enumerate(log)]


def test_a_load_over_a_load_takes_new_slots() -> None:
    """What the first parts brought must not stay beside what the second attempt brings."""
    rank, log = checkpoint_alone(1)
    first = rank.holdings()
    log.clear()
    rank.part(0, last=False, lanes=first[:5])
    rank.part(0, last=True, lanes=first[5:])
    (step,) = steps_of(log)
    ops = step.units[0].ops

    assert [type(op) for op in ops].count(Bind) == 1
    assert isinstance(ops[0], Bind)
    assert len(ops) == 1 + len(first[5:])


def test_events_between_parts_drop_what_was_loaded() -> None:
    rank, log = checkpoint_alone(1)
    lanes = rank.holdings()
    log.clear()
    rank.part(0, last=False, lanes=lanes[:5])
    rank.batch((0, "gpu", "store", PROMPTS[2], 0, 9))
    rank.part(1, last=True, lanes=lanes[5:])
    tally = Tally()
    (step,) = steps_of(log, tally=tally)

    assert step.units[0].ops == (Drop(),)
    assert [(note.kind, note.why) for note in tally.notes] == [("unloaded", "part 1 of a checkpoint was due")]


def test_a_hole_before_a_checkpoint_is_told_and_healed() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 20))
    lost = len(log)
    rank.beat()
    rank.checkpoint(1)
    del log[lost]
    tally = Tally()
    steps_of(log, tally=tally)

    assert [note.kind for note in tally.notes] == ["opened", "unloaded", "loaded"]


def test_parts_of_any_size_that_bridges_write_fit_into_steps() -> None:
    """No checkpoint part of 512 KiB makes more ops than a unit may have, and no piece holds anything beside it."""
    names = b"".join((j + 1).to_bytes(8, "big") for j in range(PART_BYTES_MAX // 8))
    rank, log = opened_rank()
    rank.beat()
    rank.part(0, last=True, lanes=(wire.Held(0, wire.Change(wire.STORED, 0, 1, 0.0, unplaced=names)),))
    other = RankLog(log, "pod-b", entry=rank.entry)
    other.open()
    assert len(log[2][1] or b"") >= PART_BYTES_MAX
    steps = steps_of(log[2:], start=2)

    assert {len(step.units) for step in steps} == {1}
    assert [step.piece is not None and step.piece.last for step in steps] == [False] * (len(steps) - 2) + [True, False]
    assert max(len(step.units[0].ops) for step in steps) == PIECE_OPS_MAX
    assert PIECE_OPS_MAX * 2 < sum(len(step.units[0].ops) for step in steps[:-1]) <= UNIT_OPS_MAX


def test_runs_take_more_bytes_than_hashes() -> None:
    """So the bound above holds for them, too: the shortest run is one block."""
    key = b"k" * 8
    run = wire.Run(key, 0, NO_PARENT, key, 1, 1, key)

    assert len(msgspec.msgpack.encode(run)) >= 8


async def folded(log: Log, start: int, rnd: random.Random, *, kills: int) -> tuple[MemoryIndex, dict[str, RankState]]:
    """An index whose workers died some times, anywhere: each goes on from what is stored."""
    index = MemoryIndex()
    fresh_nonce = nonces()
    await index.seek(0, "topic-1", start, len(log), drop=True)
    for left in range(kills, -1, -1):
        state = await assigned(index, len(log))
        for batch in batches(log, state.read, rnd):
            for step in fold(state, batch, end=len(log), nonce=fresh_nonce, tally=Tally()):
                assert (await index.apply(step)).verdict == "applied"
            if left and rnd.random() < 0.3:
                break
    return index, state.ranks


async def agrees(seed: int, cut: float, kills: int) -> bool:
    """Whether an index built from a cut log holds the rank's truth where a reader calls it loaded."""
    rank, log = checkpointed_log(seed, 25)
    start = int(cut * len(log))
    reader = RankState()
    for offset in range(start, len(log)):
        accept(reader, *_group_and_record(log[offset]), offset)
    index, ranks = await folded(log, start, random.Random(seed), kills=kills)
    mine = ranks.get(rank.id, RankState())
    if (mine.loaded, mine.load, mine.n, mine.life) != (reader.loaded, reader.load, reader.n, reader.life):
        return False
    return not reader.loaded or await claims(index) == {(rank.id, *claim) for claim in rank.held}


def _group_and_record(row: tuple[bytes | None, bytes | None]) -> tuple[Any, wire.EventRecord]:
    word = (row[0] or b"").decode().rpartition("/")[2]
    return (word if word == "*" else int(word)), wire.decode_event(row[1])


@given(st.integers(0, 10_000), st.floats(0, 0.95), st.integers(0, 4))
async def test_an_index_built_from_any_place_and_restarted_anywhere_is_right_where_it_is_loaded(
    seed: int, cut: float, kills: int
) -> None:
    assert await agrees(seed, cut, kills)


async def test_canary_a_load_that_does_not_survive_a_restart_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = folding._encoder

    class Forgetful:
        def encode(self, blob: Any) -> bytes:
            state = msgspec.structs.replace(blob.state, load=0)
            return encoder.encode(msgspec.structs.replace(blob, state=state))

    monkeypatch.setattr(folding, "_encoder", Forgetful())

    assert not all([await agrees(seed, 0.5, 4) for seed in range(60)])


async def test_canary_a_load_that_keeps_the_old_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(effect: Any) -> Any:
        return [op for op in ops_of(effect) if not isinstance(op, Bind) or type(effect).__name__ == "Opening"]

    monkeypatch.setattr(folding, "ops_of", keep)

    assert not all([await agrees(seed, 0.5, 1) for seed in range(60)])


# -- lower tiers and signs of life -----------------------------------------------------------------------------------


def test_a_lower_tier_from_a_checkpoint_does_not_count_before_it_stores_again() -> None:
    """A checkpoint does not say when the tier last stored: milliseconds since 1970 exceed every limit."""
    rank, log = checkpoint_alone(2, medium="cpu")
    state = state_at()
    (loaded,) = steps_of(log, state)
    done = len(log)
    rank.batch((0, "cpu", "store", PROMPTS[2], 0, 9))
    (stored,) = steps_of(log[done:], state, start=done)

    assert loaded.units[0].now.silent == ((0, 1, 1001),)  # broker_ms 1001 less 0
    assert stored.units[0].now.silent == ((0, 1, 0),)


def test_a_sign_of_life_is_heard_and_proves_nothing() -> None:
    """Log times 1000, 1001 …: the batch at 1001, two signs of life, a heartbeat that proves again."""
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    for _ in range(2):
        rank.put(wire.Heartbeat(*rank.next(), rank.seq, b"d", alive=True))
    rank.beat()
    state = state_at()
    units = [steps_of([row], state, start=offset)[0].units[0] for offset, row in enumerate(log)]

    assert [unit.broker_ms for unit in units] == [1000, 1001, 1002, 1003, 1004]
    assert [unit.now.unproven_ms for unit in units] == [0, 0, 1, 2, 0]


def test_canary_a_sign_of_life_that_counts_as_proof_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "proves", lambda _: True)

    with pytest.raises(AssertionError):
        test_a_sign_of_life_is_heard_and_proves_nothing()


async def test_the_last_proof_outlives_the_worker_that_read_it() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    rank.put(wire.Heartbeat(*rank.next(), rank.seq, b"d", alive=True))
    rank.put(wire.Heartbeat(*rank.next(), rank.seq, b"d", alive=True))
    index = MemoryIndex()
    told = []
    for offset, row in enumerate(log):
        state = await assigned(index, len(log))
        for step in fold(state, [(offset, 1000 + offset, *row, None)], end=len(log), nonce=nonces(), tally=Tally()):
            told += [unit.now.unproven_ms for unit in step.units]
            await index.apply(step)

    assert told == [0, 0, 1, 2]


@pytest.mark.parametrize("suspended", [True, False])
def test_a_checkpoint_proves_nothing_to_a_reader_without_a_past(*, suspended: bool) -> None:
    """Until the rank is heard of again its picture may be as old as the log."""
    rank, log = checkpoint_alone(1)
    log.clear()
    rank.checkpoint(1, suspended=suspended)
    state = state_at()
    (loaded,) = steps_of(log, state)
    rank.resume()
    (resumed,) = steps_of(log[1:], state, start=1)

    assert (loaded.units[0].now.unproven_ms, resumed.units[0].now.unproven_ms) == (1000, 0)
