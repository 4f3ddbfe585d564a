"""What is in Redis: per shard a complete index with its own slots, rows, progress and catalogue version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from protocol_accept import Effect, RankState, Stamp, Wipe
from protocol_parts import AsOf
from protocol_records import MEDIA, MEDIUM, Change, Put
from protocol_rules import Rules

NO_STAMP: Stamp = RankState().stamp()
VISIBLE = ("owner", "life", "loaded", "load", "partial", "closed", "suspended")
"""What a router sees of a rank: a change of any of it is a new version of the catalogue."""


class Card(msgspec.Struct):
    """A rank in the catalogue."""

    state: RankState
    slots: dict[str, int]


class Progress(msgspec.Struct):
    """Of one partition: where a worker starts again, how far was read, and the log's end when it last sought."""

    restart: int
    read: int
    target: int


class Unit(msgspec.Struct):
    """What a worker wants applied to a rank: only upon ``before``."""

    rank: int
    before: Stamp
    after: RankState
    effects: list[Effect]


class Shard:
    """One Redis. Every method is one atomic call."""

    def __init__(self, rules: Rules, number: int, shards: int, nonce: Callable[[], int]) -> None:
        self.rules, self.number, self.shards, self._nonce = rules, number, shards, nonce
        self.cards: dict[int, Card] = {}
        self.rows: dict[int, set[tuple[int, int]]] = {}
        self.progress: dict[int, Progress] = {}
        self.version = 0
        self.unsettled: set[int] = set()
        self._slots = 0

    def copied(self) -> Shard:
        """A snapshot that shares nothing."""
        twin = Shard(self.rules, self.number, self.shards, self._nonce)
        twin.cards = {rank: Card(card.state.copied(), dict(card.slots)) for rank, card in self.cards.items()}
        twin.rows = {slot: set(row) for slot, row in self.rows.items()}
        twin.progress = {p: Progress(x.restart, x.read, x.target) for p, x in self.progress.items()}
        twin.version, twin._slots = self.version, self._slots
        return twin

    def _renew(self) -> None:
        self.version = self._nonce() if self.rules.version_unique else self.version + 1

    def _slot(self) -> int:
        self._slots += 1
        return self._slots

    def drop_partition(self, ranks: Sequence[int], partition: int) -> None:
        """Everything of a partition goes: it is rebuilt."""
        for rank in ranks:
            self.cards.pop(rank, None)
        self.progress.pop(partition, None)
        self._renew()

    def apply(self, unit: Unit) -> None:
        """Rows, slots and state of one rank."""
        card = self.cards.get(unit.rank)
        before = card.state if card else None
        if card is None:
            card = self.cards[unit.rank] = Card(unit.after, {})
        for effect in unit.effects:
            self._do(card, effect)
        card.state = unit.after.copied()
        card.state.tail = ()
        shown = before is None or any(getattr(before, name) != getattr(unit.after, name) for name in VISIBLE)
        if shown or any(effect in ("bind", "drop") or isinstance(effect, Wipe) for effect in unit.effects):
            self._renew()

    def _do(self, card: Card, effect: Effect) -> None:
        match effect:
            case "drop":
                card.slots = {}
            case "bind":
                card.slots = {medium: self._slot() for medium in MEDIA}
            case Wipe():
                card.slots["gpu"] = self._slot()
            case Put() | Change() if card.slots and effect.hash % self.shards == self.number:
                row = self.rows.setdefault(card.slots[MEDIUM[effect.lane]], set())
                if isinstance(effect, Put) or (effect.effective and effect.op == "store"):
                    row.add((effect.lane, effect.hash))
                elif effect.effective:
                    row.discard((effect.lane, effect.hash))

    def as_of(self, rank: int) -> AsOf:
        """What the rank's rows cover."""
        state = self.cards[rank].state
        return AsOf(state.ghost, state.seq)

    def bits(self, rank: int, lane: int) -> set[int]:
        """What is claimed."""
        return self.row(self.cards[rank].slots.get(MEDIUM[lane], -1), lane)

    def row(self, slot: int, lane: int) -> set[int]:
        """What one slot's row holds of a lane."""
        return {block for of_lane, block in self.rows.get(slot, ()) if of_lane == lane}

    def status(self, rank: int, partition: int) -> str:
        """What an answer of this rank could be called."""
        card, progress = self.cards.get(rank), self.progress.get(partition)
        if card is None or progress is None or card.state.closed or not card.slots:
            return "unknown"
        if not card.state.loaded:
            return "loading"
        position = progress.read if self.rules.catch_up_by_read else progress.restart
        if position < progress.target and self.rules.catch_up:
            return "stale"
        if card.state.suspended:
            return "suspended"
        return "at_least" if card.state.partial else "exact"
