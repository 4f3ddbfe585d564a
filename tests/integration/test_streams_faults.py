"""``kvledger streams`` while Kafka or Redis fail under it: blocked and visible, nothing skipped, nobody needed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from servers import KafkaControl
from streamsworld import PARTITIONS, Installation

from kvledger.admin import connect, create_topics
from kvledger.stack.kafka import broker_answers
from kvledger_wire.topics import topic_specs

Make = Callable[..., Installation]
SILENT_SECONDS = 0.2
"""How long a frozen broker may stay silent to count as frozen."""


@pytest.fixture
def make(topic_prefix: str, namespace: str, tmp_path: Path) -> Iterator[Make]:
    """A factory for an installation on servers of the test's choice."""
    made: list[Installation] = []

    def factory(kafka: str, redis: str) -> Installation:
        create_topics(connect(kafka), topic_specs(partitions=PARTITIONS, prefix=topic_prefix))
        made.append(Installation(kafka, redis, topic_prefix, namespace, tmp_path))
        return made[-1]

    yield factory
    for each in made:
        each.__exit__()


async def test_a_flushed_redis_is_rebuilt_from_the_log(
    make: Make, kafka: str, redis_server: Any, eventually_async: Any
) -> None:
    rnd = random.Random(1)
    world = make(kafka, redis_server().url)
    world.ranks(6)
    world.act(rnd, 200)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    async with Redis.from_url(world.redis) as client:
        await client.flushall()
    world.act(rnd, 100)
    world.push()
    await eventually_async(world.is_true)
    worker.wait("partition_placed", count=2 * PARTITIONS)  # also those without a rank, by their next stamp
    rebuilt = worker.lines("partition_placed")[PARTITIONS:]

    assert {(line["partition"], line["drop"]) for line in rebuilt} == {(number, True) for number in range(PARTITIONS)}
    assert worker.stop() == 0


async def test_a_redis_that_dies_blocks_and_shows_and_its_restart_goes_on(
    make: Make, kafka: str, redis_server: Any, eventually_async: Any
) -> None:
    """Append-only, so what comes back is what was there, perhaps less its last second."""
    rnd = random.Random(2)
    server = redis_server(append_only=True)
    world = make(kafka, server.url)
    world.ranks(6)
    world.act(rnd, 200)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    server.kill()
    world.act(rnd, 100)
    world.push()
    worker.wait("partition_blocked")
    server.start()
    await eventually_async(world.is_true)

    assert "does not answer" in worker.lines("partition_blocked")[0]["why"]
    assert worker.stop() == 0


async def test_a_redis_that_freezes_is_waited_for_and_a_stop_does_not_hang_on_it(
    make: Make, kafka: str, redis_server: Any, eventually_async: Any
) -> None:
    rnd = random.Random(3)
    server = redis_server()
    world = make(kafka, server.url)
    world.ranks(4)
    world.act(rnd, 50)
    world.push()
    worker = world.worker(KVLEDGER_STREAMS_REQUEST_SECONDS="1", KVLEDGER_STREAMS_STOP_SECONDS="4")
    await eventually_async(world.is_true)
    _signal(server, signal.SIGSTOP)
    world.act(rnd, 50)
    world.push()
    worker.wait("partition_blocked")
    _signal(server, signal.SIGCONT)
    await eventually_async(world.is_true)
    _signal(server, signal.SIGSTOP)
    stopped = worker.stop()
    _signal(server, signal.SIGCONT)

    assert stopped in {0, 1}
    assert worker.lines()[-1]["event"] == "worker_stopped"


def _signal(server: Any, number: signal.Signals) -> None:
    os.kill(server.process.pid, number)


async def test_a_second_signal_ends_it_at_once(make: Make, kafka: str, redis_server: Any, eventually: Any) -> None:
    server = redis_server()
    world = make(kafka, server.url)
    world.ranks(4)
    world.push()
    worker = world.worker(KVLEDGER_STREAMS_REQUEST_SECONDS="30", KVLEDGER_STREAMS_STOP_SECONDS="60")
    worker.wait("partition_caught_up", count=PARTITIONS)
    _signal(server, signal.SIGSTOP)
    try:
        worker.send(signal.SIGTERM)
        worker.wait("worker_stopping")
        worker.send(signal.SIGTERM)
        ended = worker.process.join(10)
    finally:
        _signal(server, signal.SIGCONT)

    assert ended
    assert worker.process.returncode == 1 or worker.lines("worker_stopped")


async def test_a_topic_that_was_re_created_is_another_log(
    make: Make, kafka: str, redis_url: str, eventually_async: Any
) -> None:
    rnd = random.Random(4)
    world = make(kafka, redis_url)
    world.ranks(6)
    world.act(rnd, 200)
    world.push()
    worker = world.worker(KVLEDGER_STREAMS_TOPIC_CHECK_SECONDS="0.5")
    await eventually_async(world.is_true)
    (gone,) = world.admin.delete_topics([world.topic]).values()
    gone.result(15)
    worker.wait("topic_unseen")
    create_topics(connect(kafka), topic_specs(partitions=PARTITIONS, prefix=world.prefix))
    world.writers.clear()
    world.ranks(3, owner=1)  # a lower owner than before: only another log makes it count
    world.act(rnd, 50)
    world.push()
    await eventually_async(world.is_true)

    assert any("topic id" in line["why"] for line in worker.lines("partition_placed"))
    assert worker.stop() == 0


async def test_a_log_that_retention_cut_below_a_stopped_worker_is_rebuilt(
    make: Make, kafka: str, redis_url: str, eventually_async: Any
) -> None:
    rnd = random.Random(5)
    world = make(kafka, redis_url)
    (writer,) = world.ranks(1)
    world.act(rnd, 50)
    world.push()
    first = world.worker()
    await eventually_async(world.is_true)
    assert first.stop() == 0
    home = world.place(writer.id.encode() + b"/0")
    writer.beat()
    world.push()
    end = world.end(home)
    writer.open()
    world.act(rnd, 50)
    world.push()
    world.forget(home, end)
    second = world.worker()
    await eventually_async(world.is_true)
    placed = {line["partition"]: line for line in second.lines("partition_placed")}

    assert (placed[home]["drop"], placed[home]["restart"]) == (True, end)
    assert f"below the log's start {end}" in placed[home]["why"]
    assert second.stop() == 0


async def test_a_log_that_retention_cut_below_a_running_worker_is_rebuilt_not_jumped(
    make: Make, kafka: str, redis_url: str, eventually_async: Any
) -> None:
    """The worker sleeps; meanwhile its position leaves the log. A jump would leave an old life served as exact."""
    rnd = random.Random(6)
    world = make(kafka, redis_url)
    (writer,) = world.ranks(1)
    world.act(rnd, 50)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    home = world.place(writer.id.encode() + b"/0")
    worker.send(signal.SIGSTOP)
    for _ in range(5):
        writer.beat()
        world.push()  # the first may be the answer to a fetch that is under way
    end = world.end(home)
    writer.open()
    world.act(rnd, 50)
    world.push()
    world.forget(home, end)
    worker.send(signal.SIGCONT)
    await eventually_async(world.is_true)

    assert any(line["partition"] == home and line["restart"] == end for line in worker.lines("partition_placed"))
    assert worker.stop() == 0


@pytest.mark.slow
async def test_a_broker_that_dies_and_comes_back_is_read_on(
    make: Make, kafka_broker: Any, redis_url: str, eventually_async: Any
) -> None:
    """While it is away nobody is called alive: to a router its ranks are stale, none is gone."""
    rnd = random.Random(7)
    broker = KafkaControl(kafka_broker())
    world = make(broker.address, redis_url)
    world.ranks(6)
    world.act(rnd, 100)
    world.push()
    worker = world.worker()
    await eventually_async(world.is_true)
    broker.freeze()
    frozen = broker_answers(broker.address, SILENT_SECONDS)
    broker.kill()  # also a frozen one

    async def unheard() -> bool:
        return all(now - alive > 4_000 for now, alive in (await world.alive_ms()).values())

    await eventually_async(unheard)
    broker.start()
    world.act(rnd, 100)
    world.push()
    await eventually_async(world.is_true, 60)

    assert not frozen
    assert worker.process.running
    assert worker.stop() == 0
