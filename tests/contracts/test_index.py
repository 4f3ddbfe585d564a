"""What every implementation of the index promises to a writer (``contract.py``, ``units.py``), one test a sentence."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from index_pairs import MODEL, OPENERS, TOPIC, Fold, Pair, card, claims, found, look, put, take

from kvledger_index.errors import InvalidInput
from kvledger_index.memory import MemoryIndex
from kvledger_index.units import (
    NEVER,
    STEP_OPS_MAX,
    STEP_UNITS_MAX,
    Bind,
    Clear,
    Drop,
    Now,
    Piece,
    Progress,
    Put,
    Stamp,
)
from kvledger_index.views import Catalogue, PartitionView

A, B, C = "replica-a/0", "replica-b/0", "replica-c/1"
PATH = tuple(range(0x1000, 0x1010))


async def everything(pair: Pair, *partitions: int) -> Any:
    """All that a caller can see, for comparing before and after."""
    models = await pair.reader.models()
    return (
        [await pair.writer.load(partition) for partition in partitions or (0,)],
        [await pair.reader.catalogue(model) for model in models],
        await claims(pair.reader),
    )


# --- which implementations there are


def test_every_implementation_is_under_contract() -> None:
    assert set(OPENERS) == found()
    assert MemoryIndex in found()


def test_an_implementation_that_nobody_lists_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of the derived list."""
    package, module = ModuleType("planted"), ModuleType("planted.other")
    package.__path__ = []
    planted = type("OtherIndex", (), {"__module__": "planted.other", **vars_of(MemoryIndex)})
    module.OtherIndex = planted  # type: ignore[attr-defined]  # a module made for this test
    monkeypatch.setitem(sys.modules, "planted.other", module)
    monkeypatch.setattr("pkgutil.iter_modules", lambda *_: [type("Info", (), {"name": "planted.other"})])

    assert found(package) == {planted}


def vars_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


# --- check, load, seek


async def test_a_sound_server_passes_the_check(pair: Pair) -> None:
    await pair.writer.check()


async def test_nothing_stored_has_no_progress_and_no_ranks(pair: Pair) -> None:
    assert await pair.writer.load(3) == (None, {})


async def test_a_seek_starts_at_its_restart_offset_and_is_behind_until_the_target_is_read(pair: Pair) -> None:
    fold = Fold(pair.writer, partition=5)
    await fold.seek(40, 60)
    await fold.open(A)
    await fold.apply(restart=50, read=60)

    progress = (await pair.writer.load(5)).progress
    assert progress == Progress(TOPIC, restart=50, read=60, target=60)

    await fold.seek(45, 90, drop=False)
    assert (await pair.writer.load(5)).progress == Progress(TOPIC, restart=45, read=45, target=90)
    _, reading = await look(pair.reader, PATH)
    assert reading.partitions == {5: PartitionView(45, 45, 90, 0)}


async def test_load_hands_back_stamps_and_states_unread(pair: Pair, fold: Fold) -> None:
    state = bytes(range(256)) * 3
    await fold.apply(fold.unit(A, Bind(), state=state), fold.unit(B, state=b""))

    assert (await pair.writer.load(0)).ranks == {A: (Stamp(7, 7, 1, 0), state), B: (Stamp(7, 7, 1, 0), b"")}


async def test_a_seek_that_keeps_the_ranks_changes_no_answer(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    before = await pair.reader.catalogue(MODEL)
    await fold.seek(fold.restart, 9, drop=False)

    assert await pair.reader.catalogue(MODEL) == before
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH}


async def test_a_dropping_seek_forgets_ranks_catalogue_and_blocks(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    before = await pair.reader.catalogue(MODEL)
    await fold.seek(0, 7)

    assert await pair.writer.load(0) == (Progress(TOPIC, 0, 0, 7), {})
    assert await claims(pair.reader) == set()
    after = await pair.reader.catalogue(MODEL)
    assert after == Catalogue(b"", {})
    assert after.version != before.version
    assert await pair.reader.models() == []


async def test_a_dropping_seek_leaves_other_partitions_alone(pair: Pair, fold: Fold) -> None:
    other = Fold(pair.writer, partition=1)
    await other.seek()
    await fold.do(A, Bind(), put(PATH))
    await other.do(B, Bind(), put(PATH, 0, 3))
    before = await pair.reader.catalogue(MODEL)
    await fold.seek()

    after = await pair.reader.catalogue(MODEL)
    assert after.version not in {before.version, b""}
    assert after.ranks == {B: before.ranks[B]}
    assert await claims(pair.reader) == {((B, "gpu", 0), key) for key in PATH[:3]}


async def test_a_rank_that_another_partition_took_over_survives_the_drop_of_its_old_one(pair: Pair, fold: Fold) -> None:
    """A topic that was made anew with another partition count places ranks elsewhere."""
    await fold.do(A, Bind(), put(PATH))
    new = Fold(pair.writer, partition=1)
    await new.seek()
    await new.do(A, Bind(), put(PATH, 0, 2))
    before = await pair.reader.catalogue(MODEL)
    await fold.seek()

    assert (await pair.reader.catalogue(MODEL)).ranks == before.ranks
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:2]}


@pytest.mark.parametrize(("partition", "restart"), [(-1, 0), (2**32, 0), (0, 2**63)])
async def test_a_seek_out_of_bounds_is_the_caller_s_fault(pair: Pair, partition: int, restart: int) -> None:
    with pytest.raises(InvalidInput):
        await pair.writer.seek(partition, TOPIC, restart, 0, drop=True)


async def test_a_seek_in_another_topic_must_drop(pair: Pair, fold: Fold) -> None:
    await fold.open(A)
    before = await everything(pair)
    with pytest.raises(InvalidInput, match="topic-b"):
        await pair.writer.seek(0, "topic-b", 0, 0, drop=False)

    assert await everything(pair) == before
    await pair.writer.seek(0, "topic-b", 3, 4, drop=True)
    assert await pair.writer.load(0) == (Progress("topic-b", 3, 3, 4), {})


# --- compare and set


async def test_a_step_before_any_seek_is_refused(pair: Pair) -> None:
    outcome = await Fold(pair.writer, partition=9).do(A, Bind())

    assert (outcome.verdict, outcome.applied, outcome.duplicates) == ("refused", 0, 0)
    assert "partition 9" in outcome.why
    assert await everything(pair, 9) == ([(None, {})], [], set())


@pytest.mark.parametrize("wrong", [{"topic_id": "topic-b"}, {"restart_before": 0}, {"restart_before": 2}])
async def test_a_step_that_believes_another_topic_or_restart_offset_is_refused(
    pair: Pair, fold: Fold, wrong: dict[str, Any]
) -> None:
    await fold.do(A, Bind(), put(PATH))
    before = await everything(pair)
    outcome = await pair.writer.apply(fold.step(fold.unit(A, take(PATH)), **wrong))

    assert outcome.verdict == "refused"
    assert TOPIC in outcome.why
    assert "1" in outcome.why
    assert await everything(pair) == before


@pytest.mark.parametrize(
    "before", [Stamp(7, 7, 1, 1), Stamp(7, 8, 0, 0), Stamp(8, 7, 1, 0), Stamp(-1, -1, 0, 5), Stamp(2**62, 7, 1, 0)]
)
async def test_a_unit_that_does_not_follow_refuses_the_whole_step(pair: Pair, fold: Fold, before: Stamp) -> None:
    await fold.do(A, Bind(), put(PATH))
    seen = await everything(pair)
    fits = fold.unit(B, Bind(), put(PATH))
    outcome = await pair.writer.apply(
        fold.step(fits, fold.unit(A, Drop(), before=before, after=Stamp(2**62, 2**62, 9, 9)), at_end=True)
    )

    assert outcome.verdict == "refused"
    assert A in outcome.why
    assert str(tuple(before)) in outcome.why
    assert str((7, 7, 1, 0)) in outcome.why
    assert await everything(pair) == seen


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NEVER, Stamp(7, 7, 1, 0)),
        (NEVER, Stamp(-1, -1, 0, 0)),
        (Stamp(7, 7, 0, 9), Stamp(7, 7, 1, 0)),
        (Stamp(6, 9, 9, 9), Stamp(6, 9, 9, 9)),
    ],
)
async def test_a_unit_at_or_below_what_is_stored_is_ignored(
    pair: Pair, fold: Fold, before: Stamp, after: Stamp
) -> None:
    await fold.do(A, Bind(), put(PATH))
    seen = await everything(pair)
    outcome = await fold.apply(
        fold.unit(A, Drop(), before=before, after=after, card=card(closed=True), state=b"old"), restart=1, read=1
    )

    assert outcome == ("applied", 0, 1, "")
    assert await everything(pair) == seen


async def test_a_step_of_duplicates_still_moves_the_progress(pair: Pair, fold: Fold) -> None:
    unit = fold.unit(A, Bind(), put(PATH))
    await fold.apply(unit)
    await fold.apply(unit, restart=20, read=25)

    assert (await pair.writer.load(0)).progress == Progress(TOPIC, 20, 25, 0)


async def test_a_step_repeated_whole_is_refused_where_it_moved_the_restart_offset(pair: Pair, fold: Fold) -> None:
    step = fold.step(fold.unit(A, Bind(), put(PATH)))
    await pair.writer.apply(step)
    before = await everything(pair)

    assert (await pair.writer.apply(step)).verdict == "refused"
    assert await everything(pair) == before


async def test_new_units_behind_duplicates_are_applied(pair: Pair, fold: Fold) -> None:
    old = fold.unit(A, Bind(), put(PATH))
    await fold.apply(old)
    outcome = await fold.apply(old, fold.unit(A, take(PATH, 8)), fold.unit(B, Bind()))

    assert outcome == ("applied", 2, 1, "")
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:8]}


async def test_units_of_one_rank_follow_each_other_within_a_step(pair: Pair, fold: Fold) -> None:
    first = fold.unit(A, Bind(), put(PATH))
    second = fold.unit(A, take(PATH, 4), before=first.after, after=Stamp(7, 7, 1, 1))
    third = fold.unit(A, Clear("gpu"), put(PATH, 0, 2), before=second.after, after=Stamp(7, 7, 1, 4), state=b"last")
    outcome = await fold.apply(first, second, third)

    assert outcome == ("applied", 3, 0, "")
    assert (await pair.writer.load(0)).ranks == {A: (Stamp(7, 7, 1, 4), b"last")}
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:2]}


async def test_a_unit_may_leave_the_stamp_where_it_is(pair: Pair, fold: Fold) -> None:
    """A hole unloads a rank and keeps its n."""
    await fold.do(A, Bind(), put(PATH))
    stamp = fold.stamps[A]
    outcome = await fold.do(A, Drop(), before=stamp, after=stamp, state=b"unloaded")

    assert outcome == ("applied", 1, 0, "")
    assert (await pair.writer.load(0)).ranks == {A: (stamp, b"unloaded")}
    assert await claims(pair.reader) == set()


async def test_stamps_offsets_and_times_keep_all_their_bits(pair: Pair) -> None:
    fold = Fold(pair.writer)
    top = 2**63 - 1
    await fold.seek(top - 3, top)
    first, second = Stamp(2**53, 2**53, 2**53, 2**53), Stamp(2**53, 2**53, 2**53, 2**53 + 1)
    await fold.do(A, before=NEVER, after=first)
    await fold.apply(fold.unit(A, before=first, after=second, now=Now(*second, seq=top)), read=top)
    highest = Stamp(top, top, top, top)
    await fold.apply(fold.unit(A, before=second, after=highest), read=top)

    stored = await pair.writer.load(0)
    assert stored.progress == Progress(TOPIC, top, top, top)
    assert stored.ranks[A][0] == highest
    again = fold.step(fold.unit(A, before=second, after=highest), restart=top, read=top)
    assert (await pair.writer.apply(again)).duplicates == 1


async def test_a_rollback_is_refused_and_caught_up_to_the_same_end(pair: Pair, fold: Fold) -> None:
    """Redis loses its newest writes.

    log      1 2 3 | 4 5
    redis    1 2 3       <- a snapshot comes back
    worker           4?  -> refused, load, 4 and 5 again
    """
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(PATH, 0, 4))
    photo = await pair.snapshot()
    lost = [fold.step(fold.unit(A, take(PATH, 8), put(PATH, 0, 3, lane=1)))]
    await fold.send(lost[0])
    lost.append(fold.step(fold.unit(B, Clear("gpu"), put(PATH, 0, 1))))
    await fold.send(lost[1])
    end, version = await claims(pair.reader), (await pair.reader.catalogue(MODEL)).version
    await pair.restore(photo)

    assert (await pair.reader.catalogue(MODEL)).version != version
    assert (await fold.do(A, Drop())).verdict == "refused"
    await fold.reload()
    assert fold.restart == lost[0].restart_before
    assert [(await pair.writer.apply(step)).verdict for step in lost] == ["applied", "applied"]
    assert await claims(pair.reader) == end


# --- slots


async def test_a_new_life_has_a_new_slot_for_every_medium(pair: Pair, fold: Fold) -> None:
    used: set[int] = set()
    for rank in (A, B, A, A):
        await fold.do(rank, Bind())
        slots = (await pair.reader.catalogue(MODEL)).ranks[rank].slots
        assert len(set(slots)) == 4
        assert 0 not in slots
        assert not used & set(slots), "slots are never reused"
        used |= set(slots)


async def test_a_new_life_holds_nothing(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH), put(PATH, medium="cpu"))
    await fold.do(B, Bind(), put(PATH))
    await fold.do(A, Bind())

    assert await claims(pair.reader) == {((B, "gpu", 0), key) for key in PATH}
    holders, _ = await look(pair.reader, PATH)
    assert holders == [{(B, "gpu", 0)}] * 16


async def test_a_clear_empties_one_medium(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH), put(PATH, medium="cpu"), put(PATH, lane=1))
    before = (await pair.reader.catalogue(MODEL)).ranks[A].slots
    await fold.do(A, Clear("gpu"))

    gpu, *others = (await pair.reader.catalogue(MODEL)).ranks[A].slots
    assert gpu not in {0, *before}
    assert tuple(others) == before[1:]
    assert await claims(pair.reader) == {((A, "cpu", 0), key) for key in PATH}


async def test_a_dropped_rank_has_no_slots_until_the_next_life(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    await fold.do(A, Drop())
    await fold.do(A, put(PATH), Clear("gpu"), put(PATH))

    assert (await pair.reader.catalogue(MODEL)).ranks[A].slots == (0, 0, 0, 0)
    assert await claims(pair.reader) == set()
    assert fold.stamps[A] == (await pair.writer.load(0)).ranks[A][0], "the stamp stays"

    await fold.do(A, put(PATH), Bind(), put(PATH, 0, 2))
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:2]}


async def test_a_rank_without_a_life_holds_nothing(pair: Pair, fold: Fold) -> None:
    await fold.do(A, put(PATH))

    assert await claims(pair.reader) == set()


async def test_changes_take_effect_in_their_order(pair: Pair, fold: Fold) -> None:
    await fold.do(
        A,
        Bind(),
        put(PATH),
        Clear("gpu"),
        put(PATH, 0, 4),
        take(PATH, 1, 3),
        put(PATH, 2, 3),
        Clear("cpu"),
        take(PATH, 3),
    )

    assert await claims(pair.reader) == {((A, "gpu", 0), PATH[0]), ((A, "gpu", 0), PATH[2])}


# --- leaving the catalogue


async def leave(fold: Fold, rank: str, **changes: Any) -> Any:
    stamp = fold.stamps[rank]
    return await fold.do(rank, Drop(), before=stamp, after=stamp, card=None, leaves=True, **changes)


async def test_a_rank_that_leaves_is_in_no_catalogue_and_its_stamp_stays(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(PATH, 0, 2))
    before, stamp = await pair.reader.catalogue(MODEL), fold.stamps[A]
    outcome = await leave(fold, A, state=b"gone")

    assert outcome == ("applied", 1, 0, "")
    after = await pair.reader.catalogue(MODEL)
    assert set(after.ranks) == {B}
    assert after.version != before.version
    assert await claims(pair.reader) == {((B, "gpu", 0), key) for key in PATH[:2]}
    assert (await look(pair.reader, PATH))[1].pulses.keys() == {B}
    assert (await pair.writer.load(0)).ranks[A] == (stamp, b"gone")
    assert (await leave(fold, A)).applied == 1, "twice is once"


async def test_records_from_before_a_rank_left_do_not_bring_it_back(pair: Pair, fold: Fold) -> None:
    old = fold.unit(A, Bind(), put(PATH))
    await fold.apply(old)
    await leave(fold, A)
    again = await fold.apply(old)

    assert (again.applied, again.duplicates) == (0, 1)
    assert await pair.reader.models() == []
    assert (await pair.reader.catalogue(MODEL)) == Catalogue(b"", {})


async def test_a_card_brings_a_rank_back(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    await leave(fold, A)
    await fold.do(A, Bind(), put(PATH, 0, 3), card=card())

    assert set((await pair.reader.catalogue(MODEL)).ranks) == {A}
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:3]}


async def test_a_rank_that_another_partition_took_over_stays_when_it_leaves_the_old_one(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    new = Fold(pair.writer, partition=1)
    await new.seek()
    await new.do(A, Bind(), put(PATH, 0, 2))
    before = await pair.reader.catalogue(MODEL)
    await leave(fold, A)

    assert await pair.reader.catalogue(MODEL) == before
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:2]}


# --- bounds


def broken_steps() -> dict[str, Any]:
    good = put(PATH)
    return {
        "offset": lambda f: f.step(read=2**63),
        "restart goes back": lambda f: f.step(restart=0),
        "read below restart": lambda f: f.step(restart=5, read=4),
        "number in a stamp": lambda f: f.step(f.unit(A, before=NEVER, after=Stamp(2**63, 0, 0, 0))),
        "nonce": lambda f: f.step(nonce=b"short"),
        "units": lambda f: f.step(*(f.unit(f"r/{n}") for n in range(STEP_UNITS_MAX + 1))),
        "ops": lambda f: f.step(f.unit(A, *[good] * STEP_OPS_MAX), f.unit(B, good)),
        "ops of one unit": lambda f: f.step(f.unit(A, *[good] * (STEP_OPS_MAX + 1))),
        "ops of a piece": lambda f: f.pieces(f.unit(A, *[good] * (STEP_OPS_MAX + 2)), STEP_OPS_MAX + 1)[0],
        "a piece of two": lambda f: f.step(f.unit(A, good), f.unit(B, good), piece=Piece(bytes(16), 0, last=True)),
        "token": lambda f: f.step(f.unit(A, good), piece=Piece(b"short", 0, last=True)),
        "number of a piece": lambda f: f.step(f.unit(A, good), piece=Piece(bytes(16), 2**32, last=True)),
        "a piece that is not under way": lambda f: f.step(f.unit(A, good), piece=Piece(bytes(16), 0, last=False)),
        "a piece that leaves the stamp": lambda f: f.step(
            f.unit(A, Drop(), before=f.stamps[A], after=f.stamps[A]), piece=Piece(bytes(16), 0, last=True)
        ),
        "rank": lambda f: f.step(f.unit("replica-a")),
        "stamp": lambda f: f.step(f.unit(A, before=Stamp(1, 1, 1, 1), after=Stamp(1, 1, 1, 0))),
        "blocks without a stamp": lambda f: f.step(f.unit(A, put(PATH), before=f.stamps[A], after=f.stamps[A])),
        "leaving with a card": lambda f: f.step(f.unit(A, Drop(), card=card(), leaves=True)),
        "leaving with blocks": lambda f: f.step(f.unit(A, leaves=True)),
        "card's model": lambda f: f.step(f.unit(A, card=card("other"))),
        "card's partition": lambda f: f.step(f.unit(A, card=card(partition=1))),
        "no keys": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 1, 0, (), 0))),
        "17 keys": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 0, 0, tuple(range(1, 18)), 1))),
        "over the end": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 15, 7, (8, 9), 1))),
        "position": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, -1, 0, (1,), 1))),
        "mask": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 0, 0, (1, 2), 0b100))),
        "negative mask": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 0, 0, (1, 2), -1))),
        "lane": lambda f: f.step(f.unit(A, Put(True, "gpu", 256, 1, 0, 0, (1,), 1))),
        "row": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 0, 0, (2,), 1))),
        "big key": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 0, 0, (1, 2**64), 1))),
        "negative key": lambda f: f.step(f.unit(A, Put(True, "gpu", 0, 1, 1, -1, (2,), 1))),
        "medium": lambda f: f.step(f.unit(A, Put(True, "disk", 0, 1, 0, 0, (1,), 1))),  # type: ignore[arg-type]  # on purpose
        "cleared medium": lambda f: f.step(f.unit(A, Clear("disk"))),  # type: ignore[arg-type]  # on purpose
    }


@pytest.mark.parametrize("what", broken_steps())
async def test_a_step_out_of_bounds_is_the_caller_s_fault_and_changes_nothing(
    pair: Pair, fold: Fold, what: str
) -> None:
    await fold.do(A, Bind(), put(PATH))
    before = await everything(pair)
    with pytest.raises(InvalidInput):
        await pair.writer.apply(broken_steps()[what](fold))

    assert await everything(pair) == before


async def test_a_step_of_many_ranks_goes_through(pair: Pair, fold: Fold) -> None:
    ranks = [f"replica/{n}" for n in range(STEP_OPS_MAX // 2)]
    outcome = await fold.apply(*(fold.unit(rank, Bind(), put(PATH, 0, 1)) for rank in ranks))

    assert outcome == ("applied", len(ranks), 0, "")
    holders, reading = await look(pair.reader, PATH[:1])
    assert holders == [{(rank, "gpu", 0) for rank in ranks}]
    assert set(reading.pulses) == set(ranks)
    idle = [fold.unit(f"idle/{n}") for n in range(STEP_UNITS_MAX)]
    assert (await fold.apply(*idle)).applied == STEP_UNITS_MAX
