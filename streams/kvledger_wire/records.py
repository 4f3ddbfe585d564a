"""Records on ``kvledger.events`` and ``kvledger.replicas`` (DESIGN §5).

msgpack arrays, the tag first, then ``schema``; fields are only ever appended, readers skip extra ones.
The key names replica, rank and group; token ids, salts and multimodal ids are in no record.

Every record carries its owner. Records of a life also carry (life, n): n counts the rank's records within a life,
0 for Opened, without holes. A record with ``end`` closes a unit; the records of one engine batch are one unit.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvledger_index.enginehash import Scheme
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.errors import Poison

SCHEMA = 0

Life = tuple[int, int]
"""(owner, how many lives that owner had opened with this one)."""

STORED, REMOVED, CLEARED = 1, 2, 3
LIVE, REPLAYED, ATTACHED = 0, 1, 2


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive stride keys of one path inside one segment of 16.

    ``row`` (8 bytes) is the segment's first key, ``position`` the place of the first of ``keys`` in it, ``parent``
    (8 bytes, zeros at position 0) the key before. ``keys`` is n x 8 bytes. Bit j of ``blocks``: an engine block ends at
    key j and this change names it; of ``effective``: it changed residency of (lane, key), 0 -> 1 or 1 -> 0.
    ``hashes`` holds the low 64 bits of the engine hashes, big-endian, one per bit of ``blocks``, ascending.
    ``segment`` numbers the segment on its path, from 0 (-1: written by an older bridge), so that the first of ``keys``
    ends at stride ``16 * segment + position + 1``. ``digests`` holds the engine's whole digests, as many as ``hashes``
    and of equal size (zeros: this one is not known), where the wire has only their low 64 bits and children's chains
    need them; else it is empty. All 8-byte keys are big-endian.
    """

    row: bytes
    position: int
    parent: bytes
    keys: bytes
    blocks: int
    effective: int
    hashes: bytes
    segment: int = -1
    digests: bytes = b""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One engine event, or adjacent ones of one kind, of one group.

    ``op`` STORED, REMOVED or CLEARED; ``medium`` is the code (gpu 0, cpu 1, storage 2, other 3); ``ts`` is the engine's
    wall clock; ``unplaced`` holds hashes (8 bytes each) that have no key. ``origin`` LIVE, REPLAYED or ATTACHED
    (an earlier unplaced store that got its key, or with REMOVED one that lost it: no copy came or went).
    ``unplaced_effective`` is a bitmap, bit j % 8 of byte j // 8: hash j of ``unplaced`` became resident without a key,
    or ceased to be, by this change. A hash of an ATTACHED change passes between its key and being unplaced.
    """

    op: int
    medium: int
    seq: int
    ts: float
    runs: tuple[Run, ...] = ()
    unplaced: bytes = b""
    origin: int = LIVE
    unplaced_effective: bytes = b""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What every record starts with."""

    schema: int
    owner: int


class Fence(Record, frozen=True, array_like=True, tag="fence"):
    """From here on records of lower owners do not count; suspends the rank until its owner resumes or opens."""

    bridge: str
    version: str
    why: str


class Lived(Record, frozen=True, array_like=True):
    """A record within a life."""

    life: Life
    n: int


class Opened(Lived, frozen=True, array_like=True, tag="opened"):
    """A new, empty life (n = 0): an empty checkpoint.

    ``seq`` is the last engine sequence that it covers (-1 = before the first), ``digest`` the XXH3-128 of that
    batch's raw bytes (empty at -1). ``entry`` restates the operator's model entry, whose stride the keys use.
    ``process`` identifies the engine process where it is known.
    """

    entry: ModelEntry
    stride: int
    seq: int
    digest: bytes
    partial: bool
    why: str
    engine_version: str | None = None
    process: str | None = None


class Events(Lived, frozen=True, array_like=True, tag="events"):
    """Changes of one group in engine order; of group ``*`` only clears.

    ``seq``/``digest``: the last batch this record's unit covers. ``unplaced`` (medium code, count): hashes of this
    group resident without a key after this record. ``spec``: the group's facts, when first heard or changed in this
    life. ``uncertain``: reasons that hold for the rank from here to the end of its life, when one was added.
    ``scheme``: how the engine hashes, when that was found out or changed. ``opaque`` (medium code, count): those of
    ``unplaced`` that no prompt's chain under the scheme can equal by tokens and extras known to routers. ``veiled``
    (medium code, count): those of ``unplaced`` that are proven to be no part of a prompt without adapter, salt and
    media (ADR 4); opaque ones may be among them.
    """

    seq: int
    digest: bytes
    end: bool
    changes: tuple[Change, ...]
    unplaced: tuple[tuple[int, int], ...] = ()
    spec: GroupSpec | None = None
    uncertain: tuple[str, ...] = ()
    scheme: Scheme | None = None
    opaque: tuple[tuple[int, int], ...] = ()
    veiled: tuple[tuple[int, int], ...] = ()


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What one lane holds, or a part of it.

    ``change`` is STORED; its ``seq`` and ``ts`` are those of the checkpoint's last batch. Every block of its runs is
    effective (readers refuse a part where ``effective`` differs from ``blocks``), and so is every hash of ``unplaced``
    (``unplaced_effective`` may be left out). ``copies`` are u16be, first one per block of the runs in their order, then
    one per unplaced hash; empty: all 1. ``opaque`` and ``veiled`` are bitmaps over ``unplaced`` (bit j % 8 of byte
    j // 8, trailing zero bytes left out): which of them a record's counts of that name mean.
    """

    group: int | None
    change: Change
    copies: bytes = b""
    opaque: bytes = b""
    veiled: bytes = b""


class Checkpoint(Lived, frozen=True, array_like=True, tag="checkpoint"):
    """Part ``part`` (from 0) of what the rank's ledger holds after record ``n - part - 1`` of its life.

    The parts of a checkpoint are consecutive records of the rank, each a unit of its own; ``last`` closes it. Each
    restates what Opened says and what was learnt since. ``unplaced``, ``opaque`` and ``veiled`` are (group, medium
    code, count) for the whole rank. ``lanes`` of all parts together are all that is resident. ``parents`` are names
    that GPU events gave and that no GPU lane tells: of blocks that are not resident and are kept for their children,
    the newest first, of blocks in lower tiers only, and further names of a block (all effective 0). ``weak`` are those
    that other tiers gave and no lane tells. ``ambiguous`` holds hashes (8 bytes each) that stood for two prefixes and
    are placed no more. Readers of residency need ``lanes`` only; the rest is for a bridge that restores the rank.

    A reader that is loaded keeps what it has, so whatever a part restates must have been said by records before it;
    only counts of ``opaque`` may be higher, of ``veiled`` lower, than those last said. ``life`` is the one that goes
    on, ``owner`` who writes.
    """

    part: int
    last: bool
    entry: ModelEntry
    stride: int
    seq: int
    digest: bytes
    partial: bool
    suspended: bool
    uncertain: tuple[str, ...] = ()
    engine_version: str | None = None
    process: str | None = None
    groups: tuple[GroupSpec, ...] = ()
    heard: tuple[int | None, ...] = ()
    heard_gpu: tuple[int | None, ...] = ()
    scheme: Scheme | None = None
    unplaced: tuple[tuple[int | None, int, int], ...] = ()
    opaque: tuple[tuple[int | None, int, int], ...] = ()
    veiled: tuple[tuple[int | None, int, int], ...] = ()
    lanes: tuple[Held, ...] = ()
    parents: tuple[Run, ...] = ()
    ambiguous: bytes = b""
    weak: tuple[Run, ...] = ()


class Suspended(Lived, frozen=True, array_like=True, tag="suspended"):
    """Continuity is unknown; only Resumed or Opened ends it."""

    why: str


class Resumed(Lived, frozen=True, array_like=True, tag="resumed"):
    """Continuity is proven."""

    how: str


class Gap(Lived, frozen=True, array_like=True, tag="gap"):
    """Engine sequences ``first``..``last`` are lost to the log (``last`` -1: unknown). Unloads the rank under
    ``invalidate``, marks it uncertain under ``keep``.
    """

    first: int
    last: int
    cause: str
    policy: Literal["invalidate", "keep"]


class Heartbeat(Lived, frozen=True, array_like=True, tag="heartbeat"):
    """Complete through ``seq``; follows only a live batch without changes or an answered probe.

    ``alive``: only the engine's process was seen, nothing says that no batch was lost: not gone, but not exact either.
    """

    seq: int
    digest: bytes
    uncertain: tuple[str, ...] = ()
    alive: bool = False


class Closed(Lived, frozen=True, array_like=True, tag="closed"):
    """The rank is gone: drained, deregistered or replaced."""

    why: str


class Claim(Record, frozen=True, array_like=True, tag="claim"):
    """On ``kvledger.replicas``: who takes the rank over. Its own offset is the owner number (``owner`` is -1 here)."""

    bridge: str
    version: str


class Restoring(Record, frozen=True, array_like=True, tag="restoring"):
    """On ``kvledger.replicas``: the owner lives and is still restoring."""


class Pointer(Record, frozen=True, array_like=True, tag="pointer"):
    """On ``kvledger.replicas`` with key (rank, owner): where reading of the rank's partition may start.

    ``offset`` is where the newest ``Opened`` or first part of a complete checkpoint stands (-1: log start), ``fence``
    the own Fence, so that a reader who starts behind it knows whom it ended. Before that stands, a new owner inherits a
    pointer with the earlier owner's Fence (-1: none); it writes the pointer again when it does. Written only after what
    it names was acknowledged. ``partitions``: how many the event topic had (0: an older bridge did not say). Where
    ranks belong elsewhere since, neither offset is one of the partition where the rank is now.
    """

    fence: int
    offset: int
    partitions: int = 0


class Unreadable(Record, frozen=True, array_like=True, tag="unreadable"):
    """On ``kvledger.dead-letter``, with the key of the rank: an engine batch that could not be read.

    ``digest`` is the XXH3-128 of its ``size`` raw bytes; ``raw`` holds them only where the operator opted in.
    """

    seq: int
    reason: str
    size: int
    digest: bytes
    raw: bytes = b""


EventRecord = Fence | Opened | Events | Checkpoint | Suspended | Resumed | Gap | Heartbeat | Closed
ReplicaRecord = Claim | Restoring | Pointer
DeadLetter = Unreadable

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(EventRecord)
_replicas = msgspec.msgpack.Decoder(ReplicaRecord)
_dead_letters = msgspec.msgpack.Decoder(DeadLetter)


def encode(record: EventRecord | ReplicaRecord | DeadLetter) -> bytes:
    """The value bytes of a record."""
    return _encoder.encode(record)


def decode_event(raw: bytes | None) -> EventRecord:
    """Read a value of ``kvledger.events``; raises Poison for bytes that this version cannot read."""
    record: EventRecord = _decode(_events, raw)
    return record


def decode_replica(raw: bytes | None) -> ReplicaRecord:
    """Read a value of ``kvledger.replicas``; raises Poison."""
    record: ReplicaRecord = _decode(_replicas, raw)
    return record


def decode_dead_letter(raw: bytes | None) -> DeadLetter:
    """Read a value of ``kvledger.dead-letter``; raises Poison."""
    record: DeadLetter = _decode(_dead_letters, raw)
    return record


def _decode(decoder: msgspec.msgpack.Decoder[Any], raw: bytes | None) -> Any:
    if not raw:
        msg = "record without a value"
        raise Poison(msg)
    try:
        record = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        # msgspec's text names a path and a type, never a value
        msg = f"record of {len(raw)} bytes: {error}"
        raise Poison(msg) from error
    if record.schema > SCHEMA:
        msg = f"record schema {record.schema} is newer than {SCHEMA}: upgrade this reader first"
        raise Poison(msg)
    return record
