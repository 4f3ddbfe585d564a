"""The fold under everything that can happen to readers and to the index."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from foldlog import PROMPTS, TOPIC, Log, key_of, nonces, steps_of
from hypothesis import given
from hypothesis import strategies as st
from ranklog import RankLog

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Step
from kvledger_streams import fold as folding
from kvledger_streams.fold import LogRecord, PartitionState, fold, resume
from kvledger_streams.ops import stamp_of
from kvledger_streams.tally import Tally


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


def batches(log: Log, start: int, rnd: random.Random) -> Iterator[list[LogRecord]]:
    while start < len(log):
        stop = rnd.randint(start + 1, min(len(log), start + 9))
        yield [(offset, offset, *log[offset], None) for offset in range(start, stop)]
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
