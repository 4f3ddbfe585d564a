"""The second way: which ranks have to be asked by the engine's own hashes, and by which (ADR 5). Pure.

A rank needs it while hashes are resident on it that have no block key and that the prompt's chain could equal: not
opaque ones, and for a plain prompt not veiled ones. Ranks without such hashes cost nothing: their prompt's chain is not
even computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvledger_index.enginehash import Scheme
from kvledger_index.views import Pulse, Reading
from kvledger_router.prompt import Prompt, Way
from kvledger_router.residency import Held, gather_singles
from kvledger_router.roster import Roster, Seat

SWITCHED_OFF = "switched off for this index"


class Plan(NamedTuple):
    """What the reading of one stride asks for by engine hash: ``hashes``, and where those of each way stand in them."""

    stride: int
    spans: Mapping[Way, tuple[int, int]]
    hashes: tuple[int, ...]


class Asked(NamedTuple):
    """Whether a rank was asked by engine hash: by how many; or None and, if it needs that, the ``obstacle``."""

    hashes: int | None
    obstacle: str = ""


NOT_NEEDED = Asked(None)


def needs(pulse: Pulse | None, *, plain: bool) -> bool:
    """Whether anything of a prompt, ``plain`` or not, may be resident on a rank without a block key and could be found
    by engine hash.

    Hashes may be opaque and veiled at once, so that where both are in a lane it may say so of one that needs nothing.
    """
    if pulse is None or not pulse.now.unplaced:
        return False
    opaque = {(lane, medium): count for lane, medium, count in pulse.now.opaque}
    veiled = {(lane, medium): count for lane, medium, count in pulse.now.veiled} if plain else {}
    return any(
        count > max(opaque.get((lane, medium), 0), veiled.get((lane, medium), 0))
        for lane, medium, count in pulse.now.unplaced
    )


def needing(roster: Roster, stride: int, reading: Reading, *, plain: bool) -> frozenset[str]:
    """Ranks of one stride that need it, by name; O(ranks)."""
    return frozenset(
        seat.name
        for seat in roster.seats
        if seat.card.stride == stride and needs(reading.pulses.get(seat.name), plain=plain)
    )


def plan(roster: Roster, stride: int, prompt: Prompt, names: frozenset[str]) -> Plan:
    """The hashes to ask for on behalf of ``names``. O(ranks), and the chain of each way that is new to the prompt."""
    if not names:
        return Plan(stride, {}, ())
    ways = {
        way: None  # in order, each once
        for seat in roster.seats
        if seat.name in names and seat.card.stride == stride and not obstacle_of(seat, prompt)
        for way in ways_of(seat, prompt)
    }
    spans: dict[Way, tuple[int, int]] = {}
    hashes: list[int] = []
    for way in ways:
        start = len(hashes)
        hashes += prompt.hashes(way)
        spans[way] = start, len(hashes)
    return Plan(stride, spans, tuple(hashes))


def obstacle_of(seat: Seat, prompt: Prompt) -> str:
    """Why a rank cannot be asked for this prompt by engine hash; empty where it can."""
    if seat.rule.faults:
        return "; ".join(seat.rule.faults)
    if seat.card.scheme is not None and (not seat.hash_block or seat.every % seat.hash_block):
        return f"hash blocks of {seat.hash_block or 'unknown'} tokens: name hash_block_size in the model entry"
    return prompt.obstacle(seat.card.scheme, seat.hash_block)


def ways_of(seat: Seat, prompt: Prompt) -> tuple[Way, ...]:
    """How a rank's engine may name the prompt; only without an obstacle."""
    return prompt.ways(seat.card.scheme or Scheme(), seat.hash_block, seat.every)


def asked_of(seat: Seat, prompt: Prompt, pulse: Pulse | None, asked: Plan, *, switched_on: bool) -> Asked:
    """What came of it for one rank."""
    if not needs(pulse, plain=prompt.plain):
        return NOT_NEEDED
    obstacle = obstacle_of(seat, prompt) if switched_on else SWITCHED_OFF
    if obstacle:
        return Asked(None, obstacle)
    spans = [asked.spans.get(way) for way in ways_of(seat, prompt)]
    if None in spans:
        return Asked(None, "it came to need it while it was read")
    return Asked(sum(span[1] - span[0] for span in spans if span))


def add_found(found: dict[int, Held], reading: Reading, asked: Plan, roster: Roster, prompt: Prompt) -> None:
    """Add what was found by engine hash to what each seat holds; its own ways alone count for it."""
    seats: dict[Way, set[int]] = {way: set() for way in asked.spans}
    for number, seat in enumerate(roster.seats if seats else ()):
        pulse = reading.pulses.get(seat.name)
        if seat.card.stride != asked.stride or not needs(pulse, plain=prompt.plain) or obstacle_of(seat, prompt):
            continue
        for way in ways_of(seat, prompt):
            if way in seats:
                seats[way].add(number)
    for way, (start, stop) in asked.spans.items():
        owners = {slot: where for slot, where in roster.slots.items() if where[0] in seats[way]}
        gather_singles(found, reading.singles[start:stop], owners, way.every // asked.stride)
