"""Where to read a partition from (DESIGN §6). Pure: what the index stored and what the log holds in, a plan out.

    stored ──┬─ nothing, or of another topic ────────────┐
             ├─ beyond the log's end (the log lost some) ─┼─> drop the partition's ranks, rebuild from the log's start
             ├─ below its start (retention took some) ────┘
             └─ within ─────────────────────────────────────> go on at the stored restart offset

Asked at every assignment, after every refused step, and whenever reading falls out of the log: there is one way back.
Until the read position passes ``target``, the log's end at this moment, routers see the partition's ranks as stale.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvledger_index.units import Progress


class Topic(NamedTuple):
    """A topic as it is now; ``id`` differs from that of an earlier topic of the same name."""

    id: str
    partitions: int


class Bounds(NamedTuple):
    """What a partition's log holds: offsets ``start`` <= o < ``end``. ``newest_ms``: the newest log time known."""

    topic_id: str
    start: int
    end: int
    newest_ms: int


class Plan(msgspec.Struct, frozen=True):
    """Read from ``restart``; ranks are stale until ``target`` is read. ``drop``: forget them first, because ``why``."""

    restart: int
    target: int
    drop: bool
    why: str


def plan(stored: Progress | None, bounds: Bounds) -> Plan:
    """How to go on with a partition."""
    why = _unusable(stored, bounds)
    if why is None and stored is not None:
        return Plan(stored.restart, bounds.end, drop=False, why="stored")
    return rebuild(bounds, why or "nothing stored")


def rebuild(bounds: Bounds, why: str) -> Plan:
    """Forget the partition's ranks and read the whole log."""
    return Plan(bounds.start, bounds.end, drop=True, why=why)


def _unusable(stored: Progress | None, bounds: Bounds) -> str | None:
    """Why the stored progress is not a place in this log; None where it is, or where there is none."""
    if stored is None:
        return None
    if stored.topic_id != bounds.topic_id:
        return f"stored progress is of topic id {stored.topic_id}, the topic's is {bounds.topic_id}"
    # `read` runs ahead of `restart` while a unit is unfinished: also what was applied from there must still be there
    if max(stored.restart, stored.read) > bounds.end:
        return f"stored offset {max(stored.restart, stored.read)} is beyond the log's end {bounds.end}"
    if stored.restart < bounds.start:
        return f"stored offset {stored.restart} is below the log's start {bounds.start}"
    return None
