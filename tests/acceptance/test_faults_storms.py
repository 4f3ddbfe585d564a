"""One rank behaves as none should; its neighbours on the same bridge, fold and Redis must not notice."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from load import LoopLag
from storms import BLOCK, MIB, SHORT, STORMS, Storm, blow

from kvledger.stack import Stack
from kvledger.verify.check import looking_ahead
from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_engine.recording import Meta, Published, Request, Reset, read

RECORDING = Path(__file__).parents[1] / "fixtures/engine-traces/llama_s11.jsonl.gz"
STORM_PER_SECOND = 200
STORM_SECONDS_MIN = 2.0
REQUESTS = 40
FRESH_SECONDS_MAX = 2.0
"""From publication to an exact answer that covers it, for the neighbour; the asking loop's own lag left out."""


@pytest.fixture
def pipeline(stack: Stack) -> Iterator[Pipeline]:
    """A pipeline of its own on the run's services."""
    stack.start()
    with Pipeline(stack) as running:
        yield running


@asynccontextmanager
async def storm(engine: RunningEngine, payload: bytes) -> AsyncIterator[list[int]]:
    """The same batch again and again, at a steady rate; the list counts them."""
    sent: list[int] = []

    async def blow() -> None:
        start = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, start + number / STORM_PER_SECOND - time.monotonic()))
            sent.append(engine.standin.publish(payload))

    task = asyncio.create_task(blow())
    try:
        yield sent
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.timeout(120)
async def test_200_clears_a_second_leave_the_neighbour_exact_and_fresh(pipeline: Pipeline) -> None:
    """Each batch of the storm stores a prompt's blocks and clears them; the neighbour serves recorded requests."""
    meta, *steps = read(RECORDING)
    assert isinstance(meta, Meta)
    first: Any = msgspec.msgpack.decode(next(step.payload for step in steps if isinstance(step, Published)))
    payload = msgspec.msgpack.encode([first[0], [*first[1], {"type": "AllBlocksCleared"}], first[2]])
    stormy, calm = pipeline.attach({"stormy": meta.entry(), "calm": meta.entry()})
    await stormy.settle()
    await calm.settle()
    delays: list[float] = []
    async with LoopLag() as lag, storm(stormy, payload) as sent:
        start = published = time.monotonic()
        late = 0.0
        for step in looking_ahead(iter(steps)):
            match step:
                case Published():
                    published, late = time.monotonic(), lag.seconds
                    await calm.publish(step)
                case Request():
                    answer = await calm.predict(step.tokens, lora=step.lora, salt=step.salt)
                    delays.append(time.monotonic() - published - (lag.seconds - late))

                    assert (answer.hit_tokens, answer.status) == (step.cached, "exact"), answer.reason
                case Reset():
                    break  # what follows is no longer predicted by events
                case _:
                    pass
            if len(delays) >= REQUESTS and time.monotonic() > start + STORM_SECONDS_MIN:
                break
        lasted = time.monotonic() - start
    stormy.heard(sent[-1])
    after = await stormy.predict(list(range(64)))
    for engine in (stormy, calm):
        await engine.close()

    assert len(sent) > lasted * STORM_PER_SECOND / 2, "a storm that did not blow proves nothing"
    assert len(delays) >= REQUESTS
    assert max(delays) < FRESH_SECONDS_MAX
    assert (after.hit_tokens, after.status) == (0, "exact")


ROUNDS = 20
TOLD: dict[str, tuple[int, ...]] = {
    "batch": (64 * BLOCK,),
    "prompts": (SHORT.prompt_tokens,) * SHORT.prompts,
    "tokens": (SHORT.token_blocks,),
    "replicas": (32 * BLOCK,) * ROUNDS,
}
"""What a router must be told of the prompts that are asked for at the end."""

FRESH_PROMISED_SECONDS = 3.0
"""For so long routers call a rank's answers exact: a neighbour that is told of later has been stale meanwhile."""

BRIDGE_BLOCK_BYTES_MAX = 1024
"""Of the bridge's memory per resident block: its hashes, key, lineage and count."""

REDIS_BLOCK_BYTES_MAX = 32
GROWTH_BYTES_MAX = 64 * MIB
"""Beside what each block costs: buffers, what a batch needs while it is applied, and what other tests do to Redis."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [name for name in STORMS if name != "clears"])  # those have their own test above
async def test_an_engine_out_of_proportion_costs_bounded_memory_and_its_neighbour_stays_fresh(
    stack: Stack, pipeline: Pipeline, name: str
) -> None:
    """``make storms`` does the same at full size and prints the figures."""
    figures = await blow(pipeline, stack.redis, STORMS[name], SHORT)

    assert figures.answered == TOLD[name]
    assert max(figures.delays) < FRESH_PROMISED_SECONDS, figures.row()
    assert "uncertain" not in figures.statuses, figures.row()
    assert figures.grown.bridge < figures.blocks * BRIDGE_BLOCK_BYTES_MAX + GROWTH_BYTES_MAX, figures.row()
    assert figures.grown.fold < GROWTH_BYTES_MAX, figures.row()
    assert figures.grown.redis < figures.blocks * REDIS_BLOCK_BYTES_MAX + GROWTH_BYTES_MAX, figures.row()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_neighbour_that_is_kept_waiting_is_noticed(stack: Stack, pipeline: Pipeline) -> None:
    """The canary: the fold stands still for longer than an answer is fresh."""

    async def freeze(*_: object) -> tuple[int, list[list[int]]]:
        os.kill(pipeline.fold.pid, signal.SIGSTOP)
        await asyncio.sleep(FRESH_PROMISED_SECONDS + 0.5)
        os.kill(pipeline.fold.pid, signal.SIGCONT)
        return 0, []

    figures = await blow(pipeline, stack.redis, Storm("frozen", lambda _: 1, freeze), SHORT)

    assert max(figures.delays) > FRESH_PROMISED_SECONDS - 0.5
    assert "stale" in figures.statuses
