"""One rank's answer: its hit, how sure it is, and on request why. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvledger_index.model import GROUP_NONE_LANE
from kvledger_index.views import PartitionView, Pulse
from kvledger_router.hits import Ending, explain, hit
from kvledger_router.match import Holder, RankReport
from kvledger_router.residency import Held, extension
from kvledger_router.roster import GPU, Seat
from kvledger_router.standing import PRECEDENCE, Limits, Note, age_seconds, standing, verdict


class Question(NamedTuple):
    """What is the same for all ranks of one answer.

    ``tokens`` is the length that was looked up; ``notes`` hold for every rank (a cut prompt, an unsettled catalogue).
    """

    tokens: int
    time_ms: int
    limits: Limits
    notes: tuple[Note, ...] = ()


class Facts(NamedTuple):
    """What a reading says of one rank; ``moved``: it changed between the two looks of the reading.

    ``expected_tokens``: what this router announced for it.
    """

    held: Held
    pulse: Pulse | None
    partition: PartitionView | None
    moved: bool
    expected_tokens: int = 0


class _Bounds(NamedTuple):
    """The hit with unplaced hashes absent and, at most, present; None where the rule cannot be applied."""

    low: int | None
    high: int | None


def judge(seat: Seat, facts: Facts, question: Question) -> Holder:
    """The holder of one rank. O(strides / word size) per group."""
    bounds = _bounds(seat, facts, question.tokens)
    return _holder(seat, facts, question, bounds, verdict(_notes(seat, facts, question, bounds)))


def report(seat: Seat, facts: Facts, question: Question) -> RankReport:
    """The same with everything behind it, for people."""
    bounds = _bounds(seat, facts, question.tokens)
    notes = sorted(_notes(seat, facts, question, bounds), key=lambda note: PRECEDENCE.index(note.status))
    endings: tuple[Ending, ...] = explain(seat.rule, question.tokens, _resident(seat, facts.held.gpu))
    return RankReport(
        holder=_holder(seat, facts, question, bounds, verdict(notes)),
        notes=tuple(notes),
        endings=endings,
        stride=seat.rule.stride,
        alignment=seat.rule.alignment,
        unplaced=sum(_unplaced(facts.pulse).values()),
        hit_tokens_max=bounds.high,
    )


def _holder(seat: Seat, facts: Facts, question: Question, bounds: _Bounds, deciding: Note) -> Holder:
    known = deciding.status != "unknown"
    tokens = bounds.low if known and bounds.low is not None else 0
    lower = known and bounds.low is not None and bool(facts.held.lower)
    return Holder(
        replica=seat.replica,
        rank=seat.rank,
        hit_tokens=tokens,
        extended_tokens=extension(seat, facts.held.lower, question.tokens, tokens) if lower else 0,
        status=deciding.status,
        as_of=facts.pulse.now.seq if facts.pulse else None,
        age_seconds=age_seconds(facts.pulse, question.time_ms) if facts.pulse else None,
        reason=deciding.why,
        expected_tokens=facts.expected_tokens if known else 0,
    )


def _bounds(seat: Seat, facts: Facts, tokens: int) -> _Bounds:
    """More residency never shortens a hit, so what lies between absent and all present is enclosed."""
    resident = _resident(seat, facts.held.gpu)
    low = hit(seat.rule, tokens, resident)
    unplaced = _unplaced(facts.pulse)
    every = (1 << tokens // seat.rule.stride) - 1
    widened = {group: every for group, lane in seat.lanes if lane in unplaced}
    if not widened:
        return _Bounds(low, low)
    return _Bounds(low, hit(seat.rule, tokens, resident | widened))


def _resident(seat: Seat, gpu: Mapping[int, int]) -> dict[int | None, int]:
    return {group: gpu.get(lane, 0) for group, lane in seat.lanes}


def _unplaced(pulse: Pulse | None) -> dict[int, int]:
    """GPU hashes that are resident and have no key, by lane."""
    return {lane: count for lane, medium, count in pulse.now.unplaced if medium == GPU and count} if pulse else {}


def _notes(seat: Seat, facts: Facts, question: Question, bounds: _Bounds) -> list[Note]:
    notes = list(question.notes)
    notes += standing(seat.card, facts.pulse, facts.partition, question.time_ms, question.limits)
    if facts.moved:
        notes.append(Note("uncertain", "moved: its cache changed while it was read"))
    unplaced = _unplaced(facts.pulse)
    strange = (facts.held.gpu.keys() | unplaced.keys()) - {lane for _, lane in seat.lanes}
    if strange:
        names = ", ".join("none" if lane == GROUP_NONE_LANE else str(lane) for lane in sorted(strange))
        notes.append(Note("uncertain", f"GPU blocks of groups that are not the rank's: {names}"))
    if bounds.low is None or bounds.high is None:
        notes.append(Note("uncertain", "; ".join(seat.rule.faults)))
    elif bounds.high != bounds.low:
        count = sum(unplaced.values())
        notes.append(Note("at_least", f"{count} unplaced hashes could lengthen this hit, to {bounds.high} at most"))
    return notes
