"""Bytes of the index: they come back as they went, and rubbish is Corrupt, never a wrong answer or a crash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger_index.errors import Corrupt, InvalidInput
from kvledger_index.model import GroupSpec
from kvledger_index.rows import merge, parse_row, parse_side, split_row
from kvledger_index.units import NEVER, Bind, Card, Clear, Drop, Now, Progress, Put, Stamp
from kvledger_index.values import (
    decode_card,
    decode_now,
    decode_partition,
    decode_rank,
    decode_stamp,
    encode_card,
    encode_now,
    encode_ops,
    encode_stamp,
    pack_keys,
)

I64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
STAMPS = st.builds(Stamp, I64, I64, I64, I64)
NOW = Now(1, 2, 3, 4, 5, ((0, 0, 6), (255, 3, 7)))
CARD = Card("m", 3, 16, True, False, True, ("why",), False, (GroupSpec(0, "mamba", 64), GroupSpec(None)), (None, 0))
RANK_HEAD = Struct("<32s4IH")
PARTITION = Struct(">6q")


@given(STAMPS, STAMPS)
def test_stamps_compare_as_their_bytes_do(a: Stamp, b: Stamp) -> None:
    assert (a < b) == (encode_stamp(a) < encode_stamp(b))
    assert decode_stamp(encode_stamp(a)) == a
    assert len(encode_stamp(a)) == 32


def test_never_is_below_every_stamp_of_a_log() -> None:
    assert encode_stamp(NEVER) < encode_stamp(Stamp(-1, -1, 0, 0)) < encode_stamp(Stamp(0, 0, 1, 0))


@given(st.lists(U64, max_size=40))
def test_keys_are_eight_bytes_each(keys: list[int]) -> None:
    assert pack_keys(keys) == b"".join(key.to_bytes(8, "big") for key in keys)


@pytest.mark.parametrize("bad", [[-1], [2**64], [1.5], ["x"]])
def test_what_is_no_key_is_the_caller_s_fault(bad: list[Any]) -> None:
    with pytest.raises(InvalidInput):
        pack_keys(bad)


def test_values_come_back() -> None:
    head = bytes(4) + Struct("<4I").pack(1, 2, 3, 2**32 - 1)
    assert decode_card(head + encode_card(CARD)) == ((1, 2, 3, 2**32 - 1), CARD)
    assert decode_now(encode_now(-1, NOW)) == (-1, NOW)
    assert decode_partition(PARTITION.pack(1, 2, 3, 4, 5, 6) + b"topic") == (Progress("topic", 1, 2, 3), 4, 5, 6)
    raw = RANK_HEAD.pack(encode_stamp(NEVER), 1, 2, 3, 4, 3) + "mö".encode() + b"state"
    assert decode_rank(raw) == (NEVER, (1, 2, 3, 4), "mö", b"state")


def test_fields_that_a_later_release_appends_are_skipped() -> None:
    longer = [*msgspec.msgpack.decode(encode_card(CARD)), "new", 5]

    assert decode_card(bytes(20) + msgspec.msgpack.encode(longer)) == ((0, 0, 0, 0), CARD)


@pytest.mark.parametrize(
    ("decode", "whole"),
    [
        (decode_card, bytes(20) + encode_card(CARD)),
        (decode_now, encode_now(7, NOW)),
        (decode_partition, PARTITION.pack(1, 2, 3, 4, 5, 6)),
        (decode_rank, RANK_HEAD.pack(encode_stamp(NEVER), 1, 2, 3, 4, 5) + b"model"),
    ],
)
def test_a_value_cut_anywhere_is_corrupt(decode: Callable[[bytes], Any], whole: bytes) -> None:
    decode(whole)
    for end in range(len(whole)):
        with pytest.raises(Corrupt):
            decode(whole[:end])


@given(st.binary(max_size=200))
def test_rubbish_is_corrupt_or_a_value(raw: bytes) -> None:
    for decode in (decode_card, decode_now, decode_partition, decode_rank, split_row, parse_side):
        with suppress(Corrupt):
            decode(raw)


# --- rows


def row(nodes: list[int], *entries: tuple[int, int, int], side: bool = False) -> bytes:
    head = bytes([len(nodes) + 128 * side]) + pack_keys(nodes)
    return head + b"".join(Struct("<IBH").pack(*entry) for entry in entries)


@given(
    st.lists(U64, max_size=16, unique=True),
    st.lists(U64, min_size=1, max_size=16),
    st.integers(0, 16),
    st.lists(st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 255), st.integers(1, 2**16 - 1)), max_size=5),
    st.booleans(),
)
def test_a_prompt_shares_a_row_s_path_up_to_the_first_other_key(
    nodes: list[int], prompt: list[int], shared: int, entries: list[tuple[int, int, int]], side: bool
) -> None:
    prompt = (nodes[:shared] + prompt)[:16]
    entries = [(slot, lane, mask & (1 << len(nodes)) - 1) for slot, lane, mask in entries]
    same = 0
    while same < min(len(nodes), len(prompt)) and nodes[same] == prompt[same]:
        same += 1
    view = parse_row(row(nodes, *entries, side=side), pack_keys(prompt), {})

    assert (view.shared, view.side) == (same, side)
    want = [(slot, lane, mask & (1 << same) - 1) for slot, lane, mask in entries]
    assert [entry for entry in view.holders if entry[2]] == [entry for entry in want if entry[2]]


def test_equal_entries_are_parsed_once() -> None:
    seen: dict[Any, Any] = {}
    first = parse_row(row([1, 2], (1, 0, 3), (2, 0, 1)), pack_keys([1, 2]), seen)
    second = parse_row(row([5, 6], (1, 0, 3), (2, 0, 1)), pack_keys([5, 6]), seen)
    third = parse_row(row([7, 8], (1, 0, 3), (2, 0, 1)), pack_keys([7, 9]), seen)

    assert first.holders is second.holders
    assert third.holders == ((1, 0, 1), (2, 0, 1))


@pytest.mark.parametrize("raw", [b"", b"\x11", row([1, 2])[:-1], row([1], (1, 0, 1))[:-1], row([1], (1, 0, 1)) + b"x"])
def test_a_row_of_a_wrong_length_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_row(raw, pack_keys([1, 2]), {})


@pytest.mark.parametrize("raw", [b"", b"1234", b"123456"])
def test_a_side_field_of_a_wrong_length_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_side(raw)


def test_merging_names_each_holder_once() -> None:
    assert merge(((1, 0, 0b11), (2, 0, 0b1)), {(1, 0): 0b100, (3, 9): 0b1000}) == (
        (1, 0, 0b111),
        (2, 0, 0b1),
        (3, 9, 0b1000),
    )


# --- ops


def put(row_key: int, position: int, mask: int = 1, add: bool = True) -> Put:
    keys = tuple(range(row_key + position, row_key + position + mask.bit_length()))
    return Put(add, "cpu", 255, row_key, position, row_key + position - 1, keys, mask)


def test_puts_are_gathered_by_row_between_changes_of_slots() -> None:
    ops = (put(100, 0), put(200, 1), put(100, 1), Clear("storage"), put(100, 2), Drop(), Bind(), put(300, 0))
    raw, needed = encode_ops(ops)

    def whole(row_key: int, *puts: bytes) -> bytes:
        return b"R" + pack_keys([row_key]) + len(puts).to_bytes(4, "little") + b"".join(puts)

    def one(row_key: int, position: int) -> bytes:
        head = bytes([1, 1, 255, position, 1]) + (1 << position).to_bytes(2, "little")
        return head + pack_keys([row_key + position - 1, row_key + position])

    assert needed == 5
    assert raw == (
        whole(100, one(100, 0), one(100, 1)) + whole(200, one(200, 1)) + b"C\x02" + whole(100, one(100, 2)) + b"DB"
        + whole(300, one(300, 0))
    )  # fmt: skip


def test_keys_behind_the_last_named_one_are_not_sent() -> None:
    long = Put(True, "gpu", 0, 1, 0, 0, (1, 2, 3, 4), 0b0010)
    short = Put(True, "gpu", 0, 1, 0, 0, (1, 2), 0b10)

    assert encode_ops([long]) == encode_ops([short])
    assert encode_ops([Put(True, "gpu", 0, 1, 0, 0, (1, 2), 0)]) == (b"", 0)
