"""A Kafka of lists, an index that fails as told, and a worker between them, for tests without a service."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
from ranklog import RankLog, prompt

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Outcome, Scrubbed, ScrubBudget, Step, Stored
from kvledger_streams.progress import Bounds, Starts, Topic
from kvledger_streams.settings import Settings
from kvledger_streams.telemetry import Telemetry
from kvledger_streams.worker import Batch, Worker

PROMPTS = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9)]
SETTINGS = Settings(kafka="-", redis="-", retry_seconds_min=1.0, retry_seconds_max=4.0)
Claims = set[tuple[str, int | None, str, int]]


class Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Kafka:
    """``Log`` over lists."""

    def __init__(self, partitions: int = 2) -> None:
        self.topic = Topic("id-1", partitions)
        self.logs: dict[int, list[tuple[bytes | None, bytes | None]]] = {n: [] for n in range(partitions)}
        self.base = dict.fromkeys(range(partitions), 0)
        self.silent: Exception | None = None
        self.starts_known = Starts({}, "nobody points")
        self.pointers_fault: Exception | None = None
        self.log_ms: Callable[[int], int] = lambda offset: 1000 + offset
        """When the record at an offset was appended."""

    async def describe(self) -> Topic:
        if self.silent:
            raise self.silent
        return self.topic

    async def bounds(self, partitions: Collection[int], topic: Topic) -> dict[int, Bounds]:
        if self.silent:
            raise self.silent
        newest_ms = max((self.log_ms(self.end(n) - 1) for n in self.logs if self.logs[n]), default=0)
        return {n: Bounds(topic.id, self.base[n], self.end(n), newest_ms) for n in partitions if n in self.logs}

    async def starts(self, partition: int, partitions: int) -> Starts:
        if self.pointers_fault:
            raise self.pointers_fault
        return self.starts_known

    def end(self, partition: int) -> int:
        return self.base[partition] + len(self.logs[partition])


class Consumer:
    """``Source`` over such a Kafka: one member of the group, with its own positions."""

    def __init__(self, kafka: Kafka, now: Callable[[], float]) -> None:
        self.kafka, self.now = kafka, now
        self.assigned = set(kafka.logs)
        self.position: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self.deaf = False
        self.seeks = 0
        self.asked = math.inf
        """When what ``fetch`` brings was asked for: just now, unless a test says otherwise."""

    async def seek(self, partition: int, offset: int) -> int | None:
        if partition not in self.assigned:
            return None
        self.seeks += 1
        self.position[partition] = offset
        self.epochs[partition] = self.seeks
        return self.seeks

    def end_of(self, partition: int) -> tuple[int, float] | None:
        return None if self.deaf else (self.kafka.end(partition), min(self.asked, self.now()))

    async def commit(self, offsets: Mapping[int, int]) -> None:
        self.committed.update(offsets)

    def fetch(self, partition: int, limit: int = 7) -> Batch | None:
        """What a poll brings; None: nothing. The position moves on, as a client's does."""
        at, base = self.position[partition], self.kafka.base[partition]
        rows = self.kafka.logs[partition][at - base : at - base + limit]
        self.position[partition] = at + len(rows)
        records = [Record(at + i, self.kafka.log_ms(at + i), *row) for i, row in enumerate(rows)]
        end = self.kafka.end(partition)
        asked = min(self.asked, self.now())
        return Batch(partition, self.epochs[partition], end, records, asked) if records else None

    def out_of_range(self, partition: int) -> bool:
        return not self.kafka.base[partition] <= self.position[partition] <= self.kafka.end(partition)


class Faulty:
    """An index that fails as it is told: before it did anything, or after."""

    def __init__(self, inner: MemoryIndex) -> None:
        self.inner = inner
        self.before: list[Exception | None] = []
        self.after: list[Exception | None] = []
        self.only: int | None = None
        self.steps: list[Step] = []
        self.scrubs: list[Scrubbed] = []
        self.scrub_faults: list[Exception | None] = []
        self.budgets: list[ScrubBudget] = []

    async def check(self) -> None:
        await self.inner.check()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def load(self, partition: int) -> Stored:
        self.fail(self.before, partition)
        return await self.inner.load(partition)

    async def seek(self, partition: int, topic_id: str, restart: int, target: int, *, drop: bool) -> None:
        self.fail(self.before, partition)
        await self.inner.seek(partition, topic_id, restart, target, drop=drop)

    async def apply(self, step: Step) -> Outcome:
        self.fail(self.before, step.partition)
        outcome = await self.inner.apply(step)
        self.steps.append(step)
        self.fail(self.after, step.partition)
        return outcome

    async def scrub(self, budget: ScrubBudget) -> Scrubbed:
        self.budgets.append(budget)
        self.fail(self.scrub_faults, -1)
        return self.scrubs.pop(0) if self.scrubs else await self.inner.scrub(budget)

    def fail(self, faults: list[Exception | None], partition: int) -> None:
        if faults and self.only in {None, partition}:
            error = faults.pop(0)
            if error is not None:
                raise error


class Process:
    """A worker with its clock, its log lines and the loop that a consumer runs."""

    def __init__(self, kafka: Kafka, index: Any, *, wall_seconds: float = 1.0, **changes: Any) -> None:
        self.kafka, self.index, self.clock, self.out = kafka, index, 100.0, io.StringIO()
        telemetry = Telemetry(self.out, now=self.now)
        options = {name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__} | changes
        self.worker = Worker(
            Settings(**options),
            writer=index,
            log=kafka,
            pointers=kafka,
            telemetry=telemetry,
            now=self.now,
            wall=lambda: wall_seconds,  # log times begin at 1 s
        )
        self.consumer = Consumer(kafka, self.now)
        self.worker.attach(self.consumer)
        self.worker.assign(self.consumer.assigned)

    def now(self) -> float:
        return self.clock

    def lines(self, code: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.out.getvalue().splitlines()]
        return [line for line in lines if line["event"] == code]

    async def turn(self) -> None:
        """A turn, and all that it started beside."""
        await self.worker.turn()
        await asyncio.gather(*self.worker._tasks.values())

    async def poll(self, rnd: random.Random | None = None) -> int:
        """Every readable partition once; returns how many records came."""
        came = 0
        for number in sorted(self.worker.readable()):
            if self.consumer.out_of_range(number):
                self.worker.lost(number, "not in the log")
                continue
            batch = self.consumer.fetch(number, rnd.randint(1, 9) if rnd else 7)
            if batch is not None:
                await self.worker.take(batch)
                came += len(batch.records)
        return came

    async def settle(self, seconds: float = 0.0) -> None:
        """Turn and poll until nothing comes any more; ``seconds`` pass between turns."""
        for _ in range(200):
            self.clock += seconds
            await self.turn()
            if not await self.poll() and self.worker.readable() == self.consumer.assigned:
                return
        pytest.fail("does not settle")


async def claims(index: MemoryIndex) -> Claims:
    return {(claim.rank, claim.group, claim.medium, claim.key) async for claim in index.dump()}


def write(kafka: Kafka, seed: int, length: int = 60, ranks: int = 4) -> list[RankLog]:
    """Valid logs of some ranks, each in its partition; their writers know the truth."""
    rnd = random.Random(seed)
    writers = []
    for i in range(ranks):
        writer = RankLog([], f"pod-{i}", owner=3)
        writer.log = kafka.logs[writer.partition(kafka.topic.partitions)]
        writer.take_over(3)
        writer.open()
        writers.append(writer)
    for _ in range(length):
        rnd.choice(writers).act(rnd, PROMPTS)
    return writers


def truth(writers: list[RankLog]) -> Claims:
    return {(writer.id, *claim) for writer in writers for claim in writer.held}
