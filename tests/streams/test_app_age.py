"""A worker knows what time it is on the log: what it reads late is as old as it is."""

from __future__ import annotations

import asyncio

import pytest
from workerworld import Faulty, Kafka, Process, write

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Outcome, Step


async def ages(index: MemoryIndex, now_ms: int) -> set[int]:
    """Seconds since the last word of each rank, as routers are told."""
    (model,) = await index.models()
    reading = await index.read(await index.catalogue(model), model, [])
    assert reading.pulses
    return {round((now_ms - pulse.heard_ms) / 1000) for pulse in reading.pulses.values()}


@pytest.mark.parametrize(("wall_seconds", "age"), [(1.0, 0), (4.0, 3), (61.0, 4), (-89.0, 4)])
async def test_a_rebuild_does_not_make_old_words_new(wall_seconds: float, age: int) -> None:
    """A while after the bridges died an empty index is filled from the log that they left.

    Their last words are so old that they are stale; that our own clock makes the difference is the canary. One that is
    wrong by more than a second takes them for stale, and no rank for gone.
    """
    index, kafka = MemoryIndex(clock_ms=lambda: 500_000), Kafka(1)
    write(kafka, 3)
    await Process(kafka, index, wall_seconds=wall_seconds).settle()

    assert await ages(index, 500_000) == {age}


async def test_what_waited_for_a_frozen_worker_is_as_old_as_it_is() -> None:
    """Heard of at 1 s; the worker sleeps for 50 s with newer records in its hand, and more in the log of long ago."""
    now_ms = 500_000
    index, kafka = MemoryIndex(clock_ms=lambda: now_ms), Kafka(1)
    writers = write(kafka, 3)
    process = Process(kafka, index)
    await process.settle()
    assert await ages(index, now_ms) == {0}
    for writer in writers:
        writer.beat()
    now_ms, process.clock = now_ms + 50_000, process.clock + 50
    await process.settle()

    assert process.worker.tally.records == kafka.end(0)
    assert await ages(index, now_ms) == {50}


@pytest.mark.parametrize("wall_seconds", [3601.0, -3599.0])
async def test_a_first_guess_that_was_wrong_is_soon_caught_up_with(wall_seconds: float) -> None:
    """The log's clock is an hour off ours: ranks are taken for stale, for some seconds and not for an hour."""
    now_ms = 500_000
    index, kafka = MemoryIndex(clock_ms=lambda: now_ms), Kafka(1)
    kafka.log_ms = lambda _offset: now_ms - 499_000
    writers = write(kafka, 3)
    process = Process(kafka, index, wall_seconds=wall_seconds)
    await process.settle()
    told = []
    for seconds in (1, 4):
        await process.turn()  # the log's end is known: what comes next is news
        now_ms, process.clock = now_ms + seconds * 1000, process.clock + seconds
        for writer in writers:
            writer.beat()
        await process.poll()
        await process.settle()
        told.append(await ages(index, now_ms))

    assert told == [{4}, {0}]


async def test_a_step_that_waited_for_its_turn_says_what_time_it_is_then() -> None:
    """The index stands still for 9 s within a call of another partition."""

    class Slow(Faulty):
        gate = asyncio.Event()

        async def apply(self, step: Step) -> Outcome:
            if step.partition == 0:
                await self.gate.wait()
            return await super().apply(step)

    now_ms = 500_000
    index, kafka = Slow(MemoryIndex(clock_ms=lambda: now_ms)), Kafka(2)
    index.gate.set()
    writers = {writer.partition(2): writer for writer in write(kafka, 1, length=0)}
    process = Process(kafka, index)
    await process.settle()
    index.gate.clear()
    flights = []
    for partition in (0, 1):
        writers[partition].beat()
        batch = process.consumer.fetch(partition)
        assert batch is not None
        flights.append(asyncio.create_task(process.worker.take(batch)))
        await asyncio.sleep(0)
    now_ms, process.clock = now_ms + 9_000, process.clock + 9
    index.gate.set()
    await asyncio.gather(*flights)
    stored = index.inner._store.partitions

    held, waited = stored[0], stored[1]
    await process.turn()

    assert (waited.log_at_ms, waited.log_ms > 9_900) == (now_ms, True)
    assert waited.alive_ms == 500_000, "nobody knows any more that this is the log's end"
    assert (held.alive_ms, held.log_ms < 2_000) == (now_ms, True), "what stood still in the index is dated too late"
    assert stored[0].log_ms > 9_900, "and soon dated anew"
