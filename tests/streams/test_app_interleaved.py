"""Takes, turns, losses, rebalances and cancellations between any two steps of each other: only the truth is left."""

from __future__ import annotations

import asyncio
import random

import pytest
from workerworld import PROMPTS, Faulty, Kafka, Process, claims, truth, write

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Outcome, Step
from kvledger_streams import fold as folding

MOMENTS = 60


class Yielding(Faulty):
    """An index that lets others run before and after each call."""

    def __init__(self, rnd: random.Random) -> None:
        super().__init__(MemoryIndex())
        self.rnd = rnd

    async def apply(self, step: Step) -> Outcome:
        await let_run(self.rnd, 4)
        outcome = await super().apply(step)
        await let_run(self.rnd, 4)
        return outcome


async def let_run(rnd: random.Random, times_max: int) -> None:
    for _ in range(rnd.randint(0, times_max)):
        await asyncio.sleep(0)


async def settled(process: Process) -> None:
    """All that is in the log is applied, with whatever goes on aside."""
    while True:
        await process.turn()
        came = await process.poll()
        while process.worker._asides:
            await asyncio.gather(*process.worker._asides)
            await process.turn()
        process.clock += 4.0
        if not came and process.worker.readable() == process.consumer.assigned:
            return


def act(rnd: random.Random, process: Process, takes: list[asyncio.Task[None]], turns: list[asyncio.Task[None]]) -> None:
    """One of the things that may happen to a worker at any moment."""
    worker, fate = process.worker, rnd.random()
    if fate < 0.40:
        batches = [process.consumer.fetch(number, rnd.randint(1, 9)) for number in sorted(worker.readable())]
        takes += [asyncio.create_task(worker.take(batch)) for batch in batches if batch is not None]
    elif fate < 0.70:
        turns.append(asyncio.create_task(worker.turn()))
    elif fate < 0.78:
        worker.lost(rnd.randint(0, 1), "not in the log")
    elif fate < 0.82:
        worker.revoke()
    elif fate < 0.92:
        worker.assign(process.consumer.assigned)
    elif takes:
        rnd.choice(takes).cancel()


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_falls_between_two_steps_leaves_the_truth_and_no_defect(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 2)
    monkeypatch.setattr(folding, "PIECE_OPS_MAX", 1)
    rnd = random.Random(seed)
    kafka, index = Kafka(2), Yielding(rnd)
    writers = write(kafka, seed, length=30)
    processes = [Process(kafka, index) for _ in range(1 + seed % 2)]
    takes: list[asyncio.Task[None]] = []
    turns: list[asyncio.Task[None]] = []
    for _ in range(MOMENTS):
        process = rnd.choice(processes)
        process.clock += rnd.choice((0.0, 0.1, 1.0))
        act(rnd, process, takes, turns)
        rnd.choice(writers).act(rnd, PROMPTS)
        await let_run(rnd, 6)
    ended = await asyncio.wait_for(asyncio.gather(*takes, *turns, return_exceptions=True), 10)
    for other in processes[1:]:
        other.worker.revoke()
    last = processes[0]
    last.worker.assign(last.consumer.assigned)
    await asyncio.wait_for(settled(last), 10)
    last.clock += 10  # a stamp finds out whether the other one has moved the index meanwhile
    await asyncio.wait_for(settled(last), 10)

    assert [each for each in ended if isinstance(each, Exception)] == []
    assert [process.worker._telemetry.counters.defects for process in processes] == [0] * len(processes)
    assert await claims(index.inner) == truth(writers)
