"""``kvledger streams`` as a process, against a real Kafka and a real Redis."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic
from load import LoopLag
from streamsworld import PARTITIONS, Installation

from kvledger_index.errors import Refused
from kvledger_index.errors import Unavailable as RedisUnavailable
from kvledger_index.reader import RedisReader
from kvledger_index.writer import RedisWriter
from kvledger_streams.app import serve
from kvledger_streams.errors import Unavailable
from kvledger_streams.settings import read_settings
from kvledger_streams.telemetry import Telemetry
from kvledger_wire.errors import WrongTopic
from kvledger_wire.partition import record_key
from kvledger_wire.records import decode_event


@pytest.fixture
def world(
    kafka: str, redis_url: str, topic_prefix: str, namespace: str, create_topics: Any, tmp_path: Path
) -> Iterator[Installation]:
    """An installation with empty topics, gone with all its workers after the test."""
    create_topics(topic_prefix, partitions=PARTITIONS)
    with Installation(kafka, redis_url, topic_prefix, namespace, tmp_path) as made:
        yield made


async def test_the_index_becomes_what_the_log_says_and_follows_it(world: Installation, eventually_async: Any) -> None:
    rnd = random.Random(1)
    world.ranks(8)
    world.act(rnd, 300)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    world.act(rnd, 300)
    world.push()
    await eventually_async(world.is_true)

    assert worker.stop(number=signal.SIGINT) == 0  # Ctrl-C; all others here end by SIGTERM
    assert worker.lines()[-1]["event"] == "worker_stopped"
    assert {line["partition"] for line in worker.lines("partition_caught_up")} == set(range(PARTITIONS))
    assert not worker.lines("partition_blocked")


async def test_a_worker_killed_in_the_middle_is_replaced(world: Installation, eventually_async: Any) -> None:
    rnd = random.Random(2)
    world.ranks(6)
    world.act(rnd, 200)
    world.push()
    first = world.worker(KVLEDGER_STREAMS_POLL_RECORDS_MAX="5")
    first.wait("partition_placed", count=PARTITIONS)  # what it had not begun is rebuilt by whoever comes
    await eventually_async(world.claims)  # in the middle of it
    first.kill()
    world.act(rnd, 200)
    world.push()
    second = world.worker()
    await eventually_async(world.is_true)

    assert not any(line["drop"] and line["target"] for line in second.lines("partition_placed"))
    assert second.stop() == 0


async def test_workers_join_and_leave_while_records_come(world: Installation, eventually_async: Any) -> None:
    """Timeline.

    first   |---------------------------| SIGTERM
    second          |----------------------------------
    records | ............ . . . . . . ............... |
    """
    rnd = random.Random(3)
    world.ranks(10)
    first = world.worker()
    first.wait("partition_caught_up", count=PARTITIONS)
    second = world.worker()

    async def shared() -> bool:
        world.act(rnd, 20)
        world.push()
        return bool(second.lines("partition_placed"))

    await eventually_async(shared)
    world.act(rnd, 100)
    world.push()
    assert first.stop() == 0
    world.act(rnd, 100)
    world.push()
    await eventually_async(world.is_true)
    taken = {line["partition"] for line in second.lines("partition_placed")}

    assert taken == set(range(PARTITIONS))
    assert second.stop() == 0


async def test_records_that_come_twice_change_nothing(world: Installation, eventually_async: Any) -> None:
    rnd = random.Random(4)
    world.ranks(4)
    world.act(rnd, 150)
    sent = world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    lives = {record_key(each.replica, each.rank, group): each.life for each in world.writers for group in (0, 1)}
    again = [row for row in sent if row[0] in lives and getattr(decode_event(row[1]), "life", None) == lives[row[0]]]
    assert len(again) > 50
    world.log += again
    world.push()
    world.act(rnd, 50)
    world.push()
    await eventually_async(world.is_true)

    assert worker.stop() == 0


async def test_reading_again_from_an_older_offset_changes_nothing(world: Installation, eventually_async: Any) -> None:
    rnd = random.Random(5)
    world.ranks(4)
    world.act(rnd, 150)
    world.push()
    first = world.worker()
    await eventually_async(world.is_true)
    assert first.stop() == 0
    async with RedisReader.from_url(world.redis, namespace=world.namespace) as reader:
        before = await reader.catalogue("m")
    async with RedisWriter.from_url(world.redis, namespace=world.namespace) as writer:
        for number in range(PARTITIONS):
            stored = await writer.load(number)
            assert stored.progress is not None
            await writer.seek(number, stored.progress.topic_id, 0, stored.progress.target, drop=False)
    second = world.worker()
    second.wait("partition_caught_up", count=PARTITIONS)

    async with RedisReader.from_url(world.redis, namespace=world.namespace) as reader:
        assert await reader.catalogue("m") == before
    assert await world.is_true()
    assert {line["restart"] for line in second.lines("partition_placed")} == {0}
    assert second.stop() == 0


async def test_junk_costs_the_rank_that_its_key_names_and_no_other(world: Installation, eventually_async: Any) -> None:
    rnd = random.Random(6)
    world.ranks(6)
    world.act(rnd, 150)
    world.log += [(b"junk", b"junk"), (None, b"junk"), (b"\xff/0/0", b"")]
    lost = world.writers[0]
    world.log.append((record_key(lost.replica, lost.rank, 0), b"\xc1junk"))
    lost.held, lost.loaded = set(), False
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    assert [line["rank"] for line in worker.lines("record_unreadable") if line["rank"]] == [lost.id]

    lost.open()
    world.act(rnd, 50)
    world.push()
    await eventually_async(world.is_true)

    assert worker.stop() == 0
    assert worker.lines("worker_stopped")[0]["fold_unreadable_keys"] == 3


async def test_idle_partitions_are_stamped_within_a_second(world: Installation, eventually_async: Any) -> None:
    world.ranks(8)
    world.push()
    worker = world.worker()
    await eventually_async(world.alive_ms)
    worker.wait("partition_caught_up", count=PARTITIONS)
    seen: list[dict[int, tuple[int, int]]] = []

    def newest(each: dict[int, tuple[int, int]]) -> int:
        return max(now for now, _ in each.values())

    async def watched() -> bool:
        seen.append(await world.alive_ms())
        return newest(seen[-1]) - newest(seen[0]) > 3_000

    async with LoopLag(0.05) as lag:  # the machine's other work makes worker and test late alike
        await eventually_async(watched)
    ages = [now - alive for each in seen[5:] for now, alive in each.values()]

    assert max(ages) < 1_500 + lag.seconds * 1000
    assert worker.stop() == 0


# -- at start --------------------------------------------------------------------------------------------------------


async def start(world: Installation, **changes: Any) -> None:
    """What the process does first; it must not come to more."""
    flags = {"kafka": world.kafka, "redis": world.redis, "topic_prefix": world.prefix, "request_seconds": 2.0}
    await serve(read_settings({**flags, "namespace": world.namespace, **changes}, {}), Telemetry())
    pytest.fail("it runs")


async def test_a_kafka_that_is_not_there_is_named(world: Installation) -> None:
    with pytest.raises(Unavailable, match=r"Kafka does not answer at 127\.0\.0\.1:1"):
        await start(world, kafka="127.0.0.1:1")


async def test_a_redis_that_is_not_there_is_named_without_its_password(world: Installation) -> None:
    with pytest.raises(RedisUnavailable, match=r"Redis at 127\.0\.0\.1:1/0 does not answer") as caught:
        await start(world, redis="redis://:secret@127.0.0.1:1/0")

    assert "secret" not in str(caught.value)


async def test_a_topic_of_another_shape_is_refused_with_what_to_change(world: Installation) -> None:
    name = f"{world.prefix}other.kvledger.events"
    topic = NewTopic(name, num_partitions=2, config={"cleanup.policy": "compact"})
    (done,) = world.admin.create_topics([topic]).values()
    done.result(15)
    with pytest.raises(WrongTopic) as caught:
        await start(world, topic_prefix=f"{world.prefix}other.", partitions=4)

    assert f"topic {name} has cleanup.policy=compact: set it to delete" in str(caught.value)
    assert "message.timestamp.type=CreateTime: set it to LogAppendTime" in str(caught.value)
    assert "has 2 partitions and 4 are configured" in str(caught.value)


async def test_a_redis_that_evicts_is_refused_with_what_to_change(world: Installation, redis_server: Any) -> None:
    server = redis_server(settings=("--maxmemory-policy", "allkeys-lru"))
    with pytest.raises(Refused, match="CONFIG SET maxmemory-policy noeviction"):
        await start(world, redis=server.url)


def test_a_topic_that_is_not_there_ends_the_process_with_the_command_that_makes_it(world: Installation) -> None:
    world.prefix += "other."
    worker = world.worker()
    assert worker.process.join(30)

    assert worker.process.returncode == 1
    assert worker.process.tail() == (
        f"kvledger: topic {world.prefix}kvledger.events is not there: create it with "
        f"'kvledger admin topics --topic-prefix {world.prefix}'"
    )


def test_a_setting_that_is_wrong_is_bad_input(world: Installation) -> None:
    worker = world.worker(KVLEDGER_STREAMS_STOP_SECONDS="-1")
    assert worker.process.join(30)

    assert worker.process.returncode == 2
    assert worker.process.tail() == "kvledger: stop_seconds is -1.0, must be above 0"
