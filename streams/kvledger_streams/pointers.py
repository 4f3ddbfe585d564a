"""Reads from Kafka where the ranks of a partition may be read from: pointers, and whether they point at something.

    kvledger.replicas ──to its end──> table ──per rank──> pointer ──the record there──> Starts

Asked for only when a partition is rebuilt. Bounded in time: who cannot say in time leaves the log's start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from kvledger_streams.errors import Unavailable
from kvledger_streams.progress import Starts
from kvledger_wire.replicas import ReplicaTable, begins

LOOKUP_SECONDS_MAX = 30.0
"""For one partition; a rank takes some milliseconds. Reading a log from its start takes longer."""

TABLE_SECONDS_MAX = 5.0
"""How long a table of pointers is used again: all partitions of a worker are rebuilt at once. Older pointers are good,
too: they lead to a longer way.
"""

POLL_SECONDS = 0.1
"""Between two looks at deadline and stop."""

RECORDS_PER_POLL = 1_000

FETCH_BYTES = 65_536
"""One record is asked for at a time; brokers send a larger one all the same."""

NOT_THERE = frozenset({KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET})  # noqa: SLF001 - its public name


class Pointers:
    """``worker.PointerSource`` over Kafka. Joins no group and commits nothing."""

    def __init__(self, bootstrap: str, events: str, replicas: str, *, request_seconds: float) -> None:
        """Connects with the first call."""
        self._bootstrap = bootstrap
        self._events = events
        self._replicas = replicas
        self._seconds = request_seconds
        self._one_at_a_time = asyncio.Lock()
        self._stop = threading.Event()
        self._table: tuple[float, ReplicaTable] | None = None
        self._failed: tuple[float, str] | None = None

    async def starts(self, partition: int, partitions: int) -> Starts:
        """Where each rank of a partition may be read from. Raises Unavailable. O(pointers + ranks of the partition)."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._look, partition, partitions)

    def stop(self) -> None:
        """End a look that is under way; later ones raise."""
        self._stop.set()

    def _look(self, partition: int, partitions: int) -> Starts:
        """As ``starts``; what failed a moment ago fails at once, or each partition would wait in its turn."""
        now = time.monotonic()
        if self._failed is not None and now - self._failed[0] < TABLE_SECONDS_MAX:
            raise Unavailable(self._failed[1])
        try:
            consumer = self._consumer()
            try:
                table = self._read_table(consumer, now + LOOKUP_SECONDS_MAX)
                return self._check(consumer, table, partition, partitions, now + LOOKUP_SECONDS_MAX)
            finally:
                consumer.close()
        except (KafkaException, Unavailable) as error:
            said = error.args[0]
            msg = f"{self._replicas} at {self._bootstrap}: {said.str() if isinstance(said, KafkaError) else said}"
            self._failed = (time.monotonic(), msg)
            raise Unavailable(msg) from error

    def _consumer(self) -> Consumer:
        options = {
            "bootstrap.servers": self._bootstrap,
            "group.id": "kvledger.streams.pointers",  # never joined
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            # one record here, one there: with the client's defaults each takes half a second, with these 5 ms;
            # the first one of a topic whose leaders were not asked for takes half a second all the same (``_check``)
            "fetch.message.max.bytes": FETCH_BYTES,
            "fetch.wait.max.ms": 10,
            "fetch.queue.backoff.ms": 5,
            "queued.min.messages": 1,
            "reconnect.backoff.max.ms": 500,
        }
        return Consumer(options, logger=logging.getLogger("librdkafka"))

    def _read_table(self, consumer: Consumer, deadline: float) -> ReplicaTable:
        if self._table is not None and time.monotonic() - self._table[0] < TABLE_SECONDS_MAX:
            return self._table[1]
        found = consumer.list_topics(self._replicas, timeout=self._seconds).topics[self._replicas]
        if found.error is not None:
            raise KafkaException(found.error)
        table = ReplicaTable()
        consumer.assign([TopicPartition(self._replicas, 0, OFFSET_BEGINNING)])
        while True:
            self._check_time(deadline)
            for message in consumer.consume(RECORDS_PER_POLL, timeout=POLL_SECONDS):
                error = message.error()
                if error is None:
                    table.take(message.key(), message.value(), message.timestamp()[1])
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                    self._table = (time.monotonic(), table)
                    return table
                else:
                    raise KafkaException(error)

    def _check(
        self, consumer: Consumer, table: ReplicaTable, partition: int, partitions: int, deadline: float
    ) -> Starts:
        """``starts``, of a table that was read."""
        fences = table.fences(partition, partitions)
        # who leads the partition: unasked, the client finds out on a timer, half a second after it was assigned
        consumer.list_topics(self._events, timeout=self._seconds)
        consumer.assign([TopicPartition(self._events, partition, OFFSET_BEGINNING)])
        first = self._next(consumer, deadline)
        if first is None:
            return Starts({}, "the log is empty", fences)
        starts: dict[str, int] = {}
        for rank, pointer in table.pointers(partition, partitions, first.timestamp()[1]).items():
            if pointer is None or pointer.offset < 0:
                return Starts({}, f"{rank} has no pointer", fences)
            consumer.seek(TopicPartition(self._events, partition, pointer.offset))
            message = self._next(consumer, deadline)
            found = message is not None and message.offset() == pointer.offset
            if not found or not begins(rank, message.key(), message.value()):
                return Starts({}, f"at {pointer.offset}, where {rank} points, is nothing to begin with", fences)
            starts[rank] = pointer.offset
        return Starts(starts, "" if starts else "nobody follows a rank of this partition", fences)

    def _next(self, consumer: Consumer, deadline: float) -> Any:
        """The record where the consumer was sent, or behind it; None where there is none."""
        while True:
            self._check_time(deadline)
            for message in consumer.consume(1, timeout=POLL_SECONDS):
                error = message.error()
                if error is None:
                    return message
                if error.code() == KafkaError._PARTITION_EOF or error.code() in NOT_THERE:  # noqa: SLF001 - its public name
                    return None
                raise KafkaException(error)

    def _check_time(self, deadline: float) -> None:
        if self._stop.is_set():
            msg = "stopping"
            raise Unavailable(msg)
        if time.monotonic() > deadline:
            msg = f"pointers were not read within {LOOKUP_SECONDS_MAX:g} s"
            raise Unavailable(msg)
