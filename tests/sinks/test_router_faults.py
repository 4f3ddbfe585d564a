"""The router over an index that is slow, broken, restless or unreadable: no exception, no wait, no false claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from router_fleet import MODEL, PROMPT, Fleet, World, new_world, only

from kvledger_index.errors import Unavailable
from kvledger_index.memory import MemoryIndex
from kvledger_index.views import Catalogue, Claimed, PartitionView, Reading
from kvledger_router import Breaker, Index
from kvledger_router.client import CATALOGUE_TRIES_MAX, LATE_MAX


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as ready:
        yield ready


class Wrapped:
    """A reader with faults on request, over a real one."""

    def __init__(self, inner: MemoryIndex) -> None:
        self.inner = inner
        self.silent = False
        self.broken = False
        self.calls = 0
        self.wakes = asyncio.Event()
        """What a silent reader waits for."""
        self.defect: Exception | None = None
        self.moved: frozenset[str] = frozenset()
        self.corrupt = 0

    async def models(self) -> list[str]:
        return await self.inner.models()

    async def partitions(self) -> dict[int, PartitionView]:
        return await self.inner.partitions()

    async def catalogue(self, model: str) -> Catalogue:
        await self._fault()
        return await self.inner.catalogue(model)

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        await self._fault()
        reading = await self.inner.read(catalogue, model, keys, hashes)
        return reading._replace(moved=self.moved, corrupt=self.corrupt)

    async def _fault(self) -> None:
        self.calls += 1
        if self.broken:
            raise Unavailable("Redis at nowhere does not answer")
        if self.silent:
            await self.wakes.wait()
        if self.defect:
            raise self.defect

    def dump(self, model: str | None = None, rank: str | None = None) -> AsyncIterator[Claimed]:
        return self.inner.dump(model, rank)

    async def aclose(self) -> None:
        await self.inner.aclose()


@dataclass
class Faulty:
    world: World
    reader: Wrapped
    index: Index


@pytest.fixture
async def faulty(world: World) -> AsyncIterator[Faulty]:
    """One rank that holds the prompt; three failures open the breaker."""
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    reader = Wrapped(world.memory)
    breaker = Breaker(failures_max=3, open_seconds=1.0)
    async with Index(reader, model=MODEL, deadline_seconds=0.01, breaker=breaker, clock=world.clock.seconds) as index:
        yield Faulty(world, reader, index)


async def test_past_the_deadline_there_is_no_opinion_and_no_exception(faulty: Faulty) -> None:
    assert (await faulty.index.match(PROMPT)).opinion

    faulty.reader.silent = True
    match = await faulty.index.match(PROMPT, replicas=["pod-a", "pod-z"])

    assert not match.opinion
    assert [(h.replica, h.rank, h.hit_tokens, h.status) for h in match] == [
        ("pod-a", 0, 0, "unknown"),
        ("pod-z", None, 0, "unknown"),
    ]
    assert "deadline" in match.reason
    assert match.best(include_uncertain=True) is None


async def test_a_redis_that_never_answered_lists_what_was_asked_for(faulty: Faulty) -> None:
    faulty.reader.broken = True
    match = await faulty.index.match(PROMPT, replicas=["pod-a"])

    assert [(h.replica, h.rank, h.status) for h in match] == [("pod-a", None, "unknown")]
    assert "does not answer" in match.reason
    assert len(await faulty.index.match(PROMPT)) == 0


async def test_an_open_breaker_answers_without_asking_and_closes_by_itself(faulty: Faulty) -> None:
    faulty.reader.broken = True
    for _ in range(3):
        await faulty.index.match(PROMPT)
    calls = faulty.reader.calls
    refused = await faulty.index.match(PROMPT)

    assert faulty.reader.calls == calls
    assert "breaker" in refused.reason

    faulty.reader.broken = False
    faulty.world.clock.pass_seconds(1)
    match = await faulty.index.match(PROMPT)

    assert match.opinion
    assert (await faulty.index.match(PROMPT)).opinion
    counters = faulty.index.counters
    assert (counters.asked, counters.answered, counters.failures, counters.refused) == (6, 2, 3, 1)


async def test_breaker_changes_are_logged_as_events(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvledger_router")
    faulty.reader.broken = True
    for _ in range(3):
        await faulty.index.match(PROMPT)
    faulty.reader.broken = False
    faulty.world.clock.pass_seconds(1)
    await faulty.index.match(PROMPT)
    events = [(r.__dict__["event"], r.__dict__["before"], r.__dict__["after"]) for r in caplog.records]

    assert events == [("breaker_changed", "closed", "open"), ("breaker_changed", "half_open", "closed")]


async def test_a_change_that_many_questions_witness_is_logged_once(
    faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.reader.broken = True
    for _ in range(3):
        await asyncio.gather(*(faulty.index.match(PROMPT) for _ in range(10)))
        faulty.world.clock.pass_seconds(0.001)

    assert [r.__dict__["after"] for r in caplog.records] == ["open"]


async def test_a_caller_that_goes_away_is_no_failure_of_redis(faulty: Faulty) -> None:
    faulty.reader.silent = True
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await faulty.index.match(PROMPT)
    faulty.reader.silent = False

    assert (await faulty.index.match(PROMPT)).opinion
    assert faulty.index.counters.abandoned == 5


async def test_a_late_reading_goes_on_so_that_the_next_question_need_not_start_anew(faulty: Faulty) -> None:
    """A handshake longer than the deadline is paid once: the first question fails, its connection serves the second."""
    faulty.reader.silent = True
    first = await faulty.index.match(PROMPT)
    faulty.reader.silent = False
    faulty.reader.wakes.set()
    await asyncio.wait(faulty.index._late)
    second = await faulty.index.match(PROMPT)

    assert (first.opinion, second.opinion) == (False, True)
    assert faulty.index.counters.catalogues == 1


async def test_late_readings_are_bounded_and_end_with_the_index(faulty: Faulty) -> None:
    faulty.reader.silent = True
    await asyncio.gather(*(faulty.index.match(PROMPT) for _ in range(LATE_MAX * 3)))
    await asyncio.sleep(0)
    late = set(faulty.index._late)
    await faulty.index.aclose()

    assert len(late) == LATE_MAX
    assert all(task.cancelled() for task in late)


async def test_a_defect_in_a_late_reading_is_reported_not_swallowed(faulty: Faulty) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    faulty.reader.silent = True
    await faulty.index.match(PROMPT)
    faulty.reader.defect = ZeroDivisionError("a defect")
    faulty.reader.wakes.set()
    await asyncio.wait(faulty.index._late)
    await asyncio.sleep(0)  # the wait and the report are told of the end in the same turn

    assert told == [faulty.reader.defect]


async def test_a_rank_that_moved_between_the_reads_is_not_exact(faulty: Faulty) -> None:
    faulty.reader.moved = frozenset({"pod-a/0"})
    holder = only(await faulty.index.match(PROMPT))

    assert (holder.status, holder.hit_tokens) == ("uncertain", 160)


async def test_unreadable_rows_make_an_answer_a_lower_bound(faulty: Faulty) -> None:
    faulty.reader.corrupt = 2

    assert only(await faulty.index.match(PROMPT)).status == "at_least"
    assert faulty.index.counters.corrupt == 2


class Restless(Wrapped):
    """The catalogue changes for one rank between every look at it and the reading that follows."""

    def __init__(self, inner: MemoryIndex, fleet: Fleet, changes: int, rank: str = "pod-a/0") -> None:
        super().__init__(inner)
        self.fleet, self.changes, self.rank = fleet, changes, rank

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        if self.changes:
            self.changes -= 1
            await self.fleet.become(self.rank, engine_version=str(self.changes))
        return await super().read(catalogue, model, keys, hashes)


@pytest.mark.parametrize("changes", [1, CATALOGUE_TRIES_MAX - 1])
async def test_an_answer_over_a_changed_catalogue_is_taken_again(world: World, changes: int) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    reader = Restless(world.memory, world.fleet, changes)
    match = await Index(reader, model=MODEL, deadline_seconds=5.0).match(PROMPT)

    assert [(h.hit_tokens, h.status) for h in match] == [(160, "exact")]


async def test_a_rank_that_changes_without_end_costs_the_others_nothing(world: World) -> None:
    for rank in ("pod-a/0", "pod-b/0"):
        await world.fleet.open(rank)
        await world.fleet.store(rank, PROMPT)
    index = Index(Restless(world.memory, world.fleet, 99), model=MODEL, deadline_seconds=5.0)
    match = await index.match(PROMPT)

    assert match.opinion
    assert [(h.replica, h.hit_tokens, h.status) for h in match] == [
        ("pod-b", 160, "exact"),
        ("pod-a", 160, "uncertain"),
    ]
    assert index.counters.unsettled == 1


class LastMoment(Restless):
    """Another rank changes right behind the last reading, and never before."""

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        reading = await super().read(catalogue, model, keys, hashes)
        if not self.changes:
            await self.fleet.become("pod-a/0", engine_version="another")
        return reading


async def test_what_settles_an_answer_is_younger_than_its_readings(world: World) -> None:
    """By any catalogue at hand before, the first rank did not change; by that of the last reading it may have."""
    for rank in ("pod-a/0", "pod-b/0"):
        await world.fleet.open(rank)
        await world.fleet.store(rank, PROMPT)
    reader = LastMoment(world.memory, world.fleet, CATALOGUE_TRIES_MAX, "pod-b/0")
    match = await Index(reader, model=MODEL, deadline_seconds=5.0).match(PROMPT)

    assert {h.replica: h.status for h in match} == {"pod-a": "uncertain", "pod-b": "uncertain"}


async def test_the_catalogue_is_read_once_for_many_questions(faulty: Faulty) -> None:
    await asyncio.gather(*(faulty.index.match(PROMPT) for _ in range(3)))
    for _ in range(20):
        await faulty.index.match(PROMPT)

    assert faulty.index.counters.catalogues <= 3
    assert faulty.index.counters.answered == 23
