"""What a writer asks of the index: compare-and-set units per rank, and progress per partition (DESIGN §6).

Pure values, built by the fold and applied by ``writer.py`` (Redis) and ``memory.py`` alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.enginehash import Scheme
from kvledger_index.errors import InvalidInput
from kvledger_index.model import GROUP_NONE_LANE, MEDIA, GroupSpec, Medium

STEP_UNITS_MAX = 1_024
"""Units per step; a call has a fixed number of arguments and eight per unit."""

STEP_OPS_MAX = 512
"""Ops per step. A call holds Redis meanwhile, and a router waits 20 ms: 512 runs of 16 blocks took 10 ms on a busy
2-core machine, 512 runs that all leave their row's path 44 ms (``tests/benchmarks/index.py``). The caller splits steps
between units, and a unit that is larger into pieces (``Piece``).
"""

NONCE_BYTES = 16

SCRUB_KEYS_MAX = 10_000
"""Keys and side fields that one scrub may look at: about 20 ms of Redis, which is what a router waits at most."""

SCRUB_SECONDS_MAX = 0.020
"""Of Redis, for one scrub: the same bound in time."""


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
    scheme: Scheme | None = None
    expire_seconds: float | None = None


class Now(msgspec.Struct, frozen=True, array_like=True):
    """What moves with every batch of a rank: the stamp, the engine sequence it covers, unplaced hashes per lane.

    ``unplaced`` holds (lane, medium code, count) of hashes that are resident and have no key; ``opaque`` those of them
    that cannot be asked for by hash either, ``veiled`` those that are no part of a prompt without adapter, salt and
    media; a hash may be both. ``silent`` names lower tiers that never announced a removal in this life: (lane, medium
    code, ms in log time since their last store, as of this unit's last record). ``unproven_ms`` is the log time between
    the last record that says that the picture is complete and this unit's last record: where the latter only says that
    the engine lives, the rank is not gone, but its picture is that much older.
    ``underway`` says that some pieces of a larger unit are in the index and others are not (``piece_of``).
    """

    owner: int
    life_owner: int
    life_count: int
    n: int
    seq: int
    unplaced: tuple[tuple[int, int, int], ...] = ()
    opaque: tuple[tuple[int, int, int], ...] = ()
    silent: tuple[tuple[int, int, int], ...] = ()
    veiled: tuple[tuple[int, int, int], ...] = ()
    unproven_ms: int = 0
    underway: bool = False


UNDERWAY_MS = 1_000_000_000_000
"""``unproven_ms`` while a unit is under way, 31 years: readers that do not know ``underway`` call such a rank stale."""


class RankUnit(msgspec.Struct, frozen=True):
    """One atomic step of one rank: applied iff the stored stamp equals ``before``.

    A stored stamp at or above ``after`` makes the unit a duplicate (ignored); anything else refuses the whole call.
    A unit that leaves the stamp where it is may only unload (Drop).
    ``leaves`` takes the rank out of the catalogue; its stamp and state stay, so that nothing old revives it, and its
    next card brings it back. Such a unit drops the slots and has no card.
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
    leaves: bool = False


class Progress(msgspec.Struct, frozen=True):
    """How far a partition is applied.

    ``restart`` is the lowest first offset of anything not yet applied, ``read`` the next offset to read,
    ``target`` the log end at the last seek: the partition's ranks are stale until ``read >= target``.
    """

    topic_id: str
    restart: int
    read: int
    target: int


class Piece(NamedTuple):
    """Which piece of a unit that is larger than a step: ``number`` 0 begins an attempt, and ``token``, 16 unique bytes,
    names it. Any other is taken only right behind the one before of the same attempt, so two workers never mix theirs.
    """

    token: bytes
    number: int
    last: bool


class Step(msgspec.Struct, frozen=True):
    """One call: the units of one partition in log order, and its progress, all or nothing.

    ``restart_before`` and ``topic_id`` must equal what is stored, else the call is refused. ``at_end`` says that the
    worker stands at the log's end, which stamps ``alive``. ``broker_ms`` is the log's time as it is applied, at least:
    that of the newest record, later where the writer knows that time went on.
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
    piece: Piece | None = None
    """The step's only unit is a piece. All but the last leave stamp, state, card and the partition's progress alone."""


class Outcome(NamedTuple):
    """What a call did. ``refused``: nothing was changed; load what is stored and seek to its restart offset.

    A piece before the last counts neither as applied nor as a duplicate.
    """

    verdict: Literal["applied", "refused"]
    applied: int
    duplicates: int
    why: str


def unplaced(partition: int) -> str:
    """Why a step is refused of whose partition nothing is stored."""
    return f"partition {partition}: Redis holds nothing of it (emptied?), so it has to be placed anew"


def out_of_turn(rank: str, number: int) -> str:
    """Why a piece is refused that does not follow the one before of the same attempt."""
    return f"rank {rank}: piece {number} does not follow, another attempt at the unit began"


class Stored(NamedTuple):
    """What ``load`` found for one partition; ``progress`` None: nothing stored, rebuild."""

    progress: Progress | None
    ranks: dict[str, tuple[Stamp, bytes]]


class ScrubBudget(NamedTuple):
    """What one scrub may cost: keys and side fields looked at, and seconds of Redis; whichever is used up first.

    Both are looked at between pieces of some 64 rows or 256 side fields, so a call may exceed them by one piece.
    """

    keys: int = 4_000
    seconds: float = 0.002


SCRUB_DEFAULT = ScrubBudget()


class Scrubbed(NamedTuple):
    """What a scrub did: holders' entries and whole rows freed, keys and side fields looked at. ``slots`` are still to
    free; ``idle`` says that there was nothing to do, ``ended`` that every row was visited since the pass began.
    """

    entries: int
    rows: int
    looked: int
    slots: int
    idle: bool
    ended: bool


def check_step(step: Step) -> None:
    """Raise InvalidInput where a step breaks a bound stated above; every writer calls this first. O(ops)."""
    check_numbers(step.partition, step.restart_before, step.restart, step.read, step.broker_ms)
    if not step.restart_before <= step.restart <= step.read:
        offsets = (step.restart_before, step.restart, step.read)
        raise InvalidInput(f"restart before, restart and read {offsets} do not ascend")
    if len(step.nonce) != NONCE_BYTES:
        raise InvalidInput(f"nonce of {len(step.nonce)} bytes, {NONCE_BYTES} expected")
    if len(step.units) > STEP_UNITS_MAX:
        raise InvalidInput(f"step of {len(step.units)} units > {STEP_UNITS_MAX}: split it between units")
    ops = sum(len(unit.ops) for unit in step.units)
    if ops > STEP_OPS_MAX:
        units = len(step.units)
        raise InvalidInput(
            f"step of {units} units with {ops} ops > {STEP_OPS_MAX}: split it between units, or into pieces"
        )
    if step.piece is not None:
        _check_piece(step, step.piece)
    for unit in step.units:
        _check_unit(unit, step.partition)


def piece_of(step: Step, ops: tuple[Op, ...], number: int, token: bytes, nonce: bytes) -> Step:
    """A piece, but not the last, of the only unit of ``step``: some of its ops, in their order.

    From the first piece on readers see a moving part that has the stamp of the whole unit, so that whoever looked
    before it sees a move, and that is ``underway``, so that nobody who looks until the last calls the rank exact. A
    worker that is lost in between leaves it so; the next one begins again at the restart offset. That is as if nothing
    had been written: what ops do to a block depends on the last one that names it, and each is in the unit.
    """
    (unit,) = step.units
    now = msgspec.structs.replace(unit.now, underway=True, unproven_ms=UNDERWAY_MS)
    part = msgspec.structs.replace(unit, ops=ops, now=now, state=b"", card=None)
    return msgspec.structs.replace(
        step,
        units=(part,),
        restart=step.restart_before,
        read=step.restart_before,
        at_end=False,
        nonce=nonce,
        piece=Piece(token, number, last=False),
    )


def _check_piece(step: Step, piece: Piece) -> None:
    if len(step.units) != 1:
        raise InvalidInput(f"step of {len(step.units)} units is marked as a piece of one")
    if len(piece.token) != NONCE_BYTES:
        raise InvalidInput(f"token of {len(piece.token)} bytes, {NONCE_BYTES} expected")
    if not 0 <= piece.number < 1 << 32:
        raise InvalidInput(f"piece {piece.number} is outside 0..2^32-1")
    (unit,) = step.units
    if unit.after == unit.before or unit.leaves:
        raise InvalidInput(f"unit of {unit.rank} in pieces leaves the stamp or the catalogue")
    if unit.now.underway == piece.last:
        raise InvalidInput(f"piece {piece.number} of {unit.rank}: last {piece.last}, under way {unit.now.underway}")


def _check_unit(unit: RankUnit, partition: int) -> None:
    if "/" not in unit.rank:
        raise InvalidInput(f"rank {unit.rank!r} is not replica/rank")
    check_numbers(partition, *unit.before, *unit.after, unit.broker_ms)
    if unit.after < unit.before:
        raise InvalidInput(f"unit of {unit.rank}: stamp after {tuple(unit.after)} < before {tuple(unit.before)}")
    if unit.after == unit.before and any(not isinstance(op, Drop) for op in unit.ops):
        # readers tell by the stamp whether a rank's blocks changed; an unloading shows in the catalogue's version
        raise InvalidInput(f"unit of {unit.rank} changes blocks and leaves the stamp at {tuple(unit.after)}")
    if unit.leaves and (unit.card is not None or unit.ops != (Drop(),)):
        raise InvalidInput(f"unit of {unit.rank} leaves the catalogue and does more than dropping its slots")
    if unit.card is not None and (unit.card.model, unit.card.partition) != (unit.model, partition):
        have = (unit.card.model, unit.card.partition)
        raise InvalidInput(f"unit of {unit.rank}: card of {have}, unit of {(unit.model, partition)}")
    for op in unit.ops:
        if isinstance(op, Put):
            _check_put(op)
        elif isinstance(op, Clear) and op.medium not in MEDIA:
            raise InvalidInput(f"medium {op.medium!r} is none of {', '.join(MEDIA)}")


def _check_put(op: Put) -> None:
    count = len(op.keys)
    if not (count and op.position >= 0 and op.position + count <= SEGMENT_STRIDES):
        raise InvalidInput(f"keys at {op.position}..{op.position + count} are not in one segment 0..{SEGMENT_STRIDES}")
    if not 0 <= op.mask < 1 << count:
        raise InvalidInput(f"mask {op.mask:#x} names more than {count} keys")
    if not 0 <= op.lane <= GROUP_NONE_LANE:
        raise InvalidInput(f"lane {op.lane} is outside 0..{GROUP_NONE_LANE}")
    if op.medium not in MEDIA:
        raise InvalidInput(f"medium {op.medium!r} is none of {', '.join(MEDIA)}")
    if op.position == 0 and op.row != op.keys[0]:
        raise InvalidInput(f"row {op.row:016x} does not start with the key at its position 0, {op.keys[0]:016x}")
    check_keys((op.row, op.parent, *op.keys))


def check_budget(budget: ScrubBudget) -> None:
    """Raise InvalidInput for a budget that would do nothing, or hold Redis for longer than a router waits."""
    if not 1 <= budget.keys <= SCRUB_KEYS_MAX:
        raise InvalidInput(f"scrub of {budget.keys} keys is outside 1..{SCRUB_KEYS_MAX}")
    if not 0 < budget.seconds <= SCRUB_SECONDS_MAX:
        raise InvalidInput(f"scrub of {budget.seconds} s is outside 0..{SCRUB_SECONDS_MAX}")


def check_numbers(partition: int, *numbers: int) -> None:
    """Raise InvalidInput for a partition outside 0..2^32-1, or an offset, stamp or time outside 64 bits, signed."""
    if not 0 <= partition < 1 << 32:
        raise InvalidInput(f"partition {partition} is outside 0..2^32-1")
    for number in numbers:
        if not -(1 << 63) <= number < 1 << 63:
            raise InvalidInput(f"number {number} is outside -2^63..2^63-1")


def check_keys(keys: Sequence[int]) -> None:
    """Raise InvalidInput for a block key that is none."""
    if keys and not (min(keys) >= 0 and max(keys) < 1 << 64):
        raise InvalidInput(f"key {min(keys)} or {max(keys)} is outside 0..2^64-1")
