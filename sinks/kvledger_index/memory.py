"""The index in one process: plain dicts with the semantics of ``writer.py`` and ``reader.py``, both ends in one object.

For tests, and for whoever wants to try a fold or a router without a Redis. Nothing is shared between processes and
nothing outlives the object.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.errors import InvalidInput
from kvledger_index.model import GROUP_NONE_LANE, MEDIA
from kvledger_index.units import (
    NEVER,
    NONCE_BYTES,
    SCRUB_DEFAULT,
    Bind,
    Card,
    Clear,
    Drop,
    Now,
    Outcome,
    Piece,
    Progress,
    Put,
    RankUnit,
    Scrubbed,
    ScrubBudget,
    Stamp,
    Step,
    Stored,
    check_budget,
    check_keys,
    check_numbers,
    check_step,
    out_of_turn,
    unplaced,
)
from kvledger_index.views import Catalogue, Claimed, PartitionView, Pulse, RankView, Reading, Segment

_NO_SLOTS = (0, 0, 0, 0)
_Slots = tuple[int, int, int, int]


class _Partition(NamedTuple):
    """``log_ms`` is the newest log time applied, ``log_at_ms`` our clock at that moment."""

    progress: Progress
    alive_ms: int = 0
    log_ms: int = -1
    log_at_ms: int = 0

    def view(self) -> PartitionView:
        """What a reader needs of it."""
        return PartitionView(self.progress.restart, self.progress.read, self.progress.target, self.alive_ms)


class _Rank(NamedTuple):
    stamp: Stamp
    slots: _Slots
    model: str
    state: bytes


class _Store:
    """All that a Redis would hold; a deep copy of it is a snapshot."""

    def __init__(self) -> None:
        self.partitions: dict[int, _Partition] = {}
        self.ranks: dict[int, dict[str, _Rank]] = {}
        self.cards: dict[str, dict[str, Card]] = {}
        self.versions: dict[str, bytes] = {}
        self.now: dict[str, dict[str, tuple[int, Now]]] = {}
        self.units: dict[int, tuple[bytes, int]] = {}
        """partition -> (token, number) of the piece that is due"""
        self.slot_last = 0
        self.holders: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """(row, key) -> {(slot, lane)}"""
        self.held: dict[int, set[tuple[int, int, int]]] = {}
        """slot -> {(lane, row, key)}: what to forget when the slot dies"""


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryIndex:
    """Both protocols of ``contract.py`` over dicts; ``clock_ms`` stands for Redis' clock."""

    def __init__(self, *, clock_ms: Callable[[], int] = _wall_ms) -> None:
        self._clock_ms = clock_ms
        self._store = _Store()

    def snapshot(self) -> _Store:
        """A copy of everything held, for :meth:`restore`; O(index)."""
        return copy.deepcopy(self._store)

    def restore(self, snapshot: _Store) -> None:
        """Roll back to a snapshot, as a Redis does that loses its newest writes; O(index)."""
        self._store = copy.deepcopy(snapshot)

    async def check(self) -> None:
        """Nothing can be set up wrongly here."""

    async def aclose(self) -> None:
        """Nothing to close."""

    async def load(self, partition: int) -> Stored:
        """Progress and every rank of a partition."""
        stored = self._store.partitions.get(partition)
        ranks = self._store.ranks.get(partition, {})
        known = {name: (rank.stamp, rank.state) for name, rank in ranks.items() if rank.stamp != NEVER}
        return Stored(stored.progress if stored else None, known)

    async def seek(self, partition: int, topic_id: str, restart: int, target: int, *, drop: bool) -> None:
        """Record a (re)seek; ``drop`` forgets the partition's ranks. O(ranks of the partition + their blocks)."""
        check_numbers(partition, restart, target)
        store = self._store
        have = store.partitions.get(partition)
        same = have is not None and have.progress.topic_id == topic_id
        if have is not None and not same and not drop:
            raise InvalidInput(
                f"partition {partition} stands in topic {have.progress.topic_id}, seek in {topic_id} must drop it"
            )
        store.units.pop(partition, None)  # whoever is in the middle of a unit has lost it, or begins again
        if drop:
            changed: set[str] = set()
            for name, rank in store.ranks.pop(partition, {}).items():
                self._forget(rank.slots)
                changed |= self._leave(partition, name, rank.model)
            self._renew(changed, secrets.token_bytes(NONCE_BYTES))
        progress = Progress(topic_id, restart, restart, target)
        store.partitions[partition] = have._replace(progress=progress) if have and same else _Partition(progress)

    async def apply(self, step: Step) -> Outcome:
        """Apply a step, all or nothing. O(ops + blocks of slots that die)."""
        check_step(step)
        due, why = self._due(step)
        if why:
            return Outcome("refused", 0, 0, why)
        if step.piece is not None and not step.piece.last:
            self._apply_piece(step, step.piece, due)
            return Outcome("applied", 0, 0, "")
        if due:
            self._store.units.pop(step.partition, None)
        changed: set[str] = set()
        for unit in due:
            changed |= self._apply_unit(step.partition, unit)
        self._renew(changed, step.nonce)
        old, now_ms = self._store.partitions[step.partition], self._clock_ms()
        newer = step.broker_ms > old.log_ms
        self._store.partitions[step.partition] = _Partition(
            Progress(step.topic_id, step.restart, step.read, old.progress.target),
            now_ms if step.at_end else old.alive_ms,
            step.broker_ms if newer else old.log_ms,
            now_ms if newer else old.log_at_ms,
        )
        return Outcome("applied", len(due), len(step.units) - len(due), "")

    async def scrub(self, budget: ScrubBudget = SCRUB_DEFAULT) -> Scrubbed:
        """Nothing to do: here the blocks of a slot go with it."""
        check_budget(budget)
        return Scrubbed(0, 0, 0, 0, idle=True, ended=False)

    def _due(self, step: Step) -> tuple[list[RankUnit], str]:
        """Units that follow what is stored; or why the call is refused."""
        stored = self._store.partitions.get(step.partition)
        if stored is None:
            return [], unplaced(step.partition)
        progress = stored.progress
        if (progress.topic_id, progress.restart) != (step.topic_id, step.restart_before):
            have, want = (progress.topic_id, progress.restart), (step.topic_id, step.restart_before)
            return [], f"partition {step.partition} stands at {have}, the step expects {want}"
        ranks = self._store.ranks.get(step.partition, {})
        stamps: dict[str, Stamp] = {}
        due: list[RankUnit] = []
        for unit in step.units:
            have_rank = ranks.get(unit.rank)
            stamp = stamps.get(unit.rank) or (have_rank.stamp if have_rank else NEVER)
            if stamp == unit.before:
                due.append(unit)
                stamps[unit.rank] = unit.after
            elif stamp < unit.after:
                return [], f"rank {unit.rank} stands at {tuple(stamp)}, the unit expects {tuple(unit.before)}"
        piece = step.piece
        if due and piece is not None and piece.number and self._store.units.get(step.partition) != piece[:2]:
            return [], out_of_turn(due[0].rank, piece.number)
        return due, ""

    def _apply_piece(self, step: Step, piece: Piece, due: Sequence[RankUnit]) -> None:
        """A piece before the last: the rank's stored stamp and state stay, and so does the partition's progress."""
        for unit in due:
            old = self._store.ranks.get(step.partition, {}).get(unit.rank)
            self._renew(self._apply_unit(step.partition, unit), step.nonce)
            ranks = self._store.ranks[step.partition]
            ranks[unit.rank] = ranks[unit.rank]._replace(stamp=unit.before, state=old.state if old else b"")
            self._store.units[step.partition] = (piece.token, piece.number + 1)

    def _apply_unit(self, partition: int, unit: RankUnit) -> set[str]:
        """Returns the models whose catalogue changed."""
        store, changed = self._store, set()
        ranks = store.ranks.setdefault(partition, {})
        old = ranks.get(unit.rank)
        slots = old.slots if old else _NO_SLOTS
        for op in unit.ops:
            if isinstance(op, Put):
                self._put(slots, op)
            else:
                slots = self._reslot(slots, op)
        if old and old.model != unit.model:
            changed |= self._leave(partition, unit.rank, old.model)
        ranks[unit.rank] = _Rank(unit.after, slots, unit.model, unit.state)
        if unit.leaves:
            return changed | self._leave(partition, unit.rank, unit.model)
        if unit.card is not None:
            store.cards.setdefault(unit.model, {})[unit.rank] = unit.card
        if unit.card is not None or slots != (old.slots if old else _NO_SLOTS):
            changed.add(unit.model)
        store.now.setdefault(unit.model, {})[unit.rank] = (unit.broker_ms, unit.now)
        return changed

    def _leave(self, partition: int, name: str, model: str) -> set[str]:
        """Take a rank out of a model, unless another partition holds it there (a topic of another partition count)."""
        cards = self._store.cards.get(model, {})
        if name in cards and cards[name].partition != partition:
            return set()
        cards.pop(name, None)
        self._store.now.get(model, {}).pop(name, None)
        return {model}

    def _reslot(self, slots: _Slots, op: Bind | Clear | Drop) -> _Slots:
        match op:
            case Bind():
                self._forget(slots)
                return (self._slot(), self._slot(), self._slot(), self._slot())
            case Drop():
                self._forget(slots)
                return _NO_SLOTS
            case Clear():
                medium = MEDIA.index(op.medium)
                if not slots[medium]:
                    return slots
                self._forget((slots[medium],))
                gpu, cpu, storage, other = (self._slot() if m == medium else slot for m, slot in enumerate(slots))
                return (gpu, cpu, storage, other)

    def _slot(self) -> int:
        self._store.slot_last += 1
        return self._store.slot_last

    def _put(self, slots: _Slots, op: Put) -> None:
        slot = slots[MEDIA.index(op.medium)]
        if not slot:
            return
        held = self._store.held.setdefault(slot, set())
        for j, key in enumerate(op.keys):
            if not op.mask >> j & 1:
                continue
            holders = self._store.holders.setdefault((op.row, key), set())
            if op.add:
                holders.add((slot, op.lane))
                held.add((op.lane, op.row, key))
            else:
                holders.discard((slot, op.lane))
                held.discard((op.lane, op.row, key))
                if not holders:
                    del self._store.holders[op.row, key]

    def _forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            for lane, row, key in self._store.held.pop(slot, ()):
                holders = self._store.holders[row, key]
                holders.discard((slot, lane))
                if not holders:
                    del self._store.holders[row, key]

    def _renew(self, models: set[str], nonce: bytes) -> None:
        for model in models:
            if self._store.cards.get(model):
                self._store.versions[model] = nonce
            else:
                self._store.cards.pop(model, None)
                self._store.versions.pop(model, None)
                self._store.now.pop(model, None)

    async def models(self) -> list[str]:
        """Names of the models that have a catalogue."""
        return sorted(self._store.cards)

    async def catalogue(self, model: str) -> Catalogue:
        """All ranks of a model."""
        ranks = {}
        for name, card in self._store.cards.get(model, {}).items():
            ranks[name] = RankView(card, self._store.ranks[card.partition][name].slots)
        return Catalogue(self._store.versions.get(model, b""), ranks)

    async def partitions(self) -> dict[int, PartitionView]:
        """Progress of every partition that was ever placed."""
        return {number: stored.view() for number, stored in self._store.partitions.items()}

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        """Holders of a prompt's keys and of engine hashes, all from one moment. O((keys + hashes) x holders)."""
        check_keys(keys)
        check_keys(hashes)
        partitions: dict[int, PartitionView] = {}
        pulses: dict[str, Pulse] = {}
        now = self._store.now.get(model, {})
        for name, view in catalogue.ranks.items():
            stored = self._store.partitions.get(view.card.partition)
            if stored is None:
                continue
            partitions[view.card.partition] = stored.view()
            if name in now:
                broker_ms, moving = now[name]
                pulses[name] = Pulse(moving, stored.log_at_ms - max(0, stored.log_ms - broker_ms))
        segments = [self._segment(keys[at : at + SEGMENT_STRIDES]) for at in range(0, len(keys), SEGMENT_STRIDES)]
        singles = tuple(self._segment((name,)) for name in hashes)
        version = self._store.versions.get(model, b"")
        return Reading(version, self._clock_ms(), pulses, partitions, segments, frozenset(), singles=singles)

    def _segment(self, keys: Sequence[int]) -> Segment:
        masks: dict[tuple[int, int], int] = {}
        for position, key in enumerate(keys):
            for holder in self._store.holders.get((keys[0], key), ()):
                masks[holder] = masks.get(holder, 0) | 1 << position
        return Segment(tuple((slot, lane, mask) for (slot, lane), mask in masks.items()))

    async def dump(self, model: str | None = None, rank: str | None = None) -> AsyncIterator[Claimed]:
        """Every block claimed by a live slot."""
        claims = [
            Claimed(name, None if lane == GROUP_NONE_LANE else lane, medium, key)
            for each, cards in self._store.cards.items()
            for name, card in cards.items()
            if model in {None, each} and rank in {None, name}
            for medium, slot in zip(MEDIA, self._store.ranks[card.partition][name].slots, strict=True)
            for lane, _, key in self._store.held.get(slot, ())
        ]
        for claim in claims:
            yield claim
