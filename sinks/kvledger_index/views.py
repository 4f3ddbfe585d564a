"""What a reader gets from the index (DESIGN §7, §8). Pure values, the same from Redis and from memory."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvledger_index.units import Card, Now


class RankView(NamedTuple):
    """One rank in the catalogue: its card and its slots by medium code (0 = no slot)."""

    card: Card
    slots: tuple[int, int, int, int]


class Catalogue(NamedTuple):
    """All ranks of one model. ``version`` is unique: equal versions mean equal catalogues, also after a rollback."""

    version: bytes
    ranks: dict[str, RankView]


class PartitionView(NamedTuple):
    """Reading state of one partition. ``alive_ms`` is Redis' clock when a worker last stood at the log's end."""

    restart: int
    read: int
    target: int
    alive_ms: int


class Pulse(NamedTuple):
    """One rank's moving part: ``heard_ms`` is Redis' clock when the newest record of its partition was applied, less
    the time that the rank's last record is older than that one. It is worked out when it is read, so a rank that has
    been silent for an hour is an hour old also when a worker has only just caught up.
    """

    now: Now
    heard_ms: int


class Segment(msgspec.Struct, frozen=True):
    """Holders of one segment of the prompt: (slot, lane, mask) with bit p = the prompt's key at position p.

    Bits beyond the prompt's keys, and of keys on other branches, are already gone.
    """

    holders: tuple[tuple[int, int, int], ...]


class Reading(NamedTuple):
    """One answer, of one moment for every rank but those in ``moved``, whose stamp moved while it was read.

    Where ``version`` differs from the catalogue's, it holds only for ranks that a catalogue taken afterwards shows as
    the one before did: slots are never given twice, so those were theirs all the while.
    ``singles`` are the holders of the engine hashes that were asked for, in their order; each has bit 0 only.
    ``corrupt`` counts stored values that could not be read: they count as absent, so no answer from this reading is
    exact.
    """

    version: bytes
    time_ms: int
    pulses: dict[str, Pulse]
    partitions: dict[int, PartitionView]
    segments: list[Segment]
    moved: frozenset[str]
    corrupt: int = 0
    singles: tuple[Segment, ...] = ()


class Claimed(NamedTuple):
    """One block that the index claims, as ``dump`` lists them."""

    rank: str
    group: int | None
    medium: str
    key: int
