"""The client that routers use: one question, one answer within its deadline, never an exception because of Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from kvledger_index.contract import IndexReader
from kvledger_index.errors import IndexFailure, InvalidInput, Refused, Unavailable
from kvledger_index.keyspace import NAMESPACE_DEFAULT
from kvledger_index.reader import RedisReader
from kvledger_index.views import Reading
from kvledger_router import telemetry
from kvledger_router.asking import Plan, add_found, asked_of, needing, plan
from kvledger_router.breaker import Breaker, Outcome
from kvledger_router.hints import HINT_SECONDS_DEFAULT, Hints
from kvledger_router.judge import Facts, Question, judge, report
from kvledger_router.match import Explanation, Holder, Match
from kvledger_router.prompt import Media, Prompt
from kvledger_router.residency import Held, gather
from kvledger_router.roster import Roster, Seat, seat_all
from kvledger_router.standing import FRESH_SECONDS_MAX_DEFAULT, LEASE_SECONDS_DEFAULT, Limits, Note

DEADLINE_SECONDS_DEFAULT = 0.020
"""An answer later than this has cost the request more than a prefix hit usually saves."""

LATE_MAX = 64
"""Readings that go on behind their question's deadline; further ones are cancelled, which costs a connection each."""

CATALOGUE_TRIES_MAX = 3
"""Readings of one answer: a catalogue changes when ranks come, go or hear of a new group, not with every batch."""


class _Answer(NamedTuple):
    """One reading per stride, and what was asked for by engine hash in each."""

    roster: Roster
    readings: dict[int, tuple[Reading, Plan]]

    @property
    def settled(self) -> bool:
        """Whether the catalogue did not change while it was read."""
        return all(reading.version == self.roster.version for reading, _ in self.readings.values())

    def without(self, changed: frozenset[str]) -> _Answer:
        """The same with these ranks among those that moved."""
        readings = {
            stride: (reading._replace(moved=reading.moved | changed), asked)
            for stride, (reading, asked) in self.readings.items()
        }
        return _Answer(self.roster, readings)


class _NoOpinion(NamedTuple):
    """There is no answer, and why."""

    why: str


class Index:
    """Who holds how much of a prompt, of one model. One event loop, any number of questions at once.

    The first question connects; a Redis that is not there costs no exception but an answer without an opinion.
    """

    def __init__(
        self,
        reader: IndexReader,
        *,
        model: str,
        deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
        fresh_seconds_max: float = FRESH_SECONDS_MAX_DEFAULT,
        lease_seconds: float = LEASE_SECONDS_DEFAULT,
        engine_hashes: bool = True,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Over any reader; :meth:`from_url` is for Redis. ``clock`` is monotonic, in seconds.

        ``engine_hashes`` False never asks by the engine's own hashes (ADR 5): answers that need them are lower bounds.
        """
        if deadline_seconds <= 0:
            raise InvalidInput(f"deadline_seconds {deadline_seconds} <= 0")
        self.model = model
        self.counters = telemetry.Counters()
        self._reader = reader
        self._deadline_seconds = deadline_seconds
        self._limits = Limits(fresh_seconds_max, lease_seconds)
        self._breaker = breaker or Breaker()
        self._clock = clock
        self._hints = Hints()
        self._roster: Roster | None = None
        self._engine_hashes = engine_hashes
        self._needing: dict[tuple[int, bool], frozenset[str]] = {}
        """By stride and whether the prompt was plain: ranks that had to be asked by engine hash when last looked at."""
        self._late: set[asyncio.Task[_Answer]] = set()

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        model: str,
        namespace: str = NAMESPACE_DEFAULT,
        deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
        fresh_seconds_max: float = FRESH_SECONDS_MAX_DEFAULT,
        lease_seconds: float = LEASE_SECONDS_DEFAULT,
    ) -> Self:
        """Over Redis (``redis://``, ``rediss://``, ``unix://``). Raises InvalidInput for what is no Redis URL."""
        return cls(
            RedisReader.from_url(url, namespace=namespace),
            model=model,
            deadline_seconds=deadline_seconds,
            fresh_seconds_max=fresh_seconds_max,
            lease_seconds=lease_seconds,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End what is still being read and close connections; safe to call twice."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)
        await self._reader.aclose()

    async def match(
        self,
        token_ids: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        media: Iterable[Media] = (),
        replicas: Iterable[str] | None = None,
    ) -> Match:
        """Every rank of the model, or of ``replicas``, best first; asked for but never seen: unknown.

        One round trip, two where the prompt branches inside a row, one more where the catalogue changed. Raises
        InvalidInput for the caller's own mistakes (a token outside u32), nothing else: past the deadline, or while the
        breaker is open, the match has no opinion. The router's own CPU is O(tokens + holders of rows): a few ms for
        8 k tokens and 64 ranks (``tests/benchmarks/match.py``).
        """
        prompt, asked = Prompt(self.model, token_ids, lora, salt, media), _names(replicas)
        answer = await self._ask(prompt)
        if isinstance(answer, _NoOpinion):
            return self._no_opinion(prompt, asked, answer.why)
        holders = [judge(seat, facts, question) for seat, facts, question in self._cases(answer, prompt, asked)]
        holders += _others(answer.roster, asked)
        return Match(self.model, prompt.tokens, holders, reason=self._nobody(answer.roster), keys=prompt.by_stride)

    async def explain(
        self,
        token_ids: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        media: Iterable[Media] = (),
        replicas: Iterable[str] | None = None,
    ) -> Explanation:
        """A match and, per rank that the index knows, every reason behind its number. For people: costs more CPU."""
        prompt, asked = Prompt(self.model, token_ids, lora, salt, media), _names(replicas)
        answer = await self._ask(prompt)
        if isinstance(answer, _NoOpinion):
            return Explanation(self._no_opinion(prompt, asked, answer.why), ())
        reports = [report(seat, facts, question) for seat, facts, question in self._cases(answer, prompt, asked)]
        holders = [*(each.holder for each in reports), *_others(answer.roster, asked)]
        match = Match(self.model, prompt.tokens, holders, reason=self._nobody(answer.roster), keys=prompt.by_stride)
        place = {id(holder): at for at, holder in enumerate(match)}
        return Explanation(match, tuple(sorted(reports, key=lambda each: place[id(each.holder)])))

    def expect(
        self, match: Match, replica: str, *, rank: int | None = None, seconds: float = HINT_SECONDS_DEFAULT
    ) -> None:
        """Say that the prompt of ``match`` was just sent to ``replica``.

        For ``seconds``, prompts that share a prefix with it show that prefix as ``expected_tokens`` of that replica, so
        that a burst of one new prompt stays together until the engine's events land. Local to this object; a match
        without an opinion is no hint.
        """
        self._hints.expect(match.keys, replica, rank, self._clock(), seconds)

    async def _ask(self, prompt: Prompt) -> _Answer | _NoOpinion:
        """The readings of an answer, or why there are none. One deadline for all of it, connecting included."""
        self.counters.asked += 1
        permit = self._breaker.enter(self._clock())
        if permit is None:
            self.counters.refused += 1
            return _NoOpinion("breaker open: Redis did not answer lately")
        outcome: Outcome = "abandoned"  # unless something else is known: cancelled, or a defect of ours
        answer: _Answer | _NoOpinion = _NoOpinion("")
        try:
            answer = await self._within_deadline(prompt)
            outcome = "answered"
            self.counters.answered += 1
        except TimeoutError:
            outcome = "failed"
            answer = _NoOpinion(f"deadline: no answer within {self._deadline_seconds * 1000:g} ms")
            self.counters.timeouts += 1
        except (Unavailable, Refused) as error:
            outcome = "failed"
            answer = _NoOpinion(str(error))
            self.counters.failures += 1
        except BaseException:
            self.counters.abandoned += 1
            raise
        finally:
            before = self._breaker.state
            self._breaker.leave(permit, outcome, self._clock())
            if self._breaker.state != before:
                why = answer.why if isinstance(answer, _NoOpinion) else ""
                telemetry.breaker_changed(before, self._breaker.state, why)
        return answer

    async def _within_deadline(self, prompt: Prompt) -> _Answer:
        """Read, or raise TimeoutError at the deadline.

        A reading that is late is left to finish, unheard: cancelling it would cost its connection, so a Redis that is
        a little slow would be met with new connections, and one whose handshake takes longer than a deadline would
        never be reached at all. The reader's own timeout bounds how long that takes.
        """
        task = asyncio.get_running_loop().create_task(self._read(prompt))
        try:
            await asyncio.wait({task}, timeout=self._deadline_seconds)
        except asyncio.CancelledError:
            task.cancel()
            self._leave_behind(task)
            raise
        if task.done():
            return task.result()
        if len(self._late) >= LATE_MAX:
            task.cancel()
        self._leave_behind(task)
        raise TimeoutError

    def _leave_behind(self, task: asyncio.Task[_Answer]) -> None:
        self._late.add(task)
        task.add_done_callback(self._ended_late)

    def _ended_late(self, task: asyncio.Task[_Answer]) -> None:
        self._late.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, IndexFailure):
            task.get_loop().call_exception_handler({"message": "a late reading failed", "exception": error})

    async def _read(self, prompt: Prompt) -> _Answer:
        """Catalogue and readings of one version. Where it changes with every try, the ranks that it changed for count
        as moved: one that clears without end costs the others nothing.
        """
        roster = self._roster or await self._refresh(None)
        answer = await self._read_all(roster, prompt)
        for _ in range(CATALOGUE_TRIES_MAX - 1):
            if answer.settled:
                return answer
            self.counters.rereads += 1
            answer = await self._read_all(await self._refresh(answer.roster), prompt)
        if answer.settled:
            return answer
        self.counters.unsettled += 1
        self._roster = seat_all(await self._reader.catalogue(self.model))  # one that is younger than the readings
        return answer.without(answer.roster.changed(self._roster.catalogue))

    async def _read_all(self, roster: Roster, prompt: Prompt) -> _Answer:
        return _Answer(roster, {stride: await self._read_stride(roster, stride, prompt) for stride in roster.strides})

    async def _read_stride(self, roster: Roster, stride: int, prompt: Prompt) -> tuple[Reading, Plan]:
        """One reading. What is asked by engine hash is what ranks needed when last looked at; if one needs more by now,
        all is read again.
        """
        kind = stride, prompt.plain
        asked = plan(roster, stride, prompt, self._needing.get(kind, frozenset()))
        reading = await self._read_once(roster, prompt, asked)
        if not self._engine_hashes or reading.version != roster.version:
            return reading, asked
        self._needing[kind] = needing(roster, stride, reading, plain=prompt.plain)
        wanted = plan(roster, stride, prompt, self._needing[kind])
        if wanted.spans.keys() <= asked.spans.keys():
            return reading, asked
        self.counters.hash_rereads += 1
        return await self._read_once(roster, prompt, wanted), wanted

    async def _read_once(self, roster: Roster, prompt: Prompt, asked: Plan) -> Reading:
        keys = prompt.keys(asked.stride)
        reading = await self._reader.read(roster.catalogue, self.model, keys, asked.hashes)
        self.counters.corrupt += reading.corrupt
        return reading

    async def _refresh(self, used: Roster | None) -> Roster:
        """The newest roster; another question may have fetched it already."""
        if self._roster is None or self._roster is used:
            self.counters.catalogues += 1
            self._roster = seat_all(await self._reader.catalogue(self.model))
        return self._roster

    def _cases(
        self, answer: _Answer, prompt: Prompt, asked: frozenset[str] | None
    ) -> Iterator[tuple[Seat, Facts, Question]]:
        """What is to be judged: every rank asked for whose stride was looked up."""
        expected = self._hints.shared(prompt.by_stride, self._clock())
        cut = f"cut: {prompt.looked_up} of {prompt.tokens} tokens were looked up"
        common = (Note("at_least", cut),) if prompt.looked_up < prompt.tokens else ()
        for stride, (reading, by_hash) in answer.readings.items():
            held = gather(reading.segments, answer.roster)
            add_found(held, reading, by_hash, answer.roster, prompt)
            bad = (Note("at_least", f"{reading.corrupt} stored values could not be read"),) if reading.corrupt else ()
            question = Question(prompt.looked_up, reading.time_ms, self._limits, (*common, *bad), prompt.plain)
            for number, seat in enumerate(answer.roster.seats):
                if seat.card.stride != stride or not _is_asked(seat, asked):
                    continue
                pulse = reading.pulses.get(seat.name)
                facts = Facts(
                    held=held.get(number) or Held(),
                    pulse=pulse,
                    partition=reading.partitions.get(seat.card.partition),
                    moved=seat.name in reading.moved,
                    expected_tokens=_expected(seat, expected, prompt),
                    asked=asked_of(seat, prompt, pulse, by_hash, switched_on=self._engine_hashes),
                )
                yield seat, facts, question

    def _nobody(self, roster: Roster) -> str:
        """What to say where the index knows no rank of the model: a mistyped name, an empty fleet and an index that is
        being rebuilt look the same.
        """
        if roster.seats:
            return ""
        return (
            f"no rank of model {self.model!r} is in the index: is that its logical name? "
            "An index that is being rebuilt does not know it yet"
        )

    def _no_opinion(self, prompt: Prompt, asked: frozenset[str] | None, why: str) -> Match:
        """Every rank asked for, as far as it was ever seen, as unknown."""
        seats = self._roster.seats if self._roster is not None else ()
        known = [Holder(s.replica, s.rank, 0, 0, "unknown", reason=why) for s in seats if _is_asked(s, asked)]
        others = sorted((asked or frozenset()) - {seat.replica for seat in seats})
        unseen = [Holder(name, None, 0, 0, "unknown", reason=why) for name in others]
        return Match(self.model, prompt.tokens, known + unseen, opinion=False, reason=why, keys=prompt.by_stride)


def _names(replicas: Iterable[str] | None) -> frozenset[str] | None:
    """The replicas asked for; None: all of the model."""
    if isinstance(replicas, str):
        raise InvalidInput(f"replicas must be names, not one text: [{replicas!r}] asks for one")
    return None if replicas is None else frozenset(replicas)


def _is_asked(seat: Seat, asked: frozenset[str] | None) -> bool:
    return asked is None or seat.replica in asked


def _others(roster: Roster, asked: frozenset[str] | None) -> list[Holder]:
    """Ranks whose stride was not looked up, and replicas asked for that were never seen."""
    odd = [seat for seat in roster.seats if seat.card.stride not in roster.strides and _is_asked(seat, asked)]
    why = f"more than {len(roster.strides)} strides in one model: give all replicas the same model entry"
    unread = [Holder(seat.replica, seat.rank, 0, 0, "unknown", reason=why) for seat in odd]
    unseen = sorted((asked or frozenset()) - {seat.replica for seat in roster.seats})
    return unread + [Holder(name, None, 0, 0, "unknown", reason="never seen in this model") for name in unseen]


def _expected(seat: Seat, expected: dict[tuple[str, int | None], int], prompt: Prompt) -> int:
    """What this router announced for a rank, less the last token, in whole strides."""
    if not expected:
        return 0
    tokens = max(expected.get((seat.replica, seat.rank), 0), expected.get((seat.replica, None), 0))
    stride = seat.card.stride
    return min(tokens, (prompt.tokens - 1) // stride * stride)
