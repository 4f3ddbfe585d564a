"""Adapters, salts and media: six prompts of equal tokens are six different blocks, or none can be told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger_bridge.decode import Batch, BlockStored, ExtraKey
from kvledger_bridge.identity import identify
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.pace import at_once
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.model import ModelEntry

TOKENS = tuple(range(64))
Entry = tuple[ExtraKey, ...] | None


def event(extra_keys: tuple[Entry, ...] | None, **more: Any) -> BlockStored:
    """Four blocks of 16 from token 0, as an engine since 0.20 announces them."""
    fields: dict[str, Any] = {"medium": "GPU", "group_idx": 0, "extra_keys": extra_keys, **more}
    return BlockStored((1, 2, 3, 4), fields.pop("parent", None), TOKENS, 16, **fields)


def placed(*events: BlockStored, multimodal: bool | None = None) -> list[int | None]:
    """The keys of blocks 1..4, None where one is unplaced."""
    ledger = Ledger(ModelEntry(model="m", multimodal=multimodal))
    for seq, each in enumerate(events):
        ledger.apply(seq, Batch(0.0, 0, (each,)))
    keys = {name: key for group in ledger.groups for name, key in ledger.placed(group).items()}
    resident = {name for group in ledger.groups for name in ledger.resident(group)}
    assert resident >= {1, 2, 3, 4}, "what cannot be placed is resident all the same"
    return [keys.get(name) for name in (1, 2, 3, 4)]


def expected(**more: Any) -> list[int]:
    return prompt_keys("m", TOKENS, 16, **more)


PLAIN = (None, None, None, None)
SALTED = (("s",), None, None, None)
OLD: dict[str, Any] = {"group_idx": None}


def test_no_extra_keys_is_plain_text() -> None:
    assert expected() == placed(event(None)) == placed(event(PLAIN))


def test_the_salt_comes_from_block_0_and_enters_the_namespace() -> None:
    assert expected(salt="s") == placed(event(SALTED))


def test_the_adapter_enters_the_namespace_and_its_name_is_not_a_salt() -> None:
    assert expected(lora="a") == placed(event((("a",),) * 4, lora_id=1, lora_name="a"))


def test_adapter_and_salt_of_one_name_are_told_apart() -> None:
    keys = event((("x", "x"), ("x",), ("x",), ("x",)), lora_id=1, lora_name="x")

    assert expected(lora="x", salt="x") == placed(keys)


def test_an_adapter_that_extra_keys_do_not_repeat_is_still_one() -> None:
    """0.14 to 0.16: a name and no extra keys."""
    assert expected(lora="a") == placed(event(None, lora_id=1, lora_name="a", **OLD))


def test_an_adapter_without_a_name_is_unplaced() -> None:
    """Before 0.14: only a number, which may mean another adapter on another replica."""
    assert placed(event(None, lora_id=3, **OLD)) == [None] * 4


def test_media_are_placed_by_the_token_at_which_they_start() -> None:
    keys = ((("img", 3),), (("img", -13),), (("img", -29), ("pic", 5)), (("pic", -11),))

    assert expected(media=[(3, "img"), (37, "pic")]) == placed(event(keys))


def test_media_within_a_block_of_several_strides_are_placed_by_stride() -> None:
    ledger = Ledger(ModelEntry(model="m", hash_block_size=16))
    keys = ((("img", 20), ("pic", 40)), (("pic", 8), ("late", 31)))
    ledger.apply(0, Batch(0.0, 0, (BlockStored((1, 2), None, TOKENS, 32, extra_keys=keys, group_idx=0),)))
    want = expected(media=[(20, "img"), (40, "pic"), (63, "late")])

    assert ledger.placed(0) == {1: want[1], 2: want[3]}


def test_media_that_started_before_the_event_are_in_its_parents_key() -> None:
    first = BlockStored((1,), None, TOKENS[:16], 16, extra_keys=((("img", 10),),), group_idx=0)
    rest = BlockStored((2, 3, 4), 1, TOKENS[16:], 16, extra_keys=((("img", -6),), None, None), group_idx=0)

    assert expected(media=[(10, "img")]) == placed(first, rest)


def test_a_chain_inherits_its_salt() -> None:
    first = BlockStored((1,), None, TOKENS[:16], 16, extra_keys=(("s",),), group_idx=0)
    rest = BlockStored((2, 3, 4), 1, TOKENS[16:], 16, extra_keys=(None, None, None), group_idx=0)

    assert expected(salt="s") == placed(first, rest)


def test_equal_tokens_under_different_inputs_have_disjoint_keys() -> None:
    variants = [
        placed(event(None)),
        placed(event((("a",),) * 4, lora_id=1, lora_name="a")),
        placed(event((("s",),) * 4, lora_id=2, lora_name="s")),
        placed(event(SALTED)),
        placed(event(((("img-x", 0),),) + (None,) * 3)),
        placed(event(((("img-y", 0),),) + (None,) * 3)),
    ]

    assert all(None not in each for each in variants)
    for one, other in itertools.combinations(variants, 2):
        assert not set(one) & set(other)


@pytest.mark.parametrize(("multimodal", "known"), [(None, False), (True, False), (False, True)])
def test_bare_strings_of_old_engines_are_salts_only_where_the_entry_rules_media_out(
    multimodal: bool | None, known: bool
) -> None:
    """0.17 and 0.18 write media as bare strings, too."""
    got = placed(event(SALTED, **OLD), multimodal=multimodal)

    assert got == (expected(salt="s") if known else [None] * 4)


def test_an_engine_that_has_sent_a_pair_sends_no_bare_media() -> None:
    """0.19: no group number yet, media as pairs."""
    pair = BlockStored((9,), None, TOKENS[:16], 16, extra_keys=((("img", 0),),))
    known = placed(pair, event(SALTED, **OLD))

    assert known == expected(salt="s")
    assert placed(event(((("img", 0), "s"), None, None, None), **OLD)) == expected(salt="s", media=[(0, "img")])


@pytest.mark.parametrize("multimodal", [None, False])
def test_a_bare_string_after_block_0_ends_what_can_be_placed(multimodal: bool | None) -> None:
    got = placed(event((None, ("img",), None, None)), multimodal=multimodal)

    assert got == [expected()[0], None, None, None]


@pytest.mark.parametrize(
    "item",
    [b"\x01" * 32, b"", 7, ("a",), ("mm", "img", 3), ("cache_salt", "s"), (1, "img"), (None, 1), None, ()],
    ids=repr,
)
def test_items_of_any_other_form_end_what_can_be_placed(item: ExtraKey) -> None:
    """Prompt embeds (bytes), and whatever releases to come may write."""
    got = placed(event((None, None, (item,), None)))

    assert got == [*expected()[:2], None, None]


def test_two_bare_strings_in_block_0_cannot_be_told_apart() -> None:
    assert placed(event((("s", "t"), None, None, None))) == [None] * 4


@pytest.mark.parametrize("keys", [(), (None,), (("s",),), (("s",),) * 5])
def test_entries_that_do_not_match_the_hashes_place_nothing(keys: tuple[Entry, ...]) -> None:
    unplaced = keys not in ((), (None,))  # without an entry that says anything, however many: plain text

    assert placed(event(keys)) == ([None] * 4 if unplaced else expected())


def test_what_cannot_be_placed_leaves_no_way_to_its_children() -> None:
    embeds = BlockStored((1, 2), None, TOKENS[:32], 16, extra_keys=(None, (b"\x01",)), group_idx=0)
    child = BlockStored((3, 4), 2, TOKENS[32:], 16, extra_keys=(None, None), group_idx=0)

    assert placed(embeds, child) == [expected()[0], None, None, None]


items = st.one_of(
    st.sampled_from(["a", "s", "img"]),
    st.tuples(st.sampled_from(["img", "pic"]), st.integers(-40, 40)),
    st.binary(max_size=4),
    st.integers(0, 3),
)
entries = st.none() | st.lists(items, max_size=3).map(tuple)


@settings(deadline=None)
@given(
    keys=st.none() | st.lists(entries, max_size=6).map(tuple),
    lora=st.sampled_from([None, "a"]),
    parent=st.sampled_from([None, 5]),
    group=st.sampled_from([None, 0]),
    multimodal=st.sampled_from([None, True, False]),
)
def test_identity_never_guesses(
    keys: tuple[Entry, ...] | None, lora: str | None, parent: int | None, group: int | None, multimodal: bool | None
) -> None:
    """Every item of the blocks that count as described is accounted for: adapter, salt or placed medium."""
    one = event(keys, lora_id=None if lora is None else 1, lora_name=lora, group_idx=group, parent=parent)
    identity = at_once(identify(one, pairs_known=False, multimodal=multimodal))

    assert 0 <= identity.blocks <= 4
    if parent is not None:
        assert identity.salt is None
    for number, entry in enumerate(keys or ()):
        if number >= identity.blocks:
            break
        words = [item for item in entry or () if isinstance(item, str)]
        if lora is not None and words[:1] == [lora]:
            del words[0]
        assert words == ([identity.salt] if number == 0 and identity.salt is not None else [])
        for item in entry or ():
            assert isinstance(item, str | tuple)
            if isinstance(item, tuple):
                assert isinstance(item[1], int)
                assert (number * 16 + item[1], item[0]) in identity.extras
