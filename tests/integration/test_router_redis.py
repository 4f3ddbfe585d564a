"""The router over a real Redis: the same answers as over memory; never a wait where Redis is slow, frozen or gone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from router_fleet import FULL, MODEL, PROMPT, WINDOW, Fleet, prompt

from kvledger.stack.redis import LocalRedis, redis_pid
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import GroupSpec
from kvledger_index.reader import CONNECTIONS_MAX, RedisReader
from kvledger_index.writer import RedisWriter
from kvledger_router import Breaker, Holder, Index

EventuallyAsync = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
RedisServer = Callable[[], LocalRedis]

PATIENT: dict[str, Any] = {"deadline_seconds": 30.0, "fresh_seconds_max": 60.0}
"""What a busy test machine keeps, for tests that are neither about deadlines nor about age."""


@asynccontextmanager
async def written(url: str, namespace: str) -> AsyncIterator[Fleet]:
    """An empty fleet in Redis; its keys go afterwards."""
    async with RedisWriter.from_url(url, namespace=namespace) as writer:
        await writer.check()
        fleet = Fleet(writer)
        await fleet.start()
        yield fleet


@pytest.fixture
async def fleet(redis_url: str, namespace: str) -> AsyncIterator[Fleet]:
    async with written(redis_url, namespace) as ready:
        yield ready


async def populate(fleet: Fleet, rng: random.Random) -> list[list[int]]:
    """Six ranks of two layouts with prompts that branch inside and between rows; returns the prompts."""
    trunk = prompt(700)
    prompts = [trunk[: rng.randint(0, 700)] + prompt(rng.randint(20, 400), seed=i + 1) for i in range(12)]
    groups = (FULL, WINDOW)
    for number in range(6):
        await fleet.open(f"pod-{number}/0", groups=groups if number % 2 else (FULL,))
    for tokens in prompts:
        for number in rng.sample(range(6), 3):
            for group in groups if number % 2 else (FULL,):
                kept = [block for block in range(len(tokens) // 16) if rng.random() < 0.97]
                await fleet.store(f"pod-{number}/0", tokens, kept, group=group.group)
            lost = [block for block in range(len(tokens) // 16) if rng.random() < 0.02]
            await fleet.store(f"pod-{number}/0", tokens, lost, add=False)
    return prompts


def numbers(holders: tuple[Holder, ...]) -> list[tuple[str, int, int, str]]:
    return [(h.replica, h.hit_tokens, h.extended_tokens, h.status) for h in holders]


async def test_redis_and_memory_give_the_same_answers(fleet: Fleet, redis_url: str, namespace: str) -> None:
    store = MemoryIndex()
    memory = Fleet(store)
    await memory.start()
    prompts = await populate(fleet, random.Random(5))
    await populate(memory, random.Random(5))
    seen = 0
    async with Index.from_url(redis_url, model=MODEL, namespace=namespace, **PATIENT) as index:
        for tokens in prompts:
            mine, theirs = await index.match(tokens), await Index(store, model=MODEL, **PATIENT).match(tokens)

            assert mine.opinion
            assert numbers(mine.holders) == numbers(theirs.holders)

            seen += sum(h.hit_tokens > 0 for h in mine)

    assert seen > 20


async def test_a_prompt_without_any_stored_row_is_an_exact_zero(fleet: Fleet, redis_url: str, namespace: str) -> None:
    await fleet.open("pod-a/0")
    async with Index.from_url(redis_url, model=MODEL, namespace=namespace, **PATIENT) as index:
        match = await index.match(prompt(5000, seed=9))

    assert numbers(match.holders) == [("pod-a", 0, 0, "exact")]


async def test_cancelled_questions_leave_no_answer_to_the_next_one(
    fleet: Fleet, redis_url: str, namespace: str, eventually_async: EventuallyAsync
) -> None:
    """Questions are cancelled at every stage; those after them, on the same pool, get their own answers."""
    await fleet.open("pod-a/0")
    prompts = {length: prompt(length * 16 + 1, seed=length) for length in range(1, 9)}
    for tokens in prompts.values():
        await fleet.store("pod-a/0", tokens)
    rng = random.Random(3)
    reader = RedisReader.from_url(redis_url, namespace=namespace)
    async with Index(reader, model=MODEL, **PATIENT) as index:
        abandoned = 0
        for _ in range(200):
            try:
                async with asyncio.timeout(rng.random() * 0.003):
                    await index.match(prompts[rng.randint(1, 8)])
            except TimeoutError:
                abandoned += 1
        answers = await asyncio.gather(*(index.match(prompts[length]) for length in prompts))

    assert abandoned > 20
    assert [match.holders[0].hit_tokens for match in answers] == [length * 16 for length in prompts]


async def test_a_crowd_waits_in_line_and_connections_stay_bounded(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """More questions at once than connections: all are answered, none opens one of its own."""
    await fleet.open("pod-a/0")
    await fleet.store("pod-a/0", PROMPT)
    reader = RedisReader.from_url(redis_url, namespace=namespace)
    async with Index(reader, model=MODEL, **PATIENT) as index:
        matches = await asyncio.gather(*(index.match(PROMPT) for _ in range(500)))
        pool = reader._client.connection_pool
        count = len(pool._available_connections) + len(pool._in_use_connections)

    assert {numbers(match.holders)[0] for match in matches} == {("pod-a", 160, 0, "exact")}
    assert count <= CONNECTIONS_MAX


@contextmanager
def black_hole() -> Iterator[str]:
    """A port that accepts connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(128)
        yield f"redis://127.0.0.1:{server.getsockname()[1]}"


async def timed(index: Index) -> tuple[bool, float, str]:
    """(opinion, milliseconds of this thread's own work, reason) of one question."""
    start = time.thread_time()
    match = await index.match(PROMPT)
    return match.opinion, (time.thread_time() - start) * 1000, match.reason


async def test_a_black_hole_costs_a_few_deadlines_and_then_nothing() -> None:
    """Forty questions, one after the other.

    1..5   no answer: each costs its deadline of 20 ms
    6..    the breaker is open: no waiting at all
    """
    with black_hole() as url:
        async with Index.from_url(url, model=MODEL, deadline_seconds=0.020) as index:
            asked = [await timed(index) for _ in range(40)]

    assert not any(opinion for opinion, _, _ in asked)
    assert all("deadline" in reason for _, _, reason in asked[:5])
    assert all("breaker" in reason for _, _, reason in asked[5:])
    assert sum(ms for _, ms, _ in asked[5:]) < 20, "35 refusals together cost less work than one deadline is long"


async def test_a_refused_connection_is_no_opinion_that_names_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        port = unused.getsockname()[1]
        async with Index.from_url(f"redis://user:hush@127.0.0.1:{port}", model=MODEL, **PATIENT) as index:
            opinion, _, reason = await timed(index)

    assert not opinion
    assert f"127.0.0.1:{port}" in reason
    assert "hush" not in reason


async def test_a_frozen_redis_is_left_alone_and_taken_up_again(
    redis_server: RedisServer, namespace: str, eventually_async: EventuallyAsync
) -> None:
    """One router through a stop of the server.

    running   answers
    SIGSTOP   5,000 questions at once: none has an opinion, all end with the deadline, connections stay bounded
              four more, one after the other: the breaker opens
    SIGCONT   the breaker lets a probe through and closes by itself
    """
    url = redis_server().url
    pid = redis_pid(url)
    assert pid is not None
    async with written(url, namespace) as fleet:
        await fleet.open("pod-a/0")
        await fleet.store("pod-a/0", PROMPT)
        reader = RedisReader.from_url(url, namespace=namespace)
        breaker = Breaker(failures_max=5, open_seconds=0.05, open_seconds_max=0.1)
        async with Index(reader, model=MODEL, deadline_seconds=0.2, breaker=breaker) as index:

            async def opinion() -> bool:
                await fleet.tick()
                return (await index.match(PROMPT)).opinion

            await eventually_async(opinion)  # a busy machine may need longer than the deadline for the first one
            os.kill(pid, signal.SIGSTOP)
            try:
                frozen = await asyncio.gather(*(index.match(PROMPT, replicas=["pod-a"]) for _ in range(5000)))
                after = [await index.match(PROMPT) for _ in range(4)]
                state = breaker.state
            finally:
                os.kill(pid, signal.SIGCONT)
            await eventually_async(opinion)
            pool = reader._client.connection_pool
            count = len(pool._available_connections) + len(pool._in_use_connections)

    assert {(m.opinion, m.holders[0].status, m.holders[0].replica) for m in frozen} == {(False, "unknown", "pod-a")}
    assert not any(match.opinion for match in after)
    assert state == "open"
    assert breaker.state == "closed"
    assert count <= CONNECTIONS_MAX


async def test_a_killed_redis_that_comes_back_empty_forgets_and_learns_again(
    redis_server: RedisServer, namespace: str, eventually_async: EventuallyAsync
) -> None:
    """What was lost is not claimed any more; the catalogue's version is another one."""
    server = redis_server()
    breaker = Breaker(failures_max=2, open_seconds=0.05, open_seconds_max=0.1)
    reader = RedisReader.from_url(server.url, namespace=namespace)
    async with Index(reader, model=MODEL, **PATIENT, breaker=breaker) as index:
        async with written(server.url, namespace) as fleet:
            await fleet.open("pod-a/0")
            await fleet.store("pod-a/0", PROMPT)
            before = await index.match(PROMPT)
        server.kill()
        gone = await index.match(PROMPT)
        server.start()

        async def opinion() -> bool:
            return (await index.match(PROMPT)).opinion

        await eventually_async(opinion)
        empty = await index.match(PROMPT)
        async with written(server.url, namespace) as fleet:
            await fleet.open("pod-a/0")
            await fleet.store("pod-a/0", PROMPT[:48])
            after = await index.match(PROMPT)

    assert numbers(before.holders) == [("pod-a", 160, 0, "exact")]
    assert not gone.opinion
    assert len(empty) == 0
    assert numbers(after.holders) == [("pod-a", 48, 0, "exact")]


async def test_groups_without_numbers_and_numbered_ones_live_side_by_side(
    fleet: Fleet, redis_url: str, namespace: str
) -> None:
    """Engines before and after PR #37688 in one fleet, one of them with offload events that name no group."""
    bare = GroupSpec(group=None, kind="full_attention", block_size=32)
    await fleet.open("old/0", groups=(bare,))
    await fleet.open("new/0", groups=(FULL, WINDOW))
    await fleet.store("old/0", PROMPT, range(3), group=None, size=32)
    await fleet.store("new/0", PROMPT)
    await fleet.store("new/0", PROMPT, [3, 4], group=1)
    await fleet.store("new/0", PROMPT, [5, 6], group=None, medium="cpu")
    async with Index.from_url(redis_url, model=MODEL, namespace=namespace, **PATIENT) as index:
        match = await index.match(PROMPT)

    assert numbers(match.holders) == [("old", 96, 0, "exact"), ("new", 80, 32, "exact")]
