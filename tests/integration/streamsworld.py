"""One installation for tests of the stream worker: its topics, its index, workers as processes, ranks that write."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from ranklog import RankLog, prompt

from kvledger.stack import Process
from kvledger_index.reader import RedisReader
from kvledger_wire import records as wire
from kvledger_wire.partition import claim_key, pointer_key
from kvledger_wire.replicas import begins
from kvledger_wire.topics import EVENTS, REPLICAS

PROMPTS = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9), prompt("r", 33)]
PARTITIONS = 4
START_SECONDS_MAX = 60.0
Claims = set[tuple[str, int | None, str, int]]


class WorkerProcess:
    """``kvledger streams`` as a child; what it says is read from its log."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def lines(self, code: str | None = None) -> list[dict[str, Any]]:
        """Log lines with this code, oldest first."""
        found = []
        for line in self.process.log.read_text().splitlines() if self.process.log.exists() else ():
            if line.startswith("{"):
                said = json.loads(line)
                if code in {None, said["event"]}:
                    found.append(said)
        return found

    def wait(self, code: str, *, count: int = 1) -> None:
        """Until it said ``code`` so many times; fails with its last words."""
        self.process.wait_ready(lambda: len(self.lines(code)) >= count, START_SECONDS_MAX)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def send(self, number: signal.Signals) -> None:
        """Any signal."""
        os.kill(self.process.pid, number)

    def stop(self, seconds: float = 30.0, *, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Ask it to stop; its exit code."""
        self.send(number)
        assert self.process.join(seconds), self.process.obituary("did not stop")
        return self.process.returncode


class Installation:
    """Topics with a prefix, an index in a namespace, and the writers that know what must be in it."""

    def __init__(self, kafka: str, redis: str, prefix: str, namespace: str, folder: Path) -> None:
        self.kafka, self.redis, self.prefix, self.namespace, self.folder = kafka, redis, prefix, namespace, folder
        self.topic = prefix + EVENTS
        self.partitions = PARTITIONS
        self.writers: list[RankLog] = []
        self.log: list[tuple[bytes | None, bytes | None]] = []
        self.workers: list[WorkerProcess] = []
        self.beginnings: dict[str, int] = {}
        """Where each rank's newest ``Opened`` or first part of a checkpoint stands."""
        # idempotent as the bridge's: without it a repeated request may overtake another
        options = {"bootstrap.servers": kafka, "linger.ms": 1, "enable.idempotence": True, "log_level": 0}
        self._producer = Producer(options)
        self.admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    def worker(self, *flags: str, **environment: str) -> WorkerProcess:
        """Start a worker; it may not be ready yet."""
        words = [
            *(sys.executable, "-m", "kvledger", "streams", "--kafka", self.kafka, "--redis", self.redis),
            *("--topic-prefix", self.prefix, "--namespace", self.namespace, *flags),
        ]
        name = f"worker-{len(self.workers)}"
        process = Process(name, words, log=self.folder / f"{name}.log", environment=dict(os.environ) | environment)
        process.start()
        self.workers.append(WorkerProcess(process))
        return self.workers[-1]

    def ranks(self, count: int, *, owner: int = 3) -> list[RankLog]:
        """New ranks in their first life, written to ``log``."""
        for i in range(count):
            writer = RankLog(self.log, f"pod-{i}", owner=owner)
            writer.take_over(owner)
            writer.open()
            self.writers.append(writer)
        return self.writers

    def act(self, rnd: random.Random, length: int) -> None:
        """So many things happen."""
        for _ in range(length):
            rnd.choice(self.writers).act(rnd, PROMPTS)

    def push(self, *, partition: Callable[[bytes | None], int] | None = None) -> Sequence[Any]:
        """Send what was written and wait until all is acknowledged; returns it."""
        sent, failed = list(self.log), list[Any]()
        self.log.clear()

        def delivered(error: Any, message: Any) -> None:
            rank = (message.key() or b"").decode(errors="replace").rpartition("/")[0]
            if error is not None:
                failed.append(error)
            elif begins(rank, message.key(), message.value()):
                self.beginnings[rank] = message.offset()

        for key, value in sent:
            place = partition(key) if partition else self.place(key)
            self._producer.produce(self.topic, key=key, value=value, partition=place, on_delivery=delivered)
            self._producer.poll(0)
        assert self._producer.flush(30) == 0
        assert not failed
        return sent

    def point(self, owner: int = 3, **offsets: int) -> None:
        """Write a claim and a pointer of each rank, at its beginning unless ``offsets`` (by replica) say otherwise."""
        topic = self.prefix + REPLICAS
        for name, offset in self.beginnings.items():
            replica, rank = name.split("/")
            self._producer.produce(topic, wire.encode(wire.Claim(0, -1, "b", "0")), claim_key(replica, int(rank)))
            pointer = wire.Pointer(0, owner, -1, offsets.get(replica.replace("-", "_"), offset))
            self._producer.produce(topic, wire.encode(pointer), pointer_key(replica, int(rank), owner))
        assert self._producer.flush(30) == 0

    def place(self, key: bytes | None) -> int:
        """The partition of a record key; junk goes to 0."""
        parts = (key or b"").decode(errors="replace").split("/")
        if len(parts) != 3:
            return 0
        return RankLog([], parts[0], int(parts[1])).partition(self.partitions)

    @property
    def truth(self) -> Claims:
        """What the index must hold."""
        return {(writer.id, *claim) for writer in self.writers for claim in writer.held}

    async def claims(self) -> Claims:
        """What the index holds."""
        async with RedisReader.from_url(self.redis, namespace=self.namespace) as reader:
            return {(claim.rank, claim.group, claim.medium, claim.key) async for claim in reader.dump()}

    async def is_true(self) -> bool:
        """Whether it is what it must be."""
        return await self.claims() == self.truth

    async def alive_ms(self) -> dict[int, tuple[int, int]]:
        """Partition -> (Redis' clock now, when it was last stamped), of those with ranks of model m."""
        async with RedisReader.from_url(self.redis, namespace=self.namespace) as reader:
            catalogue = await reader.catalogue("m")
            reading = await reader.read(catalogue, "m", [])
            return {number: (reading.time_ms, view.alive_ms) for number, view in reading.partitions.items()}

    def end(self, partition: int) -> int:
        """The end of a partition's log."""
        (found,) = self.admin.list_offsets({TopicPartition(self.topic, partition): OffsetSpec.latest()}).values()
        return int(found.result(15).offset)

    def forget(self, partition: int, before: int) -> None:
        """Delete the log of a partition below an offset, as retention does."""
        (done,) = self.admin.delete_records([TopicPartition(self.topic, partition, before)]).values()
        done.result(15)
