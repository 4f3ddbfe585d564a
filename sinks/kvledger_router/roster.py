"""A catalogue made ready for questions: one seat per rank, its hit rule compiled, its slots in one table. Pure.

Built once per catalogue version, so that an answer costs lookups only. O(ranks).
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from kvledger_index.model import STRIDE_TOKENS_DEFAULT, lane_code
from kvledger_index.units import Card
from kvledger_index.views import Catalogue
from kvledger_router.hits import GroupSet, HitRule, compile_rule

STRIDES_MAX = 4
"""Strides that one answer looks up: each costs a round trip. Several show only while a model entry is being changed."""

GPU = 0
"""Code of the medium whose blocks count as a hit."""


class Seat(NamedTuple):
    """One rank of the catalogue.

    ``lanes`` are its groups with their lane codes. ``depth`` is the set whose blocks in lower tiers may extend a hit:
    full attention, or the only one; None where there is none, or where the rule has faults. ``hash_block``: tokens
    per engine hash, 0 where nobody said it; ``every``: entries of its groups end at multiples of so many tokens.
    """

    name: str
    replica: str
    rank: int
    card: Card
    rule: HitRule
    lanes: tuple[tuple[int | None, int], ...]
    depth: GroupSet | None
    hash_block: int
    every: int


class Roster(NamedTuple):
    """``slots`` maps a live slot to (seat number, medium code); ``strides`` the most frequent first."""

    catalogue: Catalogue
    seats: tuple[Seat, ...]
    slots: dict[int, tuple[int, int]]
    strides: tuple[int, ...]

    @property
    def version(self) -> bytes:
        """The catalogue's."""
        return self.catalogue.version

    def changed(self, later: Catalogue) -> frozenset[str]:
        """Ranks that a later catalogue shows otherwise, or not at all. O(ranks)."""
        return frozenset(name for name, view in self.catalogue.ranks.items() if later.ranks.get(name) != view)


def seat_all(catalogue: Catalogue) -> Roster:
    """Prepare every rank; a rank id is ``replica/rank``, and a replica's name has no slash."""
    seats: list[Seat] = []
    slots: dict[int, tuple[int, int]] = {}
    for name, view in sorted(catalogue.ranks.items()):
        slots.update({slot: (len(seats), medium) for medium, slot in enumerate(view.slots) if slot})
        seats.append(_seat(name, view.card))
    frequency: dict[int, int] = {}
    for seat in seats:
        frequency[seat.card.stride] = frequency.get(seat.card.stride, 0) + 1
    strides = sorted(frequency, key=lambda stride: (-frequency[stride], stride))
    # a catalogue without ranks is read with some stride, too: that is how its first rank is noticed
    return Roster(catalogue, tuple(seats), slots, tuple(strides[:STRIDES_MAX]) or (STRIDE_TOKENS_DEFAULT,))


def _seat(name: str, card: Card) -> Seat:
    replica, _, rank = name.rpartition("/")
    rule = compile_rule(
        card.groups,
        stride=card.stride,
        hash_block_size=card.hash_block_size,
        alignment=card.alignment,
        partial_hash_hits=card.partial_hash_hits,
    )
    lanes = tuple((g.group, lane_code(g.group)) for g in card.groups)
    depth = None if rule.faults else _depth(rule.sets)
    # as the bridge that found the scheme: the entry's, else what it was proven with; never guessed from the groups,
    # of which one may not have been heard yet
    hash_block = card.hash_block_size or (card.scheme.block if card.scheme is not None else None) or 0
    return Seat(name, replica, int(rank), card, rule, lanes, depth, hash_block, _every(rule, hash_block))


def _every(rule: HitRule, hash_block: int) -> int:
    """Where hits may end inside a block, entries end at hash blocks; else only at blocks."""
    blocks = [s.block for s in rule.sets if s.block]
    if rule.partial or not blocks or any(rule.splits(block) for block in blocks):
        return hash_block
    return gcd(*blocks)


def _depth(sets: tuple[GroupSet, ...]) -> GroupSet | None:
    """The set that lower tiers continue: sets of the full family stand first."""
    return sets[0] if sets and (sets[0].full or len(sets) == 1) else None
