"""From the segments of a reading to residency bits per rank, tier and lane, and how far lower tiers continue. Pure.

Bits are Python ints over the strides of the prompt, as in ``hits``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from struct import Struct

from kvledger_index.model import GROUP_NONE_LANE, lane_code
from kvledger_index.views import Segment
from kvledger_router.hits import block_ends
from kvledger_router.roster import GPU, Roster, Seat

Lanes = dict[int, int]
"""Bits by lane code."""


class Held:
    """What one rank holds of the prompt: ``gpu`` and, over all lower tiers together, ``lower``, by lane code."""

    __slots__ = ("gpu", "lower")

    def __init__(self) -> None:
        self.gpu: Lanes = {}
        self.lower: Lanes = {}


def gather(segments: Sequence[Segment], roster: Roster) -> dict[int, Held]:
    """What every seat holds, by seat number; seats that hold nothing are left out, and so are dead slots.

    O(holders of segments that differ from the one before): a run of segments with equal holders is one step.
    """
    # masks per holder and segment in plain lists, packed once: several times quicker than shifting into one integer
    masks: dict[int, list[int]] = {}
    at = 0
    for holders, run in groupby(segments, key=_holders_of):
        count = sum(1 for _ in run)
        for slot, lane, mask in holders:
            who = slot << 8 | lane
            row = masks.get(who)
            if row is None:
                row = masks[who] = [0] * len(segments)
            if count == 1:
                row[at] = mask
            else:
                row[at : at + count] = [mask] * count
        at += count
    pack = Struct(f"<{len(segments)}H").pack
    found: dict[int, Held] = {}
    for who, row in masks.items():
        where = roster.slots.get(who >> 8)
        if where is None:
            continue
        held = found.get(where[0])
        if held is None:
            held = found[where[0]] = Held()
        tier, lane = held.gpu if where[1] == GPU else held.lower, who & 0xFF
        tier[lane] = tier.get(lane, 0) | int.from_bytes(pack(*row), "little")
    return found


def _holders_of(segment: Segment) -> tuple[tuple[int, int, int], ...]:
    return segment.holders


def extension(seat: Seat, lower: Mapping[int, int], tokens: int, hit_tokens: int) -> int:
    """Tokens right behind a hit that lower tiers continue without a hole, in whole blocks of the seat's ``depth``.

    A tier that names no group (a lane of its own) holds all groups of its chunks. Nothing here is ever exact: several
    tiers announce no removals.
    """
    if seat.depth is None or not lower:
        return 0
    stride, block = seat.rule.stride, seat.depth.block
    strides = tokens // stride
    every = (1 << strides) - 1
    bits = every
    for group in seat.depth.groups:
        bits &= lower.get(lane_code(group), 0)
    # joint blocks of the groups, or those of a tier that names none
    blocks = block_ends(bits | lower.get(GROUP_NONE_LANE, 0) & every, strides, block // stride)
    covered = _spread(blocks, block // stride)
    behind = covered >> hit_tokens // stride
    run = (~behind & (behind + 1)).bit_length() - 1
    # the last token is always computed, and blocks are loaded whole
    end = min(hit_tokens + run * stride, max(tokens - 1, 0))
    return max(end - end % block - hit_tokens, 0)


def _spread(blocks: int, ratio: int) -> int:
    """Block bits as stride bits: every block covers ``ratio`` strides."""
    if ratio == 1:
        return blocks
    return int("".join(digit * ratio for digit in f"{blocks:b}"), 2)
