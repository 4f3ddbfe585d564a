"""Rebuilds from pointers: from where, what is passed over, and that the log's start is always there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranklog import RankLog
from workerworld import PROMPTS, Kafka, Process, claims, truth

from kvledger_index.memory import MemoryIndex
from kvledger_streams.errors import Unavailable
from kvledger_streams.fold import RANKS_PER_STEP_MAX
from kvledger_streams.progress import Starts
from kvledger_wire.records import Checkpoint, Opened, decode_event
from kvledger_wire.replicas import begins


def world(ranks: int = 3) -> tuple[Kafka, list[RankLog]]:
    """One partition, all ranks open."""
    kafka = Kafka(1)
    writers = []
    for i in range(ranks):
        writer = RankLog(kafka.logs[0], f"pod-{i}", owner=3)
        writer.take_over(3)
        writer.open()
        writer.batch((0, "gpu", "store", PROMPTS[i % 3], 0, 9))
        writers.append(writer)
    return kafka, writers


def point(kafka: Kafka, *, behind: int = 0) -> None:
    """What pointers would say: each rank's newest Opened or complete checkpoint, or (``behind``) an older one."""
    found: dict[str, list[int]] = {}
    begun: dict[str, int] = {}
    for place, (key, value) in enumerate(kafka.logs[0]):
        record = decode_event(value)
        rank = (key or b"").decode().rpartition("/")[0]
        if isinstance(record, Checkpoint):
            begun[rank] = place if record.part == 0 else begun.get(rank, -1)
        if begins(rank, key, value) and isinstance(record, Opened):
            found.setdefault(rank, []).append(place)
        elif isinstance(record, Checkpoint) and record.last and begun[rank] >= 0:
            found.setdefault(rank, []).append(begun[rank])
    base = kafka.base[0]
    kafka.starts_known = Starts(
        {rank: base + places[max(-len(places), -1 - behind)] for rank, places in found.items()}, ""
    )


def cut(kafka: Kafka, before: int) -> None:
    """Retention takes the head of the log."""
    del kafka.logs[0][: before - kafka.base[0]]
    kafka.base[0] = before


def placed(process: Process) -> list[tuple[int, bool, str]]:
    return [(line["restart"], line["drop"], line["why"]) for line in process.lines("partition_placed")]


async def test_a_rebuild_begins_at_the_lowest_pointer_and_all_ranks_are_whole() -> None:
    """What retention took is in the checkpoints."""
    kafka, writers = world()
    head = kafka.end(0)
    for writer in writers:
        writer.checkpoint(2)
        writer.batch((1, "gpu", "store", PROMPTS[0], 0, 5))
    point(kafka)
    cut(kafka, head)
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()

    assert placed(process) == [(head, True, "nothing stored; from the lowest of 3 pointers")]
    assert await claims(index) == truth(writers)
    assert [line["rank"] for line in process.lines("rank_loaded")] == [writer.id for writer in writers]


async def test_canary_without_checkpoints_the_cut_log_is_not_enough() -> None:
    kafka, writers = world()
    head = kafka.end(0)
    for writer in writers:
        writer.batch((1, "gpu", "store", PROMPTS[0], 0, 5))
    cut(kafka, head)
    index = MemoryIndex()
    await Process(kafka, index).settle()

    assert (await claims(index), truth(writers) == set()) == (set(), False)


async def test_records_of_a_rank_below_its_own_pointer_are_passed_over() -> None:
    """An idle rank holds the start back; the others need not be folded from there.

    pod-0  Opened . . . . . . . . . . . . . . .   points at its Opened, the lowest
    pod-1  Opened . . . checkpoint . . . . . .    its earlier records are not even looked at
    """
    kafka, (idle, busy) = world(2)
    for _ in range(20):
        busy.batch((0, "gpu", "store", PROMPTS[0], 0, 5), (0, "gpu", "remove", PROMPTS[0], 0, 5))
    busy.checkpoint(2)
    busy.batch((0, "gpu", "store", PROMPTS[2], 0, 5))
    point(kafka)
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()
    assert await claims(index) == truth([idle, busy])
    assert process.worker.tally.opened == 1

    kafka.starts_known = Starts(dict.fromkeys(kafka.starts_known.ranks, 1), "")
    other = Process(kafka, MemoryIndex())
    await other.settle()
    assert other.worker.tally.ops > process.worker.tally.ops
    assert other.worker.tally.opened == 2


async def test_pointers_that_cannot_be_read_leave_the_logs_start_and_are_told() -> None:
    kafka, writers = world()
    kafka.pointers_fault = Unavailable("kvledger.replicas at nowhere: no such topic")
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()

    assert await claims(index) == truth(writers)
    assert [line["topic"] for line in process.lines("pointers_unread")] == ["kvledger.replicas"]
    assert "from the log's start: kvledger.replicas at nowhere" in placed(process)[0][2]


async def test_a_defect_in_reading_pointers_does_not_block_a_rebuild() -> None:
    kafka, writers = world()
    kafka.pointers_fault = ValueError("of ours")
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()

    assert await claims(index) == truth(writers)


async def test_pointers_are_not_asked_for_where_the_index_knows_where_to_go_on() -> None:
    kafka, writers = world()
    index = MemoryIndex()
    await Process(kafka, index).settle()
    kafka.pointers_fault = AssertionError("asked")
    writers[0].beat()
    process = Process(kafka, index)
    await process.settle()

    assert process.lines("pointers_unread") == []
    assert [why for _, _, why in placed(process)] == ["stored"]


async def test_a_log_that_grew_while_pointers_were_read_is_looked_at_again() -> None:
    """A checkpoint written meanwhile points beyond the end that was known before."""
    kafka, (writer,) = world(1)
    starts = kafka.starts

    async def slowly(partition: int, partitions: int) -> Starts:
        writer.checkpoint(1)
        point(kafka)
        return await starts(partition, partitions)

    kafka.starts = slowly  # type: ignore[method-assign]  # this one takes its time
    process = Process(kafka, MemoryIndex())
    await process.settle()

    assert placed(process) == [(3, True, "nothing stored; from the lowest of 1 pointers")]


async def test_retention_that_overtakes_a_running_worker_ends_in_pointers() -> None:
    """The second way into a rebuild: the place where we stand is not in the log any more."""
    kafka, writers = world()
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()
    for writer in writers:
        for _ in range(5):
            writer.batch((0, "gpu", "store", PROMPTS[1], 0, 30))
    head = kafka.end(0)
    for writer in writers:
        writer.checkpoint(2)
    point(kafka)
    cut(kafka, head)
    process.worker.lost(0, "not in the log")
    await process.settle()

    assert placed(process)[-1][:2] == (head, True)
    assert "below the log's start" in placed(process)[-1][2]
    assert await claims(index) == truth(writers)


async def test_a_restart_within_a_rebuild_goes_on_without_the_pointers() -> None:
    """What is below a rank's own pointer is harmless: it is loaded by what stands there."""
    kafka, (idle, busy) = world(2)
    for _ in range(10):
        busy.batch((0, "gpu", "store", PROMPTS[0], 0, 9), (0, "gpu", "remove", PROMPTS[0], 0, 5))
    busy.checkpoint(3)
    busy.batch((0, "gpu", "store", PROMPTS[2], 0, 5))
    point(kafka)
    index = MemoryIndex()
    first = Process(kafka, index)
    await first.turn()
    batch = first.consumer.fetch(0, 6)
    assert batch is not None
    await first.worker.take(batch)
    assert await claims(index) == truth([idle])
    kafka.pointers_fault = AssertionError("asked again")
    await Process(kafka, index).settle()

    assert await claims(index) == truth([idle, busy])


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 2), st.data())
async def test_a_rebuild_from_any_pointers_ends_as_one_from_zero(seed: int, behind: int, data: st.DataObject) -> None:
    """Several ranks in one partition, some restored by other bridges; retention up to the lowest pointer or less."""
    rnd = random.Random(seed)
    kafka, writers = world(3)
    for _ in range(40):
        writer = rnd.choice(writers)
        roll = rnd.random()
        if not writer.loaded or roll < 0.75:
            writer.act(rnd, PROMPTS)
        elif roll < 0.92:
            writer.checkpoint(rnd.randint(1, 3))
        else:
            writer.take_over(writer.owner + 1)
            writer.resume()
    point(kafka, behind=behind)
    whole, cut_off = MemoryIndex(), MemoryIndex()
    await Process(kafka, whole).settle()
    cut(kafka, data.draw(st.integers(0, min(kafka.starts_known.ranks.values()))))
    process = Process(kafka, cut_off)
    await process.settle()

    assert await claims(cut_off) == await claims(whole) == truth(writers)
    assert "pointers" in placed(process)[0][2]


def ended(kafka: Kafka) -> tuple[RankLog, RankLog]:
    """The newer bridge fenced, its Fence and all it wrote are gone with the log's head; the older one wakes up."""
    old = RankLog(kafka.logs[0], "pod-0", owner=3)
    new = RankLog(kafka.logs[0], "pod-0", owner=5)
    old.take_over(3)
    old.open()
    old.batch((0, "gpu", "store", PROMPTS[0], 0, 9))
    new.take_over(5)
    new.open()
    cut(kafka, kafka.end(0))
    old.checkpoint(1)
    old.batch((0, "gpu", "store", PROMPTS[0], 9, 12))
    return old, new


async def test_what_an_owner_sends_that_was_ended_before_the_logs_start_does_not_count() -> None:
    """Also for the worker after the one that rebuilt."""
    kafka = Kafka(1)
    old, new = ended(kafka)
    kafka.starts_known = Starts({}, "nobody points", {old.id: {0: 3, 3: 5}})
    index = MemoryIndex()
    await Process(kafka, index).settle()
    old.checkpoint(1)
    await Process(kafka, index).settle()
    assert await claims(index) == set()
    assert await index.models() == []

    new.checkpoint(1)
    new.batch((0, "gpu", "store", PROMPTS[2], 0, 3))
    process = Process(kafka, index)
    await process.settle()
    assert await claims(index) == {(new.id, *claim) for claim in new.held}
    assert [line["rank"] for line in process.lines("rank_loaded")] == [new.id]


async def test_canary_without_knowing_who_was_ended_an_old_life_is_served() -> None:
    kafka = Kafka(1)
    old, _ = ended(kafka)
    index = MemoryIndex()
    await Process(kafka, index).settle()

    assert await claims(index) == {(old.id, *claim) for claim in old.held}


async def test_owners_of_more_ranks_than_a_step_may_have_are_told_in_several() -> None:
    kafka, index = Kafka(1), MemoryIndex()
    names = [f"gone-{i}/0" for i in range(RANKS_PER_STEP_MAX + 1)]
    kafka.starts_known = Starts({}, "nobody points", {name: {-5: 7} for name in names})
    await Process(kafka, index).settle()

    assert {name: stamp.owner for name, (stamp, _) in (await index.load(0)).ranks.items()} == dict.fromkeys(names, 7)


async def test_canary_a_start_behind_a_first_part_is_caught() -> None:
    """Nothing but a rank's beginning loads it: a pointer that is one off would show as a rank that stays away."""
    kafka, writers = world(1)
    writers[0].checkpoint(2)
    point(kafka)
    kafka.starts_known = Starts({rank: offset + 1 for rank, offset in kafka.starts_known.ranks.items()}, "")
    index = MemoryIndex()
    await Process(kafka, index).settle()

    assert await claims(index) != truth(writers)


@pytest.mark.parametrize("offset", [0, 10_000])
async def test_a_pointer_outside_the_log_leaves_the_logs_start(offset: int) -> None:
    kafka, writers = world(1)
    writers[0].checkpoint(1)
    cut(kafka, 1)
    kafka.starts_known = Starts({writers[0].id: offset}, "")
    index = MemoryIndex()
    process = Process(kafka, index)
    await process.settle()

    assert placed(process)[0][:2] == (1, True)
    assert "points outside" in placed(process)[0][2]
    assert await claims(index) == truth(writers)
