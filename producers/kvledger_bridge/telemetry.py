"""Every observable event of a bridge, in one place: a code, fields, and what to do about it.

Logs are JSON lines on stdout. Tests and operators look for ``event``; texts may change, codes do not. No line holds
tokens, salts or multimodal ids.

    code                    level    what to do
    ----                    -----    ----------
    bridge_started          info     nothing
    rank_claimed            info     nothing; ``why`` says what made this bridge claim
    rank_restoring          info     nothing; a rank is being read back from the log for long
    rank_restored           info     nothing; the log gave the rank back, from ``start`` (-1: its beginning)
    rank_not_restored       info     nothing; ``why`` the log does not: the engine's replay buffer has to
    rank_checkpointed       info     nothing; a restart begins at ``offset`` from here on
    rank_opened             info     nothing; ``partial``: answers are lower bounds until the engine restarts or clears
    rank_suspended          warning  nothing once; often: look at the engine's replay endpoint and the network
    rank_resumed            info     nothing
    rank_gap                warning  batches are lost: see ``cause``; often: raise the engine's buffer_steps
    rank_superseded         warning  nothing in a rolling update; else two bridges have this rank: keep one
    rank_claims_went_back   error    the replicas topic was re-created: re-create the event topic too, then restart
    rank_seam_mismatch      warning  data and replay address reach different engines, or one restarted just then
    rank_unreachable        warning  no engine at the data address, or not any more: correct it, or start the engine
    rank_never_heard        warning  connected, but nothing was ever published: is --kv-events-config set?
    rank_heard_by_replay    warning  live batches do not arrive, replay has them: correct data address or topic
    rank_process_unread     warning  the metrics page does not tell the engine's start: correct it, or leave it out
    rank_ledger_failed      error    a defect of ours: report it; the rank goes on in a partial life
    batch_unreadable        warning  the engine speaks something new: see ``reason`` and upgrade kvledger
    data_address_failed     warning  the data address cannot be bound yet: is another bridge on this host?
    kafka_failed            warning  Kafka is not reached; engines' buffers hold on for a while
    kafka_stalled           warning  Kafka does not take records quickly enough; engines are not read meanwhile
    kafka_resumed           info     nothing
    producer_rebuilt        error    Kafka's client gave up and was replaced; every rank is claimed anew
    topic_changed           warning  re-created: ranks are claimed anew; other partitions: the bridge ends, restart it
    dead_letters_dropped    warning  more unreadable batches than may be kept: look at batch_unreadable
    bridge_progress         info     the canonical line: totals since start, ranks by phase
    bridge_stopping         info     nothing
    bridge_stopped          info     nothing; the last line of a clean stop; what is ``unsent`` comes again later
    bridge_crashed          error    a defect of ours: report it; the supervisor starts another
    bridge_refused          error    Kafka's topics do not fit any more: do what ``why`` says
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal, TextIO

import msgspec
import structlog

from kvledger_bridge.silence import Trouble

Code = Literal[
    "bridge_started",
    "rank_claimed",
    "rank_restoring",
    "rank_restored",
    "rank_not_restored",
    "rank_checkpointed",
    "rank_opened",
    "rank_suspended",
    "rank_resumed",
    "rank_gap",
    "rank_superseded",
    "rank_claims_went_back",
    "rank_seam_mismatch",
    "rank_unreachable",
    "rank_never_heard",
    "rank_heard_by_replay",
    "rank_process_unread",
    "rank_ledger_failed",
    "batch_unreadable",
    "data_address_failed",
    "kafka_failed",
    "kafka_stalled",
    "kafka_resumed",
    "producer_rebuilt",
    "topic_changed",
    "dead_letters_dropped",
    "bridge_progress",
    "bridge_stopping",
    "bridge_stopped",
    "bridge_crashed",
    "bridge_refused",
]

Level = Literal["info", "warning", "error"]

REPEAT_SECONDS_MIN: Final = 5.0
"""Between two lines of the same trouble of the same rank; those in between are counted."""

REPEATS_KNOWN_MAX: Final = 2_000


class Counters(msgspec.Struct):
    """Plain totals of the process since its start, carried by the canonical line."""

    turns: int = 0
    records: int = 0
    bytes: int = 0
    delivered: int = 0
    failed: int = 0
    dead_letters: int = 0
    dead_letters_dropped: int = 0
    stalls: int = 0
    rebuilt: int = 0


class Telemetry:
    """One per process. Methods are named after what happened; ``now`` is a monotonic clock. Thread-safe."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counters()
        self._now = now
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}
        self._lock = threading.Lock()
        self._log = structlog.wrap_logger(
            structlog.PrintLogger(stream or sys.stdout),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
                _code_first,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.BoundLogger,
        )

    def started(self, **facts: Any) -> None:
        """Kafka was reached and its topics fit."""
        self._say("info", "bridge_started", **facts)

    def claimed(self, rank: str, owner: int, why: str) -> None:
        """The fence was written: this bridge writes for the rank."""
        self._say("info", "rank_claimed", rank=rank, owner=owner, why=why)

    def restoring(self, rank: str, *, records: int, seconds: float) -> None:
        """It is still being read back."""
        self._rarely("info", "rank_restoring", rank, rank=rank, records=records, seconds=round(seconds, 1))

    def restored(self, rank: str, **facts: Any) -> None:
        """The log gave it back; the engine has still to prove that it lives that life."""
        self._say("info", "rank_restored", rank=rank, **facts)

    def not_restored(self, rank: str, **facts: Any) -> None:
        """The log does not give it back."""
        self._say("info", "rank_not_restored", rank=rank, **facts)

    def checkpointed(self, rank: str, *, offset: int, bytes_: int) -> None:
        """A checkpoint is complete and pointed at."""
        self._rarely("info", "rank_checkpointed", rank, rank=rank, offset=offset, bytes=bytes_)

    def opened(self, rank: str, *, life: tuple[int, int], seq: int, partial: bool, why: str) -> None:
        """A new life began."""
        self._say("info", "rank_opened", rank=rank, life=life, seq=seq, partial=partial, why=why)

    def suspended(self, rank: str, why: str) -> None:
        """Continuity is unknown."""
        self._rarely("warning", "rank_suspended", rank, rank=rank, why=why)

    def resumed(self, rank: str, how: str) -> None:
        """It was proven."""
        self._rarely("info", "rank_resumed", rank, rank=rank, how=how)

    def gap(self, rank: str, *, first: int, last: int, cause: str, policy: str) -> None:
        """Batches are lost to the log."""
        self._rarely("warning", "rank_gap", rank, rank=rank, first=first, last=last, cause=cause, policy=policy)

    def noted(self, rank: str, code: str, text: str) -> None:
        """What a session noted."""
        known: dict[str, tuple[Level, Code]] = {
            "superseded": ("warning", "rank_superseded"),
            "seam_mismatch": ("warning", "rank_seam_mismatch"),
            "ledger_failed": ("error", "rank_ledger_failed"),
            "claims_went_back": ("error", "rank_claims_went_back"),
        }
        level, name = known[code]
        self._rarely(level, name, rank, rank=rank, why=text)

    def silent(self, rank: str, code: Trouble, address: str) -> None:
        """A rank that is not heard."""
        codes: dict[Trouble, Code] = {
            "unreachable": "rank_unreachable",
            "never_heard": "rank_never_heard",
            "heard_by_replay": "rank_heard_by_replay",
        }
        self._say("warning", codes[code], rank=rank, data=address)

    def process_unread(self, rank: str, metrics: str) -> None:
        """Which process the engine is could not be read: nothing proves that it is the same one."""
        self._rarely("warning", "rank_process_unread", rank, rank=rank, metrics=metrics)

    def unreadable(self, rank: str, *, seq: int, reason: str, size: int, digest: bytes) -> None:
        """A batch, or an event of it, could not be read."""
        self.counters.dead_letters += 1
        self._rarely(
            "warning", "batch_unreadable", rank, rank=rank, seq=seq, reason=reason, size=size, digest=digest.hex()
        )

    def dead_letter_dropped(self) -> None:
        """More of them than may be kept."""
        self.counters.dead_letters_dropped += 1
        self._rarely("warning", "dead_letters_dropped", "", dropped=self.counters.dead_letters_dropped)

    def data_failed(self, rank: str, address: str) -> None:
        """The live socket could not be opened."""
        self._rarely("warning", "data_address_failed", rank, rank=rank, data=address)

    def kafka_failed(self, name: str, text: str) -> None:
        """Kafka's client reports trouble, in its words."""
        self._rarely("warning", "kafka_failed", name, name=name, text=text[:300])

    def stalled(self, *, records: int, bytes_: int) -> None:
        """The queue towards Kafka is full."""
        self.counters.stalls += 1
        self._say("warning", "kafka_stalled", records=records, bytes=bytes_)

    def unstalled(self, seconds: float) -> None:
        """It has room again."""
        self._say("info", "kafka_resumed", seconds=round(seconds, 3))

    def rebuilt(self, why: str) -> None:
        """The producer was replaced."""
        self.counters.rebuilt += 1
        self._rarely("error", "producer_rebuilt", "", why=why)

    def topic_changed(self, change: str) -> None:
        """A topic is not the one that was checked."""
        self._say("warning", "topic_changed", change=change)

    def progress(self, **fields: Any) -> None:
        """The canonical line."""
        self._say("info", "bridge_progress", **msgspec.structs.asdict(self.counters), **fields)

    def stopping(self) -> None:
        """A stop was asked for: nothing more is read."""
        self._say("info", "bridge_stopping")

    def stopped(self, *, clean: bool, unsent: int, **fields: Any) -> None:
        """The last line."""
        self._say(
            "info", "bridge_stopped", clean=clean, unsent=unsent, **msgspec.structs.asdict(self.counters), **fields
        )

    def refused(self, why: str) -> None:
        """Kafka's topics do not fit any more."""
        self._say("error", "bridge_refused", why=why)

    def crashed(self, why: str, trace: str) -> None:
        """The loop raised."""
        self._say("error", "bridge_crashed", why=why, trace=trace)

    def _rarely(self, level: Level, code: Code, what: str, **fields: Any) -> None:
        """Say it unless the same was said a moment ago; tell how often it was left out."""
        key, now = (code, what), self._now()
        with self._lock:
            last, hidden = self._last.get(key, (-REPEAT_SECONDS_MIN, 0))
            if now - last < REPEAT_SECONDS_MIN:
                self._last[key] = (last, hidden + 1)
                return
            if len(self._last) >= REPEATS_KNOWN_MAX:
                self._last.clear()
            self._last[key] = (now, 0)
        self._say(level, code, **fields, **({"left_out": hidden} if hidden else {}))

    def _say(self, level: Level, code: Code, **fields: Any) -> None:
        getattr(self._log, level)(code, **fields)


def _code_first(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """When, how bad and what stand at the start of a line, where a reader looks."""
    return {"ts": fields.pop("ts"), "level": fields.pop("level"), "event": fields.pop("event"), **fields}
