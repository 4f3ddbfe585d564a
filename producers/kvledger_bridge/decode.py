"""Bytes of one engine batch -> typed events, for every generation of vLLM's wire format (ENGINE.md §1).

A batch is an array in every release: ``[ts: float, events: array, data_parallel_rank: int | nil]``; the rank came with
0.9.1. Each event is an array with its tag first (releases <= 0.23) or a map with its tag under ``type`` (>= 0.24).
The encoding is decided per event, so engines may be upgraded, and events of both kinds mixed, under a running bridge.

The whole batch is decoded in one typed pass. Where that fails, every event is read on its own: unknown tags and fields
are counted and skipped, an event that cannot be read is listed in ``failures``; neither fails the batch.
The structs forbid unknown fields on purpose: a batch that has some leaves the quick path, so that they can be counted.

Nothing here logs, and no text made here holds a value from the wire except the name of an unknown tag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvledger_bridge.errors import Undecodable

BATCH_BYTES_MAX = 32 * 2**20
"""Largest batch: 240 000 tokens announced by ten groups are 12 MiB; decoding takes up to ten times the bytes."""

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
    token_ids: tuple[int, ...]
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
    token_ids: tuple[int, ...]
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
_float = msgspec.msgpack.Decoder(float)
_rank = msgspec.msgpack.Decoder(int | None)
_word = msgspec.msgpack.Decoder(str)

# RecursionError: nesting; OverflowError and ValueError: numbers and text that no field can hold
_Unreadable = (msgspec.DecodeError, RecursionError, OverflowError, ValueError)

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
    """Read one batch; O(bytes).

    Raises Undecodable where the bytes are no batch: not msgpack, not an array, truncated, trailing bytes, nested or
    large beyond BATCH_BYTES_MAX and EVENTS_MAX.
    """
    if len(raw) > BATCH_BYTES_MAX:
        raise Undecodable(f"batch of {len(raw)} bytes is larger than {BATCH_BYTES_MAX}")
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


def _event_by_event(raw: bytes) -> Batch:
    try:
        parts = _parts(raw)
        ts = _float.decode(parts[0])
        events = _split.decode(parts[1])
        rank = _rank.decode(parts[2]) if len(parts) > 2 else None
    except _Unreadable as error:
        # msgspec names a path and a type, never a value
        raise Undecodable(f"batch of {len(raw)} bytes: {error}") from error
    readings = [_read(each) for each in events]
    return Batch(
        ts,
        rank,
        tuple([each.event for each in readings if each.event is not None]),
        tuple([each.unknown for each in readings if each.unknown is not None]),
        sum(each.surplus for each in readings) + max(0, len(parts) - 3),
        tuple([Failure(i, each.failure) for i, each in enumerate(readings) if each.failure is not None]),
    )


def _read(raw: msgspec.Raw) -> _Reading:
    """Read one event, whatever its encoding."""
    first = memoryview(raw)[0]
    try:
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
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
