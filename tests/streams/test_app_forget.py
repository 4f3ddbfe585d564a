"""Which ranks leave the catalogue, by whose clock, and what brings them back."""

from __future__ import annotations

from ranklog import RankLog
from workerworld import PROMPTS, Kafka, Process, claims

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import NEVER

FORGET_SECONDS = 0.02
"""20 records: the log's clock of this world moves by 1 ms a record."""


def rank(kafka: Kafka, name: str, owner: int = 3) -> RankLog:
    """A rank with a life that holds something."""
    writer = RankLog([], name, owner=owner)
    writer.log = kafka.logs[0]
    writer.take_over(owner)
    writer.open()
    writer.batch((0, "gpu", "store", PROMPTS[0], 0, 20))
    return writer


async def ranks(index: MemoryIndex) -> set[str]:
    return {name for model in await index.models() for name in (await index.catalogue(model)).ranks}


async def idle(process: Process) -> None:
    """All read, and stamped at the log's end."""
    for _ in range(2):
        await process.settle(1.0)


def worker(kafka: Kafka, index: MemoryIndex) -> Process:
    return Process(kafka, index, forget_seconds=FORGET_SECONDS)


async def test_a_closed_rank_leaves_and_its_stamp_stays() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    gone, other = rank(kafka, "gone"), rank(kafka, "other")
    gone.close()
    process = worker(kafka, index)
    await idle(process)

    assert await ranks(index) == {other.id}
    assert (await index.load(0)).ranks[gone.id][0] > NEVER
    assert [(line["rank"], line["why"]) for line in process.lines("rank_forgotten")] == [(gone.id, "closed")]
    assert process.worker.tally.forgotten == 1


async def test_a_rank_that_the_log_outlived_leaves_with_its_blocks() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    gone, other = rank(kafka, "gone"), rank(kafka, "other")
    process = worker(kafka, index)
    await idle(process)
    assert {claim[0] for claim in await claims(index)} == {gone.id, other.id}
    for _ in range(30):
        other.beat()
    await idle(process)

    assert await ranks(index) == {other.id}
    assert {claim[0] for claim in await claims(index)} == {other.id}


async def test_a_silent_partition_forgets_nobody() -> None:
    """Only the log's clock counts: nothing was heard of anyone, so nobody is known to be gone."""
    kafka, index = Kafka(1), MemoryIndex()
    writers = [rank(kafka, "one"), rank(kafka, "two")]
    process = worker(kafka, index)
    await idle(process)
    process.clock += 1e6
    await idle(process)

    assert await ranks(index) == {writer.id for writer in writers}


async def test_nobody_is_forgotten_while_the_log_is_still_read() -> None:
    """What is ahead may be of that rank.

    gone  o b                    ... b
    other     h h h h h h h h h h      <- here gone looks silent, and is not
    """
    kafka, index = Kafka(1), MemoryIndex()
    gone, other = rank(kafka, "gone"), rank(kafka, "other")
    for _ in range(60):
        other.beat()
    gone.beat()
    process = worker(kafka, index)
    await process.turn()
    while await process.poll():
        process.clock += 1
        await process.turn()
    await idle(process)

    assert await ranks(index) == {gone.id, other.id}
    assert process.lines("rank_forgotten") == []


async def test_a_new_life_brings_a_rank_back() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    back, other = rank(kafka, "back"), rank(kafka, "other")
    back.close()
    process = worker(kafka, index)
    await idle(process)
    assert await ranks(index) == {other.id}
    back.take_over(4)
    back.open()
    back.batch((0, "gpu", "store", PROMPTS[2], 0, 3))
    await idle(process)

    assert await ranks(index) == {back.id, other.id}
    assert {claim[3] for claim in await claims(index) if claim[0] == back.id} == set(PROMPTS[2][:3])


async def test_late_records_of_a_fenced_owner_revive_nobody() -> None:
    """The old owner wakes up when the rank is long forgotten; another worker reads what it writes."""
    kafka, index = Kafka(1), MemoryIndex()
    old, other = rank(kafka, "gone", owner=3), rank(kafka, "other")
    new = RankLog([], "gone", owner=4)
    new.log = kafka.logs[0]
    new.take_over(4)
    new.open()
    new.close()
    await idle(worker(kafka, index))
    old.batch((0, "gpu", "store", PROMPTS[1], 0, 9))
    old.open()
    old.batch((0, "gpu", "store", PROMPTS[1], 0, 9))
    await idle(worker(kafka, index))

    assert await ranks(index) == {other.id}
    assert {claim[0] for claim in await claims(index)} == {other.id}


async def test_what_goes_on_in_a_forgotten_life_is_not_believed() -> None:
    """Its blocks are gone, so more of the same life would be half of the truth."""
    kafka, index = Kafka(1), MemoryIndex()
    asleep, other = rank(kafka, "asleep"), rank(kafka, "other")
    for _ in range(30):
        other.beat()
    process = worker(kafka, index)
    await idle(process)
    asleep.batch((0, "gpu", "store", PROMPTS[2], 0, 3))
    await idle(process)

    assert {claim[0] for claim in await claims(index)} == {other.id}


async def test_a_checkpoint_of_a_forgotten_life_brings_the_rank_back() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    slept, other = rank(kafka, "slept"), rank(kafka, "other")
    process = worker(kafka, index)
    await idle(process)
    for _ in range(30):
        other.beat()
    await idle(process)
    assert await ranks(index) == {other.id}
    slept.checkpoint(2)
    await idle(process)

    assert await ranks(index) == {slept.id, other.id}
    assert {claim[1:] for claim in await claims(index) if claim[0] == slept.id} == slept.held


async def test_the_next_worker_knows_who_was_forgotten() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    gone, other = rank(kafka, "gone"), rank(kafka, "other")
    gone.close()
    await idle(worker(kafka, index))
    second = worker(kafka, index)
    await idle(second)

    assert second.lines("rank_forgotten") == []
    assert await ranks(index) == {other.id}


async def test_a_forgotten_rank_s_unfinished_batch_holds_the_restart_offset_no_more() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    gone, other = rank(kafka, "gone"), rank(kafka, "other")
    pinned = kafka.end(0)
    gone.events(end=False)
    for _ in range(30):
        other.beat()
    process = Process(kafka, index)
    await idle(process)
    stored = (await index.load(0)).progress
    assert stored is not None
    assert stored.restart == pinned
    second = worker(kafka, index)
    await idle(second)
    stored = (await index.load(0)).progress

    assert stored is not None
    assert stored.restart == kafka.end(0)
    assert await ranks(index) == {other.id}
