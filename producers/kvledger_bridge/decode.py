"""Bytes of one engine batch -> typed events, for every generation of vLLM's wire format (ENGINE.md §1).

A batch is an array in every release: ``[ts: float, events: array, data_parallel_rank: int | nil]``; the rank came with
0.9.1. Each event is an array with its tag first (releases <= 0.23) or a map with its tag under ``type`` (>= 0.24).
The encoding is decided per event, so engines may be upgraded, and events of both kinds mixed, under a running bridge.

The whole batch is decoded in one typed pass. Where that fails, every event is read on its own: unknown tags and fields
are counted and skipped, an event that cannot be read is listed in ``failures``; neither fails the batch.
The structs forbid unknown fields on purpose: a batch that has some leaves the quick path, so that they can be counted.
Of a batch above PIECE_BYTES a part at a time is read so, with the same result.

Nothing here logs, and no text made here holds a value from the wire except the name of an unknown tag.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvledger_bridge.errors import Undecodable
from kvledger_bridge.pace import Work, at_once

BATCH_BYTES_MAX = 32 * 2**20
"""Largest batch: 240 000 tokens announced by ten groups are 12 MiB; decoding takes up to ten times the bytes."""

PIECE_BYTES = 2**19
"""Bytes that are read at once: about 8 ms."""

PIECE_TOKENS = 2**16

EVENTS_MAX = 2**20
"""Events per batch; the smallest real event has about 25 bytes, so BATCH_BYTES_MAX of them are about as many."""

FIELDS_MAX = 256
"""Elements or entries of one event; known layouts have at most 16."""

EXTRA_BYTES_MAX = 2**20
"""``extra_keys`` of one event where they must be read item by item: 64 MiB while that lasts."""

TAG_CHARS_MAX = 64

UNREADABLE = b""
"""Stands in ``extra_keys`` for what this version cannot read: whoever places the hash must give up on it."""

HashValue = int | Annotated[bytes, Meta(min_length=1)]
"""A block hash as it is on the wire: an integer (signed or unsigned, 64 bits) or bytes (16, 32, k x 32)."""

if TYPE_CHECKING:
    ExtraKey = str | bytes | int | None | tuple[str | int | None, ...]
else:
    # msgspec takes str or bytes in a union, not both: batches with a digest are read event by event
    ExtraKey = str | int | None | tuple[str | int | None, ...]
"""LoRA name or salt (str), multimodal ``(identifier, offset)``, prompt-embeds digest (bytes)."""

if TYPE_CHECKING:
    Tokens = Sequence[int]
else:
    Tokens = tuple[int, ...]
"""Token ids: a tuple, or in events above PIECE_BYTES an array of u32. A tuple of millions takes ten times the memory,
and the whole process waits while it is freed, and while the garbage collector looks through it."""

_U64 = 2**64 - 1


class BlockStored(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """One BlockStored: ``block_hashes`` are resident once more in (medium, group).

    | # | field | type | optional | since |
    |---|---|---|---|---|
    | 1 | block_hashes | array of int or bin | no | 0.9.0 (bin: 0.10.2) |
    | 2 | parent_block_hash | int, bin or nil | nil: the span starts at token 0 | 0.9.0 |
    | 3 | token_ids | array of int | may be empty | 0.9.0 |
    | 4 | block_size | int | 0: placeholder | 0.9.0 |
    | 5 | lora_id | int or nil | nil: no adapter | 0.9.0 |
    | 6 | medium | str or nil | absent: GPU | 0.10.2 |
    | 7 | lora_name | str or nil | nil: no adapter | 0.14 |
    | 8 | extra_keys | array, one array or nil per hash, or nil | nil | 0.17 |
    | 9 | group_idx | int or nil | nil: no group, never group 0 | 0.20 |
    | 10 | kv_cache_spec_kind | str or nil | nil | 0.22 |
    | 11 | kv_cache_spec_sliding_window | int or nil | nil | 0.22 |
    | map | locality | str | absent | 0.26 |
    | map | ownership | str | absent | 0.29 |
    | map | session_id | str | absent | 0.30 |
    | map | lookahead_token_ids | array of arrays of int | absent | 0.33 |

    Numbers are positions after the tag in the array form, which ends at 11: what follows there was never defined.
    """

    block_hashes: tuple[HashValue, ...]
    parent_block_hash: HashValue | None
    token_ids: Tokens
    block_size: Annotated[int, Meta(ge=0)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...] | None, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """One BlockRemoved: one copy less of each hash in (medium, group).

    | # | field | type | optional | since |
    |---|---|---|---|---|
    | 1 | block_hashes | array of int or bin | no | 0.9.0 |
    | 2 | medium | str or nil | absent: GPU | 0.10.2 |
    | 3 | group_idx | int or nil | nil: no group | 0.20 |
    | map | locality | str | absent | 0.26 |
    | map | ownership | str | absent | 0.29 |
    """

    block_hashes: tuple[HashValue, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Everything of the rank is gone from GPU and CPU; no fields, since 0.9.0. Applied at its place in the batch."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Failure(msgspec.Struct, frozen=True):
    """An event that could not be read: its place in the batch, and why, without values."""

    index: int
    reason: str


class Batch(msgspec.Struct, frozen=True):
    """One engine batch.

    ``ts`` is the engine's wall clock in seconds, ``rank`` its data-parallel rank (None: not said). ``events`` are those
    that were read, in order. ``unknown`` holds the tags of events that were skipped, ``unknown_fields`` counts fields
    that were. A batch with ``failures`` is not the whole truth: what it did to the cache is not known.
    """

    ts: float
    rank: int | None
    events: tuple[Event, ...]
    unknown: tuple[str, ...] = ()
    unknown_fields: int = 0
    failures: tuple[Failure, ...] = ()


class _StoredRow(msgspec.Struct, gc=False, array_like=True, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: tuple[HashValue, ...]
    parent_block_hash: HashValue | None
    token_ids: Tokens
    block_size: Annotated[int, Meta(ge=0)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def event(self) -> BlockStored:
        return BlockStored(*msgspec.structs.astuple(self))


class _RemovedRow(msgspec.Struct, gc=False, array_like=True, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: tuple[HashValue, ...]
    medium: str | None = None
    group_idx: int | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx)


class _ClearedRow(msgspec.Struct, gc=False, array_like=True, tag="AllBlocksCleared", forbid_unknown_fields=True):
    def event(self) -> AllBlocksCleared:
        return AllBlocksCleared()


_Row = _StoredRow | _RemovedRow | _ClearedRow
_Limit = Meta(max_length=EVENTS_MAX)


class _Maps(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: Annotated[tuple[Event, ...], _Limit]
    rank: int | None = None


class _Rows(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: Annotated[tuple[_Row, ...], _Limit]
    rank: int | None = None


_maps = msgspec.msgpack.Decoder(_Maps)
_rows = msgspec.msgpack.Decoder(_Rows)
_one_map: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_one_row: msgspec.msgpack.Decoder[_Row] = msgspec.msgpack.Decoder(_Row)
_elements = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=FIELDS_MAX)])
_entries = msgspec.msgpack.Decoder(Annotated[dict[str, msgspec.Raw], Meta(max_length=FIELDS_MAX)])
_split = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _Limit])
_items = msgspec.msgpack.Decoder(list[list[msgspec.Raw] | None])
_item = msgspec.msgpack.Decoder(ExtraKey)
_digest = msgspec.msgpack.Decoder(bytes)
_some_maps = msgspec.msgpack.Decoder(list[Event])
_some_rows = msgspec.msgpack.Decoder(list[_Row])
_some_tokens = msgspec.msgpack.Decoder(tuple[int, ...])
_tokens_piece = re.compile(
    rb"(?s:(?:[\x00-\x7f\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xce\xd2]....|[\xcf\xd3]........){%d})" % PIECE_TOKENS
)
_float = msgspec.msgpack.Decoder(float)
_rank = msgspec.msgpack.Decoder(int | None)
_word = msgspec.msgpack.Decoder(str)

# RecursionError: nesting; OverflowError and ValueError: numbers and text that no field can hold
_Unreadable = (msgspec.DecodeError, RecursionError, OverflowError, ValueError)

_ROW_HEADS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_NO_TOKENS = msgspec.Raw(b"\x90")
_TOKENS_HEAD = b"\xdd" + PIECE_TOKENS.to_bytes(4, "big")

_EVENTS: dict[str, type[Event]] = {each.__name__: each for each in (BlockStored, BlockRemoved, AllBlocksCleared)}
_NAMES: dict[str, tuple[str, ...]] = {tag: each.__struct_fields__ for tag, each in _EVENTS.items()}
_ARRAY_NAMES = {
    "BlockStored": _StoredRow.__struct_fields__,
    "BlockRemoved": _RemovedRow.__struct_fields__,
    "AllBlocksCleared": (),
}
_FIELDS: dict[str, dict[str, msgspec.msgpack.Decoder[Any]]] = {
    tag: {field.name: msgspec.msgpack.Decoder(field.type) for field in msgspec.structs.fields(each)}
    for tag, each in _EVENTS.items()
}
_HARMLESS = frozenset({"kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"})
"""Fields whose loss changes no key and no lane: an unreadable one counts as an unknown field."""


def low64(value: int | bytes) -> int:
    """The ledger's form of a hash: its low 64 bits, unsigned. Bytes are big-endian, so their last 8 count;
    a negative integer is its two's complement. Byte and integer forms of one engine meet here.
    """
    return value & _U64 if isinstance(value, int) else int.from_bytes(value[-8:], "big")


def decode_batch(raw: bytes) -> Batch:
    """``decoding`` without a pause."""
    return at_once(decoding(raw))


def decoding(raw: bytes) -> Work[Batch]:
    """Read one batch; O(bytes).

    Raises Undecodable where the bytes are no batch: not msgpack, not an array, truncated, trailing bytes, nested or
    large beyond BATCH_BYTES_MAX and EVENTS_MAX.
    """
    if len(raw) > BATCH_BYTES_MAX:
        raise Undecodable(f"batch of {len(raw)} bytes is larger than {BATCH_BYTES_MAX}")
    if len(raw) > PIECE_BYTES:
        return (yield from _in_pieces(raw))
    try:
        maps = _maps.decode(raw)
    except _Unreadable:
        pass
    else:
        return Batch(maps.ts, maps.rank, maps.events)
    try:
        rows = _rows.decode(raw)
    except _Unreadable:
        return _event_by_event(raw)
    return Batch(rows.ts, rows.rank, tuple([row.event() for row in rows.events]))


def layouts(raw: bytes) -> tuple[tuple[str, ...], ...]:
    """Names of the fields that the layout of each event of ``decode_batch(raw).events`` has.

    An array names the fields that its length reaches; a map leaves out what is at its default, so its layout is every
    field that maps ever had. For people who look at a recording; reads event by event.
    """
    try:
        events = _split.decode(_parts(raw)[1])
    except _Unreadable as error:
        raise Undecodable(f"batch of {len(raw)} bytes: {error}") from error
    readings = [_read(each) for each in events]
    return tuple(reading.names for reading in readings if reading.event is not None)


class _Reading(NamedTuple):
    """One event read on its own: exactly one of ``event``, ``unknown`` (its tag), ``failure`` is set."""

    event: Event | None = None
    unknown: str | None = None
    failure: str | None = None
    names: tuple[str, ...] = ()
    surplus: int = 0


def _parts(raw: bytes) -> list[msgspec.Raw]:
    parts = _elements.decode(raw)
    if len(parts) < 2:
        raise Undecodable(f"batch is an array of {len(parts)}, expected [ts, events, rank]")
    return parts


class _Opened(NamedTuple):
    """A batch whose events are not read."""

    ts: float
    rank: int | None
    events: list[msgspec.Raw]
    surplus: int


def _open(raw: bytes) -> Work[_Opened]:
    try:
        parts = _parts(raw)
        yield
        ts = _float.decode(parts[0])
        events = _split.decode(parts[1])
        rank = _rank.decode(parts[2]) if len(parts) > 2 else None
    except _Unreadable as error:
        # msgspec names a path and a type, never a value
        raise Undecodable(f"batch of {len(raw)} bytes: {error}") from error
    return _Opened(ts, rank, events, max(0, len(parts) - 3))


def _gathered(opened: _Opened, readings: Sequence[_Reading]) -> Batch:
    return Batch(
        opened.ts,
        opened.rank,
        tuple([each.event for each in readings if each.event is not None]),
        tuple([each.unknown for each in readings if each.unknown is not None]),
        sum(each.surplus for each in readings) + opened.surplus,
        tuple([Failure(i, each.failure) for i, each in enumerate(readings) if each.failure is not None]),
    )


def _event_by_event(raw: bytes) -> Batch:
    opened = at_once(_open(raw))
    return _gathered(opened, [_read(each) for each in opened.events])


def _in_pieces(raw: bytes) -> Work[Batch]:
    """A large batch: some events at a time, and of a long event some tokens at a time."""
    opened = yield from _open(raw)
    yield
    readings: list[_Reading] = []
    some: list[msgspec.Raw] = []
    size = 0
    for event in opened.events:
        bytes_ = len(memoryview(event))
        if size and size + bytes_ > PIECE_BYTES:
            readings += _read_some(some)
            some, size = [], 0
            yield
        if bytes_ > PIECE_BYTES:
            readings.append((yield from _read_long(event)))
        else:
            some.append(event)
            size += bytes_
    return _gathered(opened, readings + _read_some(some))


def _read_some(events: list[msgspec.Raw]) -> list[_Reading]:
    """Events that are not long: in one typed pass where that is possible."""
    raw = b"\xdd" + len(events).to_bytes(4, "big") + b"".join(map(bytes, events))
    try:
        return [_Reading(event) for event in _some_maps.decode(raw)]
    except _Unreadable:
        pass
    try:
        return [_Reading(row.event()) for row in _some_rows.decode(raw)]
    except _Unreadable:
        return [_read(each) for each in events]


def _read_long(raw: msgspec.Raw) -> Work[_Reading]:
    """Like ``_read``; tokens, which are most of a long event, are read some at a time."""
    try:
        if memoryview(raw)[0] in _ROW_HEADS:
            elements = _elements.decode(raw)
            at = 1 + _ARRAY_NAMES["BlockStored"].index("token_ids")
            tokens = elements[at] if len(elements) > at else None
            rest: Any = [*elements[:at], _NO_TOKENS, *elements[at + 1 :]]
        else:
            entries = _entries.decode(raw)
            tokens = entries.get("token_ids")
            rest = {**entries, "token_ids": _NO_TOKENS}
    except _Unreadable:
        return _read(raw)
    yield
    read = None if tokens is None else (yield from _read_tokens(memoryview(tokens)))
    yield
    if read is None:
        return _read(raw)
    reading = _read(msgspec.Raw(msgspec.msgpack.encode(rest)))
    if not isinstance(reading.event, BlockStored):
        return _read(raw)
    return reading._replace(event=msgspec.structs.replace(reading.event, token_ids=read))


def _read_tokens(raw: memoryview) -> Work[array[int] | None]:
    """An array of u32, without ever making more than PIECE_TOKENS objects; None where it is none."""
    if raw[0] != 0xDD:  # an array of fewer than 2**16 elements is no long one
        return None
    left, at = int.from_bytes(raw[1:5], "big"), 5
    tokens = array("I")
    try:
        while left > PIECE_TOKENS:
            piece = _tokens_piece.match(raw, at)
            if piece is None:
                return None
            tokens.extend(_some_tokens.decode(_TOKENS_HEAD + raw[at : piece.end()]))
            left, at = left - PIECE_TOKENS, piece.end()
            yield
        tokens.extend(_some_tokens.decode(b"\xdd" + left.to_bytes(4, "big") + raw[at:]))
    except _Unreadable:
        return None
    return tokens


def _read(raw: msgspec.Raw) -> _Reading:
    """Read one event, whatever its encoding."""
    first = memoryview(raw)[0]
    try:
        if first in _ROW_HEADS:
            return _read_row(raw)
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            return _read_map(raw)
    except _Unreadable as error:
        return _Reading(failure=str(error))
    return _Reading(failure="event is neither an array nor a map")


def _read_row(raw: msgspec.Raw) -> _Reading:
    elements = _elements.decode(raw)
    if not elements:
        return _Reading(failure="event is an empty array")
    tag = _word.decode(elements[0])
    if tag not in _EVENTS:
        return _Reading(unknown=_printable(tag))
    names = _ARRAY_NAMES[tag][: len(elements) - 1]
    try:
        return _Reading(_one_row.decode(raw).event(), names=names)
    except _Unreadable:
        values = dict(zip(names, elements[1:], strict=False))
        return _by_field(tag, values, names, surplus=len(elements) - 1 - len(names))


def _read_map(raw: msgspec.Raw) -> _Reading:
    entries = _entries.decode(raw)
    if "type" not in entries:
        return _Reading(failure="event is a map without a type")
    tag = _word.decode(entries.pop("type"))
    if tag not in _EVENTS:
        return _Reading(unknown=_printable(tag))
    names = _NAMES[tag]
    try:
        return _Reading(_one_map.decode(raw), names=names)
    except _Unreadable:
        values = {name: entries[name] for name in names if name in entries}
        return _by_field(tag, values, names, surplus=len(entries) - len(values))


def _by_field(tag: str, values: dict[str, msgspec.Raw], names: tuple[str, ...], surplus: int) -> _Reading:
    """Build an event from the fields that can be read, if those that say what and where are among them."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        try:
            read[name] = _FIELDS[tag][name].decode(value)
        except _Unreadable as error:
            if name in _HARMLESS:
                surplus += 1
            elif name == "extra_keys":
                read[name] = _extra_keys(value)
            elif name == "lookahead_token_ids":
                read[name] = (None,)
                surplus += 1
            else:
                return _Reading(failure=f"{tag}.{name}: {error}")
    missing = [f.name for f in msgspec.structs.fields(_EVENTS[tag]) if f.required and f.name not in read]
    if missing:
        return _Reading(failure=f"{tag} without {', '.join(missing)}")
    return _Reading(_EVENTS[tag](**read), names=names, surplus=surplus)


def _extra_keys(raw: msgspec.Raw) -> tuple[tuple[ExtraKey, ...] | None, ...]:
    """Item by item; what no version so far has sent becomes UNREADABLE."""
    if len(memoryview(raw)) > EXTRA_BYTES_MAX:
        return ((UNREADABLE,),)
    try:
        entries = _items.decode(raw)
    except _Unreadable:
        return ((UNREADABLE,),)
    return tuple([None if entry is None else tuple([_extra_key(item) for item in entry]) for entry in entries])


def _extra_key(raw: msgspec.Raw) -> ExtraKey:
    decoder: msgspec.msgpack.Decoder[Any]
    for decoder in (_item, _digest):
        try:
            key: ExtraKey = decoder.decode(raw)
        except _Unreadable:
            continue
        return key
    return UNREADABLE


def _printable(tag: str) -> str:
    """A tag as it may stand in a log line: bounded, plain characters."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in tag[:TAG_CHARS_MAX])
