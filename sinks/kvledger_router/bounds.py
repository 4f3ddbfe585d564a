"""The longest hit that is still possible where some of what a rank holds is not known by position. Pure.

A lane with c hashes that may be any block of the prompt holds at most c blocks beyond those that are known. A hit of L
tokens needs certain blocks of every group (ENGINE §5); where a group lacks more than its c of them, L is impossible.
That is a necessary condition, so the longest length that meets it is never below the truth:

    full family     every block of [0, L), and where L ends inside a block, an entry of that block at or behind L
    sliding window  the min(tail, L / b) blocks that end at L; EAGLE needs one more, which is left out here
    Mamba           the state at L
    chunked         every block from the start of L's chunk to L
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvledger_index.model import SLIDING_KINDS
from kvledger_router.hits import MAMBA, GroupSet, HitRule, Resident, block_ends, hit, tail_blocks

STEPS_MAX = 1_024
"""Lengths that are tried one by one, from the longest down; where none of them can be ruled in, the next one stands as
the bound, which is then only looser. Full attention, of which every prefix counts, is bisected instead."""


class _Lane(NamedTuple):
    """One group as the bound sees it: bits over strides and over its blocks, and how many more it may hold."""

    set: GroupSet
    points: int
    blocks: int
    spare: int


def longest(rule: HitRule, tokens: int, resident: Resident, spare: Mapping[int | None, int]) -> int | None:
    """An upper bound of the hit over every residency that adds at most ``spare`` entries to each group's.

    Equals :func:`hit` where ``spare`` is empty; None where the rule cannot be applied.
    O(words of a group's bits x lengths tried).
    """
    strides = tokens // rule.stride
    every = (1 << strides) - 1
    most = hit(rule, tokens, {**resident, **{group: every for group, count in spare.items() if count}})
    if not most or not any(spare.values()):
        return most
    lanes = [
        _Lane(s, bits, block_ends(bits, strides, s.block // rule.stride), spare.get(group, 0))
        for s in rule.sets
        for group in s.groups
        for bits in (resident.get(group, 0) & every,)
    ]
    return _longest(rule, lanes, most)


def _longest(rule: HitRule, lanes: list[_Lane], most: int) -> int:
    """The longest of ``most``, ``most`` - A, … that no lane rules out."""
    full = [lane for lane in lanes if lane.set.full]
    others = [lane for lane in lanes if not lane.set.full]
    low, high = 0, -(-most // rule.alignment)  # in steps below ``most``; ``high`` is always possible: nothing
    while low < high:
        middle = (low + high) // 2
        if _possible(rule, full, most - middle * rule.alignment):
            high = middle
        else:
            low = middle + 1
    length = max(most - low * rule.alignment, 0)
    for _ in range(STEPS_MAX):
        if length <= 0 or _possible(rule, others, length):
            break
        length -= rule.alignment
    return max(length, 0)


def _possible(rule: HitRule, lanes: list[_Lane], length: int) -> bool:
    return all(_lacking(rule, lane, length) <= lane.spare for lane in lanes)


def _lacking(rule: HitRule, lane: _Lane, length: int) -> int:
    """How many entries a hit of ``length`` tokens needs at least of what this lane is not known to hold."""
    s, end = lane.set, length // lane.set.block
    inside = length % s.block
    if length <= 0:
        return 0
    if s.full:
        behind = lane.points >> length // rule.stride - 1 & (1 << (s.block - inside) // rule.stride + 1) - 1
        return _zeros(lane.blocks, 0, end) + (inside > 0 and not behind)
    if s.kind == MAMBA and rule.splits(s.block):
        return not lane.points >> length // rule.stride - 1 & 1
    # inside a block no hit of the other kinds ends: nothing is said of such a length
    return 0 if inside else _zeros(lane.blocks, _first_needed(s, length), end)


def _first_needed(s: GroupSet, length: int) -> int:
    """The first block that a hit of ``length`` needs of a set that looks back only so far."""
    end = length // s.block
    if s.kind in SLIDING_KINDS:
        return max(end - tail_blocks(s, drop=False), 0)
    if s.kind == MAMBA:
        return end - 1
    return end if s.chunk % s.block else length // s.chunk * s.chunk // s.block


def _zeros(bits: int, start: int, end: int) -> int:
    """How many of the bits start..end-1 are not set."""
    span = end - start
    return span - (bits >> start & (1 << span) - 1).bit_count()
