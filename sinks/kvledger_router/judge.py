"""One rank's answer: its hit, how sure it is, and on request why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvledger_index.model import GROUP_NONE_LANE
from kvledger_index.views import PartitionView, Pulse
from kvledger_router.asking import NOT_NEEDED, Asked
from kvledger_router.bounds import longest
from kvledger_router.hits import Ending, explain, hit
from kvledger_router.match import Holder, RankReport
from kvledger_router.residency import Held, extension, lower_tiers
from kvledger_router.roster import GPU, Seat
from kvledger_router.standing import MOVED, PRECEDENCE, Limits, Note, age_seconds, standing, verdict


class Question(NamedTuple):
    """What is the same for all ranks of one answer.

    ``tokens`` is the length that was looked up; ``notes`` hold for every rank (a cut prompt, unreadable values).
    ``plain``: the prompt has neither adapter nor salt nor media.
    """

    tokens: int
    time_ms: int
    limits: Limits
    notes: tuple[Note, ...] = ()
    plain: bool = False


class Facts(NamedTuple):
    """What a reading says of one rank; ``moved``: it changed between the two looks of the reading.

    ``expected_tokens``: what this router announced for it. What was found by engine hash is in ``held``.
    """

    held: Held
    pulse: Pulse | None
    partition: PartitionView | None
    moved: bool
    expected_tokens: int = 0
    asked: Asked = NOT_NEEDED


class _Bounds(NamedTuple):
    """The hit with what has no known place absent, and the longest with it; None where the rule cannot be applied."""

    low: int | None
    high: int | None


def judge(seat: Seat, facts: Facts, question: Question) -> Holder:
    """The holder of one rank. O(strides / word size) per group."""
    bounds = _bounds(seat, facts, question)
    return _holder(seat, facts, question, bounds, verdict(_notes(seat, facts, question, bounds)))


def report(seat: Seat, facts: Facts, question: Question) -> RankReport:
    """The same with everything behind it, for people."""
    bounds = _bounds(seat, facts, question)
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
        engine_hashes=_on_hashes(facts),
    )


def _holder(seat: Seat, facts: Facts, question: Question, bounds: _Bounds, deciding: Note) -> Holder:
    known = deciding.status != "unknown"
    tokens = bounds.low if known and bounds.low is not None else 0
    lower = lower_tiers(facts.held, seat, facts.pulse, question.time_ms) if known and bounds.low is not None else None
    return Holder(
        replica=seat.replica,
        rank=seat.rank,
        hit_tokens=tokens,
        extended_tokens=extension(seat, facts.held.gpu, lower, question.tokens, tokens) if lower else 0,
        status=deciding.status,
        as_of=facts.pulse.now.seq if facts.pulse else None,
        age_seconds=age_seconds(facts.pulse, question.time_ms) if facts.pulse else None,
        reason=deciding.why,
        expected_tokens=facts.expected_tokens if known else 0,
    )


def _bounds(seat: Seat, facts: Facts, question: Question) -> _Bounds:
    """More residency never shortens a hit, so what lies between absent and present is enclosed."""
    resident = _resident(seat, facts.held.gpu)
    low = hit(seat.rule, question.tokens, resident)
    loose = _loose(facts, plain=question.plain)
    spare = {group: loose[lane] for group, lane in seat.lanes if lane in loose}
    if not spare:
        return _Bounds(low, low)
    return _Bounds(low, longest(seat.rule, question.tokens, resident, spare))


def _resident(seat: Seat, gpu: Mapping[int, int]) -> dict[int | None, int]:
    return {group: gpu.get(lane, 0) for group, lane in seat.lanes}


def _unplaced(pulse: Pulse | None) -> dict[int, int]:
    """GPU hashes that are resident and have no key, by lane."""
    return _on_gpu(pulse.now.unplaced) if pulse else {}


def _on_gpu(counts: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    return {lane: count for lane, medium, count in counts if medium == GPU and count}


def _loose(facts: Facts, *, plain: bool) -> dict[int, int]:
    """How many of the unplaced GPU hashes may be any block of the prompt, by lane.

    All of them; for a plain prompt not the veiled ones; where the prompt's engine hashes were asked for, none but those
    that cannot be asked for, as the others are found, or not this prompt's. A hash may be opaque and veiled, so of the
    two counts that then hold the smaller one does.
    """
    if facts.pulse is None:
        return {}
    now = facts.pulse.now
    veiled = _on_gpu(now.veiled) if plain else {}
    loose = {lane: count - veiled.get(lane, 0) for lane, count in _on_gpu(now.unplaced).items()}
    if facts.asked.hashes is not None:
        opaque = _on_gpu(now.opaque)
        loose = {lane: min(count, opaque.get(lane, 0)) for lane, count in loose.items()}
    return {lane: count for lane, count in loose.items() if count > 0}


def _on_hashes(facts: Facts) -> str:
    """For people: what the second way did for this rank."""
    if facts.asked.hashes is not None:
        return f"asked for by {facts.asked.hashes} engine hashes, beside the block keys"
    if facts.asked.obstacle:
        return f"not asked for by engine hash: {facts.asked.obstacle}"
    return "not asked for by engine hash: nothing of such a prompt that could be found so can be without a block key"


def _notes(seat: Seat, facts: Facts, question: Question, bounds: _Bounds) -> list[Note]:
    notes = list(question.notes)
    notes += standing(seat.card, facts.pulse, facts.partition, question.time_ms, question.limits)
    if facts.moved:
        notes.append(Note("uncertain", MOVED))
    unplaced = _unplaced(facts.pulse)
    strange = (facts.held.gpu.keys() | unplaced.keys()) - {lane for _, lane in seat.lanes}
    if strange:
        names = ", ".join("none" if lane == GROUP_NONE_LANE else str(lane) for lane in sorted(strange))
        notes.append(Note("uncertain", f"GPU blocks of groups that are not the rank's: {names}"))
    if bounds.low is None or bounds.high is None:
        notes.append(Note("uncertain", "; ".join(seat.rule.faults)))
    elif bounds.high != bounds.low:
        count = sum(_loose(facts, plain=question.plain).values())
        notes.append(Note("at_least", f"{count} unplaced hashes could lengthen this hit, to {bounds.high} at most"))
    return notes
