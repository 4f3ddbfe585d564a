"""A bridge between stand-in engines and a real Kafka, and a reader of what it wrote."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from kvledger_bridge.bridge import Bridge, Identity, RankStatus
from kvledger_bridge.decode import decode_batch
from kvledger_bridge.discovery import RankConfig
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.settings import Settings
from kvledger_bridge.sockets import Endpoints
from kvledger_bridge.telemetry import Telemetry
from kvledger_engine.recording import Meta, Published, read
from kvledger_engine.standin import StandIn
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import Applied, Dropped, Loading, Opening, RankState, accept
from kvledger_wire.partition import parse_key, partition_of
from kvledger_wire.records import ATTACHED, CLEARED, STORED, Run, decode_event
from kvledger_wire.topics import EVENTS

SECONDS_MAX = 30.0
FIXTURES = Path(__file__).parents[1] / "fixtures"

Block = tuple[int | str | None, int, bytes]
"""(group, medium code, block key)."""


def recording(name: str) -> tuple[ModelEntry, list[Published]]:
    """Model entry and batches of a recorded engine."""
    meta, *steps = read(FIXTURES / "engine-traces" / f"{name}.jsonl.gz")
    assert isinstance(meta, Meta)
    return meta.entry(), [step for step in steps if isinstance(step, Published)]


def truth(entry: ModelEntry, batches: list[Published]) -> set[Block]:
    """What is resident after these batches, by a ledger of our own."""
    ledger = Ledger(entry)
    for batch in batches:
        ledger.apply(batch.seq, decode_batch(batch.payload))
    return {(group, 0, key.to_bytes(8, "big")) for group in ledger.groups for key in ledger.placed(group).values()}


class Rank:
    """One rank as any reader of the log sees it."""

    def __init__(self) -> None:
        self.state = RankState()
        self.blocks: set[Block] = set()
        self.loose: set[Block] = set()
        """Engine hashes that are resident without a key, in the place of one."""
        self.records: list[Any] = []
        self.partitions: set[int] = set()

    def take(self, group: int | str | None, record: Any, partition: int, offset: int) -> None:
        self.records.append(record)
        self.partitions.add(partition)
        for effect in accept(self.state, group, record, offset):
            match effect:
                case Opening() | Loading() | Dropped():
                    self.blocks.clear()
                    self.loose.clear()
                case Applied(group=of, changes=changes):
                    for change in changes:
                        self._apply(of, change)

    def _apply(self, group: int | str | None, change: Any) -> None:
        if change.op == CLEARED:
            self.blocks = {block for block in self.blocks if block[1] != change.medium}
            self.loose = {block for block in self.loose if block[1] != change.medium}
            return
        self._apply_loose(group, change)
        for run in change.runs:
            for key in _effective(run):
                block = (group, change.medium, key)
                if change.op == STORED:
                    self.blocks.add(block)
                else:
                    self.blocks.discard(block)

    def _apply_loose(self, group: int | str | None, change: Any) -> None:
        """What is attached passes between being loose and its key."""
        if change.origin == ATTACHED:
            named = {(group, change.medium, name) for run in change.runs for name in _names(run.hashes)}
            self.loose = self.loose - named if change.op == STORED else self.loose | named
        for i, name in enumerate(_names(change.unplaced)):
            if change.unplaced_effective[i // 8] >> i % 8 & 1:
                block = (group, change.medium, name)
                if change.op == STORED:
                    self.loose.add(block)
                else:
                    self.loose.discard(block)

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.records]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def _names(raw: bytes) -> Iterator[bytes]:
    for at in range(0, len(raw), 8):
        yield raw[at : at + 8]


def _effective(run: Run) -> Iterator[bytes]:
    for i in range(len(run.keys) // 8):
        if run.effective >> i & 1:
            yield run.keys[8 * i : 8 * i + 8]


class LogReader:
    """Reads every partition of the event topic from the start and keeps on reading."""

    def __init__(self, kafka: str, prefix: str, partitions: int, *, misplaced: bool = False) -> None:
        """``misplaced``: records may stand in partitions that are not their rank's; they are passed over."""
        self.topic = prefix + EVENTS
        self.partitions = partitions
        self.misplaced = misplaced
        self.ranks: dict[str, Rank] = {}
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka,
                "group.id": "none",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(self.topic, p, 0) for p in range(partitions)])

    def poll(self, seconds: float = 0.1) -> None:
        for message in self._consumer.consume(1000, timeout=seconds):
            if message.error() is None:
                key = parse_key(message.key())
                at_home = message.partition() == partition_of(key.replica, key.rank, self.partitions)
                assert at_home or self.misplaced
                if not at_home:
                    continue
                rank = self.ranks.setdefault(key.rank_id, Rank())
                rank.take(key.group, decode_event(message.value()), message.partition(), message.offset())

    def until(self, rank: str, seq: int, seconds: float = SECONDS_MAX) -> Rank:
        """Read until the rank is loaded, not suspended, and covers ``seq``."""
        end = time.monotonic() + seconds
        while True:
            have = self.ranks.get(rank)
            if have and have.state.loaded and have.state.seq >= seq and not have.state.suspended:
                return have
            assert time.monotonic() < end, (rank, seq, have and have.kinds()[-10:], have and have.state.seq)
            self.poll()

    def close(self) -> None:
        self._consumer.close()


PAGE = "http://engine/metrics"
"""What an identity that a test makes up is asked about."""


class Setup:
    """Engines by rank, and bridges that follow all of them; everything is closed at the end."""

    def __init__(self, kafka: str, prefix: str, partitions: int = 4, **options: Any) -> None:
        self.kafka = kafka
        self.prefix = prefix
        self.partitions = partitions
        self.options = options
        self.engines: dict[tuple[str, int], StandIn] = {}
        self.entries: dict[tuple[str, int], ModelEntry] = {}
        self.logs: dict[str, io.StringIO] = {}
        self._bridges: list[Bridge] = []
        self._readers: list[LogReader] = []

    def engine(self, entry: ModelEntry, replica: str = "r", rank: int = 0, **options: Any) -> StandIn:
        engine = StandIn(**options).start()
        self.engines[replica, rank] = engine
        self.entries[replica, rank] = entry
        return engine

    def ranks(self, metrics: str | None = None) -> list[RankConfig]:
        return [
            RankConfig(*who, self.entries[who], Endpoints(engine.data, engine.replay), metrics)
            for who, engine in self.engines.items()
        ]

    def settings(self, **options: Any) -> Settings:
        return Settings(kafka=self.kafka, topic_prefix=self.prefix, **(self.options | options))

    def bridge(
        self, *, identity: Identity | None = None, ranks: list[RankConfig] | None = None, **options: Any
    ) -> Bridge:
        stream = io.StringIO()
        told: dict[str, Any] = {"telemetry": Telemetry(stream)}
        if identity is None:
            bridge = Bridge(self.settings(**options), ranks or self.ranks(), **told)
        else:
            bridge = Bridge(self.settings(**options), ranks or self.ranks(PAGE), identity=identity, **told)
        self.logs[bridge.name] = stream
        self._bridges.append(bridge)
        return bridge.start()

    def reader(self, *, misplaced: bool = False) -> LogReader:
        self._readers.append(LogReader(self.kafka, self.prefix, self.partitions, misplaced=misplaced))
        return self._readers[-1]

    def lines(self, bridge: Bridge, code: str | None = None) -> list[dict[str, Any]]:
        said = [json.loads(line) for line in self.logs[bridge.name].getvalue().splitlines()]
        return [line for line in said if code in {None, line["event"]}]

    def messages(self, topic: str, count: int) -> list[Any]:
        """The first ``count`` messages of a topic of one partition."""
        consumer = Consumer({"bootstrap.servers": self.kafka, "group.id": "none", "log_level": 0})
        consumer.assign([TopicPartition(self.prefix + topic, 0, 0)])
        found: list[Any] = []
        end = time.monotonic() + SECONDS_MAX
        while len(found) < count:
            assert time.monotonic() < end, len(found)
            found += [m for m in consumer.consume(100, timeout=0.2) if m.error() is None]
        consumer.close()
        return found

    def admin(self) -> Any:
        return AdminClient({"bootstrap.servers": self.kafka, "log_level": 0})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bridge in self._bridges:
            bridge.abort()
        for bridge in self._bridges:
            if bridge.error is None:
                assert bridge.join(SECONDS_MAX)
        for engine in self.engines.values():
            engine.stop()
        for reader in self._readers:
            reader.close()


def status(bridge: Bridge, rank: int = 0) -> RankStatus:
    """Where one of its ranks stands."""
    return bridge.status()[rank]


def play(engine: StandIn, batches: list[Published], *, own_sequence: bool = True) -> None:
    """Publish batches as they were recorded, or with the engine's next sequences."""
    for batch in batches:
        engine.publish(batch.payload, batch.topic, batch.seq if own_sequence else None)


def rewritten(batch: Published, rank: int) -> bytes:
    """The payload with another data-parallel rank."""
    ts, events, _ = msgspec.msgpack.decode(batch.payload)
    return msgspec.msgpack.encode([ts, events, rank])
