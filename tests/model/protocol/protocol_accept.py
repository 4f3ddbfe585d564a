"""What a record does to what a reader knows of its rank: the one function of fold and restoring bridge."""

from __future__ import annotations

import copy
from typing import Literal

import msgspec
from protocol_records import GROUP, NO_LIFE, Change, Life, Put, Record
from protocol_rules import Rules


class Wipe(msgspec.Struct, frozen=True, gc=False):
    """The GPU is cleared; of one group only where clears are not cut out of their batch."""

    group: int | None


Effect = Literal["bind", "drop"] | Change | Put | Wipe

Stamp = tuple[int, Life, int]


class RankState(msgspec.Struct):
    """A reader's state of one rank. ``load`` is the next part of an unfinished load, 0 without one."""

    owner: int = -1
    life: Life = NO_LIFE
    n: int = -1
    loaded: bool = False
    load: int = 0
    seq: int = -1
    digest: int | None = None
    process: int | None = None
    partial: bool = False
    closed: bool = False
    suspended: bool = False
    ghost: int | None = None
    at: int = -1
    tail: tuple[Record, ...] = ()

    def stamp(self) -> Stamp:
        return (self.owner, self.life, self.n)

    def copied(self) -> RankState:
        return copy.copy(self)


def accept(rules: Rules, state: RankState, record: Record, offset: int) -> list[Effect]:
    """Take one record at ``offset``; changes ``state``, returns what is to be done with rows and slots."""
    if not record.readable:
        fresh = offset > state.at or not rules.unreadable_once
        return _unload(state) if rules.unreadable_unloads and fresh else []
    if record.owner < state.owner and rules.owners_fenced:
        return []
    out: list[Effect] = []
    if record.owner > state.owner or record.kind == "Fence":
        out = _new_owner(rules, state, record)
    if record.kind == "Fence":
        return out
    if record.kind == "Opened":
        return out + _open(rules, state, record, offset)
    return out + _lived(rules, state, record, offset)


def _unload(state: RankState) -> list[Effect]:
    state.tail = ()
    if not (state.loaded or state.load):
        return []
    state.loaded, state.load = False, 0
    return ["drop"]


def _new_owner(rules: Rules, state: RankState, record: Record) -> list[Effect]:
    out: list[Effect] = []
    if rules.fence_drops_tail:
        state.tail = ()
    if state.load:
        state.load = 0
        out.append("drop")
    if record.owner > state.owner and rules.fence_suspends:
        state.suspended = True  # also when the Fence itself was not read
    state.owner = max(record.owner, state.owner)
    return out


def _open(rules: Rules, state: RankState, record: Record, offset: int) -> list[Effect]:
    if record.life <= state.life:
        return []
    _restate(state, record, offset)
    state.n, state.loaded, state.load = 0, True, 0
    state.partial = record.partial and rules.opened_restates_partial
    state.suspended = False
    return ["bind"]


def _restate(state: RankState, record: Record, offset: int) -> None:
    state.life, state.n = record.life, record.n
    state.seq, state.digest, state.process, state.ghost = record.seq, record.digest, record.process, record.ghost
    state.closed, state.tail, state.at = False, (), offset


def _lived(rules: Rules, state: RankState, record: Record, offset: int) -> list[Effect]:
    due = state.n + len(state.tail) + 1
    if record.life < state.life:
        if not rules.older_life_unloads or offset <= state.at:
            return []
        hole = True
    elif record.life == state.life:
        if record.n < due:
            return []
        hole = record.n > due and rules.next_n
    else:
        hole = True
    if not hole and state.loaded:
        return _unit(rules, state, record, offset)
    return _unloaded(rules, state, record, offset, hole=hole)


def _unloaded(rules: Rules, state: RankState, record: Record, offset: int, *, hole: bool) -> list[Effect]:
    """A record that does not follow, or that meets a rank that is not loaded."""
    if record.kind == "Checkpoint" and record.part == 0:
        known = state.life == record.life or state.loaded or state.load
        if rules.checkpoint_restates_opened or known:
            return _begin_load(rules, state, record, offset)
    follows = state.load and record.life == state.life and (not hole or not rules.parts_consecutive)
    if follows and record.kind == "Checkpoint" and record.part == state.load:
        state.n, state.at, state.load = record.n, offset, record.part + 1
        if record.last:
            state.loaded, state.load = True, 0
        return list(record.puts)
    if state.load and not rules.parts_consecutive and record.kind != "Checkpoint":
        return _unit(rules, state, record, offset)
    if state.loaded or state.load:
        return _unload(state)
    if rules.loaded_by_whole:
        return []
    state.life, state.loaded, state.n, state.tail, state.ghost = record.life, True, record.n - 1, (), record.ghost
    return ["bind", *_unit(rules, state, record, offset)]


def _begin_load(rules: Rules, state: RankState, record: Record, offset: int) -> list[Effect]:
    _restate(state, record, offset)
    state.loaded, state.load = record.last, 0 if record.last else 1
    state.partial = record.partial and rules.checkpoint_restates_partial
    state.suspended = record.suspended and rules.checkpoint_restates_suspended
    return ["bind", *record.puts]


def _unit(rules: Rules, state: RankState, record: Record, offset: int) -> list[Effect]:
    unit: tuple[Record, ...] = (record,)
    if rules.whole_units:
        unit = (*state.tail, record)
        if not record.end:
            state.tail = unit
            return []
    state.tail = ()
    out: list[Effect] = []
    for each in unit:
        out += _take(rules, state, each)
    state.at = offset
    return out


def _take(rules: Rules, state: RankState, record: Record) -> list[Effect]:
    """One record of a whole unit."""
    out: list[Effect] = []
    match record.kind:
        case "Events":
            for change in record.changes:
                if change.op == "clear":
                    out.append(Wipe(None if rules.cut_at_clear else GROUP[change.lane]))
                    state.partial = state.partial and not rules.clear_ends_partial
                else:
                    out.append(change)
        case "Suspended":
            state.suspended = True
        case "Resumed":
            state.suspended = False
        case "Gap" if rules.gap_unloads:
            state.loaded, state.load = False, 0
            out.append("drop")
        case "Gap":
            state.partial = True
        case "Closed":
            state.closed = True
            out.append("drop")
        case _:
            pass
    if record.kind in {"Events", "Heartbeat", "Checkpoint"} and record.end:
        state.seq, state.digest, state.ghost = record.seq, record.digest, record.ghost
    state.n = record.n
    return out
