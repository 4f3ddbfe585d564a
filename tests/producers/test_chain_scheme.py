"""Finding out how an engine hashes: on which events, at what cost, and what is never concluded."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from chain_engine import HashingEngine, Prompt, text

from kvledger_bridge.chain import Told
from kvledger_bridge.decode import Batch, BlockStored
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.pace import at_once
from kvledger_bridge.scheme import SEARCH_EVENTS_MAX, Finder
from kvledger_index.enginehash import ALGORITHMS, Item, Namespace, Scheme
from kvledger_index.model import ModelEntry

FULL: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 48}


def in_blocks_of_16(scheme: Scheme) -> Scheme:
    return msgspec.structs.replace(scheme, block=16)


class Rank:
    """A ledger and the schemes that its pieces told."""

    def __init__(self, **entry: Any) -> None:
        self.ledger = Ledger(ModelEntry(model="m", hash_block_size=16, **entry))
        self.told: list[Scheme] = []
        self.uncertain: list[str] = []
        self.seq = -1

    def take(self, *events: BlockStored) -> None:
        self.seq += 1
        for piece in self.ledger.apply(self.seq, Batch(0.0, 0, events)):
            self.told += [] if piece.scheme is None else [piece.scheme]
            self.uncertain += piece.uncertain


@pytest.mark.parametrize(
    ("algorithm", "seed", "raw"), [*product(ALGORITHMS, ["vllm-none-hash", "0"], [False, True])], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_known_algorithms_and_seeds_are_found_and_told_once(algorithm: Any, seed: str, raw: bool, masked: bool) -> None:
    engine = HashingEngine(Scheme(algorithm, seed), raw=raw)
    rank = Rank()
    more = WINDOW if masked else {}
    for salt in range(3):
        rank.take(engine.stored(Prompt(text(4, salt)), 0, 4, [2] if masked else None, **more))

    assert rank.told == [in_blocks_of_16(engine.scheme)]


def test_the_search_for_a_random_seed_ends() -> None:
    rank = Rank()
    finder = rank.ledger.lineage.chains.finder
    engine = HashingEngine(Scheme("sha256", "8c1f"))
    wanted = []
    for salt in range(SEARCH_EVENTS_MAX + 3):
        wanted.append(finder.wants)
        rank.take(engine.stored(Prompt(text(2, salt)), 0, 2))

    assert wanted == [True] * SEARCH_EVENTS_MAX + [False] * 3
    assert (rank.told, rank.uncertain) == ([], [])


@pytest.mark.parametrize("masked", [False, True])
def test_a_rank_that_begins_with_adapters_of_unknown_path_is_found_out_by_what_follows(masked: bool) -> None:
    engine = HashingEngine(Scheme("xxhash_cbor", "0", "tagged"))
    rank = Rank()
    for first in range(SEARCH_EVENTS_MAX + 3):
        prompt = Prompt(text(4, first), Namespace("a", path="/a"))
        rank.take(engine.stored(prompt, 0, 4, [0, 3] if masked else None))
    assert rank.told == []
    rank.take(engine.stored(Prompt(text(4, 1000)), 0, 4, [0, 3] if masked else None))

    assert [(each.algorithm, each.seed) for each in rank.told] == [("xxhash_cbor", "0")]


def test_an_event_that_no_candidate_can_be_tried_on_costs_nothing() -> None:
    finder = Finder(Scheme("sha256", "0", "tagged"))
    finder.confirmed = True
    told = Told((1, 2), 1, None, Namespace("a"), dense=True)
    at_once(finder.look(told, bytes(128), None, block=16, start=0, root=True, bare_possible=False, digest_bytes=None))

    assert finder._events == SEARCH_EVENTS_MAX


def test_byte_hashes_give_the_algorithm_although_the_seed_is_random() -> None:
    """Digests of parents are on the wire: masked spans behind them are placed, and no router is told."""
    engine = HashingEngine(Scheme("sha256", "8c1f"), raw=True)
    rank = Rank()
    prompt = Prompt(text(8))
    rank.take(engine.stored(prompt, 0, 2, per=2, **FULL), engine.stored(prompt, 2, 4, per=2, **FULL))
    rank.take(engine.stored(prompt, 4, 8, [4, 6], **WINDOW), engine.stored(prompt, 0, 4, [1, 2], **WINDOW))

    assert len(rank.ledger.placed(0)) == 3, "4 and 6 by their parent's digest, 1 by the dense event"
    assert len(rank.ledger.resident(0)) == 4
    assert rank.told == []


@pytest.mark.parametrize("form", ["tagged", "offsets"])
@pytest.mark.parametrize(
    "prompt",
    [Prompt(text(4, 1), Namespace(salt="s")), Prompt(text(4, 1), items=(Item("img", 3, 20),))],
    ids=["salt", "media"],
)
def test_the_form_of_extra_keys_is_told_when_an_event_shows_it(form: Any, prompt: Prompt) -> None:
    engine = HashingEngine(Scheme("sha256_cbor", extras=form))
    rank = Rank()
    rank.take(engine.stored(Prompt(text(4)), 0, 4))
    rank.take(engine.stored(prompt, 0, 4))

    assert rank.told == [in_blocks_of_16(Scheme("sha256_cbor")), in_blocks_of_16(engine.scheme)]


def test_a_salt_does_not_tell_two_forms_apart_that_hash_it_alike() -> None:
    """Engines without group numbers may list media with or without offsets."""
    engine = HashingEngine(Scheme("sha256_cbor", extras="offsets"))
    rank = Rank(multimodal=False)
    rank.take(engine.stored(Prompt(text(4)), 0, 4, group_idx=None))
    rank.take(engine.stored(Prompt(text(4, 1), Namespace(salt="s")), 0, 4, group_idx=None))

    assert rank.told == [in_blocks_of_16(Scheme("sha256_cbor"))]
    rank.take(engine.stored(Prompt(text(4, 1), items=(Item("img", 3, 20),)), 0, 4, group_idx=None))
    assert rank.told[1:] == [in_blocks_of_16(engine.scheme)]


def test_a_scheme_that_the_entry_names_is_told_with_its_block_size_once_it_is_confirmed() -> None:
    engine = HashingEngine(Scheme("sha256", "42", "tagged", (("a", "/a"),)))
    rank = Rank(hash_scheme=engine.scheme)
    rank.take(engine.stored(Prompt(text(4), Namespace("a", path="/a")), 0, 4, [3], **WINDOW))
    rank.take(engine.stored(Prompt(text(4, 1)), 0, 4, [2], **WINDOW))

    assert (rank.told, rank.uncertain) == ([in_blocks_of_16(engine.scheme)], [])
    assert len(rank.ledger.placed(0)) == 2


def test_a_scheme_of_the_entry_that_is_not_the_engines_is_named() -> None:
    engine = HashingEngine(Scheme("sha256_cbor"))
    rank = Rank(hash_scheme=Scheme("sha256", "42"))
    rank.take(engine.stored(Prompt(text(4)), 0, 4))

    assert rank.told == [in_blocks_of_16(engine.scheme)]
    assert len(rank.uncertain) == 1
    assert "hash_scheme" in rank.uncertain[0]


def test_a_scheme_found_in_a_batch_that_changed_nothing_is_told_with_the_next_change() -> None:
    engine = HashingEngine(Scheme("sha256"))
    rank = Rank()
    event = engine.stored(Prompt(text(4)), 0, 4)
    at_once(rank.ledger.lineage.place((event,)))  # as if what it brought had been refused
    assert rank.told == []
    rank.take(HashingEngine(Scheme("sha256", "x")).stored(Prompt(text(1, 5)), 0, 1))

    assert rank.told == [in_blocks_of_16(engine.scheme)]


def test_a_further_group_of_the_same_block_size_is_no_news() -> None:
    engine = HashingEngine(Scheme("sha256"))
    ledger = Ledger(ModelEntry(model="m"))
    prompt = Prompt(text(8))
    told = []
    for seq, event in enumerate((engine.stored(prompt, 0, 4, **FULL), engine.stored(prompt, 0, 4, [3], **WINDOW))):
        told += [piece.scheme for piece in ledger.apply(seq, Batch(0.0, 0, (event,)))]

    assert told == [in_blocks_of_16(engine.scheme), None]
