"""A worker that meets a unit larger than a step: the rest of its partitions do not wait for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranklog import RankLog, prompt
from test_app_worker import everything_at_once
from workerworld import Faulty, Kafka, Process, claims, truth, write

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Outcome, Step
from kvledger_streams import fold as folding

LARGE = prompt("large", 160)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ops a step, two a piece."""
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 4)
    monkeypatch.setattr(folding, "PIECE_OPS_MAX", 2)


class Gated(Faulty):
    """An index whose pieces wait for ``gate`` behind the first one."""

    def __init__(self, inner: MemoryIndex) -> None:
        super().__init__(inner)
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    async def apply(self, step: Step) -> Outcome:
        if step.piece is not None and step.piece.number:
            self.begun.set()
            await self.gate.wait()
        return await super().apply(step)


def world() -> tuple[Kafka, Gated, dict[int, RankLog]]:
    """Two partitions, a rank in each."""
    kafka, index = Kafka(2), Gated(MemoryIndex())
    ranks = {writer.partition(2): writer for writer in write(kafka, 1, length=0)}
    assert set(ranks) == {0, 1}
    return kafka, index, ranks


async def begin(process: Process, index: Gated, rank: RankLog) -> None:
    """Take a large batch up to where its second piece waits."""
    await process.settle()
    rank.batch((0, "gpu", "store", LARGE, 0, 160))
    batch = process.consumer.fetch(0)
    assert batch is not None
    await process.worker.take(batch)
    # the index of one process has no other client to wait for: the turnstile is held by the piece at the gate
    await asyncio.wait_for(index.begun.wait(), 5)


async def fetch_behind(process: Process, rank: RankLog) -> None:
    """What takes most of it away again comes while it is being applied."""
    rank.batch((0, "gpu", "remove", LARGE, 16, 160))
    batch = process.consumer.fetch(0)
    assert batch is not None
    await process.worker.take(batch)


@pytest.mark.usefixtures("small")
async def test_a_take_returns_at_the_first_piece_and_the_partition_is_not_fetched_meanwhile() -> None:
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])

    assert process.worker.readable() == {1}
    index.gate.set()
    await process.settle()
    assert process.worker.readable() == {0, 1}
    assert {claim[3] for claim in await claims(index.inner)} == set(LARGE)


@pytest.mark.usefixtures("small")
async def test_other_partitions_are_folded_and_stamped_between_the_pieces() -> None:
    """Steps pass one by one, in the order of asking: behind a piece whoever waited is next."""
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])
    ranks[1].batch((0, "gpu", "store", LARGE, 0, 16))
    batch = process.consumer.fetch(1)
    assert batch is not None
    flight = asyncio.create_task(process.worker.take(batch))
    await asyncio.sleep(0)
    index.gate.set()
    await flight
    order = [(step.partition, step.piece.number if step.piece else None) for step in index.steps]

    assert order.index((1, None), order.index((0, 0))) < order.index((0, 2))
    await process.settle()
    assert (0, 4) in [(step.partition, step.piece.number if step.piece else None) for step in index.steps]


@pytest.mark.usefixtures("small")
async def test_what_was_fetched_behind_a_large_unit_is_folded_after_it() -> None:
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])
    await fetch_behind(process, ranks[0])
    index.gate.set()
    await process.settle()

    assert {claim[3] for claim in await claims(index.inner)} == set(LARGE[:16])
    assert process.lines("partition_resynced") == []


@pytest.mark.usefixtures("small")
async def test_a_partition_that_moved_away_drops_what_was_fetched_behind() -> None:
    kafka, index, ranks = world()
    process, other = Process(kafka, index), Process(kafka, index.inner)
    await begin(process, index, ranks[0])
    await fetch_behind(process, ranks[0])
    process.worker.revoke()
    await other.settle()
    steps = len(index.steps)
    index.gate.set()
    await process.turn()
    await process.turn()

    assert process.worker.readable() == set()
    assert len(index.steps) == steps + 1, "one piece was under way, and it was refused"
    assert await claims(index.inner) == truth(list(ranks.values()))


@pytest.mark.usefixtures("small")
async def test_a_partition_that_is_lost_in_a_large_unit_is_left_there_and_placed_again() -> None:
    """Its topic was looked at, or its place in the log is gone: what goes on aside would write for nobody."""
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])
    process.worker.lost(0, "not in the log")
    steps = len(index.steps)
    index.gate.set()
    while process.worker.readable() != {0, 1}:
        await process.turn()
    pieces = [step.piece.number for step in index.steps[steps:] if step.piece]
    await process.settle()

    assert pieces == [1], "the one that was under way"
    assert process.worker._telemetry.counters.defects == 0
    assert {claim[3] for claim in await claims(index.inner)} == set(LARGE)


@pytest.mark.usefixtures("small")
async def test_a_stop_lets_a_large_unit_finish() -> None:
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])
    stopping = asyncio.create_task(process.worker.stop(5.0))
    await asyncio.sleep(0)
    index.gate.set()

    assert await stopping
    assert {claim[3] for claim in await claims(index.inner)} == set(LARGE)


@pytest.mark.usefixtures("small")
async def test_a_stop_in_the_middle_of_a_large_unit_does_not_wait_for_ever() -> None:
    kafka, index, ranks = world()
    process = Process(kafka, index)
    await begin(process, index, ranks[0])

    assert not await process.worker.stop(0.01)
    index.gate.set()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100_000), st.integers(1, 4))
async def test_no_mixture_of_faults_between_pieces_leaves_anything_but_the_truth(seed: int, ops: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "OPS_PER_STEP_MAX", ops)
        patch.setattr(folding, "PIECE_OPS_MAX", 1)
        await everything_at_once(seed)
