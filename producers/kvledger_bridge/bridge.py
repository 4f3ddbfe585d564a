"""The bridge of one node: sessions, sockets and Kafka in one thread (DESIGN §4).

``_turn`` is the system. Every step of it is bounded, so that neither a busy engine nor a slow Kafka starves the others:

    Kafka: what was delivered, what failed, who else claims     -> sessions
    ranks that are read back from the log: a bounded time       -> sessions
    engines: wait for frames, read them, drain the monitors     -> sessions
    sessions: step, bounded batches each, in rotating order     -> commands
    commands: records to Kafka, requests and sockets to engines

Runs embedded (``start``, ``stop``, ``join``, ``abort``) or in the calling thread (``run``).
"""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvledger_bridge.attention import Attention
from kvledger_bridge.commands import (
    Announce,
    AskProcess,
    AskReplay,
    CloseAll,
    Command,
    DeadLetter,
    DropReplay,
    Forget,
    Note,
    OpenData,
    Rank,
    Restore,
    Write,
)
from kvledger_bridge.commands import Counts as SessionCounts
from kvledger_bridge.continuity import Phase
from kvledger_bridge.decode import decoding
from kvledger_bridge.discovery import RankConfig
from kvledger_bridge.engine import Session
from kvledger_bridge.errors import Refused
from kvledger_bridge.lease import Leases
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.pace import Rotation
from kvledger_bridge.process import read_process
from kvledger_bridge.publish import Publisher
from kvledger_bridge.restorer import Restorer
from kvledger_bridge.schedule import Schedule
from kvledger_bridge.settings import Settings, checked
from kvledger_bridge.silence import Silence
from kvledger_bridge.sockets import Link, Sockets
from kvledger_bridge.telemetry import Telemetry
from kvledger_wire.accept import NO_LIFE
from kvledger_wire.partition import rank_id
from kvledger_wire.records import (
    SCHEMA,
    Checkpoint,
    Claim,
    EventRecord,
    Fence,
    Gap,
    Life,
    Opened,
    Pointer,
    ReplicaRecord,
    Restoring,
    Resumed,
    Suspended,
)

IDLE_SECONDS = 0.02
"""Longest wait of a turn: bounds how late a timer or a stop is noticed."""

AWAITING_SECONDS = 0.002
"""The same while an acknowledgement is awaited, as Kafka's client cannot wake the poller."""

STALLED_SECONDS = 0.02
"""How long a turn waits for Kafka alone while its queue is full."""

CHECKPOINT_LOOK_SECONDS = 0.5
"""How often it is looked at whose checkpoint is due."""

IDENTITY_THREADS = 4

Identity = Callable[[str], str | None]
"""Reads the identity of an engine's process from its metrics page; may block, runs in a thread of its own."""


class RankStatus(NamedTuple):
    """Where one rank stands; a copy."""

    replica: str
    rank: int
    phase: str
    owner: int
    life: Life
    last: int
    counts: SessionCounts


class _Seat:
    """One rank at the table: its session, its sockets and what is remembered for the log."""

    def __init__(self, config: RankConfig, session: Session, link: Link, schedule: Schedule, silence: Silence) -> None:
        self.config = config
        self.session = session
        self.link = link
        self.schedule = schedule
        self.who = (config.replica, config.rank)
        self.name = rank_id(*self.who)
        self.silence = silence
        self.reading: Future[str | None] | None = None


class _Shell(NamedTuple):
    """What one run talks through; made in the thread that uses it."""

    sockets: Sockets
    publisher: Publisher
    restorer: Restorer
    leases: Leases
    readers: ThreadPoolExecutor


class Bridge:
    """All ranks of a node. One instance runs once."""

    def __init__(
        self,
        settings: Settings,
        ranks: Sequence[RankConfig],
        *,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity = read_process,
    ) -> None:
        self.settings = checked(settings)
        self.telemetry = telemetry or Telemetry()
        self.error: BaseException | None = None
        self.name = f"{self.settings.id}/{uuid.uuid4().hex[:8]}"
        self._ranks = tuple(ranks)
        self._clock = clock
        self._identity = identity
        self._stop = threading.Event()
        self._abort = threading.Event()
        self._thread: threading.Thread | None = None
        self._seats: list[_Seat] = []
        self._by_who: dict[tuple[str, int], _Seat] = {}
        self._first = self._loads = 0
        self._attention = Attention()
        self._large: _Seat | None = None
        self._rotation = Rotation()
        self._look_at = 0.0
        self._stalled_at: float | None = None
        self._reported_at = 0.0

    # ---- life cycle

    def start(self) -> Bridge:
        """Check Kafka's topics, then run in a thread. Raises Unavailable or Refused; nothing runs then."""
        publisher = self._checked_publisher()
        self._thread = threading.Thread(target=self._guarded, args=(publisher,), name="kvledger-bridge", daemon=True)
        self._thread.start()
        return self

    def run(self) -> None:
        """The same in this thread, until ``stop``. Raises what ended it."""
        self._guarded(self._checked_publisher())
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Take in nothing more, deliver what is queued, end. Returns at once; safe in a signal handler."""
        self._stop.set()

    def abort(self) -> None:
        """End without delivering what is queued."""
        self._abort.set()
        self._stop.set()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if it is still running. Raises what ended it, if it was not a stop."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        if self.error is not None:
            raise self.error
        return True

    def status(self) -> list[RankStatus]:
        """Where each rank stands, from any thread."""
        seats = list(self._seats)
        if len(seats) < len(self._ranks):
            return [RankStatus(r.replica, r.rank, "starting", -1, NO_LIFE, -1, SessionCounts()) for r in self._ranks]
        return [
            RankStatus(*seat.who, s.phase.value, s.owner, s.life, s.last, msgspec.structs.replace(s.counts))
            for seat in seats
            for s in (seat.session,)
        ]

    # ---- the loop

    def _checked_publisher(self) -> Publisher:
        publisher = Publisher(self.settings, self.telemetry, name=self.name, clock=self._clock)
        partitions = publisher.check()
        self.telemetry.started(
            bridge=self.name, kafka=self.settings.kafka, partitions=partitions, ranks=len(self._ranks)
        )
        return publisher

    def _guarded(self, publisher: Publisher) -> None:
        try:
            self._serve(publisher)
        except Refused as error:
            self.error = error
            self.telemetry.refused(str(error))
        except Exception as error:  # noqa: BLE001  whatever ends the loop ends the process, and is told
            self.error = error
            self.telemetry.crashed(f"{type(error).__name__}: {error}", traceback.format_exc(limit=-5))

    def _serve(self, publisher: Publisher) -> None:
        publisher.start()
        restorer, leases = publisher.restorer(self._clock), publisher.leases()
        unsent = 0
        try:
            with Sockets() as sockets, ThreadPoolExecutor(IDENTITY_THREADS, "kvledger-identity") as readers:
                self._take_seats(sockets, publisher.retention_seconds)
                shell = _Shell(sockets, publisher, restorer, leases, readers)
                while not self._stop.is_set():
                    self._turn(shell)
                self.telemetry.stopping()
                readers.shutdown(wait=False, cancel_futures=True)
        finally:
            restorer.close()
            leases.close()
            unsent = publisher.stop(0.0 if self._abort.is_set() else self.settings.stop_seconds)
        self.telemetry.stopped(clean=unsent == 0, unsent=unsent, **self._totals())

    def _take_seats(self, sockets: Sockets, retention_seconds: float) -> None:
        now = self._clock()
        rates = self.settings.rates(retention_seconds)
        self._reported_at = now
        for config in self._ranks:
            replay = config.endpoints.replay is not None
            process = config.metrics is not None and not replay  # replay proves more
            session = Session(
                Rank(config.replica, config.rank, config.entry, replay, process),
                decode=decoding,
                ledger=Ledger,
                bridge=self.name,
                version=_version(),
                limits=self.settings.limits,
            )
            silence = Silence(now, self.settings.silent_seconds)
            seat = _Seat(config, session, sockets.link(config.endpoints), Schedule(rates), silence)
            self._seats.append(seat)
            self._by_who[seat.who] = seat

    def _turn(self, shell: _Shell) -> None:
        publisher = shell.publisher
        now = self._clock()
        self.telemetry.counters.turns += 1
        self._take_deliveries(publisher, now)
        self._take_replicas(publisher)
        self._watch_owners(shell, now)
        publisher.look_at_topics(now)
        if publisher.fatal:
            self._rebuild(shell)
        stalled = self._is_stalled(publisher, now)
        self._restore(shell, now)
        self._checkpoint(publisher, now)
        before = self._clock()
        ready = set() if stalled else shell.sockets.wait(self._patience(shell.restorer))
        now = self._clock()
        moment = self._attention.looked(before, now, time.thread_time())
        self._loads = sum(seat.session.loading for seat in self._seats)
        self._choose_large()
        for seat in self._in_turn():
            self._take_identity(seat)
            if seat.link in ready or stalled:
                self._pump(seat, moment, stalled=stalled)
            elif moment is not None:
                seat.link.rest(seat.session, moment)
            seat.link.tick(seat.session, now)
            if not stalled:
                self._step(seat, now, shell)
        self._watch_silence(now)
        self._report(now, publisher)

    def _take_deliveries(self, publisher: Publisher, now: float) -> None:
        """What Kafka took, and what it did not."""
        for who, record, offset, why in publisher.serve(STALLED_SECONDS if self._stalled_at is not None else 0.0):
            seat = self._by_who[who]
            if why:
                seat.session.failed(record, why)
                continue
            seat.session.acknowledged(record, offset)
            self._note_delivery(seat, record, offset, now)

    def _note_delivery(self, seat: _Seat, record: EventRecord | ReplicaRecord, offset: int, now: float) -> None:
        match record:
            case Fence(owner=owner, why=why) if owner == seat.session.owner:
                self.telemetry.claimed(seat.name, owner, why)
            case Pointer(owner=owner, fence=fence, offset=at) if owner == seat.session.owner and 0 <= fence < at:
                seat.schedule.pointed(at, now)  # not an inherited one: what that leads to is older
                if seat.session.counts.checkpoints:
                    self.telemetry.checkpointed(seat.name, offset=at, bytes_=seat.schedule.size)
            case Pointer() | Claim() | Restoring():
                return  # of the other topic
        seat.schedule.grew(offset)

    def _take_replicas(self, publisher: Publisher) -> None:
        """Ranks that another bridge claimed, as the higher claim wins; and the pointers that were inherited."""
        for who, owner, name in publisher.claims():
            seat = self._by_who.get(who)
            if seat is not None:
                seat.session.superseded(owner, name)
        for seat in self._seats:
            if seat.session.phase is Phase.POINTING and publisher.read_to >= seat.session.owner:
                seat.session.pointed(publisher.pointer(seat.who))

    def _watch_owners(self, shell: _Shell, now: float) -> None:
        """Claim ranks again whose new owner fell silent."""
        for seat in self._seats:
            if seat.session.phase is Phase.CLOSED and seat.session.foreign > seat.session.owner:
                shell.leases.watch(seat.who, seat.session.foreign, now)
        for who, owner in shell.publisher.spoke():
            shell.leases.heard(who, owner, now)
        for lapse in shell.leases.poll(now, kafka_answers=shell.publisher.answers(now)):
            self._by_who[lapse.who].session.lapsed(f"owner {lapse.owner} was silent for {lapse.seconds:.0f} s")

    def _rebuild(self, shell: _Shell) -> None:
        """A fatal producer stays dead: a new one, and every rank claims anew, so nothing of the old one counts."""
        why = f"the producer was rebuilt: {shell.publisher.fatal}"
        shell.publisher.rebuild()
        shell.restorer.clear()
        for seat in self._seats:
            seat.session.release(why)

    def _restore(self, shell: _Shell, now: float) -> None:
        """Read ranks back from the log for a moment; what takes long is said where other bridges see it."""
        if not shell.restorer.busy:
            return
        for who, owner in shell.restorer.owners(self.settings.restoring_seconds):
            shell.publisher.announce(who, Restoring(SCHEMA, owner))
        for done in shell.restorer.work():
            seat = self._by_who[done.who]
            if done.recalled is None:
                seat.session.unrestorable(done.owner, done.why)
                continue
            seat.session.restored(done.owner, *done.recalled)
            age = done.age if done.start >= 0 else float("inf")  # readers begin at the log's start: one is due now
            seat.schedule.pointed(max(0, done.start), now, age=age, size=done.bytes)

    def _checkpoint(self, publisher: Publisher, now: float) -> None:
        """One rank at a time writes its ledger: each is a burst."""
        if now < self._look_at or any(seat.session.checkpointing for seat in self._seats):
            return
        self._look_at = now + CHECKPOINT_LOOK_SECONDS
        for seat in self._in_turn():
            ranks = partial(publisher.ranks_beside, seat.who)
            if seat.schedule.due(now, record_bytes=publisher.record_bytes, ranks=ranks):
                self._look_at = now
                seat.schedule.asked(now)
                seat.session.checkpoint()
                return

    def _is_stalled(self, publisher: Publisher, now: float) -> bool:
        """Whether Kafka's queue is full: engines are not read then, only their monitors are."""
        if publisher.full and self._stalled_at is None:
            self._stalled_at = now
            records, bytes_ = publisher.queued
            self.telemetry.stalled(records=records, bytes_=bytes_)
        elif not publisher.full and self._stalled_at is not None:
            self.telemetry.unstalled(now - self._stalled_at)
            self._stalled_at = None
        return self._stalled_at is not None

    def _patience(self, restorer: Restorer) -> float:
        """How long this turn may wait for engines."""
        if restorer.busy:
            return AWAITING_SECONDS
        if any(seat.session.ready for seat in self._seats):
            return 0.0
        return AWAITING_SECONDS if any(seat.session.awaiting for seat in self._seats) else IDLE_SECONDS

    def _in_turn(self) -> Iterator[_Seat]:
        """Every seat, beginning with another one each turn."""
        count = len(self._seats)
        self._first = (self._first + 1) % max(1, count)
        return (self._seats[(self._first + i) % count] for i in range(count))

    def _choose_large(self) -> None:
        """One rank at a time goes on with a large batch, each in turn: two pieces of work would make a turn twice as
        long.
        """
        chosen = self._rotation.next([i for i, seat in enumerate(self._seats) if seat.session.covering])
        self._large = None if chosen is None else self._seats[chosen]

    def _pump(self, seat: _Seat, moment: float | None, *, stalled: bool) -> None:
        live, replay = (0, 0) if stalled else (self.settings.turn_live_max, self.settings.turn_replay_max)
        seat.link.pump(seat.session, live_max=live, replay_max=replay, moment=moment)
        if seat.link.failed:
            self.telemetry.data_failed(seat.name, seat.config.endpoints.data)

    def _step(self, seat: _Seat, now: float, shell: _Shell) -> None:
        before = seat.session.loading
        may_load = self._loads < self.settings.loads_max
        waits = seat.session.covering and seat is not self._large
        batches_max = 0 if waits else self.settings.turn_batches_max
        commands = seat.session.step(now, batches_max=batches_max, may_load=may_load)
        self._loads += seat.session.loading - before
        for command in commands:
            if not self._produce(seat, command, now, shell):
                self._execute(seat, command, now, shell)

    def _produce(self, seat: _Seat, command: Command, now: float, shell: _Shell) -> bool:
        """What a session wants of Kafka; False: of something else."""
        publisher = shell.publisher
        match command:
            case Write(group=group, record=record, known=known):
                size = publisher.write(seat.who, group, record, known=known)
                if isinstance(record, Checkpoint):
                    seat.schedule.wrote(size, first=record.part == 0)
                self._tell(seat, record)
            case Announce(record=record):
                publisher.announce(seat.who, record)
            case Forget(owner=owner):
                publisher.forget(seat.who, owner)
            case Restore(owner=owner, start=start, end=end):
                shell.restorer.ask(seat.who, seat.config.entry, owner=owner, start=start, end=end)
            case DeadLetter(seq=seq, reason=reason, digest=digest, raw=raw):
                self.telemetry.unreadable(seat.name, seq=seq, reason=reason, size=len(raw), digest=digest)
                publisher.dead_letter(
                    seat.who, owner=seat.session.owner, seq=seq, reason=reason, digest=digest, raw=raw, now=now
                )
            case _:
                return False
        return True

    def _execute(self, seat: _Seat, command: Command, now: float, shell: _Shell) -> None:
        """What it wants of the engine's sockets."""
        match command:
            case OpenData():
                seat.link.open_data(now)
            case AskReplay(start=start):
                seat.link.ask(start)
            case DropReplay():
                seat.link.drop_replay()
            case AskProcess():
                if seat.config.metrics is not None:
                    seat.reading = shell.readers.submit(self._identity, seat.config.metrics)
            case CloseAll():
                seat.link.close()
            case Note(code=code, text=text):
                wait = shell.leases.wait(seat.who) if code == "superseded" else None
                self.telemetry.noted(seat.name, code, text if wait is None else f"{text} for {wait:.0f} s")

    def _take_identity(self, seat: _Seat) -> None:
        """The answer of a process that was asked, before the monitor can say that the connection broke since."""
        if seat.reading is None or not seat.reading.done():
            return
        reading, seat.reading = seat.reading, None
        identity = None if reading.cancelled() or reading.exception() else reading.result()
        if identity is None:
            self.telemetry.process_unread(seat.name, seat.config.metrics or "")
        seat.session.identified(identity)

    # ---- what is told

    def _tell(self, seat: _Seat, record: EventRecord) -> None:
        match record:
            case Opened(life=life, seq=seq, partial=partial, why=why):
                self.telemetry.opened(seat.name, life=life, seq=seq, partial=partial, why=why)
            case Suspended(why=why):
                self.telemetry.suspended(seat.name, why)
            case Resumed(how=how):
                self.telemetry.resumed(seat.name, how)
            case Gap(first=first, last=last, cause=cause, policy=policy):
                self.telemetry.gap(seat.name, first=first, last=last, cause=cause, policy=policy)
            case _:
                pass

    def _watch_silence(self, now: float) -> None:
        """Tell of a rank that was expected and is not heard: it is unknown to routers, not empty."""
        for seat in self._seats:
            session, counts = seat.session, seat.session.counts
            trouble = seat.silence.look(
                now,
                owned=session.phase is not Phase.CLOSED,
                attached=session.attached,
                heard=counts.live + counts.replayed > 0 or session.last >= 0,
                live=counts.live,
                late=counts.late,
            )
            if trouble is not None:
                self.telemetry.silent(seat.name, trouble, seat.config.endpoints.data)

    def _report(self, now: float, publisher: Publisher) -> None:
        if now - self._reported_at < self.settings.report_seconds:
            return
        self._reported_at = now
        records, bytes_ = publisher.queued
        self.telemetry.progress(queued_records=records, queued_bytes=bytes_, **self._totals())

    def _totals(self) -> dict[str, Any]:
        totals: Counter[str] = Counter()
        for seat in self._seats:
            totals.update(msgspec.structs.asdict(seat.session.counts))
        phases = Counter(seat.session.phase.value for seat in self._seats)
        heard = sum(seat.session.last >= 0 for seat in self._seats)
        attached = sum(seat.session.attached for seat in self._seats)
        return {
            "ranks": len(self._seats),
            "ranks_attached": attached,
            "ranks_heard": heard,
            "phases": dict(phases),
            "sessions": dict(totals),
        }


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvledger")
    except PackageNotFoundError:
        return "unknown"
