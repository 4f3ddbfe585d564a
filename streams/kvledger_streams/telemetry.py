"""Every observable event of a stream worker, in one place: a code, fields, and what to do about it.

Logs are JSON lines on stdout. Tests and operators look for ``event``; texts may change, codes do not.

    code                   level    what to do
    ----                   -----    ----------
    worker_started         info     nothing
    partition_placed       info     nothing; ``drop`` says that its index is rebuilt, ``why`` says why and from where
    pointers_unread        warning  look at the replicas topic: the partition is rebuilt from the log's start, which
                                    takes longer and finds only ranks that opened, or wrote a checkpoint, since
    partition_caught_up    info     nothing: its ranks are no longer stale
    partition_blocked      error    look at ``why``: nothing is lost, but the partition's ranks go stale meanwhile
    partition_resynced     warning  nothing once; often: two workers or a Redis that loses writes
    rank_opened            info     nothing
    rank_loaded            info     nothing: it was taken from a checkpoint, not from its life's beginning
    rank_unloaded          warning  look at the bridge of that rank: the log has a hole there
    record_unusable        warning  the rank is unknown until its next life or checkpoint; restart its engine
    rank_forgotten         info     nothing: it was closed, or silent for long, and left the catalogue
    record_unreadable      warning  a writer of another version, or junk: the key's rank is unloaded
    record_misplaced       warning  written before partitions were added, or by a bridge not restarted since
    topic_changed          warning  the topic was re-created or grew: partitions are rebuilt
    topic_unseen           warning  Kafka's admin API does not answer; reading may go on
    fetch_failed           warning  Kafka does not serve a partition
    scrub_failed           warning  Redis does not let dead slots be freed: costs memory, never an answer
    library_log            warning  a line of Faust, aiokafka or librdkafka
    fold_progress          info     the canonical line: totals since start
    worker_stopping        info     nothing
    worker_stopped         info     nothing; the last line of a clean stop
    worker_crashed         error    the process ends with 1; its supervisor starts another, which goes on
    worker_aborted         warning  a second signal ended it at once
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal, TextIO

import msgspec
import structlog

from kvledger_index.units import Scrubbed
from kvledger_streams.progress import Plan
from kvledger_streams.tally import Note, Tally

Code = Literal[
    "worker_started",
    "partition_placed",
    "pointers_unread",
    "partition_caught_up",
    "partition_blocked",
    "partition_resynced",
    "rank_opened",
    "rank_loaded",
    "rank_unloaded",
    "record_unusable",
    "rank_forgotten",
    "record_unreadable",
    "record_misplaced",
    "topic_changed",
    "topic_unseen",
    "fetch_failed",
    "scrub_failed",
    "library_log",
    "fold_progress",
    "worker_stopping",
    "worker_stopped",
    "worker_crashed",
    "worker_aborted",
]

Level = Literal["info", "warning", "error"]

REPEAT_SECONDS_MIN: Final = 5.0
"""Between two lines of the same trouble; those in between are counted. aiokafka says 80 lines a second of an outage."""

REPEATS_KNOWN_MAX: Final = 1_000
"""Kinds of trouble that are told apart; above it the memory starts afresh."""

_NOTE_CODES: Final[dict[str, tuple[Code, Level]]] = {
    "opened": ("rank_opened", "info"),
    "loaded": ("rank_loaded", "info"),
    "unloaded": ("rank_unloaded", "warning"),
    "unusable": ("record_unusable", "warning"),
    "forgotten": ("rank_forgotten", "info"),
    "unreadable_value": ("record_unreadable", "warning"),
    "unreadable_key": ("record_unreadable", "warning"),
    "misplaced": ("record_misplaced", "warning"),
}


class Counters(msgspec.Struct):
    """Plain totals since the start, carried by the canonical line."""

    steps: int = 0
    units: int = 0
    duplicates: int = 0
    refused: int = 0
    blocked: int = 0
    defects: int = 0
    placed: int = 0
    rebuilt: int = 0
    stale_batches: int = 0
    fetch_failures: int = 0
    scrubs: int = 0
    scrub_passes: int = 0
    scrub_failures: int = 0
    scrubbed_entries: int = 0
    scrubbed_rows: int = 0


class Telemetry:
    """One per process. Methods are named after what happened; ``now`` is a monotonic clock."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counters()
        self._now = now
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}
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
        """The worker reached Kafka and Redis."""
        self._say("info", "worker_started", **facts)

    def placed(self, partition: int, plan: Plan, ranks: int) -> None:
        """A partition is being read from ``plan.restart``."""
        self.counters.placed += 1
        self.counters.rebuilt += plan.drop
        facts = {"restart": plan.restart, "target": plan.target, "drop": plan.drop, "why": plan.why}
        self._say("info", "partition_placed", partition=partition, ranks=ranks or len(plan.starts), **facts)

    def pointers_unread(self, partition: int, topic: str, why: str) -> None:
        """A partition is rebuilt without knowing where its ranks begin."""
        self._rarely("warning", "pointers_unread", (), partition=partition, topic=topic, why=why)

    def caught_up(self, partition: int, read: int, seconds: float) -> None:
        """The log end of the last seek is passed."""
        self._say("info", "partition_caught_up", partition=partition, read=read, seconds=round(seconds, 3))

    def blocked(self, partition: int, why: str, retry_seconds: float) -> None:
        """A partition waits for Kafka or Redis."""
        self.counters.blocked += 1
        self._rarely("error", "partition_blocked", (str(partition),), partition=partition, why=why, retry=retry_seconds)

    def defect(self, partition: int, error: BaseException, retry_seconds: float) -> None:
        """A partition waits because of a defect of ours; the trace shows code, not data."""
        self.counters.defects += 1
        trace = traceback.format_tb(error.__traceback__)[-3:]
        why = f"{type(error).__name__}: {error}"
        fields = {"partition": partition, "why": why, "retry": retry_seconds, "trace": "".join(trace)}
        self._rarely("error", "partition_blocked", (str(partition), why), **fields)

    def resynced(self, partition: int, why: str) -> None:
        """What is stored, or where the consumer stands, is not what we believed; loaded and sought again."""
        self._rarely("warning", "partition_resynced", (str(partition),), partition=partition, why=why)

    def notes(self, partition: int, tally: Tally) -> None:
        """Log what the fold noted, and empty it."""
        notes: list[Note] = tally.notes
        for note in notes:
            code, level = _NOTE_CODES[note.kind]
            fields = {"partition": partition, "rank": note.rank, "offset": note.offset, "why": note.why}
            if level == "info":
                self._say(level, code, **fields)
            else:
                self._rarely(level, code, (note.kind, note.rank, str(partition)), **fields)
        notes.clear()

    def topic_changed(self, topic: str, before: str, after: str) -> None:
        """The topic's id or partition count is another one."""
        self._say("warning", "topic_changed", topic=topic, before=before, after=after)

    def topic_unseen(self, topic: str, why: str) -> None:
        """The topic could not be looked at."""
        self._rarely("warning", "topic_unseen", (), topic=topic, why=why)

    def fetch_failed(self, why: str) -> None:
        """A fetch raised."""
        self.counters.fetch_failures += 1
        self._rarely("warning", "fetch_failed", (why.partition(":")[0],), why=why)

    def scrubbed(self, done: Scrubbed) -> None:
        """A piece of what dead slots occupied is free; the canonical line carries the sums."""
        self.counters.scrubs += 1
        self.counters.scrub_passes += done.ended
        self.counters.scrubbed_entries += done.entries
        self.counters.scrubbed_rows += done.rows

    def scrub_failed(self, why: str) -> None:
        """Redis did not carry a scrub out; the next one goes on."""
        self.counters.scrub_failures += 1
        self._rarely("warning", "scrub_failed", (), why=why)

    def library(self, logger: str, level: str, text: str, template: str) -> None:
        """A line of a library's own log."""
        self._rarely("warning", "library_log", (logger, template), logger=logger, library_level=level, text=text)

    def progress(self, tally: Tally, **gauges: Any) -> None:
        """The canonical line."""
        self._say("info", "fold_progress", **self._totals(tally), **gauges)

    def stopping(self, signal: str) -> None:
        """A stop was asked for."""
        self._say("info", "worker_stopping", signal=signal)

    def stopped(self, tally: Tally, *, clean: bool) -> None:
        """The last line."""
        self._say("info", "worker_stopped", clean=clean, **self._totals(tally))

    def crashed(self, why: str) -> None:
        """Faust gave up."""
        self._say("error", "worker_crashed", why=why)

    def aborted(self, signal: str) -> None:
        """A second signal."""
        self._say("warning", "worker_aborted", signal=signal)

    def _totals(self, tally: Tally) -> dict[str, int]:
        totals = msgspec.structs.asdict(self.counters)
        folded = msgspec.structs.asdict(tally)
        return {**totals, **{f"fold_{name}": value for name, value in folded.items() if name != "notes"}}

    def _rarely(self, level: Level, code: Code, what: tuple[str, ...], **fields: Any) -> None:
        """Say it unless the same was said a moment ago; tell how often it was left out."""
        key, now = (code, *what), self._now()
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


class LibraryLog(logging.Handler):
    """Takes the standard log of the libraries into ours."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__(logging.WARNING)
        self._telemetry = telemetry

    def emit(self, record: logging.LogRecord) -> None:
        """One line of a library; an exception's text is kept, its trace is not."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]!r}"
        self._telemetry.library(record.name, record.levelname, text[:500], str(record.msg))


def take_over_logging(telemetry: Telemetry) -> None:
    """From here on every library's warnings are JSON lines of ours."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(LibraryLog(telemetry))
    root.setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
