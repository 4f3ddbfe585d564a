"""Ranks that another bridge claimed over, and whether that one is still there (DESIGN §4).

A bridge that lost a rank keeps listening. While records of the higher owner come, on the event topic or on the replicas
topic, all is well; silent for a lease, the owner counts as gone and the rank is claimed again. A healthy owner of one
whose engine is down is silent, too: then both claim in turn, and wait twice as long each time.

Silence counts only while Kafka answers: an outage silences everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import OFFSET_END, TopicPartition

from kvledger_bridge.reading import reader
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_bridge.watch import Who
from kvledger_wire.partition import partition_of, rank_id

LEASE_MESSAGES_MAX = 1_000
"""Records looked at per turn, about 1 ms: of most of them only the key."""

LEASE_SECONDS_MAX = 3_600.0
"""The longest back-off; a rank that was kept for so long starts with the shortest again."""


class _Head(msgspec.Struct, array_like=True):
    """What every record begins with."""

    tag: str
    schema: int
    owner: int


class Lapse(NamedTuple):
    """An owner that was silent for so long."""

    who: Who
    owner: int
    seconds: float


class _Watched(msgspec.Struct):
    owner: int
    heard_at: float
    seconds: float


class Leases:
    """All ranks of one bridge that others own. Single-threaded; every method returns at once."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        options: Mapping[str, Any],
        *,
        partitions: int,
        logger: logging.Logger,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._options = dict(options)
        self._partitions = partitions
        self._logger = logger
        self._watched: dict[Who, _Watched] = {}
        self._names: dict[bytes, Who] = {}
        self._waits: dict[Who, tuple[float, float]] = {}  # the last wait, and when it was over
        self._assigned: set[int] = set()
        self._consumer: Any = None

    def watch(self, who: Who, owner: int, now: float) -> None:
        """``owner`` claimed the rank over."""
        have = self._watched.get(who)
        if have is not None:
            if owner > have.owner:
                have.owner, have.heard_at = owner, now
            return
        last, since = self._waits.get(who, (0.0, -LEASE_SECONDS_MAX))
        least = self._settings.lease_seconds
        seconds = least if now - since >= LEASE_SECONDS_MAX else min(LEASE_SECONDS_MAX, max(least, 2 * last))
        self._watched[who] = _Watched(owner, now, seconds)
        self._names[rank_id(*who).encode()] = who
        self._assign()

    def wait(self, who: Who) -> float | None:
        """Seconds of silence after which the rank is claimed again; None: it is not watched."""
        watched = self._watched.get(who)
        return None if watched is None else watched.seconds

    def heard(self, who: Who, owner: int, now: float) -> None:
        """A record of ``owner`` was seen."""
        have = self._watched.get(who)
        if have is not None and owner >= have.owner:
            have.heard_at = now

    def poll(self, now: float, *, kafka_answers: bool) -> list[Lapse]:
        """Listen; the owners that have been silent for a lease. Those ranks are watched no more."""
        if not self._watched:
            return []
        self._listen(now)
        if not kafka_answers:
            for each in self._watched.values():
                each.heard_at = now
        found = [
            Lapse(who, each.owner, now - each.heard_at)
            for who, each in self._watched.items()
            if now - each.heard_at >= each.seconds
        ]
        for lapse in found:
            self._waits[lapse.who] = (self._watched.pop(lapse.who).seconds, now)
            del self._names[rank_id(*lapse.who).encode()]
        if found:
            self._assign()
        return found

    def close(self) -> None:
        """Stop listening."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    # ---- inside

    def _listen(self, now: float) -> None:
        for message in self._consumer.consume(LEASE_MESSAGES_MAX, timeout=0):
            if message.error() is not None:
                self._telemetry.kafka_failed(message.error().name(), message.error().str())
                continue
            who = self._names.get((message.key() or b"").rpartition(b"/")[0])
            if who is None:
                continue
            try:
                head = msgspec.msgpack.decode(message.value() or b"", type=_Head)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # nobody can say whose it is
            self.heard(who, head.owner, now)

    def _assign(self) -> None:
        """Listen to the partitions of these ranks, from now on."""
        if self._consumer is None:
            self._consumer = reader(self._settings, self._options, "lease", reset="latest", logger=self._logger)
        wanted = {partition_of(*who, self._partitions) for who in self._watched}
        topic = self._settings.events_topic
        if gone := self._assigned - wanted:
            self._consumer.incremental_unassign([TopicPartition(topic, each) for each in gone])
        if new := wanted - self._assigned:
            self._consumer.incremental_assign([TopicPartition(topic, each, OFFSET_END) for each in new])
        self._assigned = wanted
