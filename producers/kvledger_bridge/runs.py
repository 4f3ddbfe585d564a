"""Blocks -> the runs and changes of the log (``kvledger_wire.records``): segments cut, adjacent blocks joined."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from kvledger_bridge.blocks import SEGMENT_MASK, Block, Span
from kvledger_bridge.decode import low64
from kvledger_bridge.pace import PIECE_BLOCKS, Work
from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.model import GroupSpec
from kvledger_wire.records import Change, Run

_PACK = [Struct(f">{count}Q") for count in range(SEGMENT_MASK + 2)]
_pack_one = _PACK[1].pack
_NO_PARENT = bytes(8)


class Part(NamedTuple):
    """What one segment of a span says in any lane; ``members`` pairs each block with its bit."""

    row: bytes
    position: int
    parent: bytes
    keys: bytes
    blocks: int
    hashes: bytes
    segment: int
    digests: bytes
    members: tuple[tuple[int, Block], ...]


def lay_out(span: Span, *, digests: bool = False, piece_blocks: int = PIECE_BLOCKS) -> Work[list[Part]]:
    """Cut a placed span at segment borders; ``span.before`` is the key before its first.

    Segments in which no block ends say nothing; keys after the last block end of a segment are left to the block that
    they belong to. ``digests``: tell the engine's whole hashes, too.
    """
    keys, per, start = span.keys, span.per, span.start
    packed = _big_endian(keys)
    parts: list[Part] = []
    open_at = 0  # first key of the open segment
    mask = 0
    members: list[tuple[int, Block]] = []
    names: list[int] = []

    def close() -> None:
        if not mask:
            return
        position = (start + open_at) & SEGMENT_MASK
        last = open_at + mask.bit_length()
        if position == 0:
            row, parent = packed[open_at * 8 : open_at * 8 + 8], _NO_PARENT
        else:
            row, parent = _pack_one(span.row), _pack_one(span.before)
        bytes_of_names = _PACK[len(names)].pack(*names)
        whole = digests_of([block for _, block in members], names) if digests else b""
        keys_here = packed[open_at * 8 : last * 8]
        segment = (start + open_at) // SEGMENT_STRIDES
        parts.append(Part(row, position, parent, keys_here, mask, bytes_of_names, segment, whole, tuple(members)))

    pause = piece_blocks
    for i, block in enumerate(span.blocks):
        if i >= pause:
            pause += piece_blocks
            yield
        at = (i + 1) * per - 1
        segment = at - ((start + at) & SEGMENT_MASK)
        if segment > open_at:
            close()
            open_at, mask, members, names = segment, 0, [], []
        if block is not None:
            bit = 1 << (at - open_at)
            mask |= bit
            members.append((bit, block))
            names.append(span.hashes[i])
    close()
    return parts


def _big_endian(keys: Sequence[int]) -> bytes:
    every = array("Q", keys)
    if sys.byteorder == "little":
        every.byteswap()
    return every.tobytes()


def digests_of(blocks: Sequence[Block], names: Sequence[int]) -> bytes:
    """The whole engine hashes of ``blocks`` one after the other, zeros where one is not known; empty if none is.

    ``names`` are the hashes by which the blocks are told: a block with several has the digest of one of them.
    """
    known = [
        block.digest if block.digest is not None and low64(block.digest) == name else b""
        for block, name in zip(blocks, names, strict=True)
    ]
    size = max(map(len, known), default=0)
    if not size:
        return b""
    blank = bytes(size)
    return b"".join([each if len(each) == size else blank for each in known])


class OpenChange:
    """A change that is still collecting: one kind of event of one lane.

    Blocks that come one by one join a run while they follow each other on a path, in either direction: engines evict
    a chain from its end. ``digests``: the engine's whole hashes are told, too.
    """

    __slots__ = (
        "_chain",
        "_digests",
        "_direction",
        "_effective",
        "_flips",
        "_names",
        "medium",
        "op",
        "origin",
        "runs",
        "unplaced",
    )

    def __init__(self, op: int, medium: int, origin: int, *, digests: bool = False) -> None:
        self._digests = digests
        self.op = op
        self.medium = medium
        self.origin = origin
        self.runs: list[Run] = []
        self.unplaced = bytearray()
        self._flips = bytearray()
        self._chain: list[Block] = []
        self._names: list[int] = []
        self._effective: list[bool] = []
        self._direction = 0

    def add_part(self, part: Part, effective: int) -> None:
        """One segment of a span."""
        if self._chain:
            self._close()
        row, position, parent, keys, blocks, hashes, segment, digests, _ = part
        self.runs.append(Run(row, position, parent, keys, blocks, effective, hashes, segment, digests))

    def add_block(self, block: Block, name: int, *, effective: bool) -> None:
        """A block that was found by its hash ``name``."""
        if self._chain:
            last = self._chain[-1]
            joins = 0
            if last.row == block.row:
                if block.parent == last.key:
                    joins = 1
                elif last.parent == block.key:
                    joins = -1
            if not joins or self._direction == -joins:
                self._close()
            else:
                self._direction = joins
        self._chain.append(block)
        self._names.append(name)
        self._effective.append(effective)

    def add_unplaced(self, name: int, *, effective: bool) -> None:
        """A hash without a key; ``effective``: it became resident so, or ceased to be."""
        place = len(self.unplaced) // 8
        if place % 8 == 0:
            self._flips.append(0)
        if effective:
            self._flips[-1] |= 1 << place % 8
        self.unplaced += _pack_one(name)

    def finish(self, seq: int, ts: float) -> Change:
        """The change as the log has it."""
        if self._chain:
            self._close()
        return Change(
            self.op,
            self.medium,
            seq,
            ts,
            tuple(self.runs),
            bytes(self.unplaced),
            self.origin,
            bytes(self._flips),
        )

    def _close(self) -> None:
        chain, names, effective = self._chain, self._names, self._effective
        if self._direction < 0:
            chain.reverse()
            names.reverse()
            effective.reverse()
        first = chain[0]
        position = (first.end - 1) & SEGMENT_MASK
        count = len(chain)
        self.runs.append(
            Run(
                _pack_one(first.row),
                position,
                _pack_one(first.parent) if position else _NO_PARENT,
                _PACK[count].pack(*[block.key for block in chain]),
                (1 << count) - 1,
                sum(1 << i for i, each in enumerate(effective) if each),
                _PACK[count].pack(*names),
                (first.end - 1) // SEGMENT_STRIDES,
                digests_of(chain, names) if self._digests else b"",
            )
        )
        self._chain, self._names, self._effective, self._direction = [], [], [], 0


class Draft:
    """A group's changes since the batch began or was cut."""

    __slots__ = ("changes", "spec")

    def __init__(self) -> None:
        self.changes: list[OpenChange] = []
        self.spec: GroupSpec | None = None

    def open(self, op: int, medium: int, origin: int, *, digests: bool = False) -> OpenChange:
        """The change to extend: the last one where it is of the same kind. ``digests``: it tells whole hashes, too."""
        if self.changes:
            last = self.changes[-1]
            if last.op == op and last.medium == medium and last.origin == origin:
                return last
        change = OpenChange(op, medium, origin, digests=digests)
        self.changes.append(change)
        return change
