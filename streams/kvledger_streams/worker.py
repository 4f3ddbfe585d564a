"""The partitions of one worker: placed, read, stamped, lost, placed again. No client of Kafka or Redis is in here.

    assigned ──> waiting ──place: load, plan, seek──> reading ──batch──> fold ──step──> index
                    ▲                                    │
                    └── refused · fell out of the log · Kafka or Redis silent · defect · topic changed

There is one way back, for whatever reason: forget the partition's state, load what the index stored, seek, read on.
Nothing is skipped on the way, and while a partition waits, the others are read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvledger_index import errors as index_errors
from kvledger_index.contract import IndexWriter
from kvledger_index.units import NONCE_BYTES, ScrubBudget, Step
from kvledger_streams.errors import Unavailable, UnreadableState
from kvledger_streams.fold import PartitionState, fold, forget, fresh, resume, seed
from kvledger_streams.progress import Bounds, Plan, Starts, Topic, first_guess, plan, rebuild
from kvledger_streams.settings import Settings
from kvledger_streams.tally import Tally
from kvledger_streams.telemetry import Telemetry
from kvledger_wire.errors import WrongTopic
from kvledger_wire.known import LogClock, known_of

COMMIT_SECONDS = 1.0
"""Between two commits of Kafka offsets. They serve lag tools only: nobody reads them back."""

SCRUB_BUSY_TIMES = 10
"""How much rarer dead slots are scrubbed while batches are applied: a worker that is never idle frees them, too."""

JUMPS_KNOWN_MAX = 1_000
"""Places of a partition where offsets are missing for good; a log with more of them is not asked again."""


class Fetched(Protocol):
    """A record as a Kafka consumer hands it over."""

    @property
    def offset(self) -> int:
        """Its place in the partition."""

    @property
    def timestamp(self) -> int:
        """Log time in ms."""

    @property
    def key(self) -> bytes | None:
        """As it is on the topic."""

    @property
    def value(self) -> bytes | None:
        """As it is on the topic."""

    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]:
        """As they are on the topic."""


class Batch(NamedTuple):
    """What one fetch brought of one partition. ``epoch`` names the seek that it follows, ``end`` the log end then.

    ``asked`` is when the fetch was sent, by our monotonic clock: its answer may have waited for us since.
    """

    partition: int
    epoch: int
    end: int
    records: Sequence[Fetched]
    asked: float


class Source(Protocol):
    """What the worker asks of a Kafka consumer."""

    async def seek(self, partition: int, offset: int) -> int | None:
        """Read from ``offset`` on; returns the epoch of what comes then. None: the partition is not ours any more."""

    def end_of(self, partition: int) -> tuple[int, float] | None:
        """The log's end as the broker last said, and when it was asked; None where it did not lately."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Store offsets for lag tools; best effort, never raises."""


class Log(Protocol):
    """What the worker asks of Kafka's admin API; ``broker.Broker``."""

    async def describe(self) -> Topic:
        """The topic as it is now."""

    async def bounds(self, partitions: Collection[int], topic: Topic) -> dict[int, Bounds]:
        """What the logs hold now."""


class PointerSource(Protocol):
    """Where ranks may be read from; ``pointers.Pointers``."""

    async def starts(self, partition: int, partitions: int) -> Starts:
        """Of each rank of a partition, verified. Bounded in time; raises Unavailable."""


class _Resync(Exception):
    """What is stored, or read, is not what we believed."""


class _Partition:
    """One assigned partition; ``state`` is None while it waits to be placed."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.clock = LogClock()
        """What time it is by the log: how old a rank's last word is does not depend on how fast we read."""
        self.end_seen: tuple[int, float] | None = None
        """The log's end at some moment: what stands behind it was appended later."""
        self.state: PartitionState | None = None
        self.epoch = -1
        self.target = 0
        self.caught_up = False
        self.lock = asyncio.Lock()
        """Held by whoever reads or places it: the index takes one step of a partition at a time."""
        self.failures = 0
        self.retry_at = now
        self.since = now
        self.stamped_at = -1.0
        self.applied = 0
        self.aside = False
        """A unit of it is being applied in pieces, beside the others; ``parked`` is what was fetched behind it."""
        self.parked: deque[Batch] = deque()
        self.jumps: set[tuple[int, int]] = set()
        """Offsets left out that were asked for again: (due, came)."""


class Worker:
    """Everything between a consumer's batches and the index. One per process; all methods on one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        writer: IndexWriter,
        log: Log,
        pointers: PointerSource,
        telemetry: Telemetry,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.tally = Tally()
        self.changed = asyncio.Event()
        """Set where a turn has something to do before its time."""
        self._settings = settings
        self._writer = writer
        self._log = log
        self._pointers = pointers
        self._telemetry = telemetry
        self._now = now
        self._wall = wall
        """Only a first guess of what time it is by the log."""
        self._source: Source | None = None
        self._partitions: dict[int, _Partition] = {}
        self._topic: Topic | None = None
        self._stopping = False
        self._readable = asyncio.Event()
        self._committed: dict[int, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asides: set[asyncio.Task[None]] = set()
        self._turnstile = asyncio.Lock()
        """One step at a time, in the order of asking: Redis would run all that it is given before it answers routers,
        and so steps of other partitions go between the pieces of a large unit."""
        self._scrubbed_at = now()
        self._dead_slots = 0
        self._due = {"commit": 0.0, "topic": 0.0, "report": now() + settings.report_seconds}

    def attach(self, source: Source) -> None:
        """The consumer to seek in; before the first assignment."""
        self._source = source

    # -- what the consumer calls -------------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[int]) -> None:
        """These partitions are ours from here on, and no others; they are placed by the next turn."""
        now = self._now()
        self._partitions = {number: _Partition(number, now) for number in partitions}
        self._committed.clear()
        self._tell_readable()
        self.changed.set()

    def revoke(self) -> None:
        """Nothing is ours; a call in flight may finish, the index refuses what does not follow."""
        self.assign(())

    def readable(self) -> set[int]:
        """Partitions that may be fetched: placed, and not in the middle of a large unit."""
        return {part.number for part in self._partitions.values() if part.state is not None and not part.aside}

    async def wait_readable(self) -> None:
        """Until there is one."""
        await self._readable.wait()

    async def take(self, batch: Batch) -> None:
        """Fold a batch into the index. Never raises: what goes wrong sends its partition back to be placed.

        Returns when that is done, or at the first piece of a unit that is larger than a step: the rest goes on beside,
        and the other partitions do not wait for it.
        """
        part = self._partitions.get(batch.partition)
        if part is None or self._stopping:
            return
        if part.aside:
            part.parked.append(batch)  # a few at most: a partition that is aside is not fetched
            return
        folding = self._folding(part, batch)
        async for _ in folding:
            part.aside = True
            self._tell_readable()
            task = asyncio.create_task(self._go_on_aside(part, folding), name=f"aside-{part.number}")
            self._asides.add(task)
            return

    def lost(self, partition: int, why: str) -> None:
        """The consumer cannot read on where it stands (below the log's start, beyond its end)."""
        part = self._partitions.get(partition)
        if part is not None and part.state is not None:
            self._lose(part, _Resync(why))

    # -- what the process calls --------------------------------------------------------------------------------------

    async def turn(self) -> None:
        """Place what waits, stamp what is idle, commit, look at the topic, scrub, report.

        What asks Kafka runs beside, one of each at a time: a broker that is slow must not keep partitions that are read
        from being stamped. Raises only what is a defect of ours.
        """
        self.changed.clear()
        for task in [task for task in self._asides if task.done()]:
            self._asides.remove(task)
            task.result()
        if self._waiting():
            self._beside("place", self._place_waiting)
        await self._stamp_idle()
        if self._is_due("commit", COMMIT_SECONDS):
            self._beside("commit", self._commit)
        if self._is_due("topic", self._settings.topic_check_seconds):
            self._beside("topic", self._check_topic)
        if self._may_scrub():
            self._beside("scrub", self._scrub)
        if self._is_due("report", self._settings.report_seconds):
            self._telemetry.progress(self.tally, **self._gauges())

    async def stop(self, seconds: float) -> bool:
        """Take no more batches and let calls in flight finish; True if all did in time."""
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        held = [part.lock.acquire() for part in self._partitions.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*held), seconds)
        except TimeoutError:
            return False
        await self._commit()
        return True

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _folding(self, part: _Partition, batch: Batch) -> AsyncIterator[None]:
        """All that ``take`` does with a batch; yields before the first piece of each large unit."""
        async with part.lock:
            state = part.state
            if state is None or part.epoch != batch.epoch:
                self._telemetry.counters.stale_batches += 1  # fetched before the last seek
                return
            try:
                self._tell_time(part, batch)
                self._check_place(part, state, batch)
                records = (
                    (each.offset, each.timestamp, each.key, each.value, known_of(each.headers))
                    for each in batch.records
                )
                for step in fold(state, records, end=batch.end, nonce=_nonce, tally=self.tally):
                    if step.piece is not None and step.piece.number == 0:
                        yield
                    if not self._holds(part, state):
                        break  # whoever has it now reads all of it again
                    await self._apply(part, state, step, batch.asked)
            except asyncio.CancelledError:
                self._lose(part, _Resync("cancelled in the middle of a step"))
                raise
            except Exception as error:  # noqa: BLE001 - Faust would acknowledge the batch and go on
                self._lose(part, error)
        self._telemetry.notes(batch.partition, self.tally)

    async def _go_on_aside(self, part: _Partition, folding: AsyncIterator[None]) -> None:
        """The rest of a batch that brought a large unit, and what was fetched behind it."""
        try:
            async for _ in folding:
                pass
            while part.parked and self._partitions.get(part.number) is part and not self._stopping:
                async for _ in self._folding(part, part.parked.popleft()):
                    pass
        finally:
            part.aside = False
            part.parked.clear()
            self._tell_readable()

    async def _place_waiting(self) -> None:
        waiting = self._waiting()
        try:
            topic = await self._describe()
            bounds = await self._log.bounds([part.number for part in waiting], topic)
        except Exception as error:  # noqa: BLE001 - whatever Kafka says, the partitions wait and try again
            for part in waiting:
                self._lose(part, error)
            return
        await asyncio.gather(*(self._place(part, topic, bounds.get(part.number)) for part in waiting))
        self.changed.set()  # more may have come to wait meanwhile

    async def _place(self, part: _Partition, topic: Topic, bounds: Bounds | None) -> None:
        """Load, plan, tell the index, seek: from here on the partition is read."""
        async with part.lock:
            if part.state is not None or self._partitions.get(part.number) is not part or self._source is None:
                return
            try:
                if bounds is None:
                    msg = f"partition {part.number} is not among the topic's {topic.partitions}"
                    raise WrongTopic(msg)  # noqa: TRY301 - waits like any other trouble
                await self._put(part, topic, bounds, self._source)
            except Exception as error:  # noqa: BLE001 - the partition waits and is placed again
                self._lose(part, error)

    async def _put(self, part: _Partition, topic: Topic, bounds: Bounds, source: Source) -> None:
        number = part.number
        stored = await self._writer.load(number)
        made = plan(stored.progress, bounds)
        facts = {"partitions": topic.partitions, "topic_id": topic.id, "broker_ms": bounds.newest_ms}
        state: PartitionState | None = None
        if isinstance(made, Plan):
            try:
                state = resume(number, restart=made.restart, stored=stored.ranks, **facts)  # type: ignore[arg-type]  # facts are of three types
            except UnreadableState as error:
                made = str(error)
        if isinstance(made, str):
            made = await self._rebuild(number, topic, made)
        if state is None:
            state = fresh(number, restart=made.restart, starts=made.starts, **facts)  # type: ignore[arg-type]  # the same
        await self._writer.seek(number, topic.id, made.restart, made.target, drop=made.drop)
        for step in seed(state, made.owners, nonce=_nonce):
            outcome = await self._writer.apply(step)
            if outcome.verdict == "refused":
                raise _Resync(outcome.why)
        epoch = await source.seek(number, made.restart)
        if epoch is None or self._partitions.get(number) is not part:
            return  # revoked meanwhile
        now = self._now()
        if part.clock.at(now) is None:
            guess_ms = first_guess(bounds.newest_ms, self._wall() * 1000)
            part.clock = LogClock(guess_ms=guess_ms, moment=now)
        part.epoch, part.target, part.caught_up, part.since = epoch, made.target, False, now
        part.state = state
        self._tell_readable()
        self._telemetry.placed(number, made, len(state.ranks))
        self._observe(part, state)

    async def _rebuild(self, number: int, topic: Topic, why: str) -> Plan:
        """From where to read a partition of which nothing usable is stored. Without pointers it takes longer."""
        try:
            starts = await self._pointers.starts(number, topic.partitions)
        except Exception as error:  # noqa: BLE001 - whatever keeps us from reading them, the log's start is there
            self._telemetry.pointers_unread(number, self._settings.replicas_topic, str(error))
            starts = Starts({}, str(error))
        bounds = (await self._log.bounds([number], topic))[number]
        return rebuild(bounds, why, starts)

    def _tell_time(self, part: _Partition, batch: Batch) -> None:
        """What its newest record says of the log's clock."""
        newest = batch.records[-1]
        after = part.end_seen[1] if part.end_seen is not None and newest.offset >= part.end_seen[0] else None
        part.clock.appended(newest.timestamp, after=after, before=self._now())
        part.end_seen = batch.end, batch.asked

    def _check_place(self, part: _Partition, state: PartitionState, batch: Batch) -> None:
        """Offsets of this log follow each other. A fetch that leaves some out is asked for again, once: the client may
        have dropped them on an error. What then still is missing the broker does not have; numbers tell what it was.
        """
        jump = _jump(state.read, batch.records)
        if jump is None or jump in part.jumps or len(part.jumps) >= JUMPS_KNOWN_MAX:
            return
        part.jumps.add(jump)
        msg = f"offset {jump[1]} came where {jump[0]} was due"
        raise _Resync(msg)

    async def _apply(self, part: _Partition, state: PartitionState, step: Step, asked: float) -> None:
        """``asked``: since when the log's end is known. A process that was frozen knows it of long ago."""
        async with self._turnstile:
            now = self._now()  # what waited for its turn says what holds then
            if step.at_end and now - asked > self._settings.end_age_seconds_max:
                step = msgspec.structs.replace(step, at_end=False)
            time_ms = part.clock.at(now)
            if time_ms is not None and time_ms > step.broker_ms:  # what was read may have waited, for us or for nobody
                step = msgspec.structs.replace(step, broker_ms=time_ms)
            outcome = await self._writer.apply(step)
        if outcome.verdict == "refused":
            self._telemetry.counters.refused += 1
            raise _Resync(outcome.why)
        self._telemetry.counters.steps += 1
        if step.piece is not None and not step.piece.last:
            return  # nothing is applied before all of it is
        self._telemetry.counters.units += outcome.applied
        self._telemetry.counters.duplicates += outcome.duplicates
        part.failures, part.applied = 0, step.read
        if step.at_end:
            part.stamped_at = now  # not when Redis answered: what it held up is soon said anew
        if part.state is state:
            self._observe(part, state)

    async def _stamp_idle(self) -> None:
        """Say of each partition at whose end we stand that somebody does: a rank without news is gone then, and after
        long silence forgotten.
        """
        for part in list(self._partitions.values()):
            if part.state is None or part.lock.locked() or self._stopping or self._source is None:
                continue
            asked, seen = self._now(), self._source.end_of(part.number)
            if seen is None:
                continue
            part.end_seen, end = seen, seen[0]
            if part.state.read < end or asked - part.stamped_at < self._settings.alive_seconds:
                continue
            async with part.lock:
                if part.state is not None:
                    try:
                        await self._stamp(part, part.state, end, asked)
                    except Exception as error:  # noqa: BLE001 - the partition waits and is placed again
                        self._lose(part, error)

    async def _stamp(self, part: _Partition, state: PartitionState, end: int, asked: float) -> None:
        if state.read >= end:  # a batch may have been taken since
            gone = forget(state, self._settings.forget_seconds, nonce=_nonce, tally=self.tally)
            if gone is not None:
                await self._apply(part, state, gone, asked)
                self._telemetry.notes(part.number, self.tally)
        for step in fold(state, (), end=end, nonce=_nonce, tally=self.tally):
            await self._apply(part, state, step, asked)

    async def _commit(self) -> None:
        moved = {
            part.number: part.applied
            for part in self._partitions.values()
            if part.applied and self._committed.get(part.number) != part.applied
        }
        if moved and self._source is not None:
            self._committed.update(moved)
            await self._source.commit(moved)

    async def _check_topic(self) -> None:
        try:
            await self._describe()
        except Exception as error:  # noqa: BLE001 - Kafka is silent or the topic is gone: reading shows it too
            self._telemetry.topic_unseen(self._settings.topic, str(error))

    async def _scrub(self) -> None:
        """Free a piece of what dead slots occupy. Any worker may; how far it is stands in Redis."""
        self._scrubbed_at = self._now()
        try:
            done = await self._writer.scrub(ScrubBudget(seconds=self._settings.scrub_budget_seconds))
        except (index_errors.Unavailable, index_errors.Refused) as error:
            self._telemetry.scrub_failed(str(error))
            return
        self._dead_slots = done.slots
        if not done.idle:
            self._telemetry.scrubbed(done)

    async def _describe(self) -> Topic:
        """Look at the topic; where it is another one than before, every partition is placed anew."""
        topic = await self._log.describe()
        before, self._topic = self._topic, topic
        if before is not None and before != topic:
            self._telemetry.topic_changed(self._settings.topic, str(before), str(topic))
            for part in self._partitions.values():
                self.lost(part.number, f"the topic was {before}, is {topic}")
        return topic

    def _beside(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work`` beside the turns unless it still runs; a defect in it surfaces in the next turn."""
        task = self._tasks.get(name)
        if task is not None and not task.done():
            return
        if task is not None:
            task.result()
        self._tasks[name] = asyncio.create_task(work(), name=name)

    # -- leaves ------------------------------------------------------------------------------------------------------

    def _lose(self, part: _Partition, error: Exception) -> None:
        """Send a partition back to be placed: at once the first time, then with doubling back-off."""
        wait = self._settings.retry_seconds_min * 2 ** (part.failures - 1) if part.failures else 0.0
        wait = min(wait, self._settings.retry_seconds_max)
        part.state = None
        part.failures = min(part.failures + 1, 30)
        part.retry_at = self._now() + wait
        match error:
            case _Resync():
                self._telemetry.resynced(part.number, str(error))
            case index_errors.Unavailable() | index_errors.Refused() | Unavailable() | WrongTopic():
                self._telemetry.blocked(part.number, str(error), wait)
            case _:
                self._telemetry.defect(part.number, error, wait)
        self._tell_readable()
        self.changed.set()

    def _tell_readable(self) -> None:
        """Wake or hold whoever fetches."""
        if self.readable():
            self._readable.set()
        else:
            self._readable.clear()

    def _holds(self, part: _Partition, state: PartitionState) -> bool:
        """Whether it is still ours to be folded on: it was neither revoked nor lost meanwhile."""
        return part.state is state and self._partitions.get(part.number) is part

    def _waiting(self) -> list[_Partition]:
        now = self._now()
        if self._stopping:
            return []
        return [part for part in self._partitions.values() if part.state is None and part.retry_at <= now]

    def _may_scrub(self) -> bool:
        """Only who writes to this Redis anyway, and rarely while a step is under way."""
        if self._stopping or not self.readable():
            return False
        busy = any(part.lock.locked() for part in self._partitions.values())
        pause = self._settings.scrub_seconds * (SCRUB_BUSY_TIMES if busy else 1)
        return self._now() - self._scrubbed_at >= pause

    def _observe(self, part: _Partition, state: PartitionState) -> None:
        if not part.caught_up and state.read >= part.target:
            part.caught_up = True
            self._telemetry.caught_up(part.number, state.read, self._now() - part.since)

    def _is_due(self, what: str, seconds: float) -> bool:
        now = self._now()
        if now < self._due[what]:
            return False
        self._due[what] = now + seconds
        return True

    def _gauges(self) -> dict[str, int]:
        states = [part.state for part in self._partitions.values() if part.state is not None]
        ends = [(state, self._source.end_of(state.partition)) for state in states if self._source is not None]
        return {
            "assigned": len(self._partitions),
            "reading": len(states),
            "caught_up": sum(part.caught_up and part.state is not None for part in self._partitions.values()),
            "ranks": sum(len(state.ranks) for state in states),
            "lag": sum(max(0, end[0] - state.read) for state, end in ends if end is not None),
            "dead_slots": self._dead_slots,
            "unfinished": max((state.read - state.restart for state in states), default=0),
        }


def _jump(due: int, records: Sequence[Fetched]) -> tuple[int, int] | None:
    """The first place where records leave offsets out: (due, came). O(1) where none does."""
    first, last = records[0].offset, records[-1].offset
    if first <= due and last - first == len(records) - 1:
        return None
    for record in records:
        if record.offset > due:
            return due, record.offset
        due = max(due, record.offset + 1)
    return None


def _nonce() -> bytes:
    return os.urandom(NONCE_BYTES)
