"""How many records a second the fold takes: pure, and as a worker between a real Kafka and a real Redis.

    python tests/benchmarks/fold.py [--records N] [--json]

Workload (fixed seed): 64 ranks of one model with two groups. ``runs``: an engine batch stores a run of 16 blocks in
both groups (prefill); ``singles``: one block in one group (decode); ``beats``: heartbeats only. Every batch is a record
per group. ``fold alone`` counts CPU seconds, ``Kafka to Redis`` the time that a worker takes to catch up with a log.
``rebuild`` counts CPU seconds, too: one of 17 ranks is idle since the log began, the others wrote 20 checkpoints.
``latency`` is from Kafka's acknowledgement to the block being readable, at most 100 batches a second.
"""

# ruff: noqa: E402 - what the tests share is found by path, as this is run as a script

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("streams", "integration")]

from ranklog import RankLog, prompt
from streamsworld import PARTITIONS, Installation

from kvledger.admin import connect, create_topics
from kvledger.stack import Stack
from kvledger_index.reader import RedisReader
from kvledger_streams.fold import LogRecord, fold, fresh
from kvledger_streams.tally import Tally
from kvledger_wire.topics import topic_specs

RANKS = 64
BATCH = 1_000
SEED = 1
LATENCY_BATCHES = 300
REBUILD_RANKS = 17
REBUILD_CHECKPOINTS = 20

Row = dict[str, object]


def runs(rank: RankLog, rnd: random.Random) -> None:
    """A prefill: one run of 16 new blocks in each of two groups."""
    path = prompt(f"{rank.id}/{rnd.random()}", 16)
    rank.batch((0, "gpu", "store", path, 0, 16), (1, "gpu", "store", path, 0, 16))


def singles(rank: RankLog, rnd: random.Random) -> None:
    """A decode step: one block."""
    path = prompt(f"{rank.id}/{rnd.randrange(64)}", 16)
    at = rnd.randrange(16)
    rank.batch((0, "gpu", "store" if rnd.random() < 0.6 else "remove", path, at, at + 1))


def beats(rank: RankLog, _: random.Random) -> None:
    """Nothing new."""
    rank.beat()


WORKLOADS: dict[str, Callable[[RankLog, random.Random], None]] = {"runs": runs, "singles": singles, "beats": beats}


def write(log: list[tuple[bytes | None, bytes | None]], records: int, workload: str) -> list[RankLog]:
    """A log of at least ``records`` records."""
    rnd = random.Random(SEED)
    ranks = [RankLog(log, f"pod-{i}", owner=3) for i in range(RANKS)]
    for rank in ranks:
        rank.open()
    while len(log) < records:
        WORKLOADS[workload](rnd.choice(ranks), rnd)
    return ranks


def pure(records: int, workload: str) -> Row:
    """The fold alone, in batches as a worker gets them."""
    log: list[tuple[bytes | None, bytes | None]] = []
    write(log, records, workload)
    rows: list[LogRecord] = [(offset, offset, *row, None) for offset, row in enumerate(log)]
    state, tally = fresh(0, partitions=1, topic_id="t", restart=0, broker_ms=0), Tally()
    started = time.process_time()
    steps = 0
    for at in range(0, len(rows), BATCH):
        for _ in fold(state, rows[at : at + BATCH], end=len(rows), nonce=lambda: secrets.token_bytes(16), tally=tally):
            steps += 1
    seconds = time.process_time() - started
    return row_of("fold alone", workload, len(rows), tally.ops, steps, seconds)


def rebuilds(records: int) -> list[Row]:
    """What it costs to read from an idle rank's Opened, with and without passing over what is below each rank's own
    pointer.
    """
    log: list[tuple[bytes | None, bytes | None]] = []
    idle, *busy = [RankLog(log, f"pod-{i}", owner=3) for i in range(REBUILD_RANKS)]
    rnd = random.Random(SEED)
    for rank in (idle, *busy):
        rank.open()
    own: dict[str, int] = {idle.id: 0}
    for _ in range(REBUILD_CHECKPOINTS):
        stop = len(log) + records // REBUILD_CHECKPOINTS
        while len(log) < stop:
            singles(rnd.choice(busy), rnd)
        for rank in busy:
            own[rank.id] = len(log)
            rank.checkpoint(1)
    rows: list[LogRecord] = [(offset, offset, *row, None) for offset, row in enumerate(log)]
    return [_rebuild("each rank from its pointer", rows, own), _rebuild("all from the lowest pointer", rows, {})]


def _rebuild(what: str, rows: list[LogRecord], starts: dict[str, int]) -> Row:
    tally = Tally()
    state = fresh(0, partitions=1, topic_id="t", restart=0, broker_ms=0, starts=starts)
    started = time.process_time()
    steps = 0
    for at in range(0, len(rows), BATCH):
        for _ in fold(state, rows[at : at + BATCH], end=len(rows), nonce=lambda: secrets.token_bytes(16), tally=tally):
            steps += 1
    seconds = time.process_time() - started
    return row_of(f"rebuild, {what}", "singles", len(rows), tally.ops, steps, seconds) | {"ops": tally.ops}


def row_of(what: str, workload: str, records: int, ops: int, steps: int, seconds: float) -> Row:
    """One line of the table."""
    return {
        "what": what,
        "workload": workload,
        "records_per_second": round(records / seconds),
        "ops_per_second": round(ops / seconds),
        "records": records,
        "steps": steps,
        "seconds": round(seconds, 3),
    }


def whole(stack: Stack, folder: Path, records: int, workload: str) -> Row:
    """A worker process from its first placed partition until it has caught up with a log that was there before."""
    name = f"bench-{workload}-{secrets.token_hex(3)}"
    create_topics(connect(stack.kafka), topic_specs(partitions=PARTITIONS, prefix=f"{name}."))
    (folder / name).mkdir()
    with Installation(stack.kafka, stack.redis, f"{name}.", name, folder / name) as world:
        write(world.log, records, workload)
        world.push()
        worker = world.worker(KVLEDGER_STREAMS_REPORT_SECONDS="600")
        worker.wait("partition_caught_up", count=PARTITIONS)
        worker.stop()
        seconds = max(float(line["seconds"]) for line in worker.lines("partition_caught_up"))
        last = worker.lines("worker_stopped")[0]
        return row_of(
            "Kafka to Redis", workload, int(last["fold_records"]), int(last["fold_ops"]), int(last["steps"]), seconds
        )


def latency(stack: Stack, folder: Path) -> Row:
    """From acknowledged to readable, one batch at a time."""
    name = f"bench-latency-{secrets.token_hex(3)}"
    create_topics(connect(stack.kafka), topic_specs(partitions=PARTITIONS, prefix=f"{name}."))
    (folder / name).mkdir()
    with Installation(stack.kafka, stack.redis, f"{name}.", name, folder / name) as world:
        world.ranks(8)
        for rank in world.writers:
            singles(rank, random.Random(SEED))
        world.push()
        worker = world.worker()
        worker.wait("partition_caught_up", count=PARTITIONS)
        taken = sorted(asyncio.run(_latencies(world)))
        worker.stop()
    return {
        "what": "latency",
        "workload": "singles",
        "p50_ms": round(statistics.median(taken) * 1000, 1),
        "p90_ms": round(taken[int(len(taken) * 0.90)] * 1000, 1),
        "p99_ms": round(taken[int(len(taken) * 0.99)] * 1000, 1),
        "max_ms": round(taken[-1] * 1000, 1),
        "records": len(taken),
    }


async def _latencies(world: Installation) -> list[float]:
    rnd, taken = random.Random(SEED), []
    async with RedisReader.from_url(world.redis, namespace=world.namespace) as reader:
        catalogue = await reader.catalogue("m")
        for number in range(LATENCY_BATCHES):
            rank = rnd.choice(world.writers)
            path = prompt(f"latency/{number}", 1)
            rank.batch((0, "gpu", "store", path, 0, 1))
            world.push()
            acknowledged = time.perf_counter()
            while True:
                reading = await reader.read(catalogue, "m", path)
                if reading.version != catalogue.version:
                    catalogue = await reader.catalogue("m")
                elif any(segment.holders for segment in reading.segments):
                    break
            taken.append(time.perf_counter() - acknowledged)
            await asyncio.sleep(0.01)
    return taken


def main() -> None:
    """Run everything and print a table, fastest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=40_000, help="per workload (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    rows = [pure(args.records, workload) for workload in WORKLOADS]
    rows += rebuilds(args.records)
    with Stack() as stack, tempfile.TemporaryDirectory() as folder:
        rows += [whole(stack, Path(folder), args.records, workload) for workload in WORKLOADS]
        rows.append(latency(stack, Path(folder)))
    rows.sort(key=lambda row: -int(str(row.get("records_per_second", 0))))
    for row in rows:
        words = "  ".join(f"{name} {value}" for name, value in row.items())
        sys.stdout.write((json.dumps(row) if args.json else words) + "\n")


if __name__ == "__main__":
    main()
