"""How far a rank's numbers can be trusted: the one table of statuses (DESIGN §7, §8). Pure.

Everything that holds for a rank is noted; the first status of this order that has a note is the answer's.

    status     noted where                                                              the number is
    ------     -----------                                                              -------------
    unknown    closed, unloaded, no moving part, gone, never seen, no opinion           0
    stale      suspended; a batch is being written in pieces; its partition is behind   of the past: may be over
               its target, or no worker stands at the log's end; not heard of within
               ``fresh_seconds_max``, or only that its engine lives
    uncertain  the bridge says why; clients may ask for full reports; a group has no    may be over; 0 where the rule
               rule; GPU blocks outside the groups; it moved while it was read          cannot be applied
    at_least   the life began before we listened (partial); unplaced hashes that could  never over
               not be asked for could lengthen this hit; a stored row was unreadable;
               the prompt was cut
    exact      none of these                                                            the engine's own at ``as_of``

A rank is *gone* iff the stamp of its partition's worker at the log's end is more than the lease newer than the rank's
last record. Where that stamp is itself old, nobody reads the partition: everything in it is stale and nothing is gone.
Redis' clock alone is compared with itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from kvledger_index.units import Card
from kvledger_index.views import PartitionView, Pulse

Status = Literal["exact", "at_least", "uncertain", "stale", "unknown"]

PRECEDENCE: tuple[Status, ...] = ("unknown", "stale", "uncertain", "at_least")
"""Worst first; without a note an answer is exact."""

TRUSTED: frozenset[Status] = frozenset({"exact", "at_least"})
"""Never over: what :meth:`Match.best` picks from unless asked otherwise."""

MOVED = "moved: its cache changed while it was read"
"""The one reason that the next question of the same prompt is likely to be without."""

UNDERWAY = "moving: a batch too large for one step is being written, and a part of it is in the index"

NEVER_PROVEN_MS = 10 * 365 * 86_400_000
"""An age of a picture that means none: log times count from 1970."""

STAMP_AHEAD_SECONDS_MAX = 1.0
"""How much younger than an answer its last reading may be, at most."""

FRESH_SECONDS_MAX_DEFAULT = 3.0
LEASE_SECONDS_DEFAULT = 15.0


class Note(NamedTuple):
    """One thing that keeps an answer from being exact."""

    status: Status
    why: str


class Limits(NamedTuple):
    """How old is too old, in seconds of Redis' clock."""

    fresh_seconds_max: float = FRESH_SECONDS_MAX_DEFAULT
    lease_seconds: float = LEASE_SECONDS_DEFAULT


def verdict(notes: Sequence[Note]) -> Note:
    """The note that decides; ``exact`` with an empty reason where there is none."""
    for status in PRECEDENCE:
        for note in notes:
            if note.status == status:
                return note
    return Note("exact", "")


def standing(
    card: Card, pulse: Pulse | None, partition: PartitionView | None, time_ms: int, limits: Limits
) -> Iterator[Note]:
    """What the catalogue and the clock say of a rank, whatever the prompt."""
    if card.closed:
        yield Note("unknown", "closed: drained, deregistered or replaced")
    elif not card.loaded:
        yield Note("unknown", "unloaded: waits for its next life or checkpoint")
    if pulse is None:
        yield Note("unknown", "nothing was heard of it")
        return
    if card.suspended:  # says more than the age that follows from it
        yield Note("stale", "suspended: the bridge cannot prove that the engine's cache is the one it followed")
    if pulse.now.underway:
        yield Note("stale", UNDERWAY)
    yield from _liveness(pulse, partition, time_ms, limits)
    for why in card.uncertain:
        yield Note("uncertain", why)
    if card.full_reports:
        yield Note("uncertain", "full_reports: clients may ask for reports that announce blocks the engine lacks")
    if card.partial:
        yield Note("at_least", "partial: the engine held blocks before this life was followed")


def _liveness(pulse: Pulse, partition: PartitionView | None, time_ms: int, limits: Limits) -> Iterator[Note]:
    age = age_seconds(pulse, time_ms)
    if partition is None:
        yield Note("stale", "its partition has no progress: no worker reads it")
        return
    stamp_age = (time_ms - partition.alive_ms) / 1000
    if partition.read < partition.target:
        yield Note("stale", f"its partition is read up to {partition.read}, behind {partition.target}: catching up")
    if stamp_age > limits.fresh_seconds_max:
        since = f"for {stamp_age:.1f} s" if partition.alive_ms else "so far"
        yield Note("stale", f"no worker stood at the log's end {since}")
    elif stamp_age < -STAMP_AHEAD_SECONDS_MAX:
        # of another clock: what was stamped by it would stay fresh until this one has caught up
        yield Note(
            "stale", f"Redis' clock went back by {-stamp_age:.1f} s, and no worker has stood at the log's end since"
        )
    elif (partition.alive_ms - pulse.heard_ms) / 1000 > limits.lease_seconds:
        yield Note("unknown", f"gone: silent for {age:.1f} s, more than the lease of {limits.lease_seconds:g} s")
    proven = age + pulse.now.unproven_ms / 1000
    if age > limits.fresh_seconds_max:
        yield Note("stale", f"last heard of {age:.1f} s ago, more than {limits.fresh_seconds_max:g} s")
    elif proven > limits.fresh_seconds_max and not pulse.now.underway:
        never = pulse.now.unproven_ms >= NEVER_PROVEN_MS
        since = "not yet known to be complete" if never else f"last known to be complete {proven:.1f} s ago"
        yield Note("stale", f"it is heard of, but its picture was {since}")


def age_seconds(pulse: Pulse, time_ms: int) -> float:
    """Seconds since the rank's last record; never negative."""
    return max(0.0, (time_ms - pulse.heard_ms) / 1000)
