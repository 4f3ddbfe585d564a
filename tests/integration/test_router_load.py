"""A router that is asked 1,000 times a second while its Redis fails in every way: nobody waits, and it heals by itself.

healthy | fault for 1.5 s, 1,000 questions a second                | healed, asked on
answers | each ends with its deadline; the breaker opens: no waits  | a probe passes, the breaker closes, answers
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from load import Load, Question
from proxy import Proxy
from redis.asyncio import Redis
from router_fleet import MODEL, PROMPT, Fleet

from kvledger.stack.redis import LocalRedis
from kvledger_index import reader as reader_module
from kvledger_index.writer import RedisWriter
from kvledger_router import Breaker, Index

RedisServer = Callable[..., LocalRedis]
EventuallyAsync = Callable[..., Awaitable[Any]]

PER_SECOND = 1_000.0
CALM_PER_SECOND = 100.0
"""Before and after the fault: 1,000 answers a second are most of a core of Python, which a busy machine has not."""

DEADLINE_SECONDS = 0.020
SLACK_SECONDS = 0.005
FAULT_SECONDS = 1.5
ANSWERS = 50
GUARD_SECONDS = 60.0
"""Against hanging: where the machine has no time for us, probes of a healthy Redis are late too."""

CONNECTIONS_FEW = 2


class Place(NamedTuple):
    """A Redis with a fleet in it, and the link over which the router reaches it."""

    server: LocalRedis
    link: Proxy
    raw: Any
    fleet: Fleet


Deed = Callable[[Place], Awaitable[None] | None]


class Fault(NamedTuple):
    """How to break it, and how to end that."""

    begin: Deed
    end: Deed


def to(server: LocalRedis, number: signal.Signals) -> None:
    os.kill(server.process.pid, number)


async def lose_primary(place: Place) -> None:
    """A replica that must not serve old data, and whose primary is away: MASTERDOWN for each read."""
    await place.raw.config_set("replica-serve-stale-data", "no")
    await place.raw.replicaof("127.0.0.1", 1)


async def be_primary(place: Place) -> None:
    await place.raw.replicaof("NO", "ONE")


FAULTS = {
    "slow": Fault(lambda place: place.link.latency(0.4), lambda place: place.link.latency(0.0)),
    "stopped": Fault(lambda place: to(place.server, signal.SIGSTOP), lambda place: to(place.server, signal.SIGCONT)),
    "blackholed": Fault(lambda place: place.link.blackhole(), lambda place: place.link.resume()),
    "gone": Fault(lambda place: place.server.kill(), lambda place: place.server.start()),
    "refusing": Fault(lose_primary, be_primary),
}


@pytest.fixture
def link() -> Iterator[Callable[[str], Proxy]]:
    """A factory of links to a server by its URL."""
    made: list[Proxy] = []

    def factory(url: str) -> Proxy:
        made.append(Proxy(host_of(url)).start())
        return made[-1]

    yield factory
    for one in made:
        one.stop()


def host_of(url: str) -> str:
    return url.removeprefix("redis://").partition("/")[0]


@asynccontextmanager
async def filled(server: LocalRedis, namespace: str, link: Callable[[str], Proxy]) -> AsyncIterator[Place]:
    """One rank that holds the prompt."""
    async with RedisWriter.from_url(server.url, namespace=namespace) as writer, Redis.from_url(server.url) as raw:
        await writer.check()
        fleet = Fleet(writer)
        await fleet.start()
        await fleet.open("pod-a/0")
        await fleet.store("pod-a/0", PROMPT)
        yield Place(server, link(server.url), raw, fleet)


def router(place: Place, namespace: str) -> Index:
    """A router with everything as it comes, over the link."""
    url = f"redis://{place.link.address}/0"
    return Index.from_url(url, model=MODEL, namespace=namespace, deadline_seconds=DEADLINE_SECONDS)


def count_of(index: Index) -> int:
    """Connections that its pool has."""
    reader: Any = index._reader
    pool = reader._client.connection_pool
    return len(pool._available_connections) + len(pool._in_use_connections)


async def do(deed: Deed, place: Place) -> float:
    """Carry it out; when that was. A deed that blocks must not make the router late."""
    done = await deed(place) if asyncio.iscoroutinefunction(deed) else await asyncio.to_thread(deed, place)
    assert done is None
    return time.monotonic()


async def through(fault: Fault, place: Place, load: Load, seconds: float = FAULT_SECONDS) -> list[Question]:
    """Ask before, during and after a fault; the questions that were asked while it lasted."""
    before, after = "answers before the fault", "answers after the fault"
    await load.run(lambda: load.answered(ANSWERS), GUARD_SECONDS, per_second=CALM_PER_SECOND, what=before)
    broken = await do(fault.begin, place)
    await load.run(lambda: time.monotonic() > broken + seconds, GUARD_SECONDS, per_second=PER_SECOND, what="the fault")
    over = time.monotonic()
    during = [one for one in load.since(broken) if one.at < over]
    healed = await do(fault.end, place)
    await load.run(lambda: load.answered(ANSWERS, healed), GUARD_SECONDS, per_second=CALM_PER_SECOND, what=after)
    return during


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_failing_redis_costs_no_question_more_than_its_deadline(
    name: str, redis_server: RedisServer, namespace: str, link: Callable[[str], Proxy]
) -> None:
    async with filled(redis_server(), namespace, link) as place, router(place, namespace) as index:
        load = Load(index, PROMPT)
        during = await through(FAULTS[name], place, load)
        connections = count_of(index)

    assert load.over(DEADLINE_SECONDS + SLACK_SECONDS) == []
    assert len(during) > PER_SECOND * FAULT_SECONDS / 2, "a router that was not asked proves nothing"
    assert sum(one.opinion for one in during) < len(during) / 10, "what was under way as it began"
    assert index.counters.refused > len(during) / 2, "an open breaker answers at once"
    assert connections <= reader_module.CONNECTIONS_MAX


@pytest.mark.timeout(180)
async def test_a_pool_that_is_exhausted_makes_nobody_wait_past_the_deadline(
    redis_server: RedisServer, namespace: str, link: Callable[[str], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections whose answers take 10 ms serve 200 questions a second; 1,000 are asked."""
    monkeypatch.setattr(reader_module, "CONNECTIONS_MAX", CONNECTIONS_FEW)
    crowded = Fault(lambda place: place.link.latency(0.005), lambda place: place.link.latency(0.0))
    async with filled(redis_server(), namespace, link) as place, router(place, namespace) as index:
        load = Load(index, PROMPT)
        during = await through(crowded, place, load)
        connections = count_of(index)

    assert load.over(DEADLINE_SECONDS + SLACK_SECONDS) == []
    assert sum(not one.opinion for one in during) > len(during) / 2, "a pool that suffices proves nothing"
    assert connections <= CONNECTIONS_FEW


@pytest.mark.timeout(180)
async def test_a_failover_is_survived_and_what_a_replica_says_is_no_fresher_than_it_is(
    redis_server: RedisServer, namespace: str, link: Callable[[str], Proxy], eventually_async: EventuallyAsync
) -> None:
    """The address leads to the replica before that is promoted, and nothing writes meanwhile.

    primary   stamps ... X killed
    replica   copies      | read only, 3 s and more | promoted, stamps
    answers   exact       | exact, then stale       | exact
    """
    primary, replica = redis_server(), redis_server()
    async with (
        filled(primary, namespace, link) as place,
        Redis.from_url(replica.url) as copy,
        Index.from_url(
            f"redis://{place.link.address}/0", model=MODEL, namespace=namespace, deadline_seconds=DEADLINE_SECONDS
        ) as index,
    ):
        await place.raw.config_set("repl-diskless-sync-delay", 0)
        await copy.replicaof("127.0.0.1", primary.port)

        async def copied() -> bool:
            return bool((await copy.info("replication"))["master_link_status"] == "up" and await copy.dbsize())

        await eventually_async(copied)
        load = Load(index, PROMPT)
        await load.run(lambda: load.answered(ANSWERS), GUARD_SECONDS, per_second=CALM_PER_SECOND, what="answers")
        await place.fleet.tick()
        stamped = time.monotonic()
        place.link.aim(host_of(replica.url))
        await asyncio.to_thread(primary.kill)

        def aged() -> bool:
            return sum(one.status == "stale" for one in load.since(stamped)) >= ANSWERS

        await load.run(aged, GUARD_SECONDS, per_second=CALM_PER_SECOND, what="the replica's answers age")
        old = [one for one in load.since(stamped + 3.0) if one.status in {"exact", "at_least"}]
        served = sum(one.opinion for one in load.since(stamped))
        await copy.replicaof("NO", "ONE")
        async with RedisWriter.from_url(replica.url, namespace=namespace) as writer:
            place.fleet.writer = writer
            await place.fleet.tick()
            await place.fleet.beat("pod-a/0")
            beaten = time.monotonic()

            def exact() -> bool:
                return any(one.status == "exact" for one in load.since(beaten))

            await load.run(exact, GUARD_SECONDS, per_second=CALM_PER_SECOND, what="exact answers of the new primary")

    assert load.over(DEADLINE_SECONDS + SLACK_SECONDS) == []
    assert served > ANSWERS, "a replica answers reads"
    assert old == []


@pytest.mark.timeout(180)
async def test_a_router_without_a_breaker_is_noticed(
    redis_server: RedisServer, namespace: str, link: Callable[[str], Proxy]
) -> None:
    """The canary: one that never opens lets every question wait for its deadline."""
    async with filled(redis_server(), namespace, link) as place, router(place, namespace) as index:
        index._breaker = Breaker(failures_max=1_000_000)
        load = Load(index, PROMPT)
        during = await through(FAULTS["blackholed"], place, load, seconds=0.4)

    assert index.counters.refused == 0
    assert sum(one.seconds >= DEADLINE_SECONDS for one in during) > len(during) / 2
