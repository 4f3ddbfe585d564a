"""Ranks that were expected and are not heard: what seems to be wrong with one, told once (DESIGN §4). Pure.

    no peer for a while, whatever was heard before        -> unreachable       once per outage
    a peer, and never a batch, by either way              -> never_heard       once
    batches by replay only                                -> heard_by_replay   once

An outage ends when a peer is there again. A rank that another bridge owns has no socket,
and nothing is expected of it.
"""

from __future__ import annotations

from typing import Literal

LATE_BATCHES = 3
"""Batches that only replay brought, and none live: then the live address or topic is wrong."""

Trouble = Literal["unreachable", "never_heard", "heard_by_replay"]


class Silence:
    """One rank since the bridge began to expect it; seconds are monotonic."""

    def __init__(self, now: float, seconds: float) -> None:
        self._seconds = seconds
        self._since = now  # when it began to be expected, or came back
        self._away_since: float | None = None
        self._told_away = self._told = False

    def look(self, now: float, *, owned: bool, attached: bool, heard: bool, live: int, late: int) -> Trouble | None:
        """What is to be told now. ``heard``: a batch, by either way; ``live``, ``late``: how many so far."""
        if attached or not owned:
            if self._told_away:
                self._since = now
            self._away_since, self._told_away = None, False
        elif self._away_since is None:
            self._away_since = now
        if self._away_since is not None:
            if self._told_away or now - self._away_since < self._seconds:
                return None
            self._told_away = True
            return "unreachable"
        if self._told or live or now - self._since < self._seconds:
            return None
        trouble: Trouble | None = None
        if attached and not heard:
            trouble = "never_heard"
        elif late >= LATE_BATCHES:
            trouble = "heard_by_replay"
        self._told = trouble is not None
        return trouble
