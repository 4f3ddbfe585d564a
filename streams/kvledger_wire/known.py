"""Up to when a record's picture is known to be whole: a header in log time, and its clock (DESIGN §5, §7). Pure.

A record can wait between its bridge and the log for as long as the link is down, so log time alone says when it
arrived, not how old its news is. Bridges therefore say with each record of a rank up to when they had everything that
the engine had sent, in the log's own time.

Log times are a broker's, a process has its monotonic ones, and no clock of two machines is compared. Records that we
know to have been appended between two moments of ours bound how far the log's clock is ahead of ours:

    log time - later moment  <=  ahead  <=  log time - earlier moment

The greatest lower bound is kept, so what is dated by it is rather too old than too new. An upper bound below it says
that a clock was set, or that another broker leads the partition: then it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable

HEADER = "kvledger-known-ms"
"""Name of the header: a decimal number of ms of log time; ``-1``: not known to be whole yet."""

UNKNOWN = -1

DRIFT = 0.001
"""How much the rates of two clocks may differ: far more than they do."""

_DIGITS_MAX = 15


class LogClock:
    """What one partition's clock says, at least. Moments are monotonic seconds, log times ms. O(1)."""

    def __init__(self, *, guess_ms: float | None = None, moment: float = 0.0) -> None:
        """``guess_ms``: the log time at ``moment``, as far as anybody knows; records correct it in either direction."""
        self._ahead: float | None = None if guess_ms is None else guess_ms - moment * 1000
        self._moment = moment

    def appended(self, log_ms: int, *, after: float | None, before: float) -> None:
        """A record with this log time was appended between two moments; ``after`` None: that is not known."""
        low = log_ms - before * 1000
        present = self._low(before)
        # a log time is cut to whole ms
        refuted = present is not None and after is not None and log_ms + 1 - after * 1000 < present
        if present is None or low >= present or refuted:
            self._ahead, self._moment = low, before

    def at(self, moment: float) -> int | None:
        """The log's time at a moment, rather too early than too late; None: nothing is known."""
        ahead = self._low(moment)
        return None if ahead is None else int(moment * 1000 + ahead)

    def _low(self, moment: float) -> float | None:
        return None if self._ahead is None else self._ahead - DRIFT * max(0.0, moment - self._moment) * 1000


def header(known_ms: int | None) -> tuple[str, bytes]:
    """The header of a record; None: its picture is not known to be whole."""
    return HEADER, b"%d" % (UNKNOWN if known_ms is None else max(UNKNOWN, known_ms))


def known_of(headers: Iterable[tuple[str, bytes | None]] | None) -> int | None:
    """What a record's headers say: ms of log time, UNKNOWN where that cannot be read, None where they say nothing.

    Bridges before this header wrote none: their records count as whole when they were appended.
    """
    for name, value in headers or ():
        if name == HEADER:
            readable = value is not None and value.isdigit() and len(value) <= _DIGITS_MAX
            return int(value) if readable and value is not None else UNKNOWN
    return None
