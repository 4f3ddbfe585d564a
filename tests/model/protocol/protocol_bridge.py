"""A bridge process: takes ranks over, restores their ledgers from the log, and keeps the pointers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from protocol_accept import RankState, accept
from protocol_engine import Engine, Residency, empty, wipe_gpu
from protocol_log import Late, Log, Producer
from protocol_records import GPU_LANES, GROUP, Change, Put, Record
from protocol_rules import Rules
from protocol_session import Session


class Bridge:
    """Claims its ranks at once. Each is then inherited, fenced, restored and followed as acknowledgements come in."""

    def __init__(self, rules: Rules, log: Log, engines: Mapping[int, Engine], without_replay: Iterable[int]) -> None:
        self.rules, self.log, self.alive = rules, log, True
        self._engines, self._without_replay = engines, without_replay
        self.producer = Producer(
            len(log.partitions),
            route=log.route,
            append=log.append,
            acknowledged=self._acknowledged,
            landed=self._landed,
        )
        self.sessions: dict[int, Session] = {}
        self.fences: dict[int, int | None] = {}
        self._first_parts: dict[int, int] = {}
        self._inherited: dict[int, int | None] = {}
        for rank, engine in engines.items():
            owner = self._claim(rank)
            self.sessions[rank] = Session(rules, engine, owner, self.producer.send, replay=rank not in without_replay)
            pointer = log.pointer(rank)
            if rules.inherit and (pointer.found or rules.inherit_nothing):
                self._inherited[rank] = pointer.start
                self._point(rank, pointer.start, fence=None)
            else:
                self._fence(rank)

    def _claim(self, rank: int) -> int:
        if self.rules.claim_offset:
            return self.log.append(Record("Claim", rank, len(self.log.replicas)))
        owner = 1 + max((r.owner for r in self.log.replicas if r.rank == rank), default=-1)
        self.producer.send(Record("Claim", rank, owner))
        return owner

    def _point(self, rank: int, offset: int | None, *, fence: int | None) -> None:
        self.producer.send(Record("Pointer", rank, self.sessions[rank].owner, offset=offset, fence=fence))

    def _fence(self, rank: int) -> None:
        if self.rules.fence and rank not in self.fences:
            self.fences[rank] = None
            self.producer.send(Record("Fence", rank, self.sessions[rank].owner))

    def _landed(self, record: Record, offset: int) -> None:
        if not self.rules.pointer_after_ack:
            self._point_at(record, offset, early=True)

    def _acknowledged(self, record: Record, offset: int) -> None:
        rank = record.rank
        if record.kind == "Pointer" and rank not in self.fences:
            self._fence(rank)
        elif record.kind == "Fence":
            self.fences[rank] = offset
            if self.rules.pointer_restated and rank in self._inherited:
                self._point(rank, self._inherited[rank], fence=offset)
        elif self.rules.pointer_after_ack:
            self._point_at(record, offset, early=False)

    def _point_at(self, record: Record, offset: int, *, early: bool) -> None:
        """A pointer to what may be read from: an Opened, or the first part of a checkpoint once all of it stands."""
        rank = record.rank
        if record.kind == "Opened" and self.rules.pointer_to_opened:
            self._point(rank, offset, fence=self.fences.get(rank))
        elif record.kind == "Checkpoint":
            if record.part == 0:
                self._first_parts[rank] = offset
            if record.last or early:
                self._point(rank, self._first_parts[rank], fence=self.fences.get(rank))

    def restore(self, rank: int) -> None:
        """Read the log from the pointer to the own Fence, no further."""
        session = self.sessions.get(rank)
        if session is None or session.phase != "claimed" or (self.rules.fence and self.fences.get(rank) is None):
            return
        if any(entry.item.kind == "Pointer" and entry.item.rank == rank for entry in self.producer.pending[-1]):
            return
        state, ledger, partition = RankState(), empty(), self.log.partition(rank)
        start = max(self.log.base[partition], self.log.pointer(rank).start or 0)
        state.owner = self.log.ended_before(rank, start)
        end = self.fences[rank] if self.rules.fence else None
        for at, record in enumerate(self.log.partitions[partition][start:end], start):
            if record.rank == rank:
                for effect in accept(self.rules, state, record, at):
                    _recall(ledger, effect)
        if state.loaded and not state.closed:
            session.resume_from(state, ledger)
        else:
            session.start()

    def supersede(self) -> None:
        """Stop for the ranks that somebody else claimed."""
        for rank, session in self.sessions.items():
            if self.log.top_claim(rank) > session.owner:
                session.stop()

    def rebuild(self, keep: Callable[[], int]) -> tuple[Late, Bridge]:
        """The producer failed for good: what it had is lost, and all is claimed anew."""
        self.die()
        return self.producer.lost(keep), Bridge(self.rules, self.log, self._engines, self._without_replay)

    def die(self) -> None:
        self.alive = False
        for session in self.sessions.values():
            session.stop()
            session.engine.links.remove(session.link)


def _recall(ledger: Residency, effect: object) -> None:
    """The ledger by what the log says: every copy is on it, not only the effective ones."""
    match effect:
        case "bind" | "drop":
            for copies in ledger.values():
                copies.clear()
        case Put():
            ledger[effect.lane][effect.hash] = effect.copies
        case Change():
            copies = ledger[effect.lane]
            copies[effect.hash] = max(0, copies[effect.hash] + (1 if effect.op == "store" else -1))
        case _:
            group = getattr(effect, "group", None)
            if group is None:
                wipe_gpu(ledger)
            else:
                for lane in GPU_LANES:
                    if GROUP[lane] == group:
                        ledger[lane].clear()
