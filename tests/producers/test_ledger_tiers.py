"""Every emitter of ENGINE.md §3.2 but the GPU's own pool: what its events look like, and what the ledger makes of them.

The table of ADR 4 has a row for each test here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_rank import CPU, GPU, OTHER, STORAGE, Rank, cleared, hashes_of, removed, stored, text

from kvledger_bridge.decode import BlockRemoved, BlockStored
from kvledger_wire.records import ATTACHED, CLEARED, REMOVED, STORED, Change

TOKENS = text(4)


def rank_with_gpu_blocks() -> Rank:
    """Hashes 1 to 4 of one prompt on the GPU, in group 0."""
    rank = Rank()
    rank.take(stored([1, 2, 3, 4], TOKENS))
    return rank


def raw(name: int) -> bytes:
    return b"\xaa" * 24 + name.to_bytes(8, "big")


@pytest.mark.parametrize("size", [16, 0])
def test_the_legacy_offloading_connector_sends_byte_hashes_without_tokens_or_group(size: int) -> None:
    """0.11 to 0.23: a block size until 0.19, none after; GPU events of the same engine have integers."""
    rank = rank_with_gpu_blocks()
    rank.take(stored([raw(1), raw(2), raw(9)], (), size=size, group_idx=None, medium="CPU"))
    keys = rank.keys(TOKENS)

    assert rank.ledger.placed(None, "cpu") == {1: keys[0], 2: keys[1]}
    assert rank.unplaced(None, "cpu") == {9}
    rank.take(BlockRemoved((raw(1), raw(9)), "CPU"))
    assert rank.ledger.resident(None, "cpu") == {2: 1}


def test_a_placeholder_has_its_group_and_is_found_by_its_hash() -> None:
    rank = rank_with_gpu_blocks()
    [piece] = rank.take(stored([4, 9], (), size=0, medium="CPU"))

    assert set(rank.ledger.placed(0, "cpu")) == {4}
    assert (piece.unplaced, piece.opaque) == (((CPU, 1),), ())


def test_overlapping_chunks_of_self_describing_events_are_counted() -> None:
    rank = rank_with_gpu_blocks()
    rank.take(stored([1, 2], TOKENS[:32], medium="CPU"), stored([1, 2, 3], TOKENS[:48], medium="CPU"))

    assert rank.ledger.resident(0, "cpu") == {1: 2, 2: 2, 3: 1}
    [change] = rank.changes(removed(1, 3, medium="CPU"))
    assert [run.effective for run in change.runs] == [0, 1]


@pytest.mark.parametrize("word", ["FS", "OBJ", "STORAGE"])
def test_storage_never_announces_removals_and_outlives_a_clear(word: str) -> None:
    rank = rank_with_gpu_blocks()
    rank.take(stored([1, 2], (), size=0, medium=word))
    [piece] = rank.take(cleared())

    assert STORAGE not in {change.medium for change in piece.changes}
    assert set(rank.ledger.placed(0, "storage")) == {1, 2}


@pytest.mark.parametrize(("word", "medium"), [("CPU", CPU), ("STORAGE", STORAGE)])
def test_a_secondary_tier_is_a_lane_of_its_medium_whoever_owns_it(word: str, medium: int) -> None:
    rank = rank_with_gpu_blocks()
    [change] = rank.changes(stored([1], (), size=0, medium=word, ownership="kvcr", locality="REMOTE"))
    assert change.medium == medium

    rank.take(BlockRemoved((1,), word, 0, ownership="kvcr"))
    assert rank.ledger.resident(0, word) == {}


def test_the_simple_offloading_connector_repeats_a_clear() -> None:
    rank = rank_with_gpu_blocks()
    rank.take(stored([1], TOKENS[:16], medium="CPU", locality="LOCAL"))
    pieces = rank.take(cleared(), cleared(), stored([1], TOKENS[:16]))

    assert [piece.group for piece in pieces] == ["*", "*", 0]
    assert rank.ledger.resident(0, "cpu") == {}
    assert rank.ledger.resident(0) == {1: 1}


@pytest.mark.parametrize("group", [None, 0])
def test_mooncake_names_no_adapter_so_the_gpus_word_stands(group: int | None) -> None:
    """Lower-case medium, one hash an event, no removals, a group from 0.23 on."""
    rank = Rank()
    rank.take(stored([1], TOKENS[:16], lora_id=1, lora_name="a"))
    rank.take(stored([1], TOKENS[:16], medium="cpu", group_idx=group))

    assert rank.ledger.placed(group, "cpu") == {1: rank.keys(TOKENS[:16], lora="a")[0]}
    assert rank.ledger.resident(group, "gpu") == ({} if group is None else {1: 1})


def test_lmcache_has_hashes_of_its_own_which_no_router_can_compute() -> None:
    """Chunks of 256 tokens meet the keys at their ends; a last, shorter one that ends within a stride has none."""
    rank = rank_with_gpu_blocks()
    chunk = text(16)
    [piece] = rank.take(
        stored([900], chunk, size=256, group_idx=None, medium="cpu"),
        stored([901], text(1, 5)[:7], 900, size=7, group_idx=None, medium="cpu"),
    )

    assert rank.ledger.placed(None, "cpu") == {900: rank.keys(chunk)[15]}
    assert (piece.unplaced, piece.opaque, piece.uncertain) == (((CPU, 1),), ((CPU, 1),), ())


@pytest.mark.parametrize("word", ["CXL", "HBM-POOL", ""])
def test_what_third_parties_pass_through_is_never_the_gpus(word: str) -> None:
    rank = rank_with_gpu_blocks()
    [change] = rank.changes(stored([1], (), size=0, medium=word))

    assert change.medium == OTHER
    assert rank.changes(removed(1, medium="GPU"))[0].medium == GPU
    assert rank.ledger.resident(0, "other") == {1: 1}


def test_a_second_block_pool_has_removals_of_its_own() -> None:
    """HiSparse: a CPU pool beside the GPU's, one copy each."""
    rank = rank_with_gpu_blocks()
    rank.take(stored([1, 2], TOKENS[:32], medium="CPU"), removed(1), removed(2, medium="CPU"))

    assert set(rank.ledger.resident(0)) == {2, 3, 4}
    assert set(rank.ledger.resident(0, "cpu")) == {1}


# -- whatever comes, a hash without a key is one entry of its lane ----------------------------------------------------

NAMES = st.integers(1, 5)
LANES = st.sampled_from([(0, "GPU"), (1, "GPU"), (0, "CPU"), (None, "CPU")])


@st.composite
def events(draw: st.DrawFn) -> Any:
    """Few hashes and few texts: hashes come under two keys, keys under two hashes, names are lost and found."""
    group, medium = draw(LANES)
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return cleared()
    names = tuple(draw(st.lists(NAMES, min_size=1, max_size=3)))
    if kind < 4:
        return BlockRemoved(names, medium, group)
    tokens = text(draw(st.sampled_from([0, len(names), len(names) + 1])), draw(st.integers(0, 1)))
    parent = draw(st.none() | NAMES)
    return BlockStored(names, parent, tokens, 16 if tokens else 0, medium=medium, group_idx=group)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(events(), max_size=4), max_size=10), st.sampled_from(["counted", "last"]))
def test_a_reader_of_the_bits_knows_what_is_resident_without_a_key(batches: list[list[Any]], copies: str) -> None:
    rank = Rank(copies=copies)
    read: dict[tuple[Any, int], set[int]] = {}
    for batch in batches:
        for piece in rank.take(*batch):
            for change in piece.changes:
                if change.op == CLEARED:
                    read = {lane: held for lane, held in read.items() if lane[1] != change.medium}
                else:
                    follow(read.setdefault((piece.group, change.medium), set()), change)
        for group, medium, code in ((0, "gpu", GPU), (1, "gpu", GPU), (0, "cpu", CPU), (None, "cpu", CPU)):
            assert read.get((group, code), set()) == set(rank.ledger.unplaced(group, medium))


def follow(loose: set[int], change: Change) -> None:
    """As the fold does."""
    if change.origin == ATTACHED:
        for run in change.runs:
            (loose.difference_update if change.op == STORED else loose.update)(hashes_of(run.hashes))
    for i, each in enumerate(hashes_of(change.unplaced)):
        if change.unplaced_effective[i // 8] >> i % 8 & 1:
            assert (each in loose) == (change.op == REMOVED)
            (loose.remove if change.op == REMOVED else loose.add)(each)
