"""Rebuilds from pointers against a real Kafka: what was deleted is in the checkpoints, nothing is believed unseen."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bridgeworld import Setup, play, recording, status, truth
from confluent_kafka import Consumer
from ranklog import RankLog
from redis.asyncio import Redis
from streamsworld import PARTITIONS, Installation

from kvledger_router import Index
from kvledger_streams import pointers as looking
from kvledger_streams.errors import Unavailable
from kvledger_streams.pointers import Pointers
from kvledger_wire.topics import REPLICAS


@pytest.fixture
def world(
    kafka: str, redis_server: Any, topic_prefix: str, namespace: str, create_topics: Any, tmp_path: Path
) -> Iterator[Installation]:
    """An installation with empty topics and a Redis of its own, which a test may empty."""
    create_topics(topic_prefix, partitions=PARTITIONS)
    with Installation(kafka, redis_server().url, topic_prefix, namespace, tmp_path) as made:
        yield made


def pointers(world: Installation) -> Pointers:
    return Pointers(world.kafka, world.topic, world.prefix + REPLICAS, request_seconds=5.0)


async def look(world: Installation, partition: int = 0) -> tuple[dict[str, int], str]:
    starts = await pointers(world).starts(partition, PARTITIONS)
    return dict(starts.ranks), starts.why


async def test_a_flushed_index_comes_back_whole_although_retention_took_the_logs_head(
    world: Installation, eventually_async: Any
) -> None:
    """In a worker that runs: emptied Redis, deleted head, and every rank is exact again from its checkpoint."""
    rnd = random.Random(1)
    ranks = world.ranks(8)
    world.act(rnd, 200)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true, 30)
    for rank in ranks:
        if not rank.loaded:
            rank.open()
        rank.checkpoint(3)
    world.push()
    world.point()
    lowest: dict[int, int] = {}
    for name, offset in world.beginnings.items():
        home = world.place(f"{name}/*".encode())
        lowest[home] = min(offset, lowest.get(home, offset))
    world.act(rnd, 50)
    world.push()
    for number, offset in lowest.items():
        world.forget(number, offset)
    placed = len(worker.lines("partition_placed"))
    async with Redis.from_url(world.redis) as client:
        await client.flushall()
    await eventually_async(world.is_true, 30)
    worker.wait("partition_placed", count=placed + PARTITIONS)  # also those without a rank, by their next stamp
    rebuilt = {line["partition"]: line for line in worker.lines("partition_placed")[placed:]}

    assert all(line["drop"] for line in rebuilt.values())
    assert {number: rebuilt[number]["restart"] for number in lowest} == lowest
    assert min(lowest.values()) > 0
    assert not worker.lines("pointers_unread")
    assert worker.stop() == 0


async def test_an_engine_followed_by_a_bridge_is_exact_again_from_its_checkpoint(
    world: Installation, eventually: Any, eventually_async: Any
) -> None:
    """Bridge, Kafka whose head is deleted, a worker with an empty Redis, router: all but the engine are real."""
    entry, played = recording("gemma3_s11")
    with Setup(world.kafka, world.prefix) as setup:
        engine = setup.engine(entry)
        bridge = setup.bridge(checkpoint_bytes_min=4_000)
        play(engine, played[:60])
        (line,) = eventually(lambda: setup.lines(bridge, "rank_checkpointed")[:1])
        play(engine, played[60:])
        eventually(lambda: status(bridge).last == played[-1].seq)
        home = world.place(b"r/0/*")
        world.forget(home, line["offset"])
        worker = world.worker()
        worker.wait("partition_caught_up", count=PARTITIONS)
        async with Index.from_url(
            world.redis, model=entry.model, namespace=world.namespace, deadline_seconds=5.0
        ) as index:

            async def is_exact() -> bool:
                holder = (await index.match(list(range(64)))).of("r")
                return holder is not None and holder.status == "exact"

            await eventually_async(is_exact, 20)
        held = {(group, medium, key) for _, group, medium, key in await world.claims()}
        placed = {line["partition"]: line for line in worker.lines("partition_placed")}[home]

    assert {(group, key.to_bytes(8, "big")) for group, medium, key in held if medium == "gpu"} == {
        (group, key) for group, _, key in truth(entry, played)
    }
    assert placed["restart"] >= line["offset"] > 0
    assert [loaded["rank"] for loaded in worker.lines("rank_loaded")] == ["r/0"]
    assert worker.stop() == 0


async def test_a_missing_replicas_topic_leaves_the_logs_start_and_is_told(
    world: Installation, eventually_async: Any
) -> None:
    (gone,) = world.admin.delete_topics([world.prefix + REPLICAS]).values()
    gone.result(15)
    world.ranks(4)
    world.act(random.Random(2), 50)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true, 30)

    assert worker.lines("pointers_unread")[0]["topic"] == world.prefix + REPLICAS
    assert worker.stop() == 0


async def test_pointers_count_only_where_the_rank_begins_there(world: Installation) -> None:
    """One rank a partition, so that each case is alone: right, none, the log's start, a record of another kind."""
    names = {world.place(f"pod-{i}/0/*".encode()): f"pod-{i}" for i in range(40)}
    ranks = world.ranks(40)
    rnd = random.Random(3)
    for rank in ranks:
        rank.batch((0, "gpu", "store", [rnd.getrandbits(64) for _ in range(5)], 0, 5))
    world.push()
    world.beginnings = {f"{name}/0": world.beginnings[f"{name}/0"] for name in names.values()}
    world.point(**{names[1].replace("-", "_"): -1, names[2].replace("-", "_"): world.beginnings[f"{names[2]}/0"] + 1})
    world.point(owner=4, **{names[3].replace("-", "_"): 1 << 40})
    world.point(
        owner=4, **{names[1].replace("-", "_"): -1, names[2].replace("-", "_"): 2, names[3].replace("-", "_"): 1 << 40}
    )
    found = [await look(world, number) for number in range(PARTITIONS)]

    assert found[0] == ({f"{names[0]}/0": world.beginnings[f"{names[0]}/0"]}, "")
    assert found[1] == ({}, f"{names[1]}/0 has no pointer")
    assert [ranks for ranks, _ in found[2:]] == [{}, {}]
    assert all("nothing to begin with" in why for _, why in found[2:])


async def test_ranks_that_nobody_follows_any_more_do_not_send_a_rebuild_to_the_logs_start(world: Installation) -> None:
    """Its pod left no tombstone, and where it points is below the log's start, or was never written."""
    gone, lives = [f"pod-{i}" for i in range(40) if world.place(f"pod-{i}/0/*".encode()) == 0][:2]
    assert await look(world) == ({}, "the log is empty")
    world.beginnings = {f"{gone}/0": 7}
    world.point()
    rank = RankLog(world.log, lives, owner=3)
    rank.open()
    world.push()
    assert await look(world) == ({}, "nobody follows a rank of this partition")
    del world.beginnings[f"{gone}/0"]
    world.point()

    assert await look(world) == ({f"{lives}/0": 0}, "")


class Unasked(Consumer):  # type: ignore[misc]  # the client has no types
    """A consumer that asks nobody who leads the event topic's partitions before it is sent to one."""

    def list_topics(self, topic: str, timeout: float) -> Any:
        """Of the replicas topic only."""
        return super().list_topics(topic, timeout=timeout) if topic.endswith(REPLICAS) else None


async def test_a_look_does_not_wait_for_the_clients_timer(world: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild looks at all partitions, one after the other: the quickest shows what each has to take."""

    async def quickest() -> float:
        source, taken = pointers(world), []
        for number in range(PARTITIONS):
            begun = time.monotonic()
            await source.starts(number, PARTITIONS)
            taken.append(time.monotonic() - begun)
        return min(taken)

    asked = await quickest()
    monkeypatch.setattr(looking, "Consumer", Unasked)
    unasked = await quickest()

    assert asked < 0.4 < unasked


async def test_a_look_ends_with_its_time_or_when_it_is_stopped(
    world: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what failed a moment ago fails at once."""
    monkeypatch.setattr(looking, "LOOKUP_SECONDS_MAX", 0.0)
    slow = pointers(world)
    with pytest.raises(Unavailable, match="within 0 s"):
        await slow.starts(0, PARTITIONS)
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="within"):
        await slow.starts(1, PARTITIONS)
    stopped = pointers(world)
    stopped.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await stopped.starts(0, PARTITIONS)
