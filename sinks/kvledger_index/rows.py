"""Rows as a reader sees them: which holders of which keys of a prompt (pure).

    row   STRING  byte: nodes L (0..16) + 128 if the row has a side; L x 8 bytes: keys of one path from position 0;
                  then entries of 7 bytes: slot u32le, lane u8, mask u16le (bit p: holds the block whose key is node p)
    side  HASH    key -> entries of 5 bytes: slot u32le, lane u8

A (block, holder) stands in one place: the row if the key is a node, else the side.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.errors import Corrupt

Holders = tuple[tuple[int, int, int], ...]
"""(slot, lane, mask)."""

SIDE_FLAG = 128
_ENTRY = Struct("<IBH")
_SIDE_ENTRY = Struct("<IB")


class RowView(NamedTuple):
    """``holders`` of the first ``shared`` keys of a path; the rest stands in the side, where there is one."""

    holders: Holders
    shared: int
    side: bool


NO_ROW = RowView((), 0, False)


def parse_row(raw: bytes, path: bytes, seen: dict[tuple[bytes, int], Holders]) -> RowView:
    """Match a row with the keys of a prompt's segment (``path``, 8 bytes each); raises Corrupt.

    ``seen`` is kept by the caller for the rows of one answer: neighbouring rows mostly carry identical entries, which
    are then parsed once. O(entries) the first time.
    """
    length, side, start = split_head(raw)
    shared = min(length, len(path) // 8)
    if raw[1 : 1 + 8 * shared] != path[: 8 * shared]:
        shared = next(p for p in range(shared) if raw[1 + 8 * p : 9 + 8 * p] != path[8 * p : 8 * p + 8])
    entries = raw[start:]
    # masks name nodes only, so a path that covers all nodes needs no mask of its own
    reach = SEGMENT_STRIDES if shared == length else shared
    holders = seen.get((entries, reach))
    if holders is None:
        if reach == SEGMENT_STRIDES:
            holders = tuple(_ENTRY.iter_unpack(entries))
        else:
            low = (1 << reach) - 1
            holders = tuple((slot, lane, mask & low) for slot, lane, mask in _ENTRY.iter_unpack(entries) if mask & low)
        seen[entries, reach] = holders
    return RowView(holders, shared, side)


def split_head(raw: bytes) -> tuple[int, bool, int]:
    """(nodes, has a side, where the entries start) of a row; raises Corrupt."""
    if raw:
        length = raw[0] & ~SIDE_FLAG
        start = 1 + 8 * length
        if length <= SEGMENT_STRIDES and len(raw) >= start and not (len(raw) - start) % _ENTRY.size:
            return length, raw[0] >= SIDE_FLAG, start
    raise Corrupt(f"row of {len(raw)} bytes is none of {raw[:1].hex() or 'no'} nodes")


def split_row(raw: bytes) -> tuple[list[int], bool, Holders]:
    """(keys of the path, has a side, all holders) of a row; raises Corrupt."""
    length, side, start = split_head(raw)
    nodes = [int.from_bytes(raw[1 + 8 * p : 9 + 8 * p], "big") for p in range(length)]
    return nodes, side, tuple(_ENTRY.iter_unpack(raw[start:]))


def parse_side(raw: bytes) -> list[tuple[int, int]]:
    """(slot, lane) of the holders of one key of a side; raises Corrupt."""
    if not raw or len(raw) % _SIDE_ENTRY.size:
        raise Corrupt(f"side field of {len(raw)} bytes is not a multiple of {_SIDE_ENTRY.size}")
    return list(_SIDE_ENTRY.iter_unpack(raw))


def merge(holders: Holders, more: dict[tuple[int, int], int]) -> Holders:
    """Add masks by (slot, lane), so that each holder is named once."""
    masks = {(slot, lane): mask for slot, lane, mask in holders}
    for who, mask in more.items():
        masks[who] = masks.get(who, 0) | mask
    return tuple((slot, lane, mask) for (slot, lane), mask in masks.items())
