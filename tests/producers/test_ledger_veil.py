"""Hashes that are proven to be no part of a prompt without adapter, salt and media; and what is no such proof."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chain_engine import HashingEngine, Prompt, text
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_rank import CPU, GPU, Rank, cleared, removed

from kvledger_bridge import veil
from kvledger_bridge.decode import BlockStored
from kvledger_bridge.ledger import Piece
from kvledger_index.enginehash import Item, Namespace, Scheme, low64
from kvledger_index.model import GroupSpec

ENGINE = HashingEngine(Scheme("sha256", extras="tagged"))
WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 48}
SALTED = Namespace(salt="tenant")


def names(prompt: Prompt, engine: HashingEngine = ENGINE) -> list[int]:
    return [low64(each) for each in engine.digests(prompt)]


def found_out(engine: HashingEngine = ENGINE, **entry: Any) -> Rank:
    """A rank that has seen a plain masked prompt from token 0, which gives the scheme away where it can be found."""
    rank = Rank(**entry)
    rank.take(engine.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))
    return rank


def veiled_in(rank: Rank, group: int = 0, code: int = GPU) -> set[int]:
    return rank.ledger._lanes[group, code].veiled


def counts(pieces: list[Piece]) -> tuple[Any, ...]:
    [piece] = pieces
    return piece.unplaced, piece.opaque, piece.veiled


# -- proof ----------------------------------------------------------------------------------------------------------


def test_a_hidden_salt_is_proven_by_the_chain_without_it() -> None:
    rank = found_out()
    prompt = Prompt(text(4), SALTED)

    assert counts(rank.take(ENGINE.stored(prompt, 0, 4, [2, 3], **WINDOW))) == (((GPU, 2),), (), ((GPU, 2),))


def test_hidden_media_are_proven_where_they_begin() -> None:
    """The image starts in block 4, which was left out; block 1 of the same event is placed."""
    rank = found_out()
    prompt = Prompt(text(8), items=(Item("img", 70, 3),))
    rank.take(ENGINE.stored(prompt, 0, 8, [1, 6], **WINDOW))

    assert rank.unplaced() == veiled_in(rank) == {names(prompt)[6]}


def test_hidden_media_are_proven_behind_a_parent_whose_chain_is_plain() -> None:
    rank = found_out()
    prompt = Prompt(text(8), items=(Item("img", 70, 3),))
    rank.take(ENGINE.stored(prompt, 0, 3, [2], **WINDOW))
    rank.take(ENGINE.stored(prompt, 3, 8, [7], **WINDOW))

    assert veiled_in(rank) == {names(prompt)[7]}


def test_what_hangs_on_a_chain_with_a_salt_is_veiled_though_it_hides_more() -> None:
    rank = found_out()
    prompt = Prompt(text(8), SALTED, (Item("img", 70, 3),))
    rank.take(ENGINE.stored(prompt, 0, 3, [0, 2], **WINDOW))
    rank.take(ENGINE.stored(prompt, 3, 8, [7], **WINDOW))

    assert rank.unplaced() == veiled_in(rank) == {names(prompt)[7]}


def test_a_child_of_a_veiled_hash_is_veiled_even_when_the_parent_is_gone() -> None:
    rank = found_out()
    prompt = Prompt(text(8), SALTED)
    rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    rank.take(removed(names(prompt)[3]))
    rank.take(ENGINE.stored(prompt, 4, 6, [5], **WINDOW))
    rank.take(ENGINE.stored(prompt, 6, 8, [7], **WINDOW))

    assert veiled_in(rank) == {names(prompt)[5], names(prompt)[7]}


def test_what_an_event_lists_needs_no_scheme() -> None:
    """From the first listed item on, as a chain binds what came before it; an unknown parent does not matter."""
    rank = Rank()
    images: Any = (None, (("img", 3),), None)

    assert counts(rank.take(event(3, parent=9, extra_keys=images))) == (((GPU, 3),), (), ((GPU, 2),))


@pytest.mark.parametrize(
    ("more", "opaque", "proven"),
    [
        pytest.param({"lora_name": "a", "lora_id": 1, "parent": 9}, 0, 2, id="an adapter"),
        pytest.param({"lora_id": 3}, 2, 2, id="an adapter that has a number only is opaque, too"),
        pytest.param({"extra_keys": (("a", "b"), None)}, 0, 2, id="strings that cannot be told apart"),
        pytest.param({"extra_keys": (None, (b"\x01" * 32,)), "parent": 9}, 1, 0, id="prompt embeddings"),
        pytest.param({"extra_keys": ((7,), None)}, 2, 0, id="extra keys of a release to come"),
        pytest.param({"extra_keys": (("a",),), "parent": 9}, 0, 0, id="extra keys that do not fit the hashes"),
        pytest.param({"lookahead_token_ids": ((1,), (2,))}, 2, 0, id="hashes over tokens to come"),
        pytest.param({"parent": 9}, 0, 0, id="an unknown parent"),
        pytest.param({"tokens": 64}, 0, 0, id="a masked span under an unknown scheme"),
    ],
)
def test_adapter_salt_and_media_on_the_wire_are_proof_and_nothing_else_is(
    more: dict[str, Any], opaque: int, proven: int
) -> None:
    _, found_opaque, found_veiled = counts(Rank().take(event(2, **more)))

    assert found_opaque == (((GPU, opaque),) if opaque else ())
    assert found_veiled == (((GPU, proven),) if proven else ())


def event(count: int, **more: Any) -> BlockStored:
    fields: dict[str, Any] = {"medium": "GPU", "group_idx": 0, **more}
    tokens = tuple(range(fields.pop("tokens", 16 * count)))
    return BlockStored(tuple(range(1, count + 1)), fields.pop("parent", None), tokens, 16, **fields)


# -- no proof -------------------------------------------------------------------------------------------------------


def test_before_the_scheme_is_known_nothing_is_proven_and_then_what_came_before_is() -> None:
    """A root and its child; of two hashes one that was removed meanwhile; an orphan, of which nothing is known."""
    rank = Rank()
    salted, orphan = Prompt(text(8), SALTED), Prompt(text(4, 6))
    rank.take(ENGINE.stored(salted, 0, 4, [2, 3], **WINDOW))
    rank.take(ENGINE.stored(salted, 4, 8, [7], **WINDOW), removed(names(salted)[2]))
    rank.take(ENGINE.stored(orphan, 2, 4, [3], **WINDOW))
    assert veiled_in(rank) == set()
    pieces = rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))

    assert counts(pieces) == (((GPU, 3),), (), ((GPU, 2),))
    assert veiled_in(rank) == {names(salted)[3], names(salted)[7]}


def test_what_waits_for_a_scheme_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the newest two events are kept, so what the first one brought is not proven."""
    monkeypatch.setattr(veil, "LATE_TOKENS_MAX", 128)
    rank = Rank()
    prompts = [Prompt(text(4, number), SALTED) for number in range(3)]
    for prompt in prompts:
        rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    rank.take(ENGINE.stored(Prompt(text(2, 9)), 0, 2, [1], **WINDOW))

    assert veiled_in(rank) == {names(prompt)[3] for prompt in prompts[1:]}


def test_an_operators_seed_that_no_hash_proved_is_no_proof() -> None:
    """The engine's seed is random. Byte hashes confirm algorithm and hash block behind parents; roots fit nothing."""
    engine = HashingEngine(Scheme("sha256", "nobody knows it", "tagged"), raw=True)
    rank = Rank(hash_scheme=Scheme("sha256", "0", "tagged"))
    prompt = Prompt(text(8))
    rank.take(engine.stored(prompt, 0, 2), engine.stored(prompt, 2, 4))
    rank.take(engine.stored(Prompt(text(4, 3)), 0, 4, [3], **WINDOW))
    finder = rank.ledger.lineage.chains.finder
    assert (finder.confirmed, finder.rooted, finder.seeded) == (True, True, False)

    assert rank.unplaced() == {names(Prompt(text(4, 3)), engine)[3]}
    assert veiled_in(rank) == set()


def test_an_operators_seed_counts_once_a_masked_hash_proved_it() -> None:
    rank = found_out(hash_scheme=Scheme("sha256", extras="tagged"), groups=(GroupSpec(0, "sliding_window", 16, 48),))
    prompt = Prompt(text(4), SALTED)

    assert counts(rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW)))[2] == ((GPU, 1),)


def test_a_piece_behind_tokens_that_nobody_published_may_be_anyones() -> None:
    rank = Rank(groups=(GroupSpec(0, "mamba", 64), GroupSpec(1, "full_attention", 64)), hash_block_size=16)
    prompt = Prompt(text(8))
    rank.take(ENGINE.stored(prompt, 0, 1, per=4, group_idx=1, kv_cache_spec_kind="full_attention"))
    assert rank.ledger.lineage.chains.finder.seeded

    assert counts(rank.take(ENGINE.stored(prompt, 6, 7, kv_cache_spec_kind="mamba")))[2] == ()


def test_a_hash_under_two_keys_is_never_veiled() -> None:
    """Listed with a salt by one event and without by another: whatever it is, nothing is proven of it."""
    rank = Rank()
    rank.take(event(1))
    rank.take(event(1, extra_keys=(("s",),)))

    assert counts(rank.take(event(1, extra_keys=(("s", "t"),)))) == (((GPU, 1),), ((GPU, 1),), ())
    assert 1 not in rank.ledger.veil


def test_an_event_of_another_tier_proves_nothing() -> None:
    rank = found_out()
    prompt = Prompt(text(4), SALTED)
    rank.take(ENGINE.stored(prompt, 0, 4, [3], medium="CPU"))

    assert veiled_in(rank, code=CPU) == set()


# -- bookkeeping ----------------------------------------------------------------------------------------------------


def test_what_is_proven_of_a_hash_holds_in_every_lane_that_has_it_and_is_told() -> None:
    """Stored by a tier, by another group, and again after the GPU's event that proves it."""
    rank = found_out()
    prompt = Prompt(text(4), SALTED)
    name = names(prompt)[3]
    tier = BlockStored((name,), None, (), 0, medium="CPU", group_idx=0)
    rank.take(tier, BlockStored((name,), None, (), 0, medium="CPU", group_idx=1))
    pieces = rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    rank.take(cleared())
    [again] = rank.take(tier)

    assert {piece.group: piece.veiled for piece in pieces} == {0: ((GPU, 1), (CPU, 1)), 1: ((CPU, 1),)}
    assert again.veiled == ((CPU, 1),)


def test_removals_and_clears_take_veiled_hashes_along() -> None:
    rank = found_out()
    prompt = Prompt(text(4), SALTED)
    two, three = names(prompt)[2:]
    rank.take(ENGINE.stored(prompt, 0, 4, [2, 3], **WINDOW), ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    seen = [counts(rank.take(removed(each)))[2] for each in (two, three, three)]
    rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    assert seen == [((GPU, 1),), ((GPU, 1),), ()]
    assert veiled_in(rank) == {three}
    rank.take(cleared())

    assert veiled_in(rank) == set()


def test_a_veiled_hash_that_gets_its_key_is_no_longer_without_one() -> None:
    rank = found_out()
    prompt = Prompt(text(4), SALTED)
    rank.take(ENGINE.stored(prompt, 0, 4, [3], **WINDOW))
    assert veiled_in(rank) == {names(prompt)[3]}

    assert counts(rank.take(ENGINE.stored(prompt, 0, 4, [0, 3], **WINDOW))) == ((), (), ())
    assert rank.ledger.placed(0)[names(prompt)[3]] == rank.keys(prompt.tokens, salt="tenant")[3]


def test_what_is_remembered_of_veiled_hashes_is_bounded() -> None:
    """Children follow while the parent is among the newest; what stands in a lane stays counted."""
    rank = found_out(parents_max=2)
    for number in range(5):
        rank.take(ENGINE.stored(Prompt(text(4, number), SALTED), 0, 4, [3], **WINDOW))

    assert len(rank.ledger.veil._names) == 2
    assert len(veiled_in(rank)) == 5


# -- always ---------------------------------------------------------------------------------------------------------


def run_at_random(rng: random.Random, engine: HashingEngine, **entry: Any) -> tuple[Rank, set[int], set[int]]:
    """A rank of one window after random prompts in masked chunks, all hashes of plain ones, and all of others."""
    rank = Rank(**entry)
    plain: set[int] = set()
    other: set[int] = set()
    for _ in range(rng.randint(2, 8)):
        tokens = text(8, rng.randrange(3))
        namespace = Namespace(*rng.choice([(None, None), (None, None), (None, "s"), ("a", None)]))
        start = rng.randrange(128)
        items = (Item("img", start, rng.randint(1, 40)),) if rng.random() < 0.3 else ()
        prompt = Prompt(tokens, namespace, items)
        hashes = names(prompt, engine)
        free = start // 16 if items else 8
        (plain if namespace == Namespace() else other).update(hashes[:free])
        other.update(hashes[free:])
        at = 0
        while at < 8:
            end = rng.randint(at + 1, 8)
            kept = [i for i in range(at, end) if rng.random() < 0.4]
            rank.take(engine.stored(prompt, at, end, kept, **WINDOW))
            at = end
    return rank, plain, other


@settings(max_examples=120, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from(["vllm-none-hash", "random"]))
def test_no_hash_of_a_plain_prompt_is_ever_veiled(rng: random.Random, raw: bool, seed: str) -> None:
    engine = HashingEngine(Scheme("sha256", seed, "tagged"), raw=raw)
    rank, plain, other = run_at_random(rng, engine)
    lane = rank.ledger._lanes.get((0, GPU))

    if lane is not None:
        assert lane.veiled <= lane.unplaced.keys()
        assert lane.veiled <= other
        assert not lane.veiled & plain


def test_canary_a_seed_taken_for_proven_veils_plain_prompts() -> None:
    """The property above would see a wrong proof: with the guard off, plain prompts of a random seed are veiled."""
    engine = HashingEngine(Scheme("sha256", "random", "tagged"), raw=True)
    rank = Rank(hash_scheme=Scheme("sha256", "0", "tagged"))
    finder = rank.ledger.lineage.chains.finder
    prompt = Prompt(text(8))
    rank.take(engine.stored(prompt, 0, 2), engine.stored(prompt, 2, 4))
    finder.seeded = True
    rank.take(engine.stored(Prompt(text(4, 3)), 0, 4, [3], **WINDOW))

    assert veiled_in(rank) == {names(Prompt(text(4, 3)), engine)[3]}
