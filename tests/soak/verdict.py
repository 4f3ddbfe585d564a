"""When all is quiet: engine, log and index beside each other, rank by rank. Pure.

    engine's own claims ──=── blocks of the log (accept) ──=── blocks that ``kvledger dump`` lists

A hash without a key stands in the index as a row of its own, which the dump lists like a key; the log knows which. On a
partial rank the log may know less than the engine holds, never more; why it is partial must stand in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvledger_wire.records import EventRecord, Gap, Opened

Claim = tuple[int | str | None, str, int]
"""(group, medium, block key)."""

SHOWN_MAX = 3


class Quiet(NamedTuple):
    """One rank at the end. ``loose`` are hashes that the log has without a key, ``hashes`` all that its engine holds,
    in the place of keys. ``lost`` are the sequences of its engine's present life that reached nobody since its last
    clear; ``records`` all that the log has of the rank.
    """

    name: str
    truth: frozenset[Claim]
    logged: frozenset[Claim]
    dumped: frozenset[Claim]
    loose: frozenset[Claim]
    hashes: frozenset[Claim]
    partial: bool
    lost: tuple[int, ...]
    records: Sequence[EventRecord]


def verdict(rank: Quiet) -> list[str]:
    """What is wrong with it; nothing if all is well."""
    found = _differences(rank.name, "index", rank.dumped, "log", rank.logged | rank.loose)
    phantom, missing = rank.logged - rank.truth | rank.loose - rank.hashes, rank.truth - rank.logged
    if phantom:
        found.append(f"{rank.name}: {len(phantom)} claims that its engine does not hold: {_some(phantom)}")
    if missing and not rank.partial:
        found.append(
            f"{rank.name}: {len(missing)} blocks of its engine are missing, and it is not partial: {_some(missing)}"
        )
    if rank.lost and not rank.partial:
        found.append(f"{rank.name}: batches {list(rank.lost)} were lost, and it is not partial")
    found += [
        f"{rank.name}: batch {seq} was lost without a word" for seq in rank.lost if not _is_told(seq, rank.records)
    ]
    if rank.partial and not any(isinstance(record, Gap) or _opened_partial(record) for record in rank.records):
        found.append(f"{rank.name}: partial, and nothing in the log says why")
    return found


def _is_told(seq: int, records: Sequence[EventRecord]) -> bool:
    """Whether a gap covers it, or a partial life begins there or later."""
    return any(
        (isinstance(record, Gap) and record.first <= seq and (record.last < 0 or seq <= record.last))
        or (isinstance(record, Opened) and record.partial and record.seq >= seq)
        for record in records
    )


def _opened_partial(record: EventRecord) -> bool:
    return isinstance(record, Opened) and record.partial


def _differences(name: str, one: str, left: frozenset[Claim], other: str, right: frozenset[Claim]) -> list[str]:
    return [
        f"{name}: {len(only)} claims are in the {where} and not in the {elsewhere}: {_some(only)}"
        for only, where, elsewhere in ((left - right, one, other), (right - left, other, one))
        if only
    ]


def _some(claims: frozenset[Claim]) -> str:
    shown = sorted(claims, key=repr)[:SHOWN_MAX]
    return ", ".join(f"group {group} {medium} {key:016x}" for group, medium, key in shown)
