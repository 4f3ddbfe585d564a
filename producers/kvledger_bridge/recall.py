"""A rank's log -> its ledger, without the engine and without tokens (DESIGN §4). Pure.

    records, from an Opened or a checkpoint's first part on ──> accept ──> copies, names, doubts ──> the ledger

Every physical copy is in the log, so counts come out exactly. What the log does not tell comes out on the side that
claims less: orphans stay unplaced as their tokens are gone, names that were never announced are known from checkpoints
only, and where only a count says which hashes are opaque or veiled, all are opaque, and none veiled unless all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import unpack
from typing import NamedTuple

from kvledger_bridge.blocks import Block
from kvledger_bridge.lanes import Lane
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.pace import at_once
from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import Applied, Dropped, Loading, Opening, RankState, accept
from kvledger_wire.records import ATTACHED, CLEARED, STORED, Change, Checkpoint, EventRecord, Held, Run


class Recalled(NamedTuple):
    """A rank as its log leaves it: what any reader knows, and the ledger behind it."""

    state: RankState
    ledger: Ledger


class _Contradiction(Exception):
    """The log says something that cannot follow from what it said before."""


class Recall:
    """Reads one rank's records in order. ``why`` says what would keep the rank from being restored; empty: nothing.

    ``entry`` is the operator's model entry as it is now: a life under another one is not taken up again.
    """

    def __init__(self, entry: ModelEntry, *, ledger: Callable[[ModelEntry], Ledger] = Ledger) -> None:
        self.state = RankState()
        self.records = 0
        self._entry = entry
        self._new_ledger = ledger
        self._ledger = ledger(entry)
        self._why = ""
        self._digests = False
        self._resident: dict[int, Block] = {}  # by key: a block whose name went to another one is still held

    def take(self, group: int | str | None, record: EventRecord | None, offset: int) -> None:
        """The next record of the rank, None where it cannot be read. O(changes)."""
        self.records += 1
        due = self.state.load
        effects = accept(self.state, group, record, offset)
        added = isinstance(record, Checkpoint) and 0 < due == record.part and self.state.n == record.n
        for effect in effects:
            match effect:
                case Opening() | Loading():
                    self._begin()
                    added = isinstance(record, Checkpoint)
                case Dropped():
                    self._begin()
                    added = False
                case Applied(group=of, changes=changes) if not added:
                    self._follow(of, changes)
        if added and isinstance(record, Checkpoint):
            self._restate(record)

    @property
    def why(self) -> str:
        """Why the rank cannot be restored as it stands; empty: it can."""
        state = self.state
        if not state.loaded:
            return "no whole life is in the log"
        if state.closed:
            return "the rank was closed"
        if state.entry != self._entry:
            return "the model entry is another one than that of the log"
        return self._why

    def finish(self) -> Recalled:
        """The rank after the last record; only where ``why`` is empty. O(resident hashes)."""
        state, ledger = self.state, self._ledger
        for group in state.heard_gpu:
            ledger.recall_lane(group, 0)
        for lane in ledger.lanes:
            if len(lane.opaque) < _count(state.opaque, lane):
                lane.opaque = set(lane.unplaced)  # which of them, nothing tells
            if lane.unplaced and len(lane.unplaced) == _count(state.veiled, lane):
                lane.veiled = set(lane.unplaced)
            for name in lane.veiled:
                ledger.veil.add(name)  # for their children
        ledger.recall_facts(state.groups, state.uncertain)
        ledger.lineage.chains.learn(state.groups, state.scheme, digests=self._digests)
        at_once(ledger.lineage.trim())
        return Recalled(state, ledger)

    # -- effects --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._ledger, self._why, self._digests = self._new_ledger(self._entry), "", False
        self._resident = {}

    def _follow(self, group: int | str | None, changes: Iterable[Change]) -> None:
        if self._why:
            return  # until a life begins, or a checkpoint
        try:
            for change in changes:
                self._change(group, change)
        except _Contradiction as error:
            self._why = str(error)
        at_once(self._ledger.lineage.trim())

    def _restate(self, part: Checkpoint) -> None:
        """A part of a checkpoint that is being loaded."""
        if self._why:
            return
        lineage = self._ledger.lineage
        names = lineage.names
        try:
            for held in part.lanes:
                self._hold(held)
            for run in part.parents:
                for _, block in self._named(run, gpu=True, stored=True):
                    if not block.refs:
                        names.idle.move_to_end(block, last=False)  # the newest came first
            for run in part.weak:
                for _ in self._named(run, gpu=False, stored=True):
                    pass
        except _Contradiction as error:
            self._why = str(error)
        names.ambiguous.update(dict.fromkeys(_hashes(part.ambiguous)))

    def _hold(self, held: Held) -> None:
        change = held.change
        lane = self._ledger.recall_lane(held.group, change.medium)
        copies = iter(unpack(f">{len(held.copies) // 2}H", held.copies)) if held.copies else None
        for run in change.runs:
            for _, block in self._named(run, gpu=lane.gpu, stored=True):
                self._add(lane, block, 1 if copies is None else next(copies))
        for place, name in enumerate(_hashes(change.unplaced)):
            self._loosen(lane, name, 1 if copies is None else next(copies))
            if _bit(held.opaque, place):
                lane.opaque.add(name)
            if _bit(held.veiled, place):
                lane.veiled.add(name)

    def _change(self, group: int | str | None, change: Change) -> None:
        if change.op == CLEARED:
            for lane in self._ledger.lanes:
                if lane.code == change.medium:
                    self._clear(lane)
            return
        if isinstance(group, str):
            msg = f"changes of group {group} that are no clear"
            raise _Contradiction(msg)
        lane = self._ledger.recall_lane(group, change.medium)
        attached = change.origin == ATTACHED
        for run in change.runs:
            for name, block in self._named(run, gpu=lane.gpu, stored=change.op == STORED):
                if change.op == STORED:
                    self._add(lane, block, self._tighten(lane, name) if attached else 1)
                elif attached:
                    self._retract(lane, name, block)
                else:
                    self._remove(lane, block)
        for name in _hashes(change.unplaced):
            if change.op == STORED:
                self._doubt(lane, name)
                self._loosen(lane, name, 1)
            else:
                self._remove_unplaced(lane, name)

    # -- names ----------------------------------------------------------------------------------------------------

    def _named(self, run: Run, *, gpu: bool, stored: bool) -> Iterator[tuple[int, Block]]:
        """The run's hashes with their blocks; those of what is ``stored`` are learnt."""
        if run.segment < 0:
            msg = "it was written by a bridge that did not tell where on its path a block stands"
            raise _Contradiction(msg)
        count = len(run.keys) // 8
        before = (int.from_bytes(run.parent, "big"), *unpack(f">{count}Q", run.keys))
        row = int.from_bytes(run.row, "big")
        names = _hashes(run.hashes)
        size = len(run.digests) // max(1, len(names))
        first = SEGMENT_STRIDES * run.segment + run.position
        at = 0
        for place in range(count):
            if not run.blocks >> place & 1:
                continue
            name, key = names[at], before[place + 1]
            block = self._resident.get(key)
            if stored:
                made = block or Block(name, key, row, before[place], first + place + 1)
                block = self._ledger.lineage.learn(name, made, gpu=gpu)
                digest = run.digests[at * size : (at + 1) * size]
                if any(digest):
                    block.digest = digest
                    self._digests = True
            elif block is None:
                msg = "a block was removed that was not there"
                raise _Contradiction(msg)
            at += 1
            yield name, block

    def _doubt(self, lane: Lane, name: int) -> None:
        """A hash was stored without a key: where one is remembered, it was seen under two, or forgotten."""
        lineage = self._ledger.lineage
        if lineage.find(name, gpu=lane.gpu) is not None:
            lineage.unlearn(name)
            lineage.names.ambiguous[name] = None

    # -- copies ---------------------------------------------------------------------------------------------------

    @property
    def _counted(self) -> bool:
        return self._entry.copies == "counted"

    def _add(self, lane: Lane, block: Block, copies: int) -> None:
        have = lane.copies.get(block)
        if have is None:
            lane.copies[block] = copies
            self._resident[block.key] = block
            self._ledger.lineage.retain(block)
        elif self._counted:
            lane.copies[block] = have + copies

    def _remove(self, lane: Lane, block: Block) -> None:
        have = lane.copies.get(block)
        if have is None:
            msg = "a block was removed that was not there"
            raise _Contradiction(msg)
        if self._counted and have > 1:
            lane.copies[block] = have - 1
        else:
            del lane.copies[block]
            self._release(block)

    def _remove_unplaced(self, lane: Lane, name: int) -> None:
        have = lane.unplaced.get(name, 0)
        if self._counted and have > 1:
            lane.unplaced[name] = have - 1
        else:
            self._tighten(lane, name)

    def _retract(self, lane: Lane, name: int, block: Block) -> None:
        """A hash lost its key: seen under two, or a weak name gave way to a strong one, which tells by itself."""
        copies = lane.copies.pop(block, None)
        if copies is None:
            msg = "a block lost its name that was not there"
            raise _Contradiction(msg)
        self._release(block)
        lineage = self._ledger.lineage
        known = lineage.find(name, gpu=lane.gpu)
        if known is None or known is block:
            lineage.unlearn(name)
            lineage.names.ambiguous[name] = None
        self._loosen(lane, name, copies)

    def _release(self, block: Block) -> None:
        self._ledger.lineage.release(block)
        if not block.refs:
            self._resident.pop(block.key, None)

    def _loosen(self, lane: Lane, name: int, copies: int) -> None:
        have = lane.unplaced.get(name)
        if have is None:
            lane.unplaced[name] = copies
            self._ledger.lineage.loosen(name)
        elif self._counted:
            lane.unplaced[name] = have + copies

    def _tighten(self, lane: Lane, name: int) -> int:
        """All copies of a hash without a key, which leave the lane."""
        copies = lane.unplaced.pop(name, None)
        if copies is None:
            msg = "a hash without a key left that was not there"
            raise _Contradiction(msg)
        lane.opaque.discard(name)
        lane.veiled.discard(name)
        self._ledger.lineage.tighten(name)
        return copies

    def _clear(self, lane: Lane) -> None:
        for block in lane.copies:
            self._release(block)
        for name in lane.unplaced:
            self._ledger.lineage.tighten(name)
        lane.copies.clear()
        lane.unplaced.clear()
        lane.opaque.clear()
        lane.veiled.clear()


def _count(counts: Iterable[tuple[int | None, int, int]], lane: Lane) -> int:
    return sum(count for group, code, count in counts if (group, code) == (lane.group, lane.code))


def _hashes(raw: bytes) -> tuple[int, ...]:
    return unpack(f">{len(raw) // 8}Q", raw)


def _bit(bitmap: bytes, place: int) -> bool:
    return place // 8 < len(bitmap) and bool(bitmap[place // 8] >> place % 8 & 1)
