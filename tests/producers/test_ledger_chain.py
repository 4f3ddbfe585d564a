"""The ledger where no dense event names what is masked: placed by the engine's chain, else told as it is."""

from __future__ import annotations

from typing import Any

import pytest
from chain_engine import HashingEngine, Prompt, text
from ledger_rank import GPU, Rank, hashes_of, removed

from kvledger_bridge.decode import BlockStored
from kvledger_index.enginehash import Item, Namespace, Scheme, low64
from kvledger_index.model import GroupSpec
from kvledger_wire.records import ATTACHED, STORED

ENGINE = HashingEngine(Scheme("sha256", extras="tagged"))
WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 48}
FULL: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}


def names(prompt: Prompt) -> list[int]:
    return [low64(each) for each in ENGINE.digests(prompt)]


def test_a_window_only_engine_is_placed_from_its_first_event_on() -> None:
    rank = Rank()
    prompt = Prompt(text(12))
    rank.take(ENGINE.stored(prompt, 0, 8, [2, 6, 7], **WINDOW))
    rank.take(ENGINE.stored(prompt, 8, 12, [11], **WINDOW))
    keys, hashes = rank.keys(prompt.tokens), names(prompt)

    assert rank.ledger.placed(0) == {hashes[i]: keys[i] for i in (2, 6, 7, 11)}


def test_a_child_of_a_parent_that_was_never_announced_is_placed() -> None:
    rank = Rank()
    prompt = Prompt(text(12))
    other = Prompt((*text(5), *text(3, 7)))
    rank.take(ENGINE.stored(prompt, 0, 8, [7], **WINDOW))
    rank.take(ENGINE.stored(other, 5, 8, [7], **WINDOW))

    assert rank.ledger.placed(0)[names(other)[7]] == rank.keys(other.tokens)[7]


def test_a_masked_orphan_is_attached_when_its_parent_is_named() -> None:
    rank = Rank()
    prompt = Prompt(text(8))
    rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))
    rank.take(ENGINE.stored(prompt, 4, 8, [6], **WINDOW))
    assert rank.unplaced() == {names(prompt)[6]}
    changes = rank.changes(ENGINE.stored(prompt, 0, 4, [], **WINDOW), removed(names(prompt)[6]))

    assert (changes[0].op, changes[0].origin) == (STORED, ATTACHED)
    assert hashes_of(changes[0].runs[0].hashes) == [names(prompt)[6]]


def test_every_second_block_of_a_smaller_group_is_placed() -> None:
    rank = Rank(groups=(GroupSpec(0, "sliding_window", 16, 48), GroupSpec(1, "full_attention", 32)))
    prompt = Prompt(text(12))
    rank.take(ENGINE.stored(prompt, 0, 6, per=2, **FULL), ENGINE.stored(prompt, 0, 12, [8, 10, 11], **WINDOW))

    assert rank.unplaced() == set()
    assert rank.ledger.placed(1).keys() == {names(prompt)[i] for i in range(1, 12, 2)}


def test_a_piece_of_a_block_behind_tokens_that_were_published_is_placed() -> None:
    rank = Rank(groups=(GroupSpec(0, "mamba", 64), GroupSpec(1, "full_attention", 64)), hash_block_size=16)
    prompt = Prompt(text(8))
    rank.take(ENGINE.stored(prompt, 0, 2, per=4, **FULL))
    rank.take(ENGINE.stored(prompt, 6, 7, kv_cache_spec_kind="mamba"))

    assert rank.ledger.placed(0) == {names(prompt)[6]: rank.keys(prompt.tokens)[6]}


def test_a_piece_behind_tokens_that_nobody_published_is_unplaced_and_not_opaque() -> None:
    rank = Rank(groups=(GroupSpec(0, "mamba", 64), GroupSpec(1, "full_attention", 64)), hash_block_size=16)
    prompt = Prompt(text(8))
    rank.take(ENGINE.stored(prompt, 0, 1, per=4, **FULL))
    [piece] = rank.take(ENGINE.stored(prompt, 6, 7, kv_cache_spec_kind="mamba"))

    assert (piece.unplaced, piece.opaque) == (((GPU, 1),), ())


@pytest.mark.parametrize("announced", [[0, 3], [3]])
def test_a_salt_is_followed_where_block_0_shows_it_and_hidden_else(announced: list[int]) -> None:
    rank = Rank()
    rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))
    salted = Prompt(text(4), Namespace(salt="tenant"))
    [piece] = rank.take(ENGINE.stored(salted, 0, 4, announced, **WINDOW))
    hidden = announced == [3]

    assert (rank.unplaced() == {names(salted)[3]}) == hidden
    assert piece.opaque == ()
    if not hidden:
        assert rank.ledger.placed(0)[names(salted)[3]] == rank.keys(salted.tokens, salt="tenant")[3]


def test_media_of_masked_blocks_enter_their_keys() -> None:
    rank = Rank()
    prompt = Prompt(text(8), items=(Item("img", 20, 50),))
    rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))
    rank.take(ENGINE.stored(prompt, 0, 8, [1, 7], **WINDOW))
    keys = rank.keys(prompt.tokens, media=[(20, "img")])

    assert {names(prompt)[i]: keys[i] for i in (1, 7)}.items() <= rank.ledger.placed(0).items()


def test_an_image_that_reaches_into_a_span_without_hashes_gives_no_key_a_second_hash() -> None:
    """Sixteen more tokens of it reach unseen into a span of which nothing is announced."""
    rank = Rank(groups=(GroupSpec(0, "sliding_window", 16, 17), GroupSpec(1, "full_attention", 32)))
    prompt = Prompt(text(6), items=(Item("img", 3, 32),))
    rank.take(ENGINE.stored(prompt, 0, 1, per=2, **FULL), ENGINE.stored(prompt, 0, 2, [1], **WINDOW))
    rank.take(ENGINE.stored(prompt, 1, 2, per=2, **FULL), ENGINE.stored(prompt, 2, 4, [], **WINDOW))
    rank.take(ENGINE.stored(prompt, 2, 3, per=2, **FULL), ENGINE.stored(prompt, 4, 6, [4, 5], **WINDOW))
    hashes, keys = names(prompt), rank.keys(prompt.tokens, media=[(3, "img")])

    assert rank.ledger.lineage.twins == 0
    assert {hashes[i]: keys[i] for i in (1, 4, 5)} == rank.ledger.placed(0)
    assert rank.unplaced() == set()


def test_what_no_hash_proves_never_stands_against_a_hash_that_was_announced() -> None:
    rank = Rank(groups=(GroupSpec(0, "sliding_window", 16, 48), GroupSpec(1, "full_attention", 16)), hash_block_size=16)
    prompt, salted = Prompt(text(8)), Prompt(text(8), Namespace(salt="hidden"))
    rank.ledger.lineage.chains.force()
    rank.take(ENGINE.stored(prompt, 0, 2, **FULL))
    # an engine that tells prompts apart by what it does not publish would look like this
    event = ENGINE.stored(salted, 2, 4, **FULL)
    rank.take(BlockStored(event.block_hashes, names(prompt)[1], event.token_ids, 16, medium="GPU", group_idx=1))
    before = dict(rank.ledger.placed(1))
    rank.take(ENGINE.stored(prompt, 2, 4, [], **WINDOW))

    assert rank.ledger.lineage.twins == 0
    assert rank.ledger.placed(1) == before


def test_an_adapter_without_its_path_stays_unplaced_until_the_entry_names_it() -> None:
    prompt = Prompt(text(4), Namespace("a", path="/a"))
    for scheme in (None, Scheme("sha256", extras="tagged", paths=(("a", "/a"),))):
        rank = Rank(hash_scheme=scheme)
        rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))
        rank.take(ENGINE.stored(prompt, 0, 4, [2], **WINDOW))

        assert (rank.unplaced() == set()) == (scheme is not None)


def test_a_plain_rank_keeps_no_digests() -> None:
    rank = Rank()
    prompt = Prompt(text(4))
    rank.take(ENGINE.stored(prompt, 0, 4, **FULL), ENGINE.stored(prompt, 0, 4, [3], **WINDOW))

    assert not rank.ledger.lineage.chains.need.chains
    assert all(block.digest is None for block in rank.ledger.lineage._keys.values())


def test_a_masked_hash_that_nothing_names_turns_chains_on() -> None:
    """A full-attention group of the same block size should name it; this one fell silent."""
    rank = Rank()
    prompt = Prompt(text(8))
    rank.take(ENGINE.stored(prompt, 0, 2, **FULL))
    rank.take(ENGINE.stored(prompt, 0, 8, [5], **WINDOW))
    assert rank.ledger.lineage.chains.need.chains
    rank.take(ENGINE.stored(prompt, 0, 8, [7], **WINDOW))

    assert rank.unplaced() == set(), "the span names what was stored before, too"


def test_names_that_a_chain_gave_are_bounded_like_all_that_is_not_resident() -> None:
    rank = Rank(parents_max=4)
    rank.take(ENGINE.stored(Prompt(text(30)), 0, 30, [29], **WINDOW))

    assert len(rank.ledger.lineage._keys) == 5


# -- what no router can compute -------------------------------------------------------------------------------------


def opaque(*events: BlockStored, **entry: Any) -> tuple[Any, Any]:
    [piece] = Rank(**entry).take(*events)
    return piece.unplaced, piece.opaque


def event(**more: Any) -> BlockStored:
    fields: dict[str, Any] = {"medium": "GPU", "group_idx": 0, **more}
    return BlockStored((1, 2), fields.pop("parent", None), tuple(range(fields.pop("tokens", 32))), 16, **fields)


@pytest.mark.parametrize(
    ("more", "unplaced", "opaque_count"),
    [
        pytest.param({"lookahead_token_ids": ((1,), (2,))}, 2, 2, id="hashes over tokens to come"),
        pytest.param({"extra_keys": (None, (b"\x01" * 32,))}, 1, 1, id="prompt embeddings"),
        pytest.param({"extra_keys": (None, (7,))}, 1, 1, id="extra keys of a release to come"),
        pytest.param({"lora_id": 3}, 2, 2, id="an adapter that has a number only"),
        pytest.param({"tokens": 64}, 2, 0, id="a masked span under an unknown scheme"),
        pytest.param({"parent": 9}, 2, 0, id="an unknown parent"),
        pytest.param({"extra_keys": (("a", "b"), None)}, 2, 0, id="strings that cannot be told apart"),
    ],
)
def test_only_what_no_router_can_compute_is_opaque(more: dict[str, Any], unplaced: int, opaque_count: int) -> None:
    found = opaque(event(**more))

    assert found == (((GPU, unplaced),), ((GPU, opaque_count),) if opaque_count else ())


def test_a_hash_under_two_keys_is_opaque_and_ceases_to_be_with_its_removal() -> None:
    rank = Rank()
    rank.take(event())
    [piece] = rank.take(event(tokens=32, extra_keys=(("s",), None)))
    assert (piece.unplaced, piece.opaque) == (((GPU, 2),), ((GPU, 2),))
    [piece] = rank.take(removed(1), removed(1), removed(2))

    assert (piece.unplaced, piece.opaque) == (((GPU, 1),), ((GPU, 1),))


def test_what_follows_something_opaque_is_opaque() -> None:
    rank = Rank()
    rank.take(event(extra_keys=(None, (b"\x01",))))
    [piece] = rank.take(BlockStored((3,), 2, tuple(range(16)), 16, medium="GPU", group_idx=0))

    assert (piece.unplaced, piece.opaque) == (((GPU, 2),), ((GPU, 2),))


# -- full reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_full_reports_are_noticed_by_what_follows_them_in_their_step(declared: bool) -> None:
    rank = Rank(full_reports=declared)
    prompt = Prompt(text(30))
    rank.take(ENGINE.stored(prompt, 0, 2))
    reasons: list[str] = []
    for end in range(2, 8):
        report, store = ENGINE.stored(prompt, 0, end), ENGINE.stored(prompt, end, end + 1)
        reasons += [reason for piece in rank.take(report, store) for reason in piece.uncertain]

    assert rank.ledger.counts.full_reports == 6
    assert len(reasons) == (not declared)


@pytest.mark.parametrize("kept", [[], [1]], ids=["none of it is kept", "a window is kept"])
def test_what_was_computed_again_for_another_group_is_no_full_report(kept: list[int]) -> None:
    """Two steps of such a prompt in one batch: the full-attention group only gets further copies."""
    rank = Rank()
    for number in range(6):
        prompt = Prompt(text(4, number))
        rank.take(ENGINE.stored(prompt, 0, 4, **FULL))
        rank.take(
            ENGINE.stored(prompt, 0, 2, **FULL),
            ENGINE.stored(prompt, 0, 2, kept, **WINDOW),
            ENGINE.stored(prompt, 2, 4, **FULL),
            ENGINE.stored(prompt, 2, 4, [3], **WINDOW),
        )

    assert rank.ledger.counts.full_reports == 0


def test_two_requests_that_compute_one_prefix_in_one_batch_are_no_full_report() -> None:
    rank = Rank()
    for number in range(6):
        prompt = Prompt(text(4, number))
        rank.take(*[ENGINE.stored(prompt, first, first + 2) for first in (0, 0, 2, 2)])

    assert rank.ledger.counts.full_reports == 0


def test_a_connector_that_announces_what_it_has_again_is_no_full_report() -> None:
    rank = Rank()
    prompt = Prompt(text(30))
    for end in range(2, 8):
        twice = [ENGINE.stored(prompt, 0, 2, medium="CPU") for _ in range(2)]
        rank.take(ENGINE.stored(prompt, 0, end), *twice, ENGINE.stored(prompt, 2, 3 + end, medium="CPU"))

    assert rank.ledger.counts.full_reports == 0


def test_the_same_prompt_stored_again_is_no_full_report() -> None:
    rank = Rank()
    prompt = Prompt(text(8))
    for _ in range(8):
        rank.take(ENGINE.stored(prompt, 0, 4))
        rank.take(ENGINE.stored(prompt, 4, 8))

    assert rank.ledger.counts.full_reports == 0
