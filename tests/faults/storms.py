"""Engines as no fleet should have them, on a real bridge, Kafka, fold and Redis: the cost, and what neighbours see.

One rank storms, another one on the same bridge, partition pool, fold and Redis publishes a small batch every 0.1 s; how
long each takes until a router is told ``exact`` as of it is the neighbour's freshness. As a script, at full size:

    python tests/faults/storms.py [NAME...]

    batch      one batch of 200,000 blocks
    prompts    128K-token prompts, one after the other, and each asked for
    tokens     the same with blocks of one token
    replicas   64 engines on one bridge
    clears     200 batches a second that store and clear
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import msgspec
import psutil
from load import LoopLag
from redis import Redis

from kvledger.stack import Stack
from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_index.model import GroupSpec, ModelEntry

MODEL = "m"
BLOCK = 16
PAUSE_SECONDS = 0.1
"""Between two batches of the neighbour."""

VISIBLE_SECONDS_MAX = 120.0
POLL_SECONDS = 0.005
LAG_TICK_SECONDS = 0.02
PER_SECOND = 200
MIB = 2**20


class Size(NamedTuple):
    """How much of each storm."""

    batch_blocks: int
    prompt_tokens: int
    prompts: int
    token_blocks: int
    replicas: int
    clear_seconds: float


FULL = Size(200_000, 131_072, 8, 131_072, 64, 30.0)
SHORT = Size(20_000, 16_384, 2, 4_096, 12, 2.0)


class Cost(NamedTuple):
    """Resident bytes of a process each; of Redis what its data needs."""

    bridge: int
    fold: int
    redis: int

    def since(self, before: Cost) -> Cost:
        """The growth."""
        return Cost(*(now - then for now, then in zip(self, before, strict=True)))


class Figures(NamedTuple):
    """What a storm did."""

    name: str
    blocks: int
    """What the stormy ranks hold at its end."""
    seconds: float
    """Until all of it was in the index."""
    grown: Cost
    answered: tuple[int, ...]
    """Tokens that a router was told of each prompt that was asked for at the end."""
    delays: tuple[float, ...]
    """The neighbour's, in seconds; the measuring loop's own lag left out."""
    statuses: frozenset[str]
    """All that a router was told of the neighbour meanwhile."""
    no_opinion: float
    """Share of questions about the neighbour without an opinion."""

    def row(self) -> dict[str, Any]:
        """For people."""
        ordered = sorted(self.delays)
        return {
            "storm": self.name,
            "blocks": self.blocks,
            "seconds": round(self.seconds, 2),
            **{f"{name}_mib": round(grown / MIB, 1) for name, grown in self.grown._asdict().items()},
            "neighbour_p50_ms": round(ordered[len(ordered) // 2] * 1000, 1),
            "neighbour_max_ms": round(ordered[-1] * 1000, 1),
            "neighbour_batches": len(ordered),
            "neighbour_statuses": sorted(self.statuses),
            "neighbour_no_opinion": round(self.no_opinion, 3),
        }


class Neighbour:
    """A rank that behaves, and what a router is told of it. A context manager: it publishes while that is open."""

    def __init__(self, engine: RunningEngine, pipeline: Pipeline, block: int) -> None:
        self.delays: list[float] = []
        self.statuses: set[str] = set()
        self.opinions: list[bool] = []
        self._engine = engine
        self._block = block
        self._index = pipeline.index(MODEL)

    async def __aenter__(self) -> Self:
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._publish())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task
        await self._index.aclose()

    async def _publish(self) -> None:
        async with LoopLag(LAG_TICK_SECONDS) as lag:
            for number in itertools.count():
                tokens = prompt(number % 50, 8 * self._block)
                seq = self._engine.standin.publish(batch(tokens, block=self._block))
                start, late = time.monotonic(), lag.seconds
                await self._until(seq, start + VISIBLE_SECONDS_MAX)
                self.delays.append(time.monotonic() - start - (lag.seconds - late))
                if self._stop.is_set():
                    self._engine.heard(seq)
                    return
                await asyncio.sleep(PAUSE_SECONDS)

    async def _until(self, seq: int, deadline: float) -> None:
        """Until an answer as of that batch is called exact."""
        while True:
            match = await self._index.match((), replicas=[self._engine.replica])
            holder = match.holders[0]
            self.statuses.add(holder.status)
            self.opinions.append(match.opinion)
            if holder.as_of is not None and holder.as_of >= seq and holder.status == "exact":
                return
            if time.monotonic() > deadline:
                message = f"{self._engine.replica}: batch {seq} is not told of, {holder}"
                raise TimeoutError(message)
            await asyncio.sleep(POLL_SECONDS)


def prompt(number: int, tokens: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [(number * 1_000_003 + at * 7) % 2_000_000 for at in range(tokens)]


def batch(tokens: Sequence[int], *, block: int = BLOCK, clear: bool = False) -> bytes:
    """A store of a prompt's blocks, and perhaps a clear behind it, as vLLM 0.32 sends them."""
    count = len(tokens) // block
    hashes = [hash((tokens[0], tokens[1], block, at)) & 0xFFFF_FFFF_FFFF_FFFF for at in range(count)]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens[: count * block],
        "block_size": block,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return msgspec.msgpack.encode([1.0, [stored, *([{"type": "AllBlocksCleared"}] if clear else [])], 0])


def entry(block: int = BLOCK) -> ModelEntry:
    """One full-attention group."""
    return ModelEntry(model=MODEL, groups=(GroupSpec(0, "full_attention", block),))


@asynccontextmanager
async def attached(pipeline: Pipeline, entries: Mapping[str, ModelEntry]) -> AsyncIterator[list[RunningEngine]]:
    """Engines on one bridge, their lives open."""
    engines = pipeline.attach(entries)
    try:
        for engine in engines:
            await engine.settle()
        yield engines
    finally:
        for engine in engines:
            await engine.close()


def cost_of(pipeline: Pipeline, engine: RunningEngine, redis_url: str) -> Cost:
    """What the processes hold now."""
    bridge, fold = (psutil.Process(each.pid).memory_info().rss for each in (engine.bridge, pipeline.fold))
    with Redis.from_url(redis_url) as client:
        used = client.info("memory")["used_memory"]
    return Cost(bridge, fold, used)


async def blow(pipeline: Pipeline, redis_url: str, storm: Storm, size: Size) -> Figures:
    """One storm beside one neighbour of the same model."""
    block = 1 if storm.name == "tokens" else BLOCK
    stormy = {f"stormy-{number}": entry(block) for number in range(storm.engines(size))}
    async with attached(pipeline, {**stormy, "calm": entry(block)}) as engines:
        *wild, calm = engines
        before = cost_of(pipeline, calm, redis_url)
        async with Neighbour(calm, pipeline, block) as neighbour:
            start = time.monotonic()
            blocks, prompts = await storm.deed(wild, size)
            for engine in wild:
                engine.heard(engine.standin.head)
                await engine.settle()
            seconds = time.monotonic() - start
        answers = [await wild[0].predict(tokens) for tokens in prompts]
        grown = cost_of(pipeline, calm, redis_url).since(before)
    assert {answer.status for answer in answers} <= {"exact"}, answers
    told = tuple(answer.hit_tokens for answer in answers)
    unknown = neighbour.opinions.count(False) / len(neighbour.opinions)
    delays, statuses = tuple(neighbour.delays), frozenset(neighbour.statuses)
    return Figures(storm.name, blocks, seconds, grown, told, delays, statuses, unknown)


Deed = Callable[[Sequence[RunningEngine], Size], Awaitable[tuple[int, list[list[int]]]]]
"""Publishes; returns how many blocks are held then, and prompts of the first engine to ask for."""


class Storm(NamedTuple):
    """A storm: its name, how many engines take part, and what they do."""

    name: str
    engines: Callable[[Size], int]
    deed: Deed


async def one_batch(engines: Sequence[RunningEngine], size: Size) -> tuple[int, list[list[int]]]:
    """Everything in one event of one batch."""
    tokens = prompt(1_000, size.batch_blocks * BLOCK)
    engines[0].standin.publish(await asyncio.to_thread(batch, tokens))
    return size.batch_blocks, [tokens[: 64 * BLOCK + 1]]


async def long_prompts(engines: Sequence[RunningEngine], size: Size) -> tuple[int, list[list[int]]]:
    """Each as one batch, as a chunked prefill of that length ends up."""
    prompts = [prompt(2_000 + number, size.prompt_tokens + 1) for number in range(size.prompts)]
    for tokens in prompts:
        engines[0].standin.publish(await asyncio.to_thread(batch, tokens))
    return size.prompts * size.prompt_tokens // BLOCK, prompts


async def single_tokens(engines: Sequence[RunningEngine], size: Size) -> tuple[int, list[list[int]]]:
    """One prompt, a block per token."""
    tokens = prompt(3_000, size.token_blocks + 1)
    engines[0].standin.publish(await asyncio.to_thread(batch, tokens[:-1], block=1))
    return size.token_blocks, [tokens]


async def many_replicas(engines: Sequence[RunningEngine], size: Size) -> tuple[int, list[list[int]]]:
    """Each stores twenty prompts of 32 blocks, all engines in turns, a turn every 0.1 s."""
    rounds, tokens = 20, 32 * BLOCK
    start = time.monotonic()
    for turn in range(rounds):
        await asyncio.sleep(max(0.0, start + turn * PAUSE_SECONDS - time.monotonic()))
        for number, engine in enumerate(engines):
            engine.standin.publish(batch(prompt(4_000 + number * rounds + turn, tokens)))
    asked = [[*prompt(4_000 + turn, tokens), 1] for turn in range(rounds)]
    return len(engines) * rounds * 32, asked


async def clears(engines: Sequence[RunningEngine], size: Size) -> tuple[int, list[list[int]]]:
    """Nothing is held at the end."""
    tokens = prompt(5_000, 8 * BLOCK)
    payload = batch(tokens, clear=True)
    start = time.monotonic()
    for number in range(int(size.clear_seconds * PER_SECOND)):
        await asyncio.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
        engines[0].standin.publish(payload)
    return 0, [[*tokens, 1]]


STORMS = {
    each.name: each
    for each in (
        Storm("batch", lambda _: 1, one_batch),
        Storm("prompts", lambda _: 1, long_prompts),
        Storm("tokens", lambda _: 1, single_tokens),
        Storm("replicas", lambda size: size.replicas - 1, many_replicas),
        Storm("clears", lambda _: 1, clears),
    )
}


def main(names: Sequence[str]) -> int:
    """Each storm on a pipeline of its own, at full size; one JSON line each."""
    unknown = set(names) - STORMS.keys()
    if unknown:
        sys.stderr.write(f"no storm {', '.join(sorted(unknown))}; there are {', '.join(STORMS)}\n")
        return 2
    with Stack() as stack:
        stack.start()
        for name in names or STORMS:
            with Pipeline(stack) as pipeline:
                figures = asyncio.run(blow(pipeline, stack.redis, STORMS[name], FULL))
            sys.stdout.write(json.dumps(figures.row()) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
