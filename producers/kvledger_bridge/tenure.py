"""Who may write for a rank: claim, inherit a pointer, fence, restore, give way, claim again (DESIGN §4). Pure.

    claim ──> its offset is the owner number
          ──> the newest pointer of a lower owner is written again under it: whoever comes next finds it there
          ──> Fence: from here on lower owners do not count
          ──> the pointer once more, naming that Fence: who begins to read behind it knows whom it ended
          ──> restore the ledger, from the pointer up to the Fence

Each step waits for Kafka's acknowledgement of the one before. What follows, proof of the same life or a new one, is the
session's (``engine``), which builds on this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvledger_bridge.commands import (
    Announce,
    CloseAll,
    Command,
    Counts,
    Forget,
    Ledger,
    Limits,
    Note,
    Rank,
    Restore,
    Write,
)
from kvledger_bridge.continuity import OWNING, Move, Phase, after
from kvledger_bridge.errors import Bug
from kvledger_bridge.lifelog import LifeLog
from kvledger_bridge.pace import Work
from kvledger_bridge.snapshot import Part
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import RankState
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import SCHEMA, Checkpoint, Claim, EventRecord, Fence, Life, Opened, Pointer, ReplicaRecord

FIRST_CONTACT = "first contact"
"""Why a bridge claims a rank that it did not have before."""


class Tenure:
    """One bridge's right to one rank. ``phase`` moves by the table of ``continuity`` and by nothing else."""

    def __init__(
        self,
        rank: Rank,
        *,
        decode: Callable[[bytes], Work[Any]],
        ledger: Callable[[ModelEntry], Ledger],
        snapshot: Callable[[Any, int], Iterator[Part]],
        bridge: str,
        version: str,
        limits: Limits,
    ) -> None:
        self.rank = rank
        self.phase = Phase.CLAIMING
        self.counts = Counts()
        self._limits = limits
        self._bridge = bridge
        self._version = version
        self._why = FIRST_CONTACT
        self._out: list[Command] = []
        self._log = LifeLog(rank, self._out, self.counts, decode=decode, ledger=ledger, snapshot=snapshot)
        self._awaited: EventRecord | ReplicaRecord | None = None
        self._fence = self._foreign = self._owned_last = -1
        self._foreign_name = ""
        self._inherited: Pointer | None = None
        self._pointer: Pointer | None = None
        self._first_part = (-1, -1)  # n and offset of the newest checkpoint's first part
        self._claim_at, self._claim_tries = 0.0, 0
        self._now = 0.0

    # ---- what the caller saw

    def acknowledged(self, record: EventRecord | ReplicaRecord, offset: int) -> None:
        """Kafka holds ``record`` at ``offset``. Acknowledgements of earlier owners and lives are ignored."""
        self._point(record, offset)
        if record is not self._awaited:
            return
        self._awaited = None
        match record:
            case Claim():
                self._claimed(offset)
            case Pointer() if self.phase is Phase.POINTING:
                self._move(Move.POINTED)
                why = self._why
                if why == FIRST_CONTACT and self._inherited is not None:
                    why = f"takes over from owner {self._inherited.owner}"
                fence = Fence(SCHEMA, self.owner, self._bridge, self._version, why)
                self._awaited = fence
                self._out.append(Write(RANK_WIDE, fence))
            case Fence():
                self._fence, self._claim_tries = offset, 0
                start = -1 if self._inherited is None else self._inherited.offset
                self._awaited = Pointer(SCHEMA, self.owner, offset, start)
                self._out.append(Announce(self._awaited))
            case Pointer():
                self._move(Move.FENCED)
                if self._inherited is None:
                    self._unrestored()
                else:
                    self._out.append(Restore(self.owner, self._inherited.offset, self._fence))
            case _:
                msg = f"a {type(record).__name__} was awaited"
                raise Bug(msg)

    def pointed(self, pointer: Pointer | None) -> None:
        """The replicas topic is read up to the own claim: the pointer of the highest lower owner that has one.

        None: no owner ever wrote one, and each writes one before anything else, so nothing is there to restore.
        """
        if self.phase is not Phase.POINTING or self._awaited is not None:
            return
        self._inherited = pointer
        fence, offset = (-1, -1) if pointer is None else (pointer.fence, pointer.offset)
        self._awaited = Pointer(SCHEMA, self.owner, fence, offset)
        self._out.append(Announce(self._awaited))

    def restored(self, owner: int, state: RankState, ledger: Ledger) -> None:
        """The rank as its log tells it up to the Fence of ``owner``; of an earlier owner it is late, and ignored."""
        if owner != self.owner or self.phase is not Phase.RESTORING:
            return
        if state.owner > owner:  # whoever claimed later may fence earlier: readers heed nothing that we write
            self.superseded(state.owner)
            return
        self._log.take_up(state, ledger)
        self.counts.restored += 1
        self._move(Move.RESTORED)

    def unrestorable(self, owner: int, why: str) -> None:
        """The log does not give the rank back: a new life."""
        if owner != self.owner or self.phase is not Phase.RESTORING:
            return
        self._why = f"{self._why}; not restored: {why}"
        self._unrestored()

    def failed(self, record: EventRecord | ReplicaRecord, why: str) -> None:
        """Kafka does not hold ``record``: what this owner wrote has a hole, so the rank is claimed anew."""
        if record is self._awaited or (record.owner == self.owner and self.phase in OWNING):
            self.release(f"delivery failed: {why}")

    def release(self, why: str) -> None:
        """Claim anew: the producer was rebuilt, or a record of this owner is lost."""
        if self.phase is Phase.CLOSED:
            return
        self._move(Move.RELEASED)
        self._claim_tries += 1
        self._begin(why, self._now + self._pause(self._claim_tries))

    def superseded(self, owner: int, bridge: str = "") -> None:
        """Another bridge claimed the rank at ``owner``: the higher claim wins. ``bridge`` is its name, where known."""
        if owner > self._foreign:
            self._foreign, self._foreign_name = owner, bridge
        if self.phase is Phase.CLOSED or self.owner < 0 or self._foreign < self.owner:
            return  # without an own number yet, the acknowledgement of the claim decides
        self._close()

    def lapsed(self, why: str) -> None:
        """The bridge that claimed over this one fell silent: claim again."""
        if self.phase is Phase.CLOSED:
            self._move(Move.LAPSED)
            self._begin(why, self._now)

    # ---- what the caller asks

    @property
    def owner(self) -> int:
        """The own number; -1 while it is not known."""
        return self._log.owner

    @property
    def foreign(self) -> int:
        """The highest number that another bridge claimed; -1: none."""
        return self._foreign

    @property
    def life(self) -> Life:
        """The life that records are written for."""
        return self._log.life

    @property
    def last(self) -> int:
        """The last engine sequence that the log covers; -1: none."""
        return self._log.seq

    @property
    def awaiting(self) -> bool:
        """Whether an acknowledgement of Kafka, or what the replicas topic says, is awaited."""
        return self._awaited is not None or self.phase is Phase.POINTING

    # ---- inside

    def _claim(self) -> None:
        if self._awaited is None and self._now >= self._claim_at:
            self._awaited = Claim(SCHEMA, -1, self._bridge, self._version)
            self.counts.claims += 1
            self._out.append(Announce(self._awaited))

    def _claimed(self, offset: int) -> None:
        before, self._owned_last = self._owned_last, max(offset, self._owned_last)
        self._log.own(offset)
        if offset <= before:
            self._close(Note("claims_went_back", f"owner {offset} after {before}"))
            return
        if self._foreign > offset:
            self._close()
            return
        self._move(Move.CLAIMED)

    def _unrestored(self) -> None:
        self._move(Move.UNRESTORED)

    def _point(self, record: EventRecord | ReplicaRecord, offset: int) -> None:
        """A pointer is written once what it names is there, and the ones below it are taken back once it is."""
        if record.owner != self.owner:
            return
        match record:
            case Opened(life=life) if life == self.life:
                self._announce(offset)
            case Checkpoint(life=life, n=n, part=part, last=last) if life == self.life:
                if part == 0:
                    self._first_part = (n, offset)
                if last and self._first_part[0] == n - part:
                    self._announce(self._first_part[1])
            case Pointer() if record is self._pointer:
                self._out.append(Forget(self.owner))
            case _:
                pass

    def _announce(self, offset: int) -> None:
        self._pointer = Pointer(SCHEMA, self.owner, self._fence, offset)
        self._out.append(Announce(self._pointer))

    def _begin(self, why: str, claim_at: float) -> None:
        """Start over, as nobody yet."""
        self._unsay()
        self._log.own(-1)
        self._fence, self._why, self._claim_at = -1, why, claim_at
        self._inherited = self._pointer = None
        self._reopen()

    def _close(self, note: Note | None = None) -> None:
        self._move(Move.SUPERSEDED)
        self._log.leave()
        self._quit()
        self._unsay()
        name = f", bridge {self._foreign_name}," if self._foreign_name else ""
        why = (
            f"owner {self._foreign}{name} is above {self.owner}; "
            "this bridge listens, and claims again once that one is silent"
        )
        self._out += [note or Note("superseded", why), CloseAll()]

    def _unsay(self) -> None:
        """Forget records that were not handed out: this owner writes no more."""
        self._awaited = None
        self._out[:] = [each for each in self._out if not isinstance(each, Write | Announce | Forget | Restore)]

    def _move(self, move: Move) -> None:
        self.phase = after(self.phase, move)

    def _pause(self, tries: int) -> float:
        factor = float(1 << min(tries - 1, 16))
        return min(self._limits.retry_seconds_max, self._limits.retry_seconds_min * factor)

    # ---- what the session adds

    def _reopen(self) -> None:
        """Open the engine's sockets anew."""
        raise NotImplementedError

    def _quit(self) -> None:
        """Drop what was read from the engine."""
        raise NotImplementedError
