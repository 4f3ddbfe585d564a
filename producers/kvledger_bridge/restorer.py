"""Reads ranks back from the event topic, between the turns of the bridge (DESIGN §4).

Ranks that wait for the same partition are read in one pass, from the lowest of their pointers on, each from its own
pointer up to its own Fence. A turn takes a bounded time and never waits: ranks that are followed go on meanwhile.

    pointer            readable Opened or first part of a checkpoint there   -> from there
                       anything else, or the log begins behind it            -> once more, from the log's start
    what is read       loaded, under the same model entry                    -> the rank's state and ledger
                       anything else                                         -> not restorable: a new life
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from kvledger_bridge.reading import reader
from kvledger_bridge.recall import Recall, Recalled
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_bridge.watch import Who
from kvledger_index.model import ModelEntry
from kvledger_wire.errors import Poison
from kvledger_wire.partition import parse_key, partition_of, rank_id
from kvledger_wire.records import Checkpoint, EventRecord, decode_event
from kvledger_wire.replicas import begins

FETCH_MESSAGES_MAX = 200
"""Taken from the client at a time; it holds more."""

FETCH_KILOBYTES_MAX = 16_384
"""Of the log, fetched ahead by the client."""

CLOSING_ERRORS = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001  its name
"""The offset asked for is not in the log: retention took it, or the topic is another one."""


class Restored(NamedTuple):
    """What became of one request: the rank, or why it is not to be had.

    ``start`` is where reading began (-1: the log's start), ``bytes`` the size of the newest checkpoint that was read,
    ``age`` the seconds between what stands at ``start`` and the Fence, by the broker's clock.
    """

    who: Who
    owner: int
    start: int
    recalled: Recalled | None
    why: str
    bytes: int = 0
    age: float = 0.0


class _Reading(msgspec.Struct, eq=False):
    """One rank that is being read."""

    who: Who
    owner: int
    start: int
    end: int
    entry: ModelEntry
    since: float
    recall: Recall
    told_at: float
    begun: bool = False
    bytes: int = 0
    first_ms: int = -1


class Restorer:
    """All restores of one bridge. Single-threaded; make it in the thread that uses it."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        options: Mapping[str, Any],
        *,
        partitions: int,
        clock: Callable[[], float],
        logger: logging.Logger,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._options = dict(options)
        self._partitions = partitions
        self._clock = clock
        self._logger = logger
        self._waiting: dict[Who, _Reading] = {}
        self._reading: dict[str, _Reading] = {}  # by rank id
        self._partition = -1
        self._consumer: Any = None
        self._messages: deque[Any] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._waiting or self._reading)

    def ask(self, who: Who, entry: ModelEntry, *, owner: int, start: int, end: int) -> None:
        """Read a rank from ``start`` (-1: the log's start) to its Fence at ``end``; an earlier request is dropped."""
        self.drop(who)
        now = self._clock()
        start = start if start < end else -1  # a pointer of another topic of the same name
        self._waiting[who] = _Reading(who, owner, start, end, entry, now, Recall(entry), now)

    def drop(self, who: Who) -> None:
        """Nobody waits for this rank any more."""
        self._waiting.pop(who, None)
        self._reading.pop(rank_id(*who), None)

    def clear(self) -> None:
        """Nobody waits for any rank."""
        self._waiting.clear()
        self._stop_reading()

    def owners(self, seconds: float) -> list[tuple[Who, int]]:
        """Ranks that have been waiting for ``seconds`` since that was last asked, with their owners."""
        now = self._clock()
        late = [each for each in (*self._waiting.values(), *self._reading.values()) if now - each.told_at >= seconds]
        for each in late:
            each.told_at = now
            self._telemetry.restoring(rank_id(*each.who), records=each.recall.records, seconds=now - each.since)
        return [(each.who, each.owner) for each in late]

    def work(self) -> list[Restored]:
        """Read on for a turn; what is done."""
        until = self._clock() + self._settings.restore_turn_seconds
        done: list[Restored] = []
        while self._begin():
            if not self._messages:
                self._messages.extend(self._consumer.consume(FETCH_MESSAGES_MAX, timeout=0))
                if not self._messages:
                    break
            while self._messages and self._reading:
                self._take(self._messages.popleft(), done)
                if self._clock() >= until:
                    return done
        return done

    def close(self) -> None:
        """Stop reading."""
        self.clear()

    # ---- inside

    def _begin(self) -> bool:
        """Go on with a pass, or begin the next one; False: nothing waits."""
        if self._reading:
            return True
        self._stop_reading()
        if not self._waiting:
            return False
        self._partition = partition_of(*next(iter(self._waiting)), self._partitions)
        for who in [who for who in self._waiting if partition_of(*who, self._partitions) == self._partition]:
            self._reading[rank_id(*who)] = self._waiting.pop(who)
        lowest = min(each.start for each in self._reading.values())
        options = {**self._options, "queued.max.messages.kbytes": FETCH_KILOBYTES_MAX}
        # error: below the log's start is something to know
        self._consumer = reader(self._settings, options, "restore", reset="error", logger=self._logger)
        start = OFFSET_BEGINNING if lowest < 0 else lowest
        self._consumer.assign([TopicPartition(self._settings.events_topic, self._partition, start)])
        return True

    def _stop_reading(self) -> None:
        self._reading.clear()
        self._messages.clear()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _take(self, message: Any, done: list[Restored]) -> None:
        if message.error() is not None:
            self._failed(message.error(), done)
            return
        offset = int(message.offset())
        raw = message.key() or b""
        name = raw.rpartition(b"/")[0].decode(errors="replace")
        for each in [each for each in self._reading.values() if offset >= each.start and not each.begun]:
            self._verify(each, offset, message)
        reading = self._reading.get(name)
        if reading is not None and reading.begun and offset < reading.end:
            self._recall(reading, raw, message, offset)
        for each in [each for each in self._reading.values() if offset >= each.end]:
            self._finish(each, message, done)

    def _verify(self, reading: _Reading, offset: int, message: Any) -> None:
        """Whether the pointer leads to something that can be read from."""
        if reading.start >= 0 and not (
            offset == reading.start and begins(rank_id(*reading.who), message.key(), message.value())
        ):
            self._again(reading)
            return
        reading.begun = True
        reading.first_ms = int(message.timestamp()[1]) if reading.start >= 0 else -1

    def _recall(self, reading: _Reading, raw: bytes, message: Any, offset: int) -> None:
        value = message.value()
        record: EventRecord | None
        try:
            group, record = parse_key(raw).group, decode_event(value)
        except Poison:
            group, record = None, None
        if isinstance(record, Checkpoint):
            reading.bytes = len(value) + (reading.bytes if record.part else 0)
        reading.recall.take(group, record, offset)

    def _finish(self, reading: _Reading, message: Any, done: list[Restored]) -> None:
        del self._reading[rank_id(*reading.who)]
        name = rank_id(*reading.who)
        seconds = self._clock() - reading.since
        why = reading.recall.why
        told: dict[str, Any] = {"start": reading.start, "records": reading.recall.records, "seconds": round(seconds, 3)}
        if why:
            self._telemetry.not_restored(name, why=why, **told)
            done.append(Restored(reading.who, reading.owner, reading.start, None, why))
            return
        recalled = reading.recall.finish()
        state = recalled.state
        self._telemetry.restored(name, life=state.life, n=state.n, seq=state.seq, **told)
        age = max(0, int(message.timestamp()[1]) - reading.first_ms) / 1000 if reading.first_ms >= 0 else 0.0
        done.append(Restored(reading.who, reading.owner, reading.start, recalled, "", reading.bytes, age))

    def _again(self, reading: _Reading) -> None:
        """Once more with the next pass, from the log's start."""
        del self._reading[rank_id(*reading.who)]
        now = self._clock()
        again = _Reading(
            reading.who, reading.owner, -1, reading.end, reading.entry, reading.since, Recall(reading.entry), now
        )
        self._waiting[reading.who] = again

    def _failed(self, error: Any, done: list[Restored]) -> None:
        """The log does not have what was asked for; anything else passes by itself."""
        if error.code() not in CLOSING_ERRORS:
            self._telemetry.kafka_failed(error.name(), error.str())
            return
        for reading in list(self._reading.values()):
            if reading.start >= 0:
                self._again(reading)
            else:
                del self._reading[rank_id(*reading.who)]
                done.append(Restored(reading.who, reading.owner, -1, None, error.str()))
