"""The one accept function: which records of a rank count, and what they do (DESIGN §4, §5).

Bridge, fold and audit all read a rank's log through :func:`accept`, so they cannot disagree about it.
Pure: one rank's state and one record in, effects out; the state object is changed in place.

    record                        what counts
    ------                        -----------
    of a lower owner              nothing: the owner was fenced
    Fence of the owner or above   drops an unfinished unit or load; a higher owner suspends the rank
    Opened of a higher life       a new, empty, loaded life
    n = next                      joins the unit; a record with ``end`` applies the unit as a whole
    n at or below                 nothing: a duplicate
    n above, or unknown life      a hole: the rank is unloaded until the next Opened or complete checkpoint
    unreadable, above ``at``      the same: its key names the rank
    Checkpoint, in order          of a loaded rank: nothing but its number
    Checkpoint, part 0, else      a load begins: what the rank held is void, the part is taken in
    Checkpoint, the load's next   is added; with ``last`` the rank is loaded
    anything else in a load       ends it: unloaded

A bridge that restored a rank goes on in its life: the life names the earlier owner, the record the present one.
"""

from __future__ import annotations

import msgspec

from kvledger_index.enginehash import Scheme
from kvledger_index.model import MEDIA, GroupSpec, ModelEntry
from kvledger_wire.records import (
    ATTACHED,
    STORED,
    Change,
    Checkpoint,
    Closed,
    EventRecord,
    Events,
    Fence,
    Gap,
    Heartbeat,
    Held,
    Life,
    Lived,
    Opened,
    Resumed,
    Suspended,
)

NO_LIFE: Life = (-1, 0)

GPU = MEDIA.index("gpu")

UNIT_RECORDS_MAX = 4_096
"""Records of one unit: an engine batch is a record per group and cut, so thousands mean a writer that never ends one;
readers hold an unfinished unit in memory and re-read from its start."""


class Opening(msgspec.Struct, frozen=True):
    """Effect: a new, empty life."""

    record: Opened


class Loading(msgspec.Struct, frozen=True):
    """Effect: what was held is void; what this part and those after it hold comes as ``Applied``."""

    record: Checkpoint


class Applied(msgspec.Struct, frozen=True):
    """Effect: changes of one group took place."""

    group: int | str | None
    changes: tuple[Change, ...]


class Dropped(msgspec.Struct, frozen=True):
    """Effect: what was known of the rank is no longer claimed."""

    why: str


Effect = Opening | Loading | Applied | Dropped


class RankState(msgspec.Struct, omit_defaults=True):
    """Everything a reader knows of one rank; serialisable, so that a reader can go on where another stopped.

    ``at`` is the offset of the last record taken in, ``tail`` the records of a unit that has not ended, ``tail_from``
    the offset of the first of them. ``load`` is the part of a checkpoint that is due next, 0 where none is being read.
    ``unplaced``, ``opaque`` and ``veiled`` hold (group, medium code, count). ``heard`` names the groups that said
    anything in this life, ``heard_gpu`` those that said it about the GPU: only they have a part in a hit (offload
    events may carry no group beside GPU events that do). ``unlisted`` are the lanes (group, medium code) of which some
    change did not say which hashes became resident without a key: all that are unplaced there count as opaque, too.
    """

    owner: int = -1
    life: Life = NO_LIFE
    n: int = -1
    loaded: bool = False
    seq: int = -1
    digest: bytes = b""
    partial: bool = False
    closed: bool = False
    suspended: bool = False
    uncertain: tuple[str, ...] = ()
    entry: ModelEntry | None = None
    stride: int = 0
    engine_version: str | None = None
    process: str | None = None
    groups: tuple[GroupSpec, ...] = ()
    heard: tuple[int | None, ...] = ()
    heard_gpu: tuple[int | None, ...] = ()
    unplaced: tuple[tuple[int | None, int, int], ...] = ()
    opaque: tuple[tuple[int | None, int, int], ...] = ()
    veiled: tuple[tuple[int | None, int, int], ...] = ()
    scheme: Scheme | None = None
    unlisted: tuple[tuple[int | None, int], ...] = ()
    at: int = -1
    tail: tuple[tuple[int | str | None, Lived], ...] = ()
    tail_from: int = -1
    load: int = 0


def accept(state: RankState, group: int | str | None, record: EventRecord | None, offset: int) -> list[Effect]:
    """Take one record (None: unreadable) of this rank at ``offset``; ``group`` is the one its key names.

    Offsets of one rank must come in order; a re-read from earlier is safe. O(changes of the unit).
    """
    if record is None:
        return unload(state, offset, "unreadable record") if offset > state.at else []
    if record.owner < state.owner:
        return []
    effects: list[Effect] = []
    if record.owner > state.owner:
        effects = _end_load(state)
        _no_tail(state)
        if _is_void(state, record):
            state.life, state.n = NO_LIFE, -1
        state.suspended = True  # also when the Fence itself could not be read
        state.owner = record.owner
    if isinstance(record, Fence):
        _no_tail(state)
        if offset > state.at:  # read again it says nothing of the load that began after it
            effects += _end_load(state)
            state.at = offset
        return effects
    if isinstance(record, Opened):
        return _open(state, record, offset) if record.life > state.life else effects
    return effects + _lived(state, group, record, offset)


def unload(state: RankState, offset: int, why: str) -> list[Effect]:
    """Claim nothing of the rank until its next Opened or complete checkpoint; its owner, life and n stay.

    For a hole, and for a reader that met a record at ``offset`` which it cannot use although it is in order.
    """
    _no_tail(state)
    state.at = max(state.at, offset)
    if not (state.loaded or state.load):
        return []
    state.loaded, state.load, state.unplaced, state.opaque, state.veiled = False, 0, (), (), ()
    return [Dropped(why)]


def _end_load(state: RankState) -> list[Effect]:
    return unload(state, state.at, "fenced within a checkpoint") if state.load else []


def _is_void(state: RankState, record: EventRecord) -> bool:
    """Whether the known life means nothing to a higher owner, whose first record this is: nothing is held of it, or it
    was opened behind that owner's Fence, which was not read, as the owner restates one below it.
    """
    behind = isinstance(record, Checkpoint) and record.part == 0 and record.life < state.life
    return not state.loaded or behind


def _lived(state: RankState, group: int | str | None, record: Lived, offset: int) -> list[Effect]:
    due = state.n + len(state.tail) + 1
    if (record.life < state.life and offset <= state.at) or (record.life == state.life and record.n < due):
        return []  # read again, or written twice
    why = _hole(state, record, due)
    if isinstance(record, Checkpoint) and (why is not None or not state.loaded):
        return _load(state, record, offset, why)
    if why is None and state.load:
        why = f"part {state.load} of a checkpoint was due"
    if why is not None:
        return unload(state, offset, why)
    if not state.loaded:
        return []
    if not state.tail:
        state.tail_from = offset
    state.tail += ((group, record),)
    if isinstance(record, Events) and not record.end:
        return []
    state.at = max(state.at, offset)
    unit = state.tail
    _no_tail(state)
    effects: list[Effect] = []
    for of_group, each in unit:
        effects += _take(state, of_group, each)
        state.n = each.n
    return effects


def _hole(state: RankState, record: Lived, due: int) -> str | None:
    """Why this record does not follow what is known; None where it does."""
    if record.life < state.life:
        return "record of an older life"  # of an accepted owner, read for the first time: what was between is unknown
    if record.life > state.life:
        return "record of a life that was not opened"
    if record.n > due:
        return f"record {record.n} where {due} was due"
    if record.n == due and len(state.tail) >= UNIT_RECORDS_MAX:
        return f"unit of more than {UNIT_RECORDS_MAX} records"
    return None


def _open(state: RankState, record: Opened, offset: int) -> list[Effect]:
    _no_tail(state)
    state.life, state.n, state.loaded, state.load = record.life, 0, True, 0
    state.seq, state.digest = record.seq, record.digest
    state.partial, state.closed, state.suspended = record.partial, False, False
    state.uncertain, state.groups, state.scheme = (), (), None
    state.heard, state.heard_gpu = (), ()
    state.unplaced, state.opaque, state.veiled, state.unlisted = (), (), (), ()
    state.entry, state.stride = record.entry, record.stride
    state.engine_version, state.process = record.engine_version, record.process
    state.at = max(state.at, offset)
    return [Opening(record)]


def _load(state: RankState, record: Checkpoint, offset: int, hole: str | None) -> list[Effect]:
    """A part of a checkpoint that is not news to a loaded rank but all there is: begin with it, or add it."""
    begins = record.part == 0 and record.life >= state.life  # numbers, and so stamps in an index, never go back
    if not begins and (hole is not None or record.part != state.load or not state.load):
        return unload(state, offset, hole or f"part {record.part} of a checkpoint where {state.load} was due")
    if any(not _is_whole(held) for held in record.lanes):
        return unload(state, offset, "part of a checkpoint that does not say what is held")
    effects: list[Effect] = []
    if begins:
        _no_tail(state)
        state.life, state.closed, state.unlisted = record.life, False, ()
        effects.append(Loading(record))
    state.n, state.at = record.n, max(state.at, offset)
    state.load, state.loaded = (0, True) if record.last else (record.part + 1, False)
    _restate(state, record)
    return effects + [Applied(held.group, (_resident(held),)) for held in record.lanes]


def _is_whole(held: Held) -> bool:
    """Whether this names residents only: what a part silently left out would be missing from exact answers."""
    change = held.change
    return change.op == STORED and change.origin != ATTACHED and all(run.effective == run.blocks for run in change.runs)


def _resident(held: Held) -> Change:
    """A lane's part as the change that brings it, with its unplaced hashes marked whether or not the writer did."""
    count = len(held.change.unplaced) // 8
    every = ((1 << count) - 1).to_bytes((count + 7) // 8, "little")
    return msgspec.structs.replace(held.change, unplaced_effective=every)


def _restate(state: RankState, record: Checkpoint) -> None:
    state.seq, state.digest = record.seq, record.digest
    state.partial, state.suspended, state.uncertain = record.partial, record.suspended, record.uncertain
    state.entry, state.stride = record.entry, record.stride
    state.engine_version, state.process = record.engine_version, record.process
    state.groups, state.heard, state.heard_gpu = record.groups, record.heard, record.heard_gpu
    state.scheme, state.unplaced = record.scheme, record.unplaced
    state.opaque, state.veiled = record.opaque, record.veiled


def _take(state: RankState, group: int | str | None, record: Lived) -> list[Effect]:
    """One record of a whole unit."""
    match record:
        case Events():
            state.seq, state.digest = record.seq, record.digest
            _learn(state, group, record)
            return [Applied(group, record.changes)] if record.changes else []
        case Heartbeat():
            if not record.alive:  # that one does not say through which batch the log is complete
                state.seq, state.digest = record.seq, record.digest
            state.uncertain = _join(state.uncertain, record.uncertain)
        case Checkpoint():  # all that it restates was said before
            state.seq, state.digest = record.seq, record.digest
        case Suspended():
            state.suspended = True
        case Resumed():
            state.suspended = False
        case Gap(policy="invalidate"):
            state.loaded, state.unplaced, state.opaque, state.veiled = False, (), (), ()
            return [Dropped(f"gap: {record.cause}")]
        case Gap():
            state.uncertain = _join(state.uncertain, (f"gap: {record.cause}",))
        case Closed():
            state.closed = True
            return [Dropped(f"closed: {record.why}")]
        case _:
            pass
    return []


def _learn(state: RankState, group: int | str | None, record: Events) -> None:
    state.uncertain = _join(state.uncertain, record.uncertain)
    if record.scheme is not None:
        state.scheme = record.scheme
    if isinstance(group, str):  # "*": clears only
        gone = {change.medium for change in record.changes}
        state.unplaced = tuple(u for u in state.unplaced if u[1] not in gone)
        state.opaque = tuple(u for u in state.opaque if u[1] not in gone)
        state.veiled = tuple(u for u in state.veiled if u[1] not in gone)
        state.unlisted = tuple(lane for lane in state.unlisted if lane[1] not in gone)
        if GPU in gone:
            state.partial = False  # an empty GPU cache has no unknown past
            state.uncertain = tuple(u for u in state.uncertain if not u.startswith("gap: "))
        return
    if record.spec is not None:
        state.groups = (*(g for g in state.groups if g.group != group), record.spec)
    if group not in state.heard:
        state.heard = (*state.heard, group)
    if group not in state.heard_gpu and (
        any(change.medium == GPU for change in record.changes) or any(medium == GPU for medium, _ in record.unplaced)
    ):
        state.heard_gpu = (*state.heard_gpu, group)
    state.unplaced = _recount(state.unplaced, group, record.unplaced)
    state.veiled = _recount(state.veiled, group, record.veiled)
    for change in record.changes:
        if change.unplaced and not change.unplaced_effective and (group, change.medium) not in state.unlisted:
            state.unlisted = (*state.unlisted, (group, change.medium))  # written by an older bridge
    opaque = record.opaque
    if state.unlisted:
        opaque = tuple(o for o in opaque if (group, o[0]) not in state.unlisted)
        opaque += tuple(u for u in record.unplaced if (group, u[0]) in state.unlisted)
    state.opaque = _recount(state.opaque, group, opaque)


def _recount(
    have: tuple[tuple[int | None, int, int], ...], group: int | None, counts: tuple[tuple[int, int], ...]
) -> tuple[tuple[int | None, int, int], ...]:
    """A record's counts are the group's whole truth: they replace what was known of it."""
    if not have and not counts:
        return ()
    rest = tuple(each for each in have if each[0] != group)
    return rest + tuple((group, medium, count) for medium, count in counts if count)


def _no_tail(state: RankState) -> None:
    state.tail, state.tail_from = (), -1


def _join(have: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return have + tuple(w for w in more if w not in have)
