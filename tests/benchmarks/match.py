"""How long a question takes, and how long it keeps the event loop busy. Prints a sorted table, or ``--json``.

Workload: a fleet of replicas that hold prefixes of one prompt of random length (seeded), of four layouts: one
full-attention group; a window group beside it; five window groups of equal spec beside it (gemma-3); one window group
of which no block has a key, so that every rank is asked by the prompt's engine hashes, too (ADR 5). Per layout, from
memory (the router's own CPU: nothing waits, so the whole question is time on the loop) and, with ``--redis URL``, from
Redis (what a request waits, with connections warm; and the share of it that the loop was busy).

    python tests/benchmarks/match.py [--redis URL] [--replicas 64] [--tokens 8192] [--questions 200] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "sinks"))

from router_fleet import FULL, MODEL, Fleet, prompt

from kvledger_index.blockkeys import prompt_keys
from kvledger_index.contract import IndexReader, IndexWriter
from kvledger_index.enginehash import Scheme, chain, low64
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import GroupSpec, lane_code
from kvledger_index.reader import RedisReader
from kvledger_index.views import Reading
from kvledger_index.writer import RedisWriter
from kvledger_router import Index

SEED = 20
WINDOWS = tuple(GroupSpec(group=n, kind="sliding_window", block_size=16, window=1024) for n in range(1, 6))
LAYOUTS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FULL,),
    "full + window": (FULL, WINDOWS[0]),
    "full + 5 windows": (FULL, *WINDOWS),
    "full + window by hash": (FULL, WINDOWS[0]),
}
SCHEME = Scheme("sha256", "0", block=16)
BY_HASH = "full + window by hash"


class Row(NamedTuple):
    """One line of the table; times in milliseconds, the least being what an idle machine would take."""

    layout: str
    source: str
    what: str
    least: float
    p50: float
    p99: float


class Frozen:
    """A reader that hands out one catalogue and one reading: what is left is the router's own work."""

    def __init__(self, reader: IndexReader) -> None:
        self.catalogue = reader.catalogue
        self.aclose = reader.aclose
        self.dump = reader.dump
        self.models = reader.models
        self.partitions = reader.partitions
        self._reader = reader
        self._kept: Reading | None = None

    async def read(self, catalogue: object, model: str, keys: object, hashes: object = ()) -> Reading:
        if self._kept is None or (hashes and not self._kept.singles):
            self._kept = await self._reader.read(catalogue, model, keys, hashes)  # type: ignore[arg-type]  # passed through
        return self._kept


async def fill(writer: IndexWriter, layout: str, replicas: int, tokens: list[int]) -> None:
    """Every replica holds a random prefix in full attention and a scattered set of window blocks."""
    groups = LAYOUTS[layout]
    names = [low64(digest) for digest in chain(SCHEME, None, tokens, 16)]
    rng = random.Random(SEED)
    fleet = Fleet(writer)
    await fleet.start()
    for number in range(replicas):
        name = f"replica-{number:02}/0"
        await fleet.open(name, groups=groups, scheme=SCHEME)
        blocks = rng.randint(0, len(tokens) // 16)
        for spec in groups:
            kept = [b for b in range(blocks) if spec is FULL or rng.random() < 0.95]
            if layout == BY_HASH and spec is not FULL:
                hashes, unplaced = [names[b] for b in kept], ((lane_code(spec.group), 0, len(kept)),)
                await fleet.store_hashes(name, hashes, group=spec.group, unplaced=unplaced)
            else:
                await fleet.store(name, tokens, kept, group=spec.group)


async def timed(index: Index, tokens: list[int], questions: int) -> list[float]:
    """Milliseconds of each question; the first few, which connect and compile, are not counted."""
    times: list[float] = []
    for _ in range(questions + 5):
        start = time.perf_counter()
        match = await index.match(tokens)
        times.append((time.perf_counter() - start) * 1000)
        assert match.opinion, match.reason
    return times[5:]


async def busy(index: Index, tokens: list[int], questions: int) -> list[float]:
    """The longest time that one question kept the loop from running anything else, in milliseconds."""
    worst: list[float] = []
    for _ in range(questions):
        task = asyncio.ensure_future(index.match(tokens))
        longest = 0.0
        while not task.done():
            start = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, (time.perf_counter() - start) * 1000)
        worst.append(longest)
    return worst


def row(layout: str, source: str, what: str, times: list[float]) -> Row:
    times = sorted(times)
    cuts = (0, len(times) // 2, min(int(len(times) * 0.99), len(times) - 1))
    return Row(layout, source, what, *(round(times[cut], 3) for cut in cuts))


async def measure(redis: str | None, replicas: int, length: int, questions: int) -> list[Row]:
    tokens = prompt(length)
    rows: list[Row] = []
    keys = []
    for _ in range(questions):
        start = time.perf_counter()
        prompt_keys(MODEL, tokens, 16)
        keys.append((time.perf_counter() - start) * 1000)
    rows.append(row("any", "-", "hash the prompt", keys))
    for layout in LAYOUTS:
        memory = MemoryIndex()
        await fill(memory, layout, replicas, tokens)
        async with Index(Frozen(memory), model=MODEL, deadline_seconds=60) as index:
            rows.append(row(layout, "memory", "judge (router CPU)", await timed(index, tokens, questions)))
        if redis is None:
            continue
        namespace = f"bench-{secrets.token_hex(4)}"
        async with RedisWriter.from_url(redis, namespace=namespace) as writer:
            await writer.check()
            await fill(writer, layout, replicas, tokens)
        async with Index(RedisReader.from_url(redis, namespace=namespace), model=MODEL, deadline_seconds=60) as index:
            rows.append(row(layout, "redis", "question", await timed(index, tokens, questions)))
            rows.append(row(layout, "redis", "longest loop stall", await busy(index, tokens, questions)))
    return sorted(rows, key=lambda r: (r.what, r.p50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", help="also measure over this Redis; its keys stay, use one that may be thrown away")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.redis, args.replicas, args.tokens, args.questions))
    workload = {"replicas": args.replicas, "tokens": args.tokens, "questions": args.questions, "seed": SEED}
    if args.json:
        sys.stdout.write(json.dumps({"workload": workload, "rows": [r._asdict() for r in rows]}) + "\n")
        return
    sys.stdout.write(" ".join(f"{k}={v}" for k, v in workload.items()) + ", milliseconds\n")
    sys.stdout.write(f"{'what':<20} {'layout':<22} {'source':<8} {'least':>8} {'p50':>8} {'p99':>8}\n")
    for r in rows:
        sys.stdout.write(f"{r.what:<20} {r.layout:<22} {r.source:<8} {r.least:>8} {r.p50:>8} {r.p99:>8}\n")


if __name__ == "__main__":
    main()
