"""The Kafka shell: one idempotent producer, delivery reports, and what other bridges claim (DESIGN §4, §5).

Order rests on three things: the partition is named by ours alone, the producer is idempotent with unlimited retries and
no message timeout, and a record that fails all the same makes its rank claim anew. Backpressure is a value (``full``):
the caller stops reading engines. All methods but ``check`` and ``stop`` return at once.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Producer

from kvledger_bridge.errors import InvalidConfig, Refused
from kvledger_bridge.lease import Leases
from kvledger_bridge.restorer import Restorer
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_bridge.topics import Topics
from kvledger_bridge.unit import RECORD_BYTES_MAX
from kvledger_bridge.watch import ForeignClaim, Watch, Who
from kvledger_wire.known import LogClock, header
from kvledger_wire.partition import (
    RANK_WIDE,
    claim_key,
    partition_of,
    pointer_key,
    record_key,
    restoring_key,
)
from kvledger_wire.records import (
    SCHEMA,
    EventRecord,
    Pointer,
    ReplicaRecord,
    Restoring,
    Unreadable,
    encode,
)
from kvledger_wire.replicas import leads_to

RECONNECT_MS_MAX = 1000
"""Back-off towards a broker that is away: within a second of its return records flow again."""

CLIENT_MESSAGE_BYTES_MAX = 8 * 2**20
"""The client's own bound on a message, out of the way: records are cut for the topic's."""

_silent = logging.getLogger("kvledger_bridge.librdkafka")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


class Delivery(NamedTuple):
    """What became of a record: it stands at ``offset``, or failed with ``why``."""

    who: Who
    record: EventRecord | ReplicaRecord
    offset: int
    why: str


class Publisher:
    """Kafka as one bridge uses it. Make it in the thread that uses it: its client does not survive a fork."""

    def __init__(
        self, settings: Settings, telemetry: Telemetry, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._clocks: defaultdict[int, LogClock] = defaultdict(LogClock)
        """Of the event topic's partitions: brokers that lead them say when they appended what was sent."""
        self._settings = settings
        self._telemetry = telemetry
        self._name = name
        self._partitions = 0
        self._topics: Topics | None = None
        self._producer: Any = None
        self._watch: Watch | None = None
        self._generation = 0
        self._fatal = ""
        self._records = self._bytes = 0
        self._events = self._event_bytes = 0
        self._done: list[Delivery] = []
        self._letters = 0.0
        self._letters_at = 0.0

    # ---- life cycle

    def check(self) -> int:
        """Look at the topics and return the partitions of the event topic. Raises Unavailable or Refused."""
        self._topics = Topics(self._settings, self._options({}), logger=_silent)
        self._partitions = self._topics.check()
        return self._partitions

    def start(self) -> None:
        """Make the producer, and read what the replicas topic says."""
        self._make_producer()
        self._make_watch()

    def rebuild(self) -> None:
        """Replace a producer that turned fatal. What it had not delivered counts for nothing: ranks claim anew."""
        self._telemetry.rebuilt(self._fatal)
        old, self._producer = self._producer, None
        old.purge()
        old.poll(0)
        self._records = self._bytes = 0
        self._done.clear()
        self._make_producer()
        self._make_watch()

    def stop(self, seconds: float) -> int:
        """Deliver what is queued, at most so long; returns how many records were not acknowledged."""
        left = 0
        if self._producer is not None:
            left = int(self._producer.flush(max(0.0, seconds)))
            if left:
                self._producer.purge()
                self._producer.poll(0)
            self._producer = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        return left

    def restorer(self, clock: Callable[[], float]) -> Restorer:
        """What reads ranks back from the same Kafka."""
        return Restorer(
            self._settings,
            self._telemetry,
            self._options({"error_cb": partial(self._error, 0)}),
            partitions=self._partitions,
            clock=clock,
            logger=_silent,
        )

    def leases(self) -> Leases:
        """What listens to those who claimed ranks over."""
        options = self._options({"error_cb": partial(self._error, 0)})
        return Leases(self._settings, self._telemetry, options, partitions=self._partitions, logger=_silent)

    # ---- writing

    @property
    def fatal(self) -> str:
        """Why the producer is dead; empty while it lives."""
        return self._fatal

    @property
    def full(self) -> bool:
        """Whether so much is under way that nothing more should be read from engines."""
        return self._records >= self._settings.queue_records_max or self._bytes >= self._settings.queue_bytes_max

    @property
    def queued(self) -> tuple[int, int]:
        """(records, bytes) handed over and not acknowledged."""
        return self._records, self._bytes

    @property
    def record_bytes(self) -> float:
        """What a record of the event topic took on average; 0 before the first."""
        return self._event_bytes / max(1, self._events)

    @property
    def retention_seconds(self) -> float:
        """How long the event topic keeps records; infinite where it does for ever."""
        return self._topics.retention_seconds if self._topics is not None else float("inf")

    def write(self, who: Who, group: int | str | None, record: EventRecord, *, known: float | None) -> int:
        """Produce to the rank's partition; what becomes of it comes with ``serve``. Returns its bytes.

        ``known``: the moment up to which all that the engine sent is in the rank's log with this record.
        """
        key, value = record_key(*who, group), encode(record)
        partition = partition_of(*who, self._partitions)
        self._events += 1
        self._event_bytes += len(value)
        known_ms = None if known is None else self._clocks[partition].at(known)
        report = self._reporter(who, record, clock=self._clocks[partition])
        self._produce((self._settings.events_topic, partition), key, value, report, headers=[header(known_ms)])
        return len(value)

    def announce(self, who: Who, record: ReplicaRecord) -> None:
        """Produce a claim, a pointer, or that we are restoring; what becomes of it comes with ``serve``."""
        value = record
        match record:
            case Pointer(owner=owner):
                key = pointer_key(*who, owner)
                value = msgspec.structs.replace(record, partitions=self._partitions)
            case Restoring(owner=owner):
                key = restoring_key(*who, owner)
            case _:
                key = claim_key(*who)
        self._produce((self._settings.replicas_topic, 0), key, encode(value), self._reporter(who, record))

    def forget(self, who: Who, below: int) -> None:
        """Take back the pointers of a rank's owners below, and what they and we said of restoring: a tombstone each."""
        if self._watch is None:
            return
        stale = [pointer_key(*who, owner) for owner in self._watch.table.owners(*who) if owner < below]
        stale += [restoring_key(*who, owner) for owner in self._watch.restoring.get(who, ()) if owner <= below]
        for key in stale:
            self._produce((self._settings.replicas_topic, 0), key, None, None)

    def dead_letter(
        self, who: Who, *, owner: int, seq: int, reason: str, digest: bytes, raw: bytes, now: float
    ) -> None:
        """Keep what is known of a batch that could not be read; above a rate they are counted and dropped."""
        rate = self._settings.dead_letters_per_second_max
        self._letters = min(max(1.0, rate), self._letters + (now - self._letters_at) * rate)
        self._letters_at = now
        if self._letters < 1.0:
            self._telemetry.dead_letter_dropped()
            return
        self._letters -= 1.0
        keep = raw[:RECORD_BYTES_MAX] if self._settings.dead_letter_raw else b""
        record = Unreadable(SCHEMA, owner, seq, reason, len(raw), digest, keep)
        self._produce((self._settings.dead_letter_topic, 0), record_key(*who, RANK_WIDE), encode(record), None)

    # ---- reading what came back

    def serve(self, seconds: float = 0.0) -> list[Delivery]:
        """Delivery reports since the last call, in order per rank; waits for the first of them at most so long."""
        if self._producer is not None:
            self._producer.poll(seconds)
        done, self._done = self._done, []
        return done

    def claims(self) -> list[ForeignClaim]:
        """Claims by other bridges since the last call. Where Kafka does not answer there are none, for now."""
        return self._watch.poll() if self._watch is not None else []

    def spoke(self) -> list[tuple[Who, int]]:
        """Owners whose pointers, or words that they are restoring, came with the last ``claims``."""
        return self._watch.spoke() if self._watch is not None else []

    def answers(self, now: float) -> bool:
        """Whether Kafka has answered lately."""
        return self._topics is not None and self._topics.answers(now)

    @property
    def read_to(self) -> int:
        """Up to which offset the replicas topic was read."""
        return self._watch.read_to if self._watch is not None else -1

    def pointer(self, who: Who) -> Pointer | None:
        """A rank's pointer of the highest owner that has one, as far as the replicas topic was read. One into the
        partition where the rank was before leads to the log's start.
        """
        pointer = self._watch.table.newest(*who) if self._watch is not None else None
        if pointer is None or leads_to(pointer, who, partition_of(*who, self._partitions)):
            return pointer
        return msgspec.structs.replace(pointer, fence=-1, offset=-1)

    def ranks_beside(self, who: Who) -> int:
        """How many ranks share the rank's partition, itself included. O(ranks)."""
        partition = partition_of(*who, self._partitions)
        return len(self._watch.table.pointers(partition, self._partitions)) if self._watch is not None else 1

    def look_at_topics(self, now: float) -> None:
        """A topic that was re-created has lost what was written: as fatal as a producer that lost it.

        Raises Refused where one has another number of partitions: ranks belong elsewhere then, for readers, too.
        """
        for change in self._topics.changes(now) if self._topics else ():
            self._telemetry.topic_changed(change.text)
            if change.resized:
                raise Refused(
                    f"{change.text}: this bridge ends; started again, it follows its ranks where they belong now"
                )
            self._fatal = self._fatal or change.text

    # ---- inside

    def _make_producer(self) -> None:
        self._generation += 1
        self._fatal = ""
        settings = self._settings
        options = {
            "enable.idempotence": True,
            "acks": "all",
            "compression.type": "lz4",
            "linger.ms": settings.linger_seconds * 1000,
            "message.max.bytes": CLIENT_MESSAGE_BYTES_MAX,
            "message.timeout.ms": 0,  # unlimited: a record is delivered, or its rank claims anew
            # the client's own bounds stand above ours, so that what was let in always fits
            "queue.buffering.max.messages": max(100_000, settings.queue_records_max * 4),
            "queue.buffering.max.kbytes": max(262_144, settings.queue_bytes_max * 4 // 1024),
            "error_cb": partial(self._error, self._generation),
        }
        try:
            self._producer = Producer(self._options(options), logger=_silent)
        except KafkaException as error:
            # the client names the option and never its value
            raise InvalidConfig(f"kafka_options (KVLEDGER_BRIDGE_KAFKA_OPTIONS): {error.args[0].str()}") from error

    def _make_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        options = self._options({"error_cb": partial(self._error, 0)})
        self._watch = Watch(self._settings, self._telemetry, options, name=self._name, logger=_silent)

    def _produce(
        self,
        place: tuple[str, int],
        key: bytes,
        value: bytes | None,
        report: Callable[[int, Any, Any], None] | None,
        headers: list[tuple[str, bytes]] | None = None,
    ) -> None:
        size = len(key) + len(value or b"")
        self._telemetry.counters.records += 1
        self._telemetry.counters.bytes += size
        self._records += 1
        self._bytes += size
        done = partial(self._delivered, self._generation, size, report)
        try:
            topic, partition = place
            self._producer.produce(topic, value, key, partition, on_delivery=done, headers=headers)
        except (BufferError, KafkaException) as error:
            # above our own bounds, or fatal: this record is lost, which its rank has to know
            done(error.args[0] if isinstance(error, KafkaException) else error, None)

    def _reporter(
        self, who: Who, record: EventRecord | ReplicaRecord, clock: LogClock | None = None
    ) -> Callable[[int, Any, Any], None]:
        sent = self._clock()

        def report(_generation: int, error: Any, message: Any) -> None:
            if error is None:
                kind, log_ms = message.timestamp()
                if clock is not None and kind == TIMESTAMP_LOG_APPEND_TIME:
                    clock.appended(log_ms, after=sent, before=self._clock())
                self._done.append(Delivery(who, record, int(message.offset()), ""))
            else:
                self._done.append(Delivery(who, record, -1, _name(error)))

        return report

    def _delivered(
        self,
        generation: int,
        size: int,
        report: Callable[[int, Any, Any], None] | None,
        error: Any,
        message: Any,
    ) -> None:
        if generation != self._generation:
            return  # of a producer that was replaced: its ranks have claimed anew
        self._records -= 1
        self._bytes -= size
        counters = self._telemetry.counters
        if error is None:
            counters.delivered += 1
        else:
            counters.failed += 1
            self._telemetry.kafka_failed(_name(error), str(error))
            if isinstance(error, KafkaError) and error.fatal():
                self._fatal = self._fatal or _name(error)
        if report is not None:
            report(generation, error, message)

    def _error(self, generation: int, error: Any) -> None:
        self._telemetry.kafka_failed(error.name(), error.str())
        if error.fatal() and generation == self._generation:
            self._fatal = self._fatal or error.name()

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self._settings.options,
            "bootstrap.servers": self._settings.kafka,
            "client.id": self._name,
            "reconnect.backoff.max.ms": RECONNECT_MS_MAX,
            **options,
        }


def _name(error: Any) -> str:
    return str(error.name()) if isinstance(error, KafkaError) else type(error).__name__
