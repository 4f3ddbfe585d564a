"""What every implementation of the index promises to a reader (``contract.py``, ``views.py``), one test a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from index_pairs import MODEL, Fold, MemoryPair, Pair, card, claims, look, put

from kvledger_index.errors import InvalidInput
from kvledger_index.memory import MemoryIndex
from kvledger_index.units import NEVER, Bind, Clear, Drop, Now, RankUnit, Stamp
from kvledger_index.views import Catalogue, PartitionView

A, B, C = "replica-a/0", "replica-b/0", "replica-c/1"
PATH = tuple(range(0x1000, 0x1010))


# --- catalogue and versions


async def test_an_unknown_model_has_no_ranks(pair: Pair) -> None:
    catalogue = await pair.reader.catalogue("nobody")
    assert Catalogue(b"", {}) == catalogue

    reading = await pair.reader.read(catalogue, "nobody", PATH)
    assert reading.version == b""
    assert (reading.pulses, reading.partitions, reading.moved, reading.corrupt) == ({}, {}, frozenset(), 0)
    assert [segment.holders for segment in reading.segments] == [()]


async def test_models_are_listed_by_name(pair: Pair, fold: Fold) -> None:
    await fold.apply(fold.unit(A, Bind(), model="z/model:1"), fold.unit(B, model="ä model"))

    assert await pair.reader.models() == ["z/model:1", "ä model"]


async def test_the_progress_of_every_placed_partition_is_there_with_or_without_ranks(pair: Pair) -> None:
    assert await pair.reader.partitions() == {}
    await pair.writer.seek(2, "topic", 5, 9, drop=True)
    await pair.writer.seek(0, "topic", 3, 3, drop=True)

    assert await pair.reader.partitions() == {2: PartitionView(5, 5, 9, 0), 0: PartitionView(3, 3, 3, 0)}


async def test_a_card_is_stored_as_it_is_and_gives_the_catalogue_the_step_s_nonce(pair: Pair, fold: Fold) -> None:
    full = card(
        loaded=False,
        suspended=True,
        partial=True,
        uncertain=("unknown event tag BlockInactive",),
        closed=True,
        heard=(None, 0, 3),
        hash_block_size=8,
        alignment=32,
        partial_hash_hits=True,
        full_reports=True,
        engine_version="0.33.0",
        process="pod-uid",
    )
    await fold.apply(fold.unit(A, card=full), nonce=b"0123456789abcdef")

    catalogue = await pair.reader.catalogue(MODEL)
    assert catalogue == (b"0123456789abcdef", {A: (full, (0, 0, 0, 0))})


async def test_without_a_new_card_or_slot_the_version_stays(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind())
    before = await pair.reader.catalogue(MODEL)
    await fold.do(A, put(PATH))

    assert await pair.reader.catalogue(MODEL) == before


@pytest.mark.parametrize("op", [Bind(), Clear("cpu"), Drop()])
async def test_new_slots_give_a_new_version_and_keep_the_card(pair: Pair, fold: Fold, op: Any) -> None:
    await fold.do(A, Bind(), card=card(suspended=True))
    before = await pair.reader.catalogue(MODEL)
    step = fold.step(fold.unit(A, op))
    await fold.send(step)

    after = await pair.reader.catalogue(MODEL)
    assert after.version == step.nonce
    assert after.ranks[A].card == before.ranks[A].card
    assert after.ranks[A].slots != before.ranks[A].slots


async def test_a_rank_that_serves_another_model_leaves_the_old_catalogue(pair: Pair, fold: Fold) -> None:
    await fold.open(A, B)
    old = await pair.reader.catalogue(MODEL)
    await fold.do(A, Bind(), put(PATH), model="other", card=card("other"))

    assert (await pair.reader.catalogue(MODEL)).version != old.version
    assert set((await pair.reader.catalogue(MODEL)).ranks) == {B}
    assert set((await pair.reader.catalogue("other")).ranks) == {A}
    assert (await look(pair.reader, PATH, "other"))[0] == [{(A, "gpu", 0)}] * 16
    await fold.do(B, model="other", card=card("other"))
    assert await pair.reader.models() == ["other"]
    assert await pair.reader.catalogue(MODEL) == Catalogue(b"", {})


# --- read


async def test_a_prompt_is_cut_into_segments_of_sixteen(pair: Pair, fold: Fold) -> None:
    keys = list(range(100, 140))
    await fold.do(A, Bind(), *(put(keys[at : at + 16]) for at in (0, 16, 32)))

    for count in (0, 1, 15, 16, 17, 32, 40):
        holders, reading = await look(pair.reader, keys[:count])
        assert holders == [{(A, "gpu", 0)}] * count
        assert len(reading.segments) == -(-count // 16)


async def test_a_reading_says_which_catalogue_it_belongs_to(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    old = await pair.reader.catalogue(MODEL)
    assert (await pair.reader.read(old, MODEL, PATH)).version == old.version

    await fold.do(A, Clear("gpu"))
    new = await pair.reader.catalogue(MODEL)
    assert new.version != old.version
    assert (await pair.reader.read(old, MODEL, PATH)).version == new.version


async def test_a_reading_carries_what_moves(pair: Pair, fold: Fold) -> None:
    now = Now(7, 7, 1, 0, seq=4711, unplaced=((0, 0, 3), (255, 1, 2)))
    await fold.do(A, Bind(), now=now)
    _, reading = await look(pair.reader, PATH)

    assert reading.pulses[A].now == now
    assert reading.moved == frozenset()
    assert reading.corrupt == 0


async def test_the_log_s_end_stamps_the_partition(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind())
    assert (await look(pair.reader, PATH))[1].partitions[0].alive_ms == 0

    await fold.apply(at_end=True)
    _, reading = await look(pair.reader, PATH)
    alive = reading.partitions[0].alive_ms
    assert 0 <= reading.time_ms - alive < 60_000
    await fold.do(A)
    assert (await look(pair.reader, PATH))[1].partitions[0].alive_ms == alive


async def test_a_rank_is_heard_when_the_newest_record_came_less_its_own_age(pair: Pair, fold: Fold) -> None:
    """Two ranks of one partition.

    log time   A 1000 s        B 1007 s (newest)
    heard      now - 7 s       now
    """
    start = (await pair.reader.read(await pair.reader.catalogue(MODEL), MODEL, ())).time_ms
    await fold.apply(fold.unit(A, broker_ms=1_000_000), fold.unit(B, broker_ms=1_007_000), broker_ms=1_007_000)
    _, reading = await look(pair.reader, PATH)

    assert start <= reading.pulses[B].heard_ms <= reading.time_ms
    assert reading.pulses[B].heard_ms - reading.pulses[A].heard_ms == 7_000


async def test_a_silent_rank_is_old_also_when_a_worker_has_only_just_caught_up(pair: Pair, fold: Fold) -> None:
    """A's last record is an hour older than the log's end, but was read a moment ago."""
    await fold.do(A, Bind(), broker_ms=1_000_000)
    fold.clock_ms += 3_600_000
    await fold.do(B, Bind())
    _, reading = await look(pair.reader, PATH)

    assert reading.pulses[B].heard_ms - reading.pulses[A].heard_ms == 3_600_000


async def test_reading_old_records_again_makes_nobody_younger(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind())
    fold.clock_ms += 10_000
    await fold.do(B, Bind())
    before = (await look(pair.reader, PATH))[1].pulses
    await fold.seek(drop=False)
    await fold.reload()
    await fold.apply(fold.unit(A, before=NEVER, after=Stamp(7, 7, 1, 0), broker_ms=1_000_000), broker_ms=1_000_000)

    assert (await look(pair.reader, PATH))[1].pulses == before


async def test_each_partition_has_its_own_clocks(pair: Pair, fold: Fold) -> None:
    other = Fold(pair.writer, partition=11)
    await other.seek(5, 8)
    await fold.do(A, Bind())
    await other.do(B, Bind(), broker_ms=5)
    _, reading = await look(pair.reader, PATH)

    assert reading.partitions == {0: PartitionView(1, 1, 0, 0), 11: PartitionView(6, 6, 8, 0)}
    assert set(reading.pulses) == {A, B}


@pytest.mark.parametrize("bad", [-1, 2**64])
async def test_a_key_that_is_none_is_the_caller_s_fault(pair: Pair, bad: int) -> None:
    catalogue = await pair.reader.catalogue(MODEL)
    with pytest.raises(InvalidInput):
        await pair.reader.read(catalogue, MODEL, [1, bad])
    with pytest.raises(InvalidInput):
        await pair.reader.read(catalogue, MODEL, [1], [bad])


# --- engine hashes without a block key


HASHES = (0xFFFF_FFFF_FFFF_FFFF, 0, 0xA5A5)


async def test_an_engine_hash_is_found_under_itself_beside_the_keys(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH), *(put((name,), lane=1) for name in HASHES[:2]))
    await fold.do(B, Bind(), put(HASHES[:1], lane=255, medium="cpu"))
    catalogue = await pair.reader.catalogue(MODEL)
    slots = {name: view.slots for name, view in catalogue.ranks.items()}
    reading = await pair.reader.read(catalogue, MODEL, PATH, HASHES)

    assert [set(segment.holders) for segment in reading.segments] == [{(slots[A][0], 0, 0xFFFF)}]
    assert [set(single.holders) for single in reading.singles] == [
        {(slots[A][0], 1, 1), (slots[B][1], 255, 1)},
        {(slots[A][0], 1, 1)},
        set(),
    ]


async def test_hashes_are_read_in_the_order_asked_also_without_keys_and_twice(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(HASHES[1:2]))
    catalogue = await pair.reader.catalogue(MODEL)
    asked = [HASHES[2], HASHES[1], HASHES[0], HASHES[1]]
    reading = await pair.reader.read(catalogue, MODEL, (), asked)

    assert reading.segments == []
    assert [len(single.holders) for single in reading.singles] == [0, 1, 0, 1]
    assert (await pair.reader.read(catalogue, MODEL, PATH)).singles == ()


async def test_a_hash_that_gets_its_key_moves_and_back(pair: Pair, fold: Fold) -> None:
    """As the fold moves it: both sides of a move are in one unit."""
    away, back = (put(HASHES[:1], add=False), put(PATH)), (put(HASHES[:1]), put(PATH, add=False))
    await fold.do(A, Bind(), put(HASHES[:1]))
    catalogue = await pair.reader.catalogue(MODEL)
    for ops, keyed in ((away, 1), (back, 0)):
        await fold.do(A, *ops)
        reading = await pair.reader.read(catalogue, MODEL, PATH, HASHES[:1])

        assert (len(reading.segments[0].holders), len(reading.singles[0].holders)) == (keyed, 1 - keyed)


async def test_a_cleared_medium_holds_no_hashes_either(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(HASHES[:1]), put(HASHES[:1], medium="storage"))
    await fold.do(A, Clear("gpu"))
    catalogue = await pair.reader.catalogue(MODEL)
    reading = await pair.reader.read(catalogue, MODEL, (), HASHES[:1])
    live = {slot for slot in catalogue.ranks[A].slots if slot}

    assert [slot for slot, _, _ in reading.singles[0].holders if slot in live] == [catalogue.ranks[A].slots[2]]


# --- dump


async def test_dump_lists_by_model_and_rank(pair: Pair, fold: Fold) -> None:
    await fold.apply(
        fold.unit(A, Bind(), put(PATH, 0, 1)),
        fold.unit(B, Bind(), put(PATH, 0, 2), model="other", card=card("other")),
        fold.unit(C, Bind(), put(PATH, 0, 3, lane=255, medium="cpu"), model="other", card=card("other")),
    )
    a = {((A, "gpu", 0), key) for key in PATH[:1]}
    b = {((B, "gpu", 0), key) for key in PATH[:2]}
    c = {((C, "cpu", 255), key) for key in PATH[:3]}

    assert await claims(pair.reader) == a | b | c
    assert await claims(pair.reader, MODEL) == a
    assert await claims(pair.reader, "other") == b | c
    assert await claims(pair.reader, "other", C) == c
    assert await claims(pair.reader, None, A) == a
    assert await claims(pair.reader, MODEL, B) == set()
    assert await claims(pair.reader, "nobody") == set()


async def test_closing_twice_is_safe(pair: Pair) -> None:
    for end in (pair.writer, pair.reader):
        await end.aclose()
        await end.aclose()


# --- in memory only: a clock of one's own


async def test_a_clock_can_be_given() -> None:
    index = MemoryIndex(clock_ms=lambda: 5_000_000)
    pair = MemoryPair()
    pair.index = pair.writer = pair.reader = index
    fold = Fold(index)
    await fold.seek()
    await fold.apply(fold.unit(A, broker_ms=999_000), at_end=True)
    _, reading = await look(index, PATH)

    assert reading.time_ms == 5_000_000
    assert reading.partitions[0].alive_ms == 5_000_000
    assert reading.pulses[A].heard_ms == 4_999_000


def test_a_unit_is_a_value() -> None:
    """Callers may keep, compare and repeat steps."""
    fold = Fold(MemoryIndex())
    assert fold.unit(A, Bind()) == fold.unit(A, Bind())
    assert isinstance(fold.unit(A), RankUnit)
