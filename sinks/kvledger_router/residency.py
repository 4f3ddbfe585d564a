"""From the segments of a reading to residency bits per rank, tier and lane, and how far lower tiers continue. Pure.

Bits are Python ints over the strides of the prompt, as in ``hits``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from struct import Struct

from kvledger_index.model import EXPIRE_SECONDS_DEFAULT, GROUP_NONE_LANE, lane_code
from kvledger_index.views import Pulse, Segment
from kvledger_router.hits import block_ends, hit
from kvledger_router.roster import GPU, Roster, Seat

Lanes = dict[int, int]
"""Bits by lane code."""

_ONE = ord("1")


class Held:
    """What one rank holds of the prompt: ``gpu`` by lane code, ``tiers`` by (medium code, lane code) of lower media."""

    __slots__ = ("gpu", "tiers")

    def __init__(self) -> None:
        self.gpu: Lanes = {}
        self.tiers: dict[tuple[int, int], int] = {}

    def add(self, medium: int, lane: int, bits: int) -> None:
        """Hold these strides, too."""
        if medium == GPU:
            self.gpu[lane] = self.gpu.get(lane, 0) | bits
        else:
            self.tiers[medium, lane] = self.tiers.get((medium, lane), 0) | bits


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
        held.add(where[1], who & 0xFF, int.from_bytes(pack(*row), "little"))
    return found


def gather_singles(
    found: dict[int, Held], singles: Sequence[Segment], owners: Mapping[int, tuple[int, int]], strides: int
) -> None:
    """Add what is held by engine hash: single j is the prefix of (j + 1) x ``strides`` strides.

    ``owners`` maps the slots that count to (seat number, medium code). O(hashes + their holders).
    """
    # bits as binary digits, the highest first: quicker than shifting into one integer per holder
    size = len(singles) * strides
    digits: dict[int, bytearray] = {}
    for j, single in enumerate(singles, start=1):
        for slot, lane, _ in single.holders:
            who = slot << 8 | lane
            row = digits.get(who)
            if row is None:
                row = digits[who] = bytearray(b"0") * size
            row[size - j * strides] = _ONE
    for who, row in digits.items():
        if who >> 8 in owners:
            seat, medium = owners[who >> 8]
            found.setdefault(seat, Held()).add(medium, who & 0xFF, int(row, 2))


def lower_tiers(held: Held, seat: Seat, pulse: Pulse | None, time_ms: int) -> Lanes:
    """What all lower tiers together hold by lane, without those that may have dropped it unsaid (ADR 5).

    A tier that never announced a removal is counted for so many seconds after its last store, by log time up to the
    rank's last record and by Redis' clock from there on.
    """
    lanes: Lanes = {}
    if not held.tiers or pulse is None:
        return lanes
    seconds = EXPIRE_SECONDS_DEFAULT if seat.card.expire_seconds is None else seat.card.expire_seconds
    since_heard_ms = max(0, time_ms - pulse.heard_ms)
    expired = {(medium, lane) for lane, medium, age_ms in pulse.now.silent if age_ms + since_heard_ms > seconds * 1000}
    for (medium, lane), bits in held.tiers.items():
        if (medium, lane) not in expired:
            lanes[lane] = lanes.get(lane, 0) | bits
    return lanes


def _holders_of(segment: Segment) -> tuple[tuple[int, int, int], ...]:
    return segment.holders


def extension(seat: Seat, gpu: Lanes, lower: Lanes, tokens: int, hit_tokens: int) -> int:
    """Tokens right behind a hit that lower tiers continue without a hole, in whole blocks of the seat's ``depth``.

    A tier that names no group (a lane of its own) holds all groups of its chunks. Other groups count where a tier
    holds any of their blocks of this prompt: what they need at the end must then be there, or on the GPU. Nothing here
    is ever exact: several tiers announce no removals.
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
    end -= end % block
    told = {group: lane for group, lane in seat.lanes if lower.get(lane) and group not in seat.depth.groups}
    if told and end > hit_tokens:
        bare = _spread(block_ends(lower.get(GROUP_NONE_LANE, 0) & every, strides, block // stride), block // stride)
        resident: dict[int | None, int] = dict.fromkeys((group for group, _ in seat.lanes), every)
        resident |= dict.fromkeys(seat.depth.groups, (1 << end // stride) - 1)
        resident |= {group: gpu.get(lane, 0) | lower[lane] | bare for group, lane in told.items()}
        end = hit(seat.rule, tokens, resident) or 0
    return max(end - hit_tokens, 0)


def _spread(blocks: int, ratio: int) -> int:
    """Block bits as stride bits: every block covers ``ratio`` strides."""
    if ratio == 1:
        return blocks
    return int("".join(digit * ratio for digit in f"{blocks:b}"), 2)
