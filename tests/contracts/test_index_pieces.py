"""What every implementation promises of a unit that is applied in pieces: all of it, and exact only then."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_pairs import MODEL, Fold, Pair, RedisPair, card, claims, look, put, redis_pair, take

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import NEVER, STEP_OPS_MAX, UNDERWAY_MS, Bind, Clear, Drop, Now, Op, Progress, Stamp, Step
from kvledger_index.views import Catalogue, Reading
from kvledger_index.writer import Library, library

A, B = "replica-a/0", "replica-b/0"
PATH = tuple(range(0x1000, 0x1010))
OTHER = tuple(range(0x2000, 0x2010))
OPS: tuple[Op, ...] = (put(PATH), take(PATH, 4), Clear("gpu"), put(PATH, 0, 3), put(OTHER), take(OTHER, 8))
"""Each of them wrong where it stands alone, or twice at another place."""

HELD = {((A, "gpu", 0), key) for key in (*PATH[:3], *OTHER[:8])}


@pytest.fixture
async def fold(fold: Fold) -> Fold:
    """A rank that holds something, before the unit of the tests."""
    await fold.apply(fold.unit(A, Bind(), put(OTHER, 0, 12)), fold.unit(B, Bind(), put(PATH)))
    return fold


async def claims_of_a(pair: Pair) -> set[Any]:
    return await claims(pair.reader, MODEL, A)


async def test_pieces_together_do_what_the_unit_does(pair: Pair, fold: Fold) -> None:
    unit = fold.unit(A, *OPS, card=card(partial=True))
    outcomes = [await fold.send(step) for step in fold.pieces(unit, 1, 2, 1, 1)]

    assert outcomes == [("applied", 0, 0, "")] * 4 + [("applied", 1, 0, "")]
    assert await claims_of_a(pair) == HELD
    assert (await pair.writer.load(0)).ranks[A] == (unit.after, unit.state)
    assert (await pair.reader.catalogue(MODEL)).ranks[A].card == card(partial=True)
    assert (await look(pair.reader, PATH))[1].pulses[A].now == unit.now


async def test_between_any_two_pieces_the_rank_is_under_way_and_no_other_is(pair: Pair, fold: Fold) -> None:
    unit = fold.unit(A, *OPS)
    *firsts, last = fold.pieces(unit, 1, 1, 1, 1, 1)
    for step in firsts:
        await fold.send(step)
        _, reading = await look(pair.reader, PATH)
        assert reading.pulses[A].now.underway
        assert reading.pulses[A].now.unproven_ms == UNDERWAY_MS, "stale for readers that do not know the flag"
        assert not reading.pulses[B].now.underway
    await fold.send(last)

    assert not (await look(pair.reader, PATH))[1].pulses[A].now.underway


async def test_what_a_first_piece_shows_has_another_stamp_than_before(pair: Pair, fold: Fold) -> None:
    """So a reading that looked before it and looks again behind it sees that the rank moved."""
    before = (await look(pair.reader, PATH))[1].pulses[A].now
    await fold.send(fold.pieces(fold.unit(A, *OPS), 1)[0])
    during = (await look(pair.reader, PATH))[1].pulses[A].now

    assert (before.life_owner, before.life_count, before.n) != (during.life_owner, during.life_count, during.n)


async def test_stamp_state_card_and_progress_move_with_the_last_piece_only(pair: Pair, fold: Fold) -> None:
    stored, cards = await pair.writer.load(0), (await pair.reader.catalogue(MODEL)).ranks[A].card
    *firsts, last = fold.pieces(fold.unit(A, *OPS, card=card(partial=True)), 2, 2)
    for step in firsts:
        await fold.send(step)

        assert await pair.writer.load(0) == stored
        assert (await pair.reader.catalogue(MODEL)).ranks[A].card == cards
    await fold.send(last)

    assert (await pair.writer.load(0)).progress == Progress("topic-a", 2, 2, 0)


async def test_a_rank_whose_first_unit_is_under_way_is_not_loaded(pair: Pair) -> None:
    """It has slots, and no state that anybody could go on from."""
    fold = Fold(pair.writer)
    await fold.seek()
    unit = fold.unit(A, Bind(), *OPS)
    first, *rest = fold.pieces(unit, 2, 2)
    await fold.send(first)

    assert unit.before == NEVER
    assert (await pair.writer.load(0)).ranks == {}
    assert await pair.reader.models() == []
    for step in rest:
        await fold.send(step)
    assert await claims_of_a(pair) == HELD


@pytest.mark.parametrize("pieces", range(1, 6))
async def test_another_worker_begins_again_wherever_the_first_was_lost(pair: Pair, fold: Fold, pieces: int) -> None:
    sizes = (1, 1, 1, 1, 1)
    for step in fold.pieces(fold.unit(A, *OPS), *sizes)[:pieces]:
        await fold.send(step)
    other = Fold(pair.writer)
    await other.reload()
    await other.seek(other.restart, 9, drop=False)
    for step in other.pieces(other.unit(A, *OPS), 2, 2):
        assert (await other.send(step)).verdict == "applied"

    assert await claims_of_a(pair) == HELD


async def test_a_worker_that_does_not_know_pieces_may_take_over(pair: Pair, fold: Fold) -> None:
    """It applies the unit whole; what the first one then sends changes nothing."""
    unit = fold.unit(A, *OPS)
    first, second, last = fold.pieces(unit, 3, 2)
    await fold.send(first)
    await fold.apply(unit)
    after = await pair.writer.load(0)
    await pair.writer.apply(second)
    outcome = await pair.writer.apply(last)

    assert outcome.verdict == "refused"
    assert await pair.writer.load(0) == after
    assert await claims_of_a(pair) == HELD
    assert not (await look(pair.reader, PATH))[1].pulses[A].now.underway


async def test_a_late_piece_of_an_attempt_that_another_replaced_is_refused(pair: Pair, fold: Fold) -> None:
    """It would come between two pieces of the other.

    zombie  0 1       2?  -> refused
    other       0 1      2
    """
    unit = fold.unit(A, *OPS)
    zombie, other = fold.pieces(unit, 2, 2), fold.pieces(unit, 2, 2)
    for step in (*zombie[:2], *other[:2]):
        await pair.writer.apply(step)
    seen = await claims_of_a(pair)
    outcome = await pair.writer.apply(zombie[2])

    assert outcome.verdict == "refused"
    assert A in outcome.why
    assert await claims_of_a(pair) == seen
    assert (await pair.writer.apply(other[2])).applied == 1


@pytest.mark.parametrize(("sent", "then"), [((), 1), ((0,), 2), ((0, 1), 1), ((0, 1, 2), 1), ((0, 1), 3)])
async def test_a_piece_twice_or_before_its_turn_is_refused(
    pair: Pair, fold: Fold, sent: tuple[int, ...], then: int
) -> None:
    steps = fold.pieces(fold.unit(A, *OPS), 1, 1, 1)
    for number in sent:
        await pair.writer.apply(steps[number])
    seen = await claims_of_a(pair)

    assert (await pair.writer.apply(steps[then])).verdict == "refused"
    assert await claims_of_a(pair) == seen


async def test_a_placing_ends_the_attempt_of_whoever_had_the_partition(pair: Pair, fold: Fold) -> None:
    first, second = fold.pieces(fold.unit(A, *OPS), 3)
    await pair.writer.apply(first)
    await pair.writer.seek(0, fold.topic, fold.restart, 9, drop=False)

    assert (await pair.writer.apply(second)).verdict == "refused"


async def test_pieces_of_a_unit_that_is_stored_change_nothing(pair: Pair, fold: Fold) -> None:
    unit = fold.unit(A, *OPS)
    await fold.apply(unit)
    before = await claims_of_a(pair)
    for step in fold.pieces(unit, 2, 2):
        assert (await fold.send(step)).verdict == "applied"

    assert await claims_of_a(pair) == before
    assert (await pair.writer.load(0)).ranks[A][0] == unit.after


async def test_a_piece_that_does_not_follow_the_stamp_is_refused(pair: Pair, fold: Fold) -> None:
    ahead = fold.unit(A, *OPS, before=Stamp(7, 7, 1, 5), after=Stamp(7, 7, 1, 6))

    assert (await pair.writer.apply(fold.pieces(ahead, 2)[0])).verdict == "refused"


async def test_an_unfinished_unit_goes_with_its_partition(pair: Pair, fold: Fold) -> None:
    await fold.send(fold.pieces(fold.unit(A, *OPS), 3)[0])
    await fold.seek()

    assert await pair.writer.load(0) == (Progress("topic-a", 0, 0, 0), {})
    assert await claims(pair.reader) == set()


async def test_a_unit_of_thousands_of_changes_goes_through(pair: Pair, fold: Fold) -> None:
    """One event of an engine may store or remove all its blocks."""
    paths = [range(base, base + 16) for base in range(0x10000, 0x10000 + 16 * STEP_OPS_MAX * 2, 16)]
    await fold.do(A, Bind(), *(put(path) for path in paths))
    assert len(await claims_of_a(pair)) == 16 * STEP_OPS_MAX * 2

    await fold.do(A, *(take(path) for path in paths[1:]))
    assert await claims_of_a(pair) == {((A, "gpu", 0), key) for key in paths[0]}


OPS_DRAWN: st.SearchStrategy[Op] = st.one_of(
    st.builds(
        put,
        st.sampled_from((PATH, OTHER, (*PATH[:7], 0x3007, 0x3008))),
        st.integers(0, 6),
        st.integers(7, 9),
        add=st.booleans(),
        lane=st.sampled_from((0, 255)),
    ),
    st.just(Clear("gpu")),
    st.just(Bind()),
    st.just(Drop()),
)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(OPS_DRAWN, min_size=2, max_size=12), st.data())
async def test_pieces_and_interruptions_do_not_matter(ops: list[Op], data: st.DataObject) -> None:
    """Attempts that are broken off anywhere, then one that is not: the same blocks as from the whole unit."""
    ends = []
    for attempts in (0, data.draw(st.integers(0, 2))):
        index = MemoryIndex()
        fold = Fold(index)
        await fold.seek()
        await fold.do(A, Bind(), put(OTHER, 0, 12), put(PATH))
        unit = fold.unit(A, *ops)
        if attempts == 0:
            await fold.apply(unit)
        for left in range(attempts, -1, -1):
            sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
            steps = fold.pieces(unit, *sizes)
            for step in steps[: data.draw(st.integers(1, len(steps) - 1))] if left else steps:
                await fold.send(step)
        ends.append((await claims(index, MODEL, A), (await index.load(0)).ranks))

    assert ends[0] == ends[1]


@pytest.mark.services
@pytest.mark.parametrize(
    ("line", "instead", "broken"),
    [
        ("and call('GET', unit) ~= sub(piece, 1, 20) then", "and false then", "late"),
        ("touched, args[i + 2], state))", "touched, args[i + 3], state))", "stamp"),
        ("call('DEL', pre .. 'unit:' .. p) --", "--", "placing"),
    ],
)
async def test_functions_that_lack_a_rule_of_pieces_are_found_out(
    line: str, instead: str, broken: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary."""
    body = library().body
    assert body.count(line) == 1
    faulty = Library(body.replace(line, instead))
    monkeypatch.setattr("kvledger_index.writer.library", lambda: faulty)
    checks: dict[str, Any] = {
        "late": test_a_late_piece_of_an_attempt_that_another_replaced_is_refused,
        "stamp": test_stamp_state_card_and_progress_move_with_the_last_piece_only,
        "placing": test_a_placing_ends_the_attempt_of_whoever_had_the_partition,
    }
    async with redis_pair(lambda: redis_url, namespace) as pair:
        fold = Fold(pair.writer)
        await fold.seek()
        await fold.apply(fold.unit(A, Bind(), put(OTHER, 0, 12)), fold.unit(B, Bind(), put(PATH)))
        with pytest.raises(AssertionError):
            await checks[broken](pair, fold)


async def race(pair: RedisPair, monkeypatch: pytest.MonkeyPatch, seen: Callable[[Now], bool]) -> set[int]:
    """Readings of a prompt with pieces before them and between any two of their commands; returns the numbers of blocks
    of a rank that somebody was told of who trusts what ``seen`` lets pass. Only none and all are true.

    TIME | now | parts | rows | v and t | side | now      pieces come behind one of these
    """
    path = (*PATH[:8], *range(0x3008, 0x3010))
    ops = tuple(put(path, at, at + 4) for at in range(0, 16, 4))
    told: set[int] = set()
    pipeline = pair.redis_reader._pipeline
    for early, behind in itertools.product(range(4), range(1, 8)):
        for between in range(1, 5 - early):
            fold = Fold(pair.writer)
            await fold.seek()
            await fold.apply(fold.unit(A, Bind()), fold.unit(B, Bind(), put(PATH), put(path)))
            steps = iter(fold.pieces(fold.unit(A, *ops), 1, 1, 1))
            for step in itertools.islice(steps, early):
                await fold.send(step)
            catalogue = await pair.reader.catalogue(MODEL)
            reading = await _interrupted(pair, monkeypatch, catalogue, path, behind, itertools.islice(steps, between))
            monkeypatch.setattr(pair.redis_reader, "_pipeline", pipeline)
            if A not in reading.moved and reading.version == catalogue.version and seen(reading.pulses[A].now):
                slots = catalogue.ranks[A].slots
                told.add(sum(mask.bit_count() for slot, _, mask in reading.segments[0].holders if slot in slots))
    return told


async def _interrupted(
    pair: RedisPair,
    monkeypatch: pytest.MonkeyPatch,
    catalogue: Catalogue,
    path: tuple[int, ...],
    behind: int,
    steps: Iterator[Step],
) -> Reading:
    pipeline, asked = pair.redis_reader._pipeline, 0

    async def interrupted(commands: Any) -> Any:
        nonlocal asked
        at, asked = behind - asked, asked + len(commands)
        first = await pipeline(commands[:at]) if at > 0 else []
        if 0 < at <= len(commands):
            for step in steps:
                assert (await pair.writer.apply(step)).verdict == "applied"
        rest = commands[max(at, 0) :]
        return first + (await pipeline(rest) if rest else [])

    monkeypatch.setattr(pair.redis_reader, "_pipeline", interrupted)
    return await pair.reader.read(catalogue, MODEL, path)


KNOWS: dict[str, Callable[[Now], bool]] = {
    "this build": lambda now: not now.underway,
    "an older one": lambda now: now.unproven_ms < UNDERWAY_MS,
}


@pytest.mark.services
@pytest.mark.parametrize("reader", KNOWS)
async def test_no_reading_that_meets_a_part_of_a_unit_is_trusted(
    reader: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with redis_pair(lambda: redis_url, namespace) as pair:
        assert await race(pair, monkeypatch, KNOWS[reader]) == {0, 16}


@pytest.mark.services
async def test_readings_without_the_mark_would_be_wrong(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary."""
    async with redis_pair(lambda: redis_url, namespace) as pair:
        assert await race(pair, monkeypatch, lambda _: True) > {0, 16}
