"""Where announced hashes stand on the engine's chain: never wrong, and found wherever the event tells enough."""

from __future__ import annotations

from typing import Any

import pytest
from chain_engine import TOKENS_PER_HASH, HashingEngine, Prompt, listed, text
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger_bridge.chain import NOTHING, Told, walk
from kvledger_bridge.pace import at_once
from kvledger_index.enginehash import NO_NAMESPACE, Item, Namespace, Scheme, low64

TAGGED = Scheme("sha256_cbor", extras="tagged")


def told(
    engine: HashingEngine, prompt: Prompt, first: int, kept: list[int], *, per: int = 1, dense: bool = False
) -> Told:
    digests = engine.digests(prompt)
    size = per * TOKENS_PER_HASH
    media = tuple(listed(prompt, i * size, size) for i in kept)
    namespace = prompt.namespace if first == 0 and kept[:1] == [0] else prompt.namespace._replace(salt=None)
    return Told(
        tuple(low64(digests[(i + 1) * per - 1]) for i in kept), per, media if any(media) else None, namespace, dense
    )


def follow(prompt: Prompt, kept: list[int], *, first: int = 0, per: int = 1, dense: bool = False, **more: Any) -> Any:
    engine = HashingEngine(TAGGED)
    digests = engine.digests(prompt)
    at = first * per
    work = walk(
        TAGGED,
        digests[at - 1] if at else TAGGED.none_hash,
        prompt.tokens[at * TOKENS_PER_HASH :],
        told(engine, prompt, first, kept, per=per, dense=dense),
        block=TOKENS_PER_HASH,
        start=at * TOKENS_PER_HASH,
        **more,
    )
    return at_once(work)


def test_masked_hashes_of_plain_text_are_met_wherever_they_stand() -> None:
    prompt = Prompt(text(12))
    found = follow(prompt, [1, 6, 11])

    assert found.places == [1, 6, 11]
    assert found.digests == HashingEngine(TAGGED).digests(prompt)


def test_a_block_of_several_hash_blocks_has_the_last_ones_hash() -> None:
    found = follow(Prompt(text(12)), [0, 3], first=0, per=3)

    assert found.places == [2, 11]


def test_a_span_without_hashes_still_gives_parents() -> None:
    found = follow(Prompt(text(4)), [])

    assert len(found.digests) == 4


def test_a_span_without_hashes_gives_nothing_where_an_image_may_reach_in() -> None:
    """Chains of its tokens alone would be other prompts' hashes under keys that know of the image."""
    prompt = Prompt(text(8), items=(Item("img", 3, 40),))

    assert follow(prompt, [], first=2, reached=True) == NOTHING
    assert follow(prompt, [4], first=3, reached=True).places == [1], "a hash that is met rules it out"
    assert len(follow(prompt, [4], first=3, reached=True).digests) == 5


def test_a_hidden_salt_is_met_nowhere_and_gives_no_parents() -> None:
    """Only block 0 lists it, and the event leaves that block out."""
    found = follow(Prompt(text(8), Namespace(salt="tenant")), [6, 7])

    assert (found.digests, found.places) == ([], [-1, -1])


def test_a_salt_that_block_0_lists_is_followed() -> None:
    assert follow(Prompt(text(8), Namespace(salt="tenant")), [0, 7]).places == [0, 7]


def test_an_adapter_needs_its_path_under_tagged_keys() -> None:
    assert follow(Prompt(text(8), Namespace("a", path="/adapters/a")), [3, 7]).places == [3, 7]
    assert follow(Prompt(text(8), Namespace("a")), [3, 7]) == NOTHING


def test_an_image_that_ends_in_a_gap_is_found_by_trying_its_end() -> None:
    #  block   0   1   2   3   4   5   6   7
    #  image       [---------------]
    #  kept        *                       *
    found = follow(Prompt(text(8), items=(Item("img", 20, 60),)), [1, 7])

    assert found.places == [1, 7]
    assert found.media == ((20, "img"),)


def test_an_image_that_only_the_last_hash_lists_is_found_with_its_start() -> None:
    found = follow(Prompt(text(8), items=(Item("img", 20, 108),)), [0, 6])

    assert found.places == [0, 6]
    assert found.media == ((20, "img"),)


def test_an_image_within_omitted_blocks_hides_what_follows() -> None:
    found = follow(Prompt(text(8), items=(Item("img", 50, 10),)), [1, 6])

    assert found.places == [1, -1]
    assert len(found.digests) == 2


def test_a_dense_block_of_several_hash_blocks_with_images_is_followed() -> None:
    prompt = Prompt(text(12), items=(Item("a", 5, 20), Item("b", 40, 30), Item("c", 100, 10)))
    found = follow(prompt, [0, 1, 2], per=4, dense=True)

    assert found.places == [3, 7, 11]
    assert found.digests[:12] == HashingEngine(TAGGED).digests(prompt)


def test_an_image_that_may_go_on_gives_no_parents_behind_the_last_hash() -> None:
    found = follow(Prompt(text(8), items=(Item("img", 20, 40),)), [2])

    assert len(found.digests) == 3


def test_what_is_tried_for_images_is_bounded() -> None:
    prompt = Prompt(text(100), items=(Item("img", 20, 300),))
    assert follow(prompt, [1, 90]).places == [1, 90]

    assert follow(prompt, [1, 90], tries_max=300).places == [1, -1]


@st.composite
def spans(draw: st.DrawFn) -> tuple[Prompt, int, list[int], int, bool]:
    """Prompt, first block, blocks kept, hash blocks per block, dense."""
    per = draw(st.sampled_from([1, 1, 2, 4]))
    blocks = draw(st.integers(1, 10))
    first = draw(st.integers(0, blocks - 1))
    items = []
    at = draw(st.integers(0, 40))
    for number in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 70))
        items.append(Item(f"i{number % 2}", at, length))
        at += length + draw(st.integers(0, 40))
    salt = draw(st.sampled_from([None, "s"]))
    dense = draw(st.booleans())
    kept = list(range(first, blocks)) if dense else sorted(draw(st.sets(st.integers(first, blocks - 1))))
    return Prompt(text(blocks * per), Namespace(salt=salt), tuple(items)), first, kept, per, dense


@settings(deadline=None, max_examples=300)
@given(spans())
def test_a_place_is_right_or_not_told(case: tuple[Prompt, int, list[int], int, bool]) -> None:
    """Sound always; complete where every item is listed by a hash of the event, and no salt is hidden."""
    prompt, first, kept, per, dense = case
    found = follow(prompt, kept, first=first, per=per, dense=dense)
    truth = HashingEngine(TAGGED).digests(prompt)[first * per :]
    size = per * TOKENS_PER_HASH

    for i, place in zip(kept, found.places, strict=False):
        assert place in (-1, (i - first + 1) * per - 1)
    met = max(found.places, default=-1)
    assert found.digests[: met + 1] == truth[: met + 1]
    starts = {(item.offset - first * size, item.identifier) for item in prompt.items}
    assert set(found.media) <= starts

    last = (kept[-1] + 1) * size if kept else 0
    touching = [item for item in prompt.items if item.offset < last and item.offset + item.length > first * size]
    seen = {(identifier, i * size + offset) for i in kept for identifier, offset in listed(prompt, i * size, size)}
    hidden = [item for item in touching if (item.identifier, item.offset) not in seen]
    early = [item for item in touching if item.offset < first * size]
    salted = prompt.namespace.salt is not None and first == 0 and kept[:1] != [0]
    if not (hidden or early or salted):
        assert -1 not in found.places
        assert len(found.places) == len(kept)


def test_a_dense_event_is_followed_up_to_what_contradicts_it() -> None:
    engine = HashingEngine(TAGGED)
    prompt = Prompt(text(4))
    names = told(engine, prompt, 0, [0, 1, 2, 3]).names
    wrong = Told((*names[:2], 7, names[3]), 1, None, NO_NAMESPACE, dense=True)
    found = at_once(walk(TAGGED, TAGGED.none_hash, prompt.tokens, wrong, block=TOKENS_PER_HASH, start=0))

    assert (found.places, len(found.digests)) == ([0, 1, -1, -1], 2)


@pytest.mark.parametrize("scheme", [Scheme("sha256_cbor"), Scheme("sha256_cbor", extras=None, paths=(("a", "/a"),))])
def test_extra_keys_of_an_unknown_form_are_not_guessed(scheme: Scheme) -> None:
    names = Told((1,), 1, None, Namespace("a", path="/a"), dense=False)

    assert at_once(walk(scheme, scheme.none_hash, text(2), names, block=TOKENS_PER_HASH, start=0)) == NOTHING
