"""Bytes of the values in Redis and of the functions' arguments, schema v0 (``docs/redis-schema.md``).

Keys, stamps and offsets are big-endian, so that they compare and print as they stand; slots and masks, which the
functions compute with, are little-endian. Lua sees keys, stamps and offsets as byte strings only: its numbers are
doubles.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.errors import Corrupt, InvalidInput
from kvledger_index.model import MEDIA
from kvledger_index.units import NEVER, Bind, Card, Clear, Drop, Now, Op, Piece, Progress, Put, Stamp
from kvledger_index.views import PartitionView

_STAMP = Struct(">4Q")
_STAMP_BIAS = 1 << 63
"""Added to each part of a stamp, so that -1 sorts below 0 as bytes."""

_SLOTS = Struct("<4I")
_CARD_HEAD = Struct("<I4I")
_RANK_HEAD = Struct("<32s16sH")
_MS = Struct(">q")
_PARTITION = Struct(">6q")
_KEYS = tuple(Struct(f">{count}Q") for count in range(SEGMENT_STRIDES + 1))
_PUT = Struct("<5BH")
_PIECE = Struct("<16sI?")

_card_encoder = msgspec.msgpack.Encoder()
_cards = msgspec.msgpack.Decoder(Card)
_nows = msgspec.msgpack.Decoder(Now)
_MEDIUM_CODE = {medium: code for code, medium in enumerate(MEDIA)}

Slots = tuple[int, int, int, int]


class PartitionValue(NamedTuple):
    """One field of ``parts``: offsets, then Redis' clock at the log's end, the newest log time and when it came."""

    progress: Progress
    alive_ms: int
    log_ms: int
    log_at_ms: int

    def view(self) -> PartitionView:
        """What a reader needs of it."""
        return PartitionView(self.progress.restart, self.progress.read, self.progress.target, self.alive_ms)

    def heard_ms(self, broker_ms: int) -> int:
        """Redis' clock for a log time of this partition (``Pulse``)."""
        return self.log_at_ms - max(0, self.log_ms - broker_ms)


class RankValue(NamedTuple):
    """One field of ``ranks:<partition>``."""

    stamp: Stamp
    slots: Slots
    model: str
    state: bytes


def encode_stamp(stamp: Stamp) -> bytes:
    """32 bytes that compare as the stamp does."""
    return _STAMP.pack(*(part + _STAMP_BIAS for part in stamp))


def decode_stamp(raw: bytes) -> Stamp:
    """The stamp of 32 bytes."""
    owner, life_owner, life_count, n = _STAMP.unpack(raw)
    return Stamp(owner - _STAMP_BIAS, life_owner - _STAMP_BIAS, life_count - _STAMP_BIAS, n - _STAMP_BIAS)


NEVER_BYTES = encode_stamp(NEVER)


def encode_piece(piece: Piece) -> bytes:
    """A piece as ``apply.lua`` takes it: token, number, whether it is the last."""
    return _PIECE.pack(piece.token, piece.number, piece.last)


def encode_ms(value: int) -> bytes:
    """Eight bytes of a time or an offset."""
    return _MS.pack(value)


def encode_now(broker_ms: int, now: Now) -> bytes:
    """One field of ``now:<model>``."""
    return _MS.pack(broker_ms) + _card_encoder.encode(now)


def decode_now(raw: bytes) -> tuple[int, Now]:
    """(log time of the rank's last record, what moves); raises Corrupt."""
    try:
        return _MS.unpack_from(raw)[0], _nows.decode(raw[8:])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"moving part of {len(raw)} bytes: {error}") from error


LEAVE = b"-"
"""In place of a card: the rank leaves the catalogue. A card starts with the head of an array, never with this."""


def encode_card(card: Card) -> bytes:
    """A card as the functions store it, behind partition and slots."""
    return _card_encoder.encode(card)


def decode_card(raw: bytes) -> tuple[Slots, Card]:
    """One field of ``cat:<model>``; raises Corrupt."""
    try:
        _, *slots = _CARD_HEAD.unpack_from(raw)
        gpu, cpu, storage, other = slots
        return (gpu, cpu, storage, other), _cards.decode(raw[_CARD_HEAD.size :])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"card of {len(raw)} bytes: {error}") from error


def decode_rank(raw: bytes) -> RankValue:
    """One field of ``ranks:<partition>``; raises Corrupt."""
    try:
        stamp, slots, size = _RANK_HEAD.unpack_from(raw)
        end = _RANK_HEAD.size + size
        model = raw[_RANK_HEAD.size : end].decode()
        gpu, cpu, storage, other = _SLOTS.unpack(slots)
    except (struct.error, UnicodeDecodeError) as error:
        raise Corrupt(f"rank of {len(raw)} bytes: {error}") from error
    if len(raw) < end:
        raise Corrupt(f"rank of {len(raw)} bytes ends within its model's name")
    return RankValue(decode_stamp(stamp), (gpu, cpu, storage, other), model, raw[end:])


def decode_partition(raw: bytes) -> PartitionValue:
    """One field of ``parts``; raises Corrupt."""
    try:
        restart, read, target, alive, log, log_at = _PARTITION.unpack_from(raw)
        topic_id = raw[_PARTITION.size :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise Corrupt(f"partition of {len(raw)} bytes: {error}") from error
    return PartitionValue(Progress(topic_id, restart, read, target), alive, log, log_at)


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys as 8 bytes each; raises InvalidInput for one outside 0..2^64-1."""
    try:
        return Struct(f">{len(keys)}Q").pack(*keys)
    except struct.error as error:
        raise InvalidInput(f"block keys must be integers in 0..2^64-1: {error}") from error


def encode_ops(ops: Iterable[Op]) -> tuple[bytes, int]:
    """(the ops of one unit for ``apply.lua``, new slots they may need).

    Puts between two changes of slots are gathered by row, in their order within the row: whatever they name, rows do
    not depend on each other, and each row is then read and written once. O(ops).
    """
    out: list[bytes] = []
    rows: dict[int, list[bytes]] = {}
    needed = 0
    for op in ops:
        if isinstance(op, Put):
            raw = _encode_put(op)
            if raw:
                rows.setdefault(op.row, []).append(raw)
            continue
        _flush(rows, out)
        match op:
            case Bind():
                out.append(b"B")
                needed += len(MEDIA)
            case Clear():
                out.append(b"C" + bytes((_MEDIUM_CODE[op.medium],)))
                needed += 1
            case Drop():
                out.append(b"D")
    _flush(rows, out)
    return b"".join(out), needed


def _flush(rows: dict[int, list[bytes]], out: list[bytes]) -> None:
    for row, puts in rows.items():
        out.append(b"R" + row.to_bytes(8, "big") + len(puts).to_bytes(4, "little"))
        out += puts
    rows.clear()


def _encode_put(op: Put) -> bytes:
    """Only the keys up to the last one that is named: a longer path that holds nothing would be stored for nobody."""
    count = op.mask.bit_length()
    if not count:
        return b""
    return b"".join(
        (
            _PUT.pack(op.add, _MEDIUM_CODE[op.medium], op.lane, op.position, count, op.mask << op.position),
            op.parent.to_bytes(8, "big"),
            _KEYS[count].pack(*op.keys[:count]),
        )
    )


def text(raw: Any) -> str:
    """A word that Redis returned, for messages."""
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
