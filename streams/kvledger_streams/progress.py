"""Where to read a partition from (DESIGN §6). Pure: what the index stored and what the log holds in, a plan out.

    stored ──┬─ nothing, or of another topic ────────────┐
             ├─ beyond the log's end (the log lost some) ─┼─> drop the partition's ranks, rebuild from the lowest of
             ├─ below its start (retention took some) ────┘   their pointers; from the log's start where one is missing
             └─ within ─────────────────────────────────────> go on at the stored restart offset

Asked at every assignment, after every refused step, and whenever reading falls out of the log: there is one way back.
Until the read position passes ``target``, the log's end at this moment, routers see the partition's ranks as stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvledger_index.units import Progress

GUESS_MS_MAX = 4_000
"""How much later than its newest record it may be on the log by a worker's own clock alone: enough for what is old to
be stale, too little for a rank to be called gone, and a clock that is wrong costs no more of good answers than that.
"""

GUESS_ERROR_MS_MAX = 1_000
"""A clock that is further behind a record that is there is wrong, and nobody knows by how much."""


class Topic(NamedTuple):
    """A topic as it is now; ``id`` differs from that of an earlier topic of the same name."""

    id: str
    partitions: int

    def __str__(self) -> str:
        """For people."""
        return f"of {self.partitions} partitions (id {self.id})"


class Bounds(NamedTuple):
    """What a partition's log holds: offsets ``start`` <= o < ``end``. ``newest_ms``: the newest log time known."""

    topic_id: str
    start: int
    end: int
    newest_ms: int


class Starts(NamedTuple):
    """The offset of each rank's newest Opened or complete checkpoint, by ``replica/rank``; each was looked at.

    Where one of them is missing there are none, and ``why`` says so: that rank must be looked for in the whole log.
    ``fences``: for each rank that anybody ever followed, offsets of Fences and whose they are.
    """

    ranks: Mapping[str, int]
    why: str
    fences: Mapping[str, Mapping[int, int]] = {}


class Plan(msgspec.Struct, frozen=True):
    """Read from ``restart``; ranks are stale until ``target`` is read. ``drop``: forget them first, because ``why``.

    ``starts``: records of these ranks below these offsets need not be looked at. ``owners``: of these ranks, owners
    below these were ended by a Fence that is not read.
    """

    restart: int
    target: int
    drop: bool
    why: str
    starts: Mapping[str, int] = {}
    owners: Mapping[str, int] = {}


def plan(stored: Progress | None, bounds: Bounds) -> Plan | str:
    """How to go on with a partition; or why it must be rebuilt."""
    if stored is None:
        return "nothing stored"
    return _unusable(stored, bounds) or Plan(stored.restart, bounds.end, drop=False, why="stored")


def rebuild(bounds: Bounds, why: str, starts: Starts) -> Plan:
    """Forget the partition's ranks and read the log, from where all of them are found. ``bounds`` must not be older
    than ``starts``: retention takes the log's start, and pointers may lie beyond an end that was seen before.
    """
    outside = [rank for rank, offset in starts.ranks.items() if not bounds.start <= offset < bounds.end]
    if outside:
        starts = Starts({}, f"{outside[0]} points outside {bounds.start}..{bounds.end}", starts.fences)
    if starts.ranks:
        restart, why = min(starts.ranks.values()), f"{why}; from the lowest of {len(starts.ranks)} pointers"
    else:
        restart, why = bounds.start, f"{why}; from the log's start: {starts.why}"
    owners = _ended_before(restart, starts.fences)
    return Plan(restart, bounds.end, drop=True, why=why, starts=dict(starts.ranks), owners=owners)


def first_guess(newest_ms: int, wall_ms: float) -> float:
    """What time it is on the log before a record that comes says so: by our own clock, within bounds."""
    if wall_ms < newest_ms - GUESS_ERROR_MS_MAX:
        return newest_ms + GUESS_MS_MAX
    return min(max(wall_ms, newest_ms), newest_ms + GUESS_MS_MAX)


def _ended_before(restart: int, fences: Mapping[str, Mapping[int, int]]) -> dict[str, int]:
    """Of each rank the highest owner whose Fence lies below where reading begins."""
    behind = {rank: [owner for fence, owner in each.items() if fence < restart] for rank, each in fences.items()}
    return {rank: max(owners) for rank, owners in behind.items() if owners}


def _unusable(stored: Progress, bounds: Bounds) -> str | None:
    """Why the stored progress is not a place in this log; None where it is."""
    if stored.topic_id != bounds.topic_id:
        return f"stored progress is of topic id {stored.topic_id}, the topic's is {bounds.topic_id}"
    # `read` runs ahead of `restart` while a unit is unfinished: also what was applied from there must still be there
    if max(stored.restart, stored.read) > bounds.end:
        return f"stored offset {max(stored.restart, stored.read)} is beyond the log's end {bounds.end}"
    if stored.restart < bounds.start:
        return f"stored offset {stored.restart} is below the log's start {bounds.start}"
    return None
