"""The real sessions of a bridge, with its sockets, its producer and its restorer played here."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from protocol_engine import CONNECTED, DISCONNECTED, Batch, Engine, Link
from protocol_log import Late, Producer
from real_engine import ENTRY, Payloads
from real_log import REPLICAS, Item, RealLog

from kvledger_bridge.commands import (
    Announce,
    AskProcess,
    AskReplay,
    CloseAll,
    Command,
    DropReplay,
    Forget,
    OpenData,
    Rank,
    Restore,
    Write,
)
from kvledger_bridge.continuity import Phase
from kvledger_bridge.decode import decoding
from kvledger_bridge.engine import Session
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.recall import Recall
from kvledger_wire.partition import claim_key, pointer_key, record_key
from kvledger_wire.records import Claim, encode

IDLE_SECONDS = (0.6, 0.6)
"""Together longer than the quiet after which a rank is probed; a loop that rarely looks up never calls answers late."""

TURN_SECONDS = (0.0, 0.0, 0.3)

_names = itertools.count()


class RealSession:
    """One rank: the session and its sockets. ``produce`` takes what is for Kafka."""

    def __init__(
        self, engine: Engine, payloads: Payloads, produce: Callable[[int, Command], None], name: str, *, replay: bool
    ) -> None:
        self.engine, self.payloads, self._produce = engine, payloads, produce
        rank = Rank(REPLICAS[engine.rank], engine.rank, ENTRY, replay, not replay)
        self.session = Session(rank, decode=decoding, ledger=partial(Ledger, piece_blocks=1), bridge=name)
        self.link = Link()
        engine.links.append(self.link)
        self.now = 0.0
        self._inbox: deque[Batch] = deque()
        self._monitor: deque[str] = deque()
        self._request: int | None = None
        self._frames: deque[Batch | None] = deque()
        self._process_wanted = False
        self._open = True

    @property
    def owner(self) -> int:
        return self.session.owner

    @property
    def closed(self) -> bool:
        return self.session.phase is Phase.CLOSED

    def deliver(self, count: int) -> None:
        """Bytes and events of the live socket arrive, each in its own queue."""
        for _ in range(min(count, len(self.link.wire))):
            item = self.link.wire.popleft()
            if isinstance(item, Batch):
                self._inbox.append(item)
            else:
                self._monitor.append(item)
        if self.engine.up and self._open and not self.link.connected:
            self.link.connected = True
            (self.link.wire or self._monitor).append(CONNECTED)  # behind what came before it

    def turn(self, rnd: random.Random | None, *, idle: bool = False) -> None:
        """Read, drain the monitor, step; then the engine may answer, and that is read at once, or in a later turn."""
        for seconds in IDLE_SECONDS if idle else (rnd.choice(TURN_SECONDS) if rnd else 0.0,):
            self.now += seconds
            self._step()
        if rnd is None or rnd.random() > 0.3:
            self._serve(rnd)
            if rnd is None or rnd.random() > 0.3:
                self._step()

    def _step(self) -> None:
        session = self.session
        while self._inbox:
            batch = self._inbox.popleft()
            session.live(batch.seq, self.payloads.of(self.engine.rank, batch))
        while self._frames:
            frame = self._frames.popleft()
            if frame is None:
                session.replay_ended()
            else:
                session.replayed(frame.seq, self.payloads.of(self.engine.rank, frame))
        while self._monitor:
            if self._monitor.popleft() == DISCONNECTED:
                session.disconnected()
            else:
                session.connected()
        while True:
            for command in session.step(self.now, batches_max=1000):
                self._obey(command)
            if not session.covering:
                return

    def _serve(self, rnd: random.Random | None) -> None:
        """The engine reads what was asked, and answers; END may be lost.

        Who it is it says only over an unbroken connection: a new process takes longer to come up than the end of the
        old one's connection to be seen.
        """
        if self._process_wanted and DISCONNECTED not in self.link.wire:
            self._process_wanted = False
            life = self.engine.identity(from_engine=True)
            self.session.identified(None if life is None else f"p{life}")
        if self._request is None:
            return
        got = self.engine.replay(self._request, rnd)
        if got is not None:
            self._request = None
            self._frames.extend(got)
            if rnd is None or rnd.random() > 0.05:
                self._frames.append(None)

    def _obey(self, command: Command) -> None:
        match command:
            case OpenData():
                self.link.reset()
                self._inbox.clear()
                self._monitor.clear()
            case AskReplay(start=start):
                self._request = start
            case DropReplay():
                self._request, self._frames = None, deque()
            case AskProcess():
                self._process_wanted = True
            case CloseAll():
                self.link.reset()
                self._open = False
            case _:
                self._produce(self.engine.rank, command)

    def beat(self) -> None:
        """Time passes, and a quiet rank is probed."""
        self.turn(None, idle=True)

    def checkpoint(self) -> None:
        """Ask for one; turns write it."""
        self.session.checkpoint()

    def close(self) -> None:
        """Bridges do not take ranks away."""


class RealBridge:
    """A bridge process."""

    def __init__(
        self, log: RealLog, engines: Mapping[int, Engine], without_replay: Iterable[int], payloads: Payloads
    ) -> None:
        self.log, self.alive, self.name = log, True, f"b{next(_names)}"
        self.producer: Producer[Item] = Producer(
            log.count, route=lambda item: item.partition, append=log.append, acknowledged=self._acknowledged
        )
        self.restores: dict[int, Restore] = {}
        self.sessions = {
            rank: RealSession(engine, payloads, self._produce, self.name, replay=rank not in without_replay)
            for rank, engine in engines.items()
        }
        for session in self.sessions.values():
            session.turn(None)

    def _acknowledged(self, item: Item, offset: int) -> None:
        if item.record is not None:
            self.sessions[item.rank].session.acknowledged(item.record, offset)

    def _produce(self, rank: int, command: Command) -> None:
        who = (REPLICAS[rank], rank)
        match command:
            case Write(group=group, record=record):
                key = record_key(*who, group)
                self.producer.send(Item(self.log.partition(rank), key, encode(record), record, rank))
            case Announce(record=record):
                key = claim_key(*who) if isinstance(record, Claim) else pointer_key(*who, record.owner)
                self.producer.send(Item(-1, key, encode(record), record, rank))
            case Forget(owner=owner):
                for lower in self.log.table().owners(*who):
                    if lower < owner:
                        self.producer.send(Item(-1, pointer_key(*who, lower), None, None, rank))
            case Restore():
                self.restores[rank] = command
            case _:
                pass

    def restore(self, rank: int) -> None:
        """What the replicas topic and the log say to a rank that is being taken over."""
        if rank not in self.sessions:
            return
        seat = self.sessions[rank]
        session = seat.session
        if session.phase is Phase.POINTING:
            session.pointed(self.log.table().newest(REPLICAS[rank], rank))
        asked = self.restores.pop(rank, None)
        if asked is not None:
            self._read_back(session, rank, asked)
        seat.turn(None)

    def _read_back(self, session: Session, rank: int, asked: Restore) -> None:
        base = self.log.base[self.log.partition(rank)]
        start = asked.start if asked.start < asked.end and self.log.verified(rank, asked.start) else base
        recall = Recall(ENTRY)
        for offset, group, record in self.log.read(rank, start, asked.end):
            recall.take(group, record, offset)
        if recall.why:
            session.unrestorable(asked.owner, recall.why)
        else:
            session.restored(asked.owner, *recall.finish())

    def rebuild(self, keep: Callable[[], int]) -> tuple[Late, RealBridge]:
        """The producer turned fatal: what it had is lost, and every rank claims anew."""
        late = self.producer.lost(keep)
        self.restores.clear()
        for seat in self.sessions.values():
            seat.session.release("the producer was rebuilt")
        return late, self

    def supersede(self) -> None:
        """Read the claims of others."""
        for rank, seat in self.sessions.items():
            for owner, bridge in self.log.claims(rank):
                if bridge != self.name:
                    seat.session.superseded(owner)
            seat.turn(None)

    def die(self) -> None:
        self.alive = False
        for seat in self.sessions.values():
            seat.engine.links.remove(seat.link)
