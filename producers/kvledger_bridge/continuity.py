"""What a session may do when, and what proves that an engine still has the life that we know (DESIGN §4).

The table is the only place that knows the order of phases; a proof is one small class with an opinion on one kind of
answer. Engines to come (lifetime ids, snapshots) add a class at the top of ``PROOFS`` and an answer of their own.
Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from kvledger_bridge.errors import Bug
from kvledger_wire.records import Life


class Phase(Enum):
    """Where a session stands."""

    CLAIMING = "claiming"
    """The claim is not acknowledged: nobody knows the owner number yet."""
    POINTING = "pointing"
    """The pointer of the owner before is looked for, and written again under the new number."""
    FENCING = "fencing"
    """The fence is written: what earlier owners still write behind it counts no more."""
    RESTORING = "restoring"
    """The ledger is read from the log, from the pointer up to the fence."""
    OPENING = "opening"
    """No life: the rank's cache is read from its start, or from the oldest batch that can be had."""
    FOLLOWING = "following"
    """A life, and every batch of it so far is in the log."""
    SUSPECT = "suspect"
    """A life, but whether the engine still lives it is not known: nothing is applied."""
    CLOSED = "closed"
    """Another bridge owns the rank; nothing is written, unless that one falls silent."""


class Move(Enum):
    """What may happen to a session."""

    CLAIMED = "claimed"
    POINTED = "pointed"
    FENCED = "fenced"
    RESTORED = "restored"
    UNRESTORED = "unrestored"
    OPENED = "opened"
    DOUBTED = "doubted"
    PROVEN = "proven"
    BROKEN = "broken"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    LAPSED = "lapsed"


TABLE: dict[tuple[Phase, Move], Phase] = {
    (Phase.CLAIMING, Move.CLAIMED): Phase.POINTING,
    (Phase.POINTING, Move.POINTED): Phase.FENCING,
    (Phase.FENCING, Move.FENCED): Phase.RESTORING,
    (Phase.RESTORING, Move.RESTORED): Phase.SUSPECT,
    (Phase.RESTORING, Move.UNRESTORED): Phase.OPENING,
    (Phase.OPENING, Move.OPENED): Phase.FOLLOWING,
    (Phase.FOLLOWING, Move.DOUBTED): Phase.SUSPECT,
    (Phase.SUSPECT, Move.PROVEN): Phase.FOLLOWING,
    (Phase.SUSPECT, Move.BROKEN): Phase.OPENING,
    **{(phase, Move.RELEASED): Phase.CLAIMING for phase in Phase if phase is not Phase.CLOSED},
    **{(phase, Move.SUPERSEDED): Phase.CLOSED for phase in Phase if phase is not Phase.CLOSED},
    (Phase.CLOSED, Move.LAPSED): Phase.CLAIMING,
}

OWNING = frozenset({Phase.OPENING, Phase.FOLLOWING, Phase.SUSPECT})
"""Phases in which the rank may be written for."""


def after(phase: Phase, move: Move) -> Phase:
    """The phase that follows; raises Bug for a move that the table does not have."""
    try:
        return TABLE[phase, move]
    except KeyError:
        msg = f"a session that is {phase.value} cannot be {move.value}"
        raise Bug(msg) from None


class Known(msgspec.Struct, frozen=True):
    """What is known of a life: its last covered batch (-1: none yet) and the engine's process, if it was read."""

    seq: int
    digest: bytes
    process: str | None


class Request(msgspec.Struct):
    """The replay in flight, and what was known when it was asked.

    ``expected`` is the highest live sequence that was at hand then: an honest answer reaches it. ``beyond`` is the
    first batch after a hole inside the answer; what follows it is not applied.
    """

    start: int
    known: Known
    heard_at: float
    expected: int
    written: tuple[Life, int]
    load: bool
    """The whole buffer, for a new life."""
    probe: bool
    """Nothing is known to be missing."""
    frames: int = 0
    fresh: bool = False
    beyond: tuple[int, bytes] | None = None


class First(msgspec.Struct, frozen=True):
    """Answer: the first batch of a replay that was to start at the last covered one."""

    seq: int
    digest: bytes


class Nothing(msgspec.Struct, frozen=True):
    """Answer: a replay that ended without a batch."""


class Process(msgspec.Struct, frozen=True):
    """Answer: the identity of the engine's process, read on the present connection; None: it could not be read."""

    identity: str | None


Answer = First | Nothing | Process


class Proof(Protocol):
    """One way to tell lives apart."""

    def same(self, known: Known, answer: Answer) -> bool | None:
        """True: the same life. False: another one. None: this proof has no opinion on such an answer."""


class ReplayProof:
    """The batch that we covered last is still there, byte for byte.

    A life without a batch is empty, and so is any other one before its first batch: they need not be told apart.
    An answer that starts elsewhere may also mean that the batch fell out of the buffer: not proven, so another life.
    """

    def same(self, known: Known, answer: Answer) -> bool | None:
        """Judges First and Nothing."""
        match answer:
            case First(seq=seq, digest=digest):
                return known.seq < 0 or (seq == known.seq and digest == known.digest)
            case Nothing():
                return known.seq < 0
            case _:
                return None


class ProcessProof:
    """The same process serves the present connection. For engines without a replay endpoint only."""

    def same(self, known: Known, answer: Answer) -> bool | None:
        """Judges Process; an identity that could not be read decides nothing."""
        match answer:
            case Process(identity=str(identity)):
                return identity == known.process
            case _:
                return None


PROOFS: tuple[Proof, ...] = (ReplayProof(), ProcessProof())


def judge(known: Known, answer: Answer) -> bool | None:
    """The first opinion in order of strength; None where nobody has one."""
    for proof in PROOFS:
        verdict = proof.same(known, answer)
        if verdict is not None:
            return verdict
    return None
