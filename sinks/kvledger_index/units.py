"""What a writer asks of the index: compare-and-set units per rank, and progress per partition (DESIGN §6).

Pure values, built by the fold and applied by ``writer.py`` (Redis) and ``memory.py`` alike.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvledger_index.model import GroupSpec, Medium


class Stamp(NamedTuple):
    """Where a rank stands: owner, life (owner, count), n. Compared as a tuple; NEVER is below every other."""

    owner: int
    life_owner: int
    life_count: int
    n: int


NEVER = Stamp(-1, -1, 0, -1)


class Bind(msgspec.Struct, frozen=True):
    """A new, empty life: new slots for every medium."""


class Clear(msgspec.Struct, frozen=True):
    """One medium of the rank is empty from here on: a new slot for it."""

    medium: Medium


class Drop(msgspec.Struct, frozen=True):
    """The rank is unloaded: no slots until the next Bind. Its stamp stays."""


class Put(msgspec.Struct, frozen=True):
    """Set or clear bits of consecutive keys of one segment.

    ``row`` is the segment's first key, ``position`` the place of ``keys[0]`` in the segment (0..15), ``parent`` the key
    before it (0 where position is 0). Bit j of ``mask`` stands for ``keys[j]``; keys whose bit is 0 only describe the
    path. ``position + len(keys) <= 16``. With set semantics: adding what is there, or removing what is not, is a no-op.
    """

    add: bool
    medium: Medium
    lane: int
    row: int
    position: int
    parent: int
    keys: tuple[int, ...]
    mask: int


Op = Bind | Clear | Drop | Put


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What changes rarely about a rank; each change gives its model's catalogue a new version.

    ``alignment``, ``hash_block_size`` and the flags restate the model entry (DESIGN §8). ``groups`` are those heard on
    the wire in this life, laid under those of the entry; ``heard`` names the groups that stored anything.
    """

    model: str
    partition: int
    stride: int
    loaded: bool
    suspended: bool
    partial: bool
    uncertain: tuple[str, ...]
    closed: bool
    groups: tuple[GroupSpec, ...] = ()
    heard: tuple[int | None, ...] = ()
    hash_block_size: int | None = None
    alignment: int | None = None
    partial_hash_hits: bool = False
    full_reports: bool = False
    engine_version: str | None = None
    process: str | None = None


class Now(msgspec.Struct, frozen=True, array_like=True):
    """What moves with every batch of a rank: the stamp, the engine sequence it covers, unplaced hashes per lane.

    ``unplaced`` holds (lane, medium code, count) of hashes that are resident and have no key.
    """

    owner: int
    life_owner: int
    life_count: int
    n: int
    seq: int
    unplaced: tuple[tuple[int, int, int], ...] = ()


class RankUnit(msgspec.Struct, frozen=True):
    """One atomic step of one rank: applied iff the stored stamp equals ``before``.

    A stored stamp at or above ``after`` makes the unit a duplicate (ignored); anything else refuses the whole call.
    ``state`` is the fold's own blob, handed back unread by ``load``. ``broker_ms`` is the log time of the last record.
    ``card`` None means unchanged.
    """

    rank: str
    """``replica/rank``."""
    model: str
    before: Stamp
    after: Stamp
    ops: tuple[Op, ...]
    now: Now
    state: bytes
    card: Card | None
    broker_ms: int


class Progress(msgspec.Struct, frozen=True):
    """How far a partition is applied.

    ``restart`` is the lowest first offset of anything not yet applied, ``read`` the next offset to read,
    ``target`` the log end at the last seek: the partition's ranks are stale until ``read >= target``.
    """

    topic_id: str
    restart: int
    read: int
    target: int


class Step(msgspec.Struct, frozen=True):
    """One call: the units of one partition in log order, and its progress, all or nothing.

    ``restart_before`` and ``topic_id`` must equal what is stored, else the call is refused. ``at_end`` says that the
    worker stands at the log's end, which stamps ``alive``. ``broker_ms`` is the newest log time seen in the partition.
    """

    partition: int
    topic_id: str
    restart_before: int
    restart: int
    read: int
    units: tuple[RankUnit, ...]
    at_end: bool
    broker_ms: int
    nonce: bytes
    """16 unique bytes: the new version of each catalogue that this call changes."""


class Outcome(NamedTuple):
    """What a call did. ``refused``: nothing was changed; load what is stored and seek to its restart offset."""

    verdict: Literal["applied", "refused"]
    applied: int
    duplicates: int
    why: str


class Stored(NamedTuple):
    """What ``load`` found for one partition; ``progress`` None: nothing stored, rebuild."""

    progress: Progress | None
    ranks: dict[str, tuple[Stamp, bytes]]
