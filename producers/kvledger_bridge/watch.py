"""The replicas topic as a bridge reads it: who claims which rank, and where reading of each may start (DESIGN §4, §5).

Read from its beginning on and ever after: a rank's pointer counts once everything up to the own claim was read. A turn
reads a bounded number of records and never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from kvledger_bridge.reading import reader
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_wire.errors import Poison
from kvledger_wire.partition import RESTORING_SUFFIX, parse_claim_key, parse_pointer_key
from kvledger_wire.records import Claim, decode_replica
from kvledger_wire.replicas import ReplicaTable

WATCH_MESSAGES_MAX = 2_000
"""Records read per turn, about 5 ms: a topic of a thousand ranks is read in a few turns."""

Who = tuple[str, int]
"""(replica, rank)."""


class ForeignClaim(NamedTuple):
    """Another bridge claimed a rank: its owner number and name."""

    who: Who
    owner: int
    bridge: str


class Watch:
    """Reads the topic from the start; one instance per producer, as a re-created topic is another one."""

    def __init__(
        self, settings: Settings, telemetry: Telemetry, options: Mapping[str, Any], *, name: str, logger: logging.Logger
    ) -> None:
        self.table = ReplicaTable()
        self.read_to = -1
        """The highest offset that was read."""
        self.restoring: dict[Who, set[int]] = {}
        """Owners of a rank whose word that they are restoring still stands."""
        self._spoke: list[tuple[Who, int]] = []
        self._telemetry = telemetry
        self._name = name
        # earliest: in a re-created topic lower claims than ours do no harm
        self._consumer = reader(settings, options, name, reset="earliest", logger=logger)
        self._consumer.assign([TopicPartition(settings.replicas_topic, 0, OFFSET_BEGINNING)])

    def poll(self) -> list[ForeignClaim]:
        """Read on; claims by other bridges. Where Kafka does not answer there are none, for now."""
        found = []
        for message in self._consumer.consume(WATCH_MESSAGES_MAX, timeout=0):
            if message.error() is not None:
                self._telemetry.kafka_failed(message.error().name(), message.error().str())
                continue
            offset = int(message.offset())
            self.read_to = max(self.read_to, offset)
            self.table.take(message.key(), message.value())
            who = parse_claim_key(message.key())
            if who is None or not message.value():
                self._note(message.key(), message.value())
                continue
            try:
                record = decode_replica(message.value())
            except Poison as error:
                self._telemetry.kafka_failed("claim_unreadable", str(error))
                continue
            if isinstance(record, Claim) and record.bridge != self._name:
                found.append(ForeignClaim(who, offset, record.bridge))
        return found

    def spoke(self) -> list[tuple[Who, int]]:
        """Owners that wrote a pointer, or that they are restoring, since that was last asked: they are there."""
        spoke, self._spoke = self._spoke, []
        return spoke

    def _note(self, key: bytes | None, value: bytes | None) -> None:
        raw = key or b""
        owned = parse_pointer_key(raw.removesuffix(RESTORING_SUFFIX))
        if owned is None:
            return
        replica, rank, owner = owned
        if value:
            self._spoke.append(((replica, rank), owner))
        if raw.endswith(RESTORING_SUFFIX):
            owners = self.restoring.setdefault((replica, rank), set())
            (owners.add if value else owners.discard)(owner)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()
