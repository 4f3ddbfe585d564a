"""When a worker scrubs: in idle moments, within its budget, and never at a batch's expense."""

from __future__ import annotations

from workerworld import SETTINGS, Faulty, Kafka, Process, write

from kvledger_index.errors import Unavailable
from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Scrubbed, ScrubBudget
from kvledger_streams.worker import SCRUB_BUSY_TIMES

PIECE = Scrubbed(entries=30, rows=20, looked=50, slots=7, idle=False, ended=False)


PAUSE = 0.25


async def running(**changes: float) -> tuple[Faulty, Process]:
    kafka, index = Kafka(), Faulty(MemoryIndex())
    write(kafka, 1, length=5)
    process = Process(kafka, index, scrub_seconds=PAUSE, **changes)
    await process.settle()
    index.budgets.clear()
    return index, process


async def test_a_worker_scrubs_once_per_pause_within_its_budget() -> None:
    index, process = await running(scrub_budget_seconds=0.001)
    for _ in range(10):
        process.clock += PAUSE / 2
        await process.turn()

    assert index.budgets == [ScrubBudget(seconds=0.001)] * 5


async def test_the_canonical_line_carries_what_was_freed_and_what_is_left() -> None:
    index, process = await running()
    index.scrubs += [PIECE, PIECE._replace(slots=0, ended=True)]
    lines = []
    for _ in range(3):
        process.clock += SETTINGS.report_seconds
        await process.turn()
        lines.append(process.lines("fold_progress")[-1])

    names = ("scrubs", "scrubbed_entries", "scrubbed_rows", "scrub_passes", "dead_slots")
    assert [tuple(line[name] for name in names) for line in lines[1:]] == [(1, 30, 20, 0, 7), (2, 60, 40, 1, 0)]


async def test_a_worker_that_applies_scrubs_rarely_but_it_does() -> None:
    index, process = await running()
    part = next(iter(process.worker._partitions.values()))
    counts = []
    async with part.lock:  # a step is under way
        for pauses in (1, SCRUB_BUSY_TIMES - 1):
            process.clock += PAUSE * pauses
            await process.turn()
            counts.append(len(index.budgets))

    assert counts == [0, 1]


async def test_a_worker_without_partitions_scrubs_nothing() -> None:
    index, process = await running()
    process.worker.revoke()
    process.clock += 60
    await process.turn()

    assert index.budgets == []


async def test_a_scrub_that_fails_is_counted_and_tried_again() -> None:
    index, process = await running()
    index.scrub_faults += [Unavailable("Redis does not answer"), None]
    index.scrubs.append(PIECE)
    for _ in range(2):
        process.clock += PAUSE
        await process.turn()

    counters = process.worker._telemetry.counters
    assert (counters.scrub_failures, counters.scrubs) == (1, 1)
    assert [line["why"] for line in process.lines("scrub_failed")] == ["Redis does not answer"]
    assert process.worker.readable() == process.consumer.assigned, "no partition waits for it"


async def test_a_stopping_worker_scrubs_no_more() -> None:
    index, process = await running()
    assert await process.worker.stop(1.0)
    process.clock += 60
    await process.turn()

    assert index.budgets == []
