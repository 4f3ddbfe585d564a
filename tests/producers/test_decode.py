"""Decoding of engine batches: every generation, every damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger_bridge import decode
from kvledger_bridge.decode import (
    BATCH_BYTES_MAX,
    TAG_CHARS_MAX,
    UNREADABLE,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode_batch,
    layouts,
    low64,
)
from kvledger_bridge.errors import Undecodable

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
INDEXES = sorted(WIRE.glob("g*/index.json"))
PAYLOADS = sorted(WIRE.glob("*/*.bin"))

few = settings(max_examples=40, deadline=None)
"""Per generation; a loaded machine is no failure."""

# (fields after the tag, encoding) of each generation, oldest first: ENGINE.md §1
STORED_FIELDS = BlockStored.__struct_fields__
GENERATIONS = {
    "0.9.0": (5, 1, "array", 2),
    "0.9.1": (5, 1, "array", 3),
    "0.10.2": (6, 2, "array", 3),
    "0.14": (7, 2, "array", 3),
    "0.17": (8, 2, "array", 3),
    "0.20": (9, 3, "array", 3),
    "0.22": (11, 3, "array", 3),
    "0.24": (11, 3, "map", 3),
    "0.26": (12, 4, "map", 3),
    "0.29": (13, 5, "map", 3),
    "0.30": (14, 5, "map", 3),
    "0.33": (15, 5, "map", 3),
}

u64 = st.integers(min_value=-(2**63), max_value=2**64 - 1)
hashes = u64 | st.binary(min_size=1, max_size=64)
texts = st.text(alphabet="abz-é中\x00", max_size=8)
words = st.none() | texts
numbers = st.none() | st.integers(min_value=0, max_value=2**31)
extra_items = texts | st.tuples(texts, st.integers(-64, 64)) | st.binary(max_size=32)
extra_keys = st.none() | st.lists(st.none() | st.lists(extra_items, max_size=3).map(tuple), max_size=4).map(tuple)


@st.composite
def batches(draw: st.DrawFn, generation: str) -> Batch:
    """A batch that an engine of this generation can say: later fields at their defaults."""
    stored, removed, _, arity = GENERATIONS[generation]

    def event() -> BlockStored | BlockRemoved | AllBlocksCleared:
        match draw(st.integers(0, 3)):
            case 0:
                return AllBlocksCleared()
            case 1:
                tail: list[st.SearchStrategy[Any]] = [words, numbers, words, words][: removed - 1]
                return BlockRemoved(tuple(draw(st.lists(hashes, max_size=3))), *[draw(each) for each in tail])
            case _:
                lookahead = st.none() | st.just(((1, 2), (3,)))
                tail = [numbers, words, words, extra_keys, numbers, words, numbers, words, words, words, lookahead]
                return BlockStored(
                    tuple(draw(st.lists(hashes, max_size=4))),
                    draw(st.none() | hashes),
                    tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=8))),
                    draw(st.integers(0, 2**20)),
                    *[draw(each) for each in tail[: stored - 4]],
                )

    events = tuple(event() for _ in range(draw(st.integers(0, 4))))
    rank = draw(numbers) if arity == 3 else None
    return Batch(draw(st.floats(allow_nan=False)), rank, events)


def encode(batch: Batch, generation: str) -> bytes:
    """The batch as the engine of this generation writes it."""
    stored, removed, encoding, arity = GENERATIONS[generation]
    count = {"BlockStored": stored, "BlockRemoved": removed, "AllBlocksCleared": 0}

    def one(event: Any) -> Any:
        tag = type(event).__name__
        names = type(event).__struct_fields__[: count[tag]]
        if encoding == "array":
            return [tag, *[getattr(event, name) for name in names]]
        always = ("parent_block_hash", "lora_id", "medium", "lora_name")
        values = {name: getattr(event, name) for name in names}
        return {"type": tag, **{name: value for name, value in values.items() if value is not None or name in always}}

    return msgspec.msgpack.encode([batch.ts, [one(each) for each in batch.events], batch.rank][:arity])


def truth(value: Any) -> Any:
    match value:
        case {"int": number}:
            return int(number)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case list():
            return tuple(truth(each) for each in value)
        case _:
            return value


@pytest.mark.parametrize("path", INDEXES, ids=lambda path: path.parent.name)
def test_recorded_payloads_decode_to_their_truth_in_one_typed_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prompt embeds need the slow way: one union of a typed decoder takes str or bytes, not both."""
    index = json.loads(path.read_text())
    slow: list[bytes] = []
    read = decode._event_by_event

    def seen(raw: bytes) -> Batch:
        slow.append(raw)
        return read(raw)

    monkeypatch.setattr(decode, "_event_by_event", seen)
    for each in index["batches"]:
        batch = decode_batch((path.parent / each["file"]).read_bytes())

        assert each["batch"]["ts"] == batch.ts
        assert each["batch"]["data_parallel_rank"] == batch.rank
        assert not batch.failures
        assert not batch.unknown
        assert len(each["batch"]["events"]) == len(batch.events)
        for expected, event in zip(each["batch"]["events"], batch.events, strict=True):
            assert expected["type"] == type(event).__name__
            for name, value in expected["fields"].items():
                assert truth(value) == getattr(event, name)
        assert bool(slow) == ("prompt_embeds" in each["file"])
        slow.clear()


@pytest.mark.parametrize("generation", GENERATIONS)
@few
@given(data=st.data())
def test_every_generation_survives_the_round_trip(generation: str, data: st.DataObject) -> None:
    batch = data.draw(batches(generation))

    assert batch == decode_batch(encode(batch, generation))


@pytest.mark.parametrize("generation", GENERATIONS)
@few
@given(data=st.data())
def test_layouts_name_the_fields_of_the_generation(generation: str, data: st.DataObject) -> None:
    batch = data.draw(batches(generation))
    stored, removed, encoding, _ = GENERATIONS[generation]

    names = layouts(encode(batch, generation))

    assert len(batch.events) == len(names)
    for event, fields in zip(batch.events, names, strict=True):
        reach = {"BlockStored": stored, "BlockRemoved": removed}.get(type(event).__name__, 0)
        whole = type(event).__struct_fields__
        assert (whole[:reach] if encoding == "array" else whole) == fields


@few
@given(data=st.data())
def test_generations_mixed_in_one_batch_are_read_per_event(data: st.DataObject) -> None:
    """A rolling upgrade, or a connector of another age in the same engine."""
    parts = [data.draw(batches(generation)) for generation in ("0.9.1", "0.33", "0.20", "0.24")]
    bodies = [
        msgspec.msgpack.decode(encode(part, g))[1]
        for part, g in zip(parts, ("0.9.1", "0.33", "0.20", "0.24"), strict=True)
    ]

    batch = decode_batch(msgspec.msgpack.encode([1.5, [event for body in bodies for event in body], 7]))

    assert tuple(event for part in parts for event in part.events) == batch.events
    assert (batch.rank, batch.failures, batch.unknown) == (7, (), ())


@pytest.mark.parametrize(
    "path", [each for each in PAYLOADS if each.stat().st_size < 400], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_truncation_and_trailing_byte_is_undecodable(path: Path) -> None:
    raw = path.read_bytes()
    for end in range(len(raw)):
        with pytest.raises(Undecodable):
            decode_batch(raw[:end])
    for tail in (b"\x00", b"\xc0", raw):
        with pytest.raises(Undecodable):
            decode_batch(raw + tail)


@few
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_batch_or_undecodable(raw: bytes) -> None:
    try:
        batch = decode_batch(raw)
    except Undecodable:
        return

    assert isinstance(batch, Batch)


@few
@given(data=st.data())
def test_flipped_bytes_never_escape_as_another_error(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(PAYLOADS)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode_batch(bytes(raw))
        assert len(layouts(bytes(raw))) == len(batch.events)
    except Undecodable:
        return


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgspec.msgpack.encode({"ts": 1.0, "events": []}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode([1.0, [], "zero"]),
        b"\x91" * 2_000_000,
        b"\x93\xcb" + bytes(8) + b"\x91" * 2_000_000 + b"\xc0",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x81\xa1a" * 2_000_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\x00\x20\x00\x00" + b"\xc0" * 2**21 + b"\xc0",
        b"\x93\xcb" + bytes(8) + b"\x91\xdf\xff\xff\xff\xff",
        bytes(BATCH_BYTES_MAX + 1),
    ],
    ids=range(16),
)
def test_what_is_no_batch_is_undecodable(raw: bytes) -> None:
    """Nesting and sizes that a header only claims cost neither memory nor the process."""
    with pytest.raises(Undecodable):
        decode_batch(raw)


def stored(**changes: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        **changes,
    }


def batch_of(*events: Any, rank: Any = 0) -> Batch:
    return decode_batch(msgspec.msgpack.encode([1.0, list(events), rank]))


@pytest.mark.parametrize(
    "event",
    [
        None,
        7,
        "BlockStored",
        [],
        [7],
        {},
        {"type": None},
        {"type": 7},
        {"block_hashes": [1]},
        {1: 2},
        ["BlockStored", [1], None],
        ["BlockRemoved"],
        stored(block_hashes=None),
        stored(block_hashes=[1.5]),
        stored(block_hashes=[b""]),
        stored(token_ids=["1"]),
        stored(block_size=-1),
        stored(group_idx="0"),
        stored(medium=7),
        stored(lora_name=[]),
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1},
        {"type": "BlockRemoved"},
        ["BlockRemoved", *range(300)],
    ],
    ids=range(23),
)
def test_an_event_that_cannot_be_read_is_listed_and_costs_only_itself(event: Any) -> None:
    batch = batch_of(["BlockRemoved", [1]], event, stored(block_hashes=[2]))

    assert [BlockRemoved((1,)), BlockStored((2,), None, (1, 2), 2)] == list(batch.events)
    assert [failure.index for failure in batch.failures] == [1]
    assert batch.failures[0].reason
    assert not batch.unknown


def test_reasons_for_failures_hold_no_values() -> None:
    batch = batch_of(
        stored(token_ids=["secret-token"]),
        stored(extra_keys=[["secret-salt"]], block_size="secret-size"),
        ["BlockRemoved", {"secret-hash": 1}],
        {"secret-key": 1},
    )

    assert len(batch.failures) == 4
    assert "secret" not in repr(batch.failures)


def test_unknown_tags_are_named_in_order_and_in_bounded_printable_form() -> None:
    batch = batch_of(["BlockInactive", 1], {"type": "Tier\nBlocks" + "x" * 100}, ["AllBlocksCleared"])

    assert batch.events == (AllBlocksCleared(),)
    assert batch.unknown[0] == "BlockInactive"
    assert batch.unknown[1].startswith("Tier?Blocksx")
    assert len(batch.unknown[1]) == TAG_CHARS_MAX


def test_unknown_fields_are_counted_and_skipped_in_both_encodings() -> None:
    array = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention", None, "new", 1]
    batch = batch_of(stored(origin="REUSED", version=1), array, {"type": "AllBlocksCleared", "medium": "GPU"})

    assert batch.unknown_fields == 2 + 2 + 1
    assert len(batch.events) == 3
    assert not batch.failures


def test_elements_after_the_rank_are_counted_and_skipped() -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 3, "epoch", 9]))

    assert (batch.rank, batch.unknown_fields) == (3, 2)
    assert batch.events == (AllBlocksCleared(),)


def test_unreadable_side_fields_cost_only_themselves() -> None:
    batch = batch_of(stored(session_id=7, locality=[]), stored(kv_cache_spec_kind=1))

    assert not batch.failures
    assert batch.unknown_fields == 3
    assert [event.session_id for event in batch.events if isinstance(event, BlockStored)] == [None, None]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([["a", b"\x01", ["img", 3]]], (("a", b"\x01", ("img", 3)),)),
        ([[{"mm": 1}], None], ((UNREADABLE,), None)),
        ([[["mm", ["img", 3]]]], ((UNREADABLE,),)),
        ("all", ((UNREADABLE,),)),
    ],
)
def test_extra_keys_of_forms_to_come_are_marked_never_dropped(keys: Any, expected: Any) -> None:
    """A dropped one would make an image's block look like plain text."""
    batch = batch_of(stored(extra_keys=keys))

    [event] = batch.events
    assert isinstance(event, BlockStored)
    assert expected == event.extra_keys


def test_an_unreadable_lookahead_still_counts_as_one() -> None:
    [event] = batch_of(stored(lookahead_token_ids=7)).events

    assert isinstance(event, BlockStored)
    assert event.lookahead_token_ids


def test_the_group_is_part_of_equality_and_hash_and_none_is_not_zero() -> None:
    stores = [BlockStored((1,), None, (), 16, group_idx=group) for group in (None, 0, 1)]
    removals = [BlockRemoved((1,), group_idx=group) for group in (None, 0, 1)]

    assert len(set(stores)) == 3
    assert len(set(removals)) == 3
    assert hash(stores[0]) != hash(stores[1])
    assert stores[1] == BlockStored((1,), None, (), 16, group_idx=0)


def test_an_event_is_equal_in_both_encodings() -> None:
    array = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [[["img", 3]]], 0]
    batch = batch_of(array, stored(medium="GPU", group_idx=0, extra_keys=[[["img", 3]]]))

    assert batch.events[0] == batch.events[1]
    assert hash(batch.events[0]) == hash(batch.events[1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (100, 100),
        (2**53 + 1, 2**53 + 1),
        (2**63, 2**63),
        (2**64 - 1, 2**64 - 1),
        (-5, 2**64 - 5),
        (-(2**63), 2**63),
        ((2**53 + 1).to_bytes(8, "big"), 2**53 + 1),
        (b"\xff" * 24 + (7).to_bytes(8, "big"), 7),
        (b"\x01\x02", 0x0102),
    ],
)
def test_low64_is_one_unsigned_value_per_hash(value: int | bytes, expected: int) -> None:
    assert expected == low64(value)


def test_byte_and_integer_forms_of_recorded_hashes_meet_in_their_low_64_bits() -> None:
    vectors = json.loads((WIRE / "hash_vectors.json").read_text())["vectors"]
    pairs = [(each["hashes"], each["u64"]) for each in vectors]

    assert pairs
    for long, short in pairs:
        assert [int(each) for each in short] == [low64(bytes.fromhex(each)) for each in long]
