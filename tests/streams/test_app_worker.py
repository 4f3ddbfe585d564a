"""The partitions of a worker against a Kafka of lists and the index in memory: every way to fall out, one way back."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranklog import RankLog
from workerworld import PROMPTS, SETTINGS, Faulty, Kafka, Process, claims, truth, write

from kvledger_index.errors import Refused
from kvledger_index.errors import Unavailable as RedisUnavailable
from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Outcome, Step
from kvledger_streams.errors import Unavailable
from kvledger_streams.progress import Topic
from kvledger_streams.worker import Batch
from kvledger_wire.errors import WrongTopic


async def test_a_new_worker_reads_the_whole_log() -> None:
    kafka, index = Kafka(), MemoryIndex()
    writers = write(kafka, 1)
    process = Process(kafka, index)
    await process.settle()

    assert await claims(index) == truth(writers)
    assert {line["why"] for line in process.lines("partition_placed")} == {
        "nothing stored; from the log's start: nobody points"
    }
    assert {line["partition"] for line in process.lines("partition_caught_up")} == {0, 1}


async def test_the_next_worker_goes_on_where_the_index_stands() -> None:
    kafka, index = Kafka(), MemoryIndex()
    writers = write(kafka, 2)
    await Process(kafka, index).settle()
    ends = {n: kafka.end(n) for n in kafka.logs}
    rnd = random.Random(7)
    for _ in range(30):
        rnd.choice(writers).act(rnd, PROMPTS)
    second = Process(kafka, index)
    await second.settle()

    assert await claims(index) == truth(writers)
    assert {line["partition"]: line["restart"] for line in second.lines("partition_placed")} == ends
    assert not any(line["drop"] for line in second.lines("partition_placed"))


async def test_a_redis_that_was_flushed_is_rebuilt_from_the_log() -> None:
    kafka, index = Kafka(), MemoryIndex()
    empty = index.snapshot()
    writers = write(kafka, 3)
    process = Process(kafka, index)
    await process.settle()
    index.restore(empty)
    process.clock += 1
    await process.settle()

    assert await claims(index) == truth(writers)
    assert process.worker._telemetry.counters.refused == 2
    assert [line["drop"] for line in process.lines("partition_placed")] == [True] * 4


async def test_a_redis_that_rolled_back_is_read_on_from_where_it_stands() -> None:
    kafka, index = Kafka(), MemoryIndex()
    writers = write(kafka, 4, length=30)
    process = Process(kafka, index)
    await process.settle()
    snapshot = index.snapshot()
    rnd = random.Random(7)
    for _ in range(30):
        rnd.choice(writers).act(rnd, PROMPTS)
    await process.settle()
    index.restore(snapshot)
    process.clock += 1
    await process.settle()

    assert await claims(index) == truth(writers)
    assert not any(line["drop"] for line in process.lines("partition_placed")[2:])


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_silent_redis_blocks_and_shows_and_nothing_is_skipped(when: str) -> None:
    """The call may have been carried out although the answer is lost: what is stored decides."""
    kafka, index = Kafka(), Faulty(MemoryIndex())
    writers = write(kafka, 5)
    process = Process(kafka, index)
    await process.turn()
    setattr(index, when, [None, None, RedisUnavailable("gone"), RedisUnavailable("gone"), RedisUnavailable("gone")])
    await process.settle(seconds=1.0)

    assert await claims(index.inner) == truth(writers)
    assert {line["why"] for line in process.lines("partition_blocked")} == {"gone"}


async def test_a_blocked_partition_waits_longer_each_time_and_starts_afresh_once_it_moves() -> None:
    kafka, index = Kafka(1), Faulty(MemoryIndex())
    write(kafka, 6)
    process = Process(kafka, index)
    index.before = [RedisUnavailable("gone")] * 5
    waits = []
    for _ in range(5):
        await process.turn()
        (part,) = process.worker._partitions.values()
        waits.append(part.retry_at - process.clock)
        process.clock = part.retry_at
    await process.settle(seconds=1.0)

    assert waits == [0.0, 1.0, 2.0, 4.0, 4.0]
    assert part.failures == 0


async def test_a_redis_that_refuses_while_we_run_blocks_like_a_silent_one() -> None:
    kafka, index = Kafka(1), Faulty(MemoryIndex())
    write(kafka, 6)
    process = Process(kafka, index)
    index.before = [Refused("maxmemory-policy allkeys-lru: set noeviction")]
    await process.turn()

    assert "noeviction" in process.lines("partition_blocked")[0]["why"]
    assert process.worker.readable() == set()


async def test_a_defect_blocks_its_partition_and_the_others_are_read() -> None:
    kafka, index = Kafka(), Faulty(MemoryIndex())
    writers = write(kafka, 8, ranks=6)
    process = Process(kafka, index)
    await process.turn()
    index.only, index.before = 0, [LookupError("boom")] * 100
    for _ in range(30):
        await process.poll()
        await process.turn()
    (line,) = process.lines("partition_blocked")

    assert (line["partition"], line["why"]) == (0, "LookupError: boom")
    assert {claim for claim in truth(writers) if place(claim) == 1} == await claims(index.inner)
    assert process.worker._telemetry.counters.defects > 0


def place(claim: tuple[str, int | None, str, int], partitions: int = 2) -> int:
    replica, rank = claim[0].split("/")
    return RankLog([], replica, int(rank)).partition(partitions)


async def test_a_silent_kafka_keeps_partitions_waiting() -> None:
    kafka, index = Kafka(), MemoryIndex()
    writers = write(kafka, 9)
    process = Process(kafka, index)
    kafka.silent = Unavailable("Kafka does not answer at -")
    await process.turn()
    assert process.worker.readable() == set()
    assert {line["partition"] for line in process.lines("partition_blocked")} == {0, 1}

    kafka.silent = None
    await process.settle(seconds=5.0)

    assert await claims(index) == truth(writers)


async def test_retention_that_passes_a_running_worker_means_rebuild_not_a_jump() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    writers = write(kafka, 10, ranks=1)
    process = Process(kafka, index)
    await process.turn()
    await process.poll()
    kafka.base[0] = 30
    del kafka.logs[0][:30]
    writers[0].open()
    writers[0].batch((0, "gpu", "store", PROMPTS[0], 0, 20))
    await process.settle()
    again = process.lines("partition_placed")[1]

    assert (again["restart"], again["drop"]) == (30, True)
    assert "below the log's start 30" in again["why"]
    assert await claims(index) == truth(writers)


async def test_a_topic_of_the_same_name_is_another_log() -> None:
    kafka, index = Kafka(), MemoryIndex()
    write(kafka, 11)
    process = Process(kafka, index)
    await process.settle()
    kafka.topic = Topic("id-2", 2)
    for log in kafka.logs.values():
        log.clear()
    writers = write(kafka, 12, length=200)
    process.clock += SETTINGS.topic_check_seconds
    await process.settle()

    assert await claims(index) == truth(writers)
    assert len(process.lines("topic_changed")) == 1
    assert all(line["drop"] for line in process.lines("partition_placed"))


async def test_a_topic_that_is_gone_is_said() -> None:
    kafka, index = Kafka(), MemoryIndex()
    process = Process(kafka, index)
    await process.settle()
    kafka.silent = WrongTopic("topic is not there")
    process.clock += SETTINGS.topic_check_seconds
    await process.turn()

    assert process.lines("topic_unseen")[0]["why"] == "topic is not there"


async def test_what_was_fetched_before_a_seek_is_void() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    writers = write(kafka, 13, ranks=1)
    process = Process(kafka, index)
    await process.turn()
    old = process.consumer.fetch(0)
    assert old is not None
    process.worker.lost(0, "test")
    await process.turn()
    await process.worker.take(old)
    await process.settle()

    assert process.worker._telemetry.counters.stale_batches == 1
    assert await claims(index) == truth(writers)


async def test_offsets_left_out_by_the_client_are_asked_for_again() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    writers = write(kafka, 14, ranks=1)
    process = Process(kafka, index)
    await process.turn()
    await process.poll()
    process.consumer.position[0] += 3
    await process.settle()

    assert await claims(index) == truth(writers)
    assert "was due" in process.lines("partition_resynced")[0]["why"]


async def test_offsets_that_the_broker_does_not_have_are_passed() -> None:
    """Then the numbers in the records say whether anything is missing."""
    kafka, index = Kafka(1), MemoryIndex()
    writers = write(kafka, 15, ranks=1)
    process = Process(kafka, index)
    hole = range(10, 13)

    def without(batch: Batch | None) -> Batch | None:
        return batch and batch._replace(records=[each for each in batch.records if each.offset not in hole])

    fetch = process.consumer.fetch
    process.consumer.fetch = lambda partition, limit=7: without(fetch(partition, limit))  # type: ignore[method-assign]
    await process.settle()
    (part,) = process.worker._partitions.values()

    assert part.state is not None
    assert part.state.read == kafka.end(0)
    assert len(process.lines("partition_resynced")) == 1
    assert await claims(index) == truth(writers) or await claims(index) == set()


async def test_an_unreadable_stored_state_is_rebuilt() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    writers = write(kafka, 16, ranks=1)
    await Process(kafka, index).settle()
    ranks = index._store.ranks[0]
    ranks["pod-0/0"] = ranks["pod-0/0"]._replace(state=b"\xc1")
    second = Process(kafka, index)
    await second.settle()

    assert second.lines("partition_placed")[0]["drop"]
    assert await claims(index) == truth(writers)


# -- alive -----------------------------------------------------------------------------------------------------------


async def alive(index: MemoryIndex) -> int:
    return index._store.partitions[0].alive_ms


async def test_a_partition_at_its_end_is_stamped_every_second_while_idle() -> None:
    now_ms = 1_000
    index = MemoryIndex(clock_ms=lambda: now_ms)
    kafka = Kafka(1)
    process = Process(kafka, index)
    await process.settle()
    ages = []
    for _ in range(6):
        now_ms += 500
        process.clock += 0.5
        await process.turn()
        ages.append(now_ms - await alive(index))

    assert ages == [0, 500, 0, 500, 0, 500]


async def test_nobody_is_called_alive_while_the_end_is_not_known_or_not_reached() -> None:
    now_ms = 1_000
    index = MemoryIndex(clock_ms=lambda: now_ms)
    kafka = Kafka(1)
    process = Process(kafka, index)
    await process.settle()
    await process.turn()
    process.consumer.deaf, now_ms = True, 9_000
    process.clock += 5
    await process.turn()
    deaf = await alive(index)
    process.consumer.deaf = False
    write(kafka, 17)
    await process.turn()

    assert (deaf, await alive(index)) == (1000, 1000)
    await process.settle()
    assert await alive(index) == 9000


async def test_an_answer_that_waited_while_we_were_frozen_says_nothing_about_the_end() -> None:
    """The worker sleeps with an answer in its socket; what it wakes up with was the log's end of long ago.

    asked 100 |  answered, frozen ............ | 107 awake: applies what it has, and calls nobody alive
    """
    now_ms = 1_000
    index = MemoryIndex(clock_ms=lambda: now_ms)
    kafka = Kafka(1)
    process = Process(kafka, index)
    await process.settle()
    await process.turn()
    write(kafka, 17)
    process.consumer.asked = process.clock
    now_ms, process.clock, process.consumer.deaf = 8_000, process.clock + 7, True
    await process.settle()
    woken, read = await alive(index), index._store.partitions[0].progress.read
    process.consumer.deaf = False
    await process.turn()

    assert (woken, read) == (1000, kafka.end(0))
    assert await alive(index) == 8000


# -- assignment, stop ------------------------------------------------------------------------------------------------


async def test_a_partition_that_is_revoked_while_it_is_placed_stays_out() -> None:
    kafka, index = Kafka(), MemoryIndex()
    process = Process(kafka, index)
    process.consumer.assigned = {1}
    await process.turn()

    assert process.worker.readable() == {1}


async def test_batches_of_a_partition_that_is_not_ours_are_left_alone() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    write(kafka, 18)
    process = Process(kafka, index)
    await process.turn()
    batch = process.consumer.fetch(0)
    process.worker.revoke()
    assert batch is not None
    await process.worker.take(batch)

    assert await claims(index) == set()
    assert process.worker.readable() == set()


async def test_offsets_are_committed_for_lag_tools() -> None:
    kafka, index = Kafka(), MemoryIndex()
    write(kafka, 19)
    process = Process(kafka, index)
    await process.settle()
    process.clock += 1.5
    await process.turn()

    assert process.consumer.committed == {n: kafka.end(n) for n in kafka.logs}


async def test_a_stop_lets_the_call_in_flight_finish_and_takes_no_more() -> None:
    class Slow(Faulty):
        gate = asyncio.Event()

        async def apply(self, step: Step) -> Outcome:
            await self.gate.wait()
            return await super().apply(step)

    kafka, index = Kafka(1), Slow(MemoryIndex())
    write(kafka, 20)
    process = Process(kafka, index)
    await process.turn()
    batch, more = process.consumer.fetch(0), process.consumer.fetch(0)
    assert batch is not None
    assert more is not None
    flight = asyncio.create_task(process.worker.take(batch))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(process.worker.stop(5.0))
    await asyncio.sleep(0)
    await process.worker.take(more)
    index.gate.set()

    assert await stopping
    await flight
    assert [step.read for step in index.steps] == [7]


async def test_a_stop_does_not_wait_for_ever() -> None:
    class Hanging(Faulty):
        async def apply(self, step: Step) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError(step)

    kafka = Kafka(1)
    write(kafka, 21)
    process = Process(kafka, Hanging(MemoryIndex()))
    await process.turn()
    batch = process.consumer.fetch(0)
    assert batch is not None
    flight = asyncio.create_task(process.worker.take(batch))
    await asyncio.sleep(0)

    assert not await process.worker.stop(0.01)
    flight.cancel()
    await asyncio.gather(flight, return_exceptions=True)


async def test_a_step_that_is_cancelled_leaves_its_partition_to_be_placed_again() -> None:
    class Hanging(Faulty):
        async def apply(self, step: Step) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError(step)

    kafka = Kafka(1)
    write(kafka, 22)
    process = Process(kafka, Hanging(MemoryIndex()))
    await process.turn()
    batch = process.consumer.fetch(0)
    assert batch is not None
    flight = asyncio.create_task(process.worker.take(batch))
    await asyncio.sleep(0)
    flight.cancel()
    await asyncio.gather(flight, return_exceptions=True)

    assert process.worker.readable() == set()


async def test_the_canonical_line_tells_where_the_worker_stands() -> None:
    kafka, index = Kafka(), MemoryIndex()
    write(kafka, 23)
    process = Process(kafka, index)
    await process.settle()
    process.clock += SETTINGS.report_seconds
    await process.turn()
    line = process.lines("fold_progress")[0]

    assert (line["assigned"], line["reading"], line["caught_up"], line["ranks"], line["lag"]) == (2, 2, 2, 4, 0)
    assert line["fold_records"] == sum(len(log) for log in kafka.logs.values())


# -- everything at once ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100_000))
async def test_no_mixture_of_faults_leaves_anything_but_the_truth(seed: int) -> None:
    await everything_at_once(seed)


async def everything_at_once(seed: int) -> None:
    """Two workers that both believe to own everything, calls lost before and after, rollbacks, flushes, rebalances."""
    rnd = random.Random(seed)
    kafka, index = Kafka(), Faulty(MemoryIndex())
    snapshots = [index.inner.snapshot()]
    writers = write(kafka, seed, length=rnd.randint(0, 60))
    processes = [Process(kafka, index), Process(kafka, index)]
    for _ in range(40):
        process = rnd.choice(processes)
        process.clock += 1.0
        fate = rnd.random()
        faults: list[Exception | None] = [None] * rnd.randint(0, 2)
        if fate < 0.10:
            index.before = [*faults, RedisUnavailable("before")]
        elif fate < 0.20:
            index.after = [*faults, RedisUnavailable("after")]
        elif fate < 0.25:
            index.inner.restore(rnd.choice(snapshots))
        elif fate < 0.30:
            snapshots.append(index.inner.snapshot())
        elif fate < 0.35:
            process.worker.assign(process.consumer.assigned)
        elif fate < 0.40:
            processes[processes.index(process)] = Process(kafka, index)
        elif fate < 0.50:
            for _ in range(5):
                rnd.choice(writers).act(rnd, PROMPTS)
        await process.turn()
        await process.poll(rnd)
    index.before, index.after = [], []
    last = Process(kafka, index)
    await last.settle(seconds=4.0)
    last.clock += 10  # a stamp finds out whether the other one has moved the index meanwhile
    await last.settle(seconds=4.0)

    assert await claims(index.inner) == truth(writers)
    for number in kafka.logs:
        stored = await index.inner.load(number)
        assert stored.progress is not None
        assert stored.progress.read == kafka.end(number) >= stored.progress.target
