"""A circuit breaker, so that a dead Redis does not cost every request its deadline. Pure: ``now`` is passed in.

    state      what happens                          next
    ------     -------------                         ----
    closed     an answer                             closed, the count of failures starts anew
    closed     failure number ``failures_max``       open
    open       asked before ``open_seconds`` passed  open; refused
    open       asked later                           half open; this call is the probe
    half open  asked                                 half open; refused
    half open  the probe got an answer               closed
    half open  the probe failed                      open, twice as long, up to ``open_seconds_max``
    half open  the probe's caller went away          open; the next call is the probe
    any        an outcome from before a change       no change: it says nothing about now

It closes by itself: the probe is an ordinary question of the router. Failures of calls that were under way together
count once: a router whose own loop stood still for a moment would else take itself for a dead Redis.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

FAILURES_MAX_DEFAULT = 5
"""Failures in a row before it opens: at a 20 ms deadline a dead Redis costs a serial caller 100 ms in all."""

OPEN_SECONDS_DEFAULT = 0.5
OPEN_SECONDS_MAX_DEFAULT = 5.0
"""Longest pause between probes: how late a healed Redis is noticed."""

State = Literal["closed", "open", "half_open"]
Outcome = Literal["answered", "failed", "abandoned"]


class Permit(NamedTuple):
    """One call: which change of state it belongs to, and when it began."""

    changes: int
    since: float


class Breaker:
    """Ask :meth:`enter` before a call, tell :meth:`leave` how it went. Not thread-safe: one event loop."""

    def __init__(
        self,
        *,
        failures_max: int = FAILURES_MAX_DEFAULT,
        open_seconds: float = OPEN_SECONDS_DEFAULT,
        open_seconds_max: float = OPEN_SECONDS_MAX_DEFAULT,
    ) -> None:
        if failures_max < 1 or not 0 < open_seconds <= open_seconds_max:
            msg = f"failures_max {failures_max} < 1, or not 0 < open_seconds {open_seconds} <= {open_seconds_max}"
            raise ValueError(msg)
        self._failures_max = failures_max
        self._open_seconds = open_seconds
        self._open_seconds_max = open_seconds_max
        self._state: State = "closed"
        self._changes = 0
        self._failures = 0
        self._failed_at = float("-inf")
        self._pause = open_seconds
        self._until = 0.0

    @property
    def state(self) -> State:
        """Where it stands; time passing alone does not change it."""
        return self._state

    def enter(self, now: float) -> Permit | None:
        """A permit for one call, to be given back through :meth:`leave`; None: do not call."""
        if self._state == "half_open" or (self._state == "open" and now < self._until):
            return None
        if self._state == "open":
            self._become("half_open")
        return Permit(self._changes, now)

    def leave(self, permit: Permit, outcome: Outcome, now: float) -> None:
        """Report how the call of ``permit`` ended; ``abandoned``: the caller went away, which says nothing of Redis."""
        if permit.changes != self._changes:
            return
        if self._state == "half_open":
            self._probed(outcome, now)
        elif outcome == "answered":
            self._failures = 0
        elif outcome == "failed" and permit.since >= self._failed_at:
            self._failures += 1
            self._failed_at = now
            if self._failures >= self._failures_max:
                self._pause = self._open_seconds
                self._open(now + self._pause)

    def _probed(self, outcome: Outcome, now: float) -> None:
        if outcome == "answered":
            self._failures = 0
            self._become("closed")
        elif outcome == "failed":
            self._pause = min(self._pause * 2, self._open_seconds_max)
            self._open(now + self._pause)
        else:
            self._open(now)

    def _open(self, until: float) -> None:
        self._until = until
        self._become("open")

    def _become(self, state: State) -> None:
        self._state = state
        self._changes += 1
