"""What the index costs: blocks per Redis CPU-second, bytes per block, and the time of a router's read.

Workload, fixed seed: prompts of whole segments (16 keys) stored, joined by further holders and removed again, through
``RedisWriter`` in steps of ``--ops`` puts; branches that leave a shared segment in its middle; single blocks in random
order; engine hashes without a block key, a row each; reads of one prompt of 512 blocks by ``RedisReader``, also with
its 512 engine hashes. A block operation is one key of one holder. Rates are per
second of the server's own CPU time, so that a busy machine disturbs them least; ``wall`` includes the client. Prints a
table, slowest first, or ``--json``.

``--scrub 1000000`` measures instead how so many entries of dead holders are freed while prompts are read: rows of 16
dead holders, every second one with 2 living ones too; scrubs of the default budget with the default pause of a worker.

    python tests/benchmarks/index.py [--redis URL] [--blocks 48000] [--ops 512] [--scrub ENTRIES] [--json]

Without ``--redis`` a server is started and ended here. The namespace ``bench`` is emptied before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

from kvledger.stack import Stack
from kvledger_index.keyspace import Keyspace
from kvledger_index.reader import RedisReader
from kvledger_index.units import (
    NEVER,
    STEP_OPS_MAX,
    Bind,
    Card,
    Drop,
    Now,
    Op,
    Put,
    RankUnit,
    ScrubBudget,
    Stamp,
    Step,
)
from kvledger_index.writer import RedisWriter

SEED = 7
NAMESPACE = "bench"
SEGMENT = 16
MODEL = "bench-model"
PROMPT_SEGMENTS = 32
READ_HOLDERS = 65
READS = 400
DEAD_HOLDERS = 16
LIVING_HOLDERS = 2
SCRUB_PAUSE_SECONDS = 0.1
READ_PAUSE_SECONDS = 0.005


class Row(NamedTuple):
    """One line of the report; ``rate`` in block operations per second of Redis CPU."""

    name: str
    blocks: int
    rate: float
    wall: float
    bytes_per_block: float
    call_ms: float


class Bench:
    """One partition, written as a worker would."""

    def __init__(self, writer: RedisWriter, reader: RedisReader, ops_per_step: int) -> None:
        self.writer, self.reader, self.ops_per_step = writer, reader, ops_per_step
        self.raw: Any = writer._client
        self.stamps: dict[str, Stamp] = {}
        self.restart = 0
        self.rows: list[Row] = []
        self.scrub_cpu = 0.0

    async def open(self) -> None:
        async for key in self.raw.scan_iter(match=Keyspace(NAMESPACE).prefix + b"*", count=1000):
            await self.raw.unlink(key)
        await self.writer.check()
        self.stamps.clear()
        self.restart = 0
        await self.writer.seek(0, "bench", 0, 0, drop=True)

    async def step(self, rank: str, ops: Sequence[Op]) -> None:
        before = self.stamps.get(rank, NEVER)
        after = Stamp(1, 1, 1, before.n + 1)
        card = Card(MODEL, 0, 16, True, False, False, (), False) if before == NEVER else None
        unit = RankUnit(rank, MODEL, before, after, tuple(ops), Now(*after, 1), b"state", card, 1)
        nonce = self.restart.to_bytes(16, "big")
        outcome = await self.writer.apply(
            Step(0, "bench", self.restart, self.restart + 1, self.restart + 1, (unit,), True, 1, nonce)
        )
        if outcome.verdict != "applied":
            raise RuntimeError(outcome.why)
        self.restart, self.stamps[rank] = self.restart + 1, after

    async def send(self, rank: str, puts: Iterable[Put]) -> int:
        calls, source = 0, iter(puts)
        while batch := list(islice(source, self.ops_per_step)):
            await self.step(rank, batch)
            calls += 1
        return calls

    async def measure(self, name: str, rank: str, puts: Sequence[Put]) -> None:
        blocks = sum(put.mask.bit_count() for put in puts)
        memory, cpu, began = await self.memory(), await self.cpu(), time.perf_counter()
        calls = await self.send(rank, puts)
        wall, used = time.perf_counter() - began, await self.cpu() - cpu
        grown = (await self.memory() - memory) / blocks
        self.rows.append(Row(name, blocks, blocks / max(used, 1e-9), blocks / wall, grown, used / calls * 1e3))

    async def cpu(self) -> float:
        info = await self.raw.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    async def memory(self) -> int:
        return int((await self.raw.info("memory"))["used_memory"])


def runs(paths: Iterable[Sequence[int]], *, add: bool = True, lane: int = 0) -> list[Put]:
    """One put per whole segment."""
    return [Put(add, "gpu", lane, path[0], 0, 0, tuple(path), 0xFFFF) for path in paths]


def singles(paths: Sequence[Sequence[int]], order: random.Random | None, *, add: bool = True) -> list[Put]:
    """One put per block: shuffled, or growing as decoding does."""
    puts = [
        Put(add, "gpu", 0, path[0], at, path[at - 1] if at else 0, (path[at],), 1) for path in paths for at in range(16)
    ]
    if order:
        order.shuffle(puts)
    return puts


def hashes(names: Iterable[int], *, add: bool = True) -> list[Put]:
    """One put per engine hash that has no block key: a segment of one."""
    return [Put(add, "gpu", 1, name, 0, 0, (name,), 1) for name in names]


def branches(source: random.Random, count: int) -> Iterator[Put]:
    """Runs that leave one of few shared segments in its middle."""
    shared = [[source.getrandbits(64) for _ in range(SEGMENT)] for _ in range(max(1, count // 100))]
    for number in range(count):
        base = shared[number % len(shared)]
        cut = source.randrange(1, SEGMENT)
        path = base[:cut] + [source.getrandbits(64) for _ in range(SEGMENT - cut)]
        yield Put(True, "gpu", 0, path[0], 0, 0, tuple(path), 0xFFFF)


async def writes(bench: Bench, blocks: int) -> None:
    """Every write workload, one after the other on one growing index."""
    source = random.Random(SEED)
    paths = [[source.getrandbits(64) for _ in range(SEGMENT)] for _ in range(blocks // SEGMENT)]
    ranks = [f"replica-{number}/0" for number in range(READ_HOLDERS)]
    for rank in ranks:
        await bench.step(rank, [Bind()])
    await bench.measure("store new, runs of 16", ranks[0], runs(paths))
    await bench.measure("store again (no change)", ranks[0], runs(paths))
    await bench.measure("2nd holder, runs", ranks[1], runs(paths))
    for rank in ranks[2:8]:
        await bench.send(rank, runs(paths))
    await bench.measure("9th holder, runs", ranks[8], runs(paths))
    await bench.measure("9th holder's 2nd lane, runs", ranks[8], runs(paths, lane=1))
    await bench.measure("remove 9th holder, runs", ranks[8], runs(paths, add=False))
    await bench.measure("9th holder, singles shuffled", ranks[8], singles(paths, source))
    await bench.measure("remove it, singles shuffled", ranks[8], singles(paths, source, add=False))
    for rank in ranks[8:63]:
        await bench.send(rank, runs(paths))
    await bench.measure("64th holder, runs", ranks[63], runs(paths))
    await bench.measure("remove 64th holder, runs", ranks[63], runs(paths, add=False))
    await bench.open()
    for rank in ranks[:2]:
        await bench.step(rank, [Bind()])
    await bench.measure("new, block by block (decode)", ranks[0], singles(paths, None))
    await bench.measure("remove last holder, runs", ranks[0], runs(paths, add=False))
    names = [source.getrandbits(64) for _ in range(blocks)]
    await bench.measure("new engine hashes", ranks[0], hashes(names))
    await bench.measure("2nd holder, engine hashes", ranks[1], hashes(names))
    await bench.measure("remove 2nd holder, engine hashes", ranks[1], hashes(names, add=False))
    await bench.measure("remove engine hashes", ranks[0], hashes(names, add=False))
    await bench.measure("branches in shared segments", ranks[0], list(branches(source, blocks // SEGMENT)))
    cpu = await bench.cpu()
    await bench.step(ranks[0], [Drop()])
    sys.stderr.write(f"dropping a rank with {blocks} blocks: {(await bench.cpu() - cpu) * 1e3:.2f} ms of Redis CPU\n")


async def reads(bench: Bench) -> dict[str, float]:
    """A router's read of 512 blocks x 65 holders: wall time, and Redis CPU."""
    source = random.Random(SEED)
    await bench.open()
    prompt = [source.getrandbits(64) for _ in range(PROMPT_SEGMENTS * SEGMENT)]
    paths = [prompt[at : at + SEGMENT] for at in range(0, len(prompt), SEGMENT)]
    for number in range(READ_HOLDERS):
        await bench.step(f"replica-{number}/0", [Bind(), *runs(paths)])
    figures: dict[str, float] = {}
    catalogue = await bench.reader.catalogue(MODEL)
    figures |= await timed("read, equal rows", bench, catalogue, prompt)
    names = [source.getrandbits(64) for _ in prompt]
    figures |= await timed("read, and 512 engine hashes, absent", bench, catalogue, prompt, names)
    for number in range(READ_HOLDERS):
        await bench.step(f"replica-{number}/0", hashes(names))
    figures |= await timed("read, and 512 engine hashes, 65 holders", bench, catalogue, prompt, names)
    for number in range(READ_HOLDERS):
        # every holder lost another block of every segment, so that no two rows are equal
        lost = [(path, (number + at) % 15 + 1) for at, path in enumerate(paths)]
        puts = [Put(False, "gpu", 0, path[0], at, path[at - 1], (path[at],), 1) for path, at in lost]
        await bench.step(f"replica-{number}/0", puts)
    figures |= await timed("read, all rows differ", bench, catalogue, prompt)
    branch = [*prompt[:-8], *(source.getrandbits(64) for _ in range(8))]
    await bench.step("replica-0/0", [Put(True, "gpu", 0, branch[-16], 8, branch[-9], tuple(branch[-8:]), 0xFF)])
    figures |= await timed("read, leaving the path at its end", bench, catalogue, branch)
    began = time.perf_counter()
    for _ in range(READS):
        await bench.reader.catalogue(MODEL)
    figures["catalogue, mean ms"] = (time.perf_counter() - began) / READS * 1e3
    return figures


async def timed(
    name: str, bench: Bench, catalogue: Any, keys: Sequence[int], names: Sequence[int] = ()
) -> dict[str, float]:
    times = []
    cpu = await bench.cpu()
    for _ in range(READS):
        began = time.perf_counter()
        await bench.reader.read(catalogue, MODEL, keys, names)
        times.append(time.perf_counter() - began)
    used = (await bench.cpu() - cpu) / READS
    times.sort()
    return {
        f"{name}: p50 ms": times[READS // 2] * 1e3,
        f"{name}: p99 ms": times[READS * 99 // 100] * 1e3,
        f"{name}: Redis CPU us": used * 1e6,
    }


async def scrubs(bench: Bench, entries: int) -> dict[str, float]:
    """Dead entries freed in the background: how long, for how much of Redis, and what readers notice."""
    source = random.Random(SEED)
    await bench.open()
    prompt = [source.getrandbits(64) for _ in range(PROMPT_SEGMENTS * SEGMENT)]
    shared = [prompt[at : at + SEGMENT] for at in range(0, len(prompt), SEGMENT)]
    for number in range(READ_HOLDERS):
        await bench.step(f"replica-{number}/0", [Bind(), *runs(shared)])
    empty = await bench.memory()
    paths = [[source.getrandbits(64) for _ in range(SEGMENT)] for _ in range(entries // DEAD_HOLDERS)]
    dying = [f"dead-{number}/0" for number in range(DEAD_HOLDERS)]
    for rank in dying:
        await bench.step(rank, [Bind()])
        await bench.send(rank, runs(paths))
    for number in range(LIVING_HOLDERS):
        await bench.send(f"replica-{number}/0", runs(paths[::2]))
    full = await bench.memory()
    catalogue = await bench.reader.catalogue(MODEL)
    quiet = await read_until(asyncio.ensure_future(asyncio.sleep(4)), bench, catalogue, prompt)
    for rank in dying:
        await bench.step(rank, [Drop()])
    catalogue = await bench.reader.catalogue(MODEL)
    work = asyncio.ensure_future(scrub_all(bench))
    during = await read_until(work, bench, catalogue, prompt)
    return {
        **work.result(),
        "memory before, MB": (full - empty) / 1e6,
        "memory after, MB": (await bench.memory() - empty) / 1e6,
        **{f"read before: {name}": value for name, value in quiet.items()},
        **{f"read during: {name}": value for name, value in during.items()},
    }


async def scrub_all(bench: Bench) -> dict[str, float]:
    """As a worker does it, until nothing is left."""
    began, used, calls, freed, rows = time.perf_counter(), list[float](), 0, 0, 0
    while True:
        cpu = await bench.cpu()
        sent = time.perf_counter()
        done = await bench.writer.scrub(ScrubBudget())
        used.append(time.perf_counter() - sent)
        calls, freed, rows = calls + 1, freed + done.entries, rows + done.rows
        if done.idle:
            break
        bench.scrub_cpu += await bench.cpu() - cpu
        await asyncio.sleep(SCRUB_PAUSE_SECONDS)
    used.sort()
    return {
        "scrubbed entries": freed,
        "scrubbed rows": rows,
        "scrub calls": calls,
        "scrub wall s": time.perf_counter() - began,
        "scrub Redis CPU s (with reads between two looks)": bench.scrub_cpu,
        "scrub call, p50 ms": used[calls // 2] * 1e3,
        "scrub call, max ms": used[-1] * 1e3,
    }


async def read_until(end: asyncio.Future[Any], bench: Bench, catalogue: Any, keys: Sequence[int]) -> dict[str, float]:
    """Reads one after the other with a pause, until ``end``: percentiles of their times."""
    times = []
    while not end.done():
        began = time.perf_counter()
        await bench.reader.read(catalogue, MODEL, keys)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(READ_PAUSE_SECONDS)
    times.sort()
    parts = {"p50 ms": 0.5, "p99 ms": 0.99, "max ms": 1.0}
    return {name: times[min(len(times) - 1, int(len(times) * part))] * 1e3 for name, part in parts.items()}


async def main(url: str, args: argparse.Namespace) -> None:
    async with (
        RedisWriter.from_url(url, namespace=NAMESPACE) as writer,
        RedisReader.from_url(url, namespace=NAMESPACE) as reader,
    ):
        bench = Bench(writer, reader, args.ops)
        await bench.open()
        if args.scrub:
            figures = await scrubs(bench, args.scrub)
        else:
            await writes(bench, args.blocks)
            figures = await reads(bench)
        await bench.open()
    rows = sorted(bench.rows, key=lambda row: row.rate)
    if args.json:
        report = {
            "seed": SEED,
            "blocks": args.blocks,
            "ops": args.ops,
            "scrub": args.scrub,
            "writes": [r._asdict() for r in rows],
            "reads": figures,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    if rows:
        sys.stdout.write(f"{'workload':34} {'M/CPU-s':>8} {'M/s wall':>9} {'B/block':>8} {'ms/call':>8}\n")
    for row in rows:
        sys.stdout.write(
            f"{row.name:34} {row.rate / 1e6:8.2f} {row.wall / 1e6:9.2f} {row.bytes_per_block:8.1f} {row.call_ms:8.2f}\n"
        )
    for name, value in figures.items():
        sys.stdout.write(f"{name:52} {value:8.2f}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", help="URL of a server to measure (default: one of our own)")
    parser.add_argument("--blocks", type=int, default=48_000)
    parser.add_argument("--ops", type=int, default=512, help=f"puts per step (a step holds at most {STEP_OPS_MAX})")
    parser.add_argument("--scrub", type=int, default=0, help="measure the freeing of so many dead entries instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        address = arguments.redis or stack.enter_context(Stack(local=True)).redis
        asyncio.run(main(address, arguments))
