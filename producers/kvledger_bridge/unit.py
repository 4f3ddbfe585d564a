"""What the ledger found in one batch -> the records of one unit (DESIGN §5). Pure.

Records of a unit share sequence and digest; ``end`` stands on the last, and readers apply all of them or none.
A piece that would not fit one Kafka message is cut between runs: its parts are ordinary changes in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from kvledger_bridge.pace import Work, at_once
from kvledger_index.model import GroupSpec
from kvledger_wire.records import SCHEMA, Change, Events, Life, Run

RECORD_BYTES_MAX = 512 * 1024
"""Estimated bytes of one record: half of Kafka's default ``message.max.bytes`` (1 MiB), as estimates are rough."""

_RUN_BYTES = 48
"""row, parent, two masks, position and msgpack headers of one run, beside its keys and hashes."""
_CHANGE_BYTES = 40


class Piece(Protocol):
    """What a ledger returns, in order: the changes of one group; of group ``*`` only clears."""

    @property
    def group(self) -> int | str | None:
        """None is the group ``none``."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """In engine order."""

    @property
    def unplaced(self) -> tuple[tuple[int, int], ...]:
        """(medium code, count) after this piece."""

    @property
    def spec(self) -> GroupSpec | None:
        """The group's facts, when new."""

    @property
    def uncertain(self) -> tuple[str, ...]:
        """Reasons that hold from here on."""

    # ``scheme`` (how the engine hashes), ``opaque``, ``veiled`` (medium code, count): taken where a ledger knows them


class Covered(msgspec.Struct, frozen=True):
    """The batch that a unit covers, and whose unit it is."""

    owner: int
    life: Life
    seq: int
    digest: bytes


def records(
    covered: Covered, n: int, pieces: Sequence[Piece], reasons: tuple[str, ...], *, bytes_max: int = RECORD_BYTES_MAX
) -> list[tuple[int | str | None, Events]]:
    """``record_unit`` without a pause."""
    return at_once(record_unit(covered, n, pieces, reasons, bytes_max=bytes_max))


def record_unit(
    covered: Covered, n: int, pieces: Sequence[Piece], reasons: tuple[str, ...], *, bytes_max: int = RECORD_BYTES_MAX
) -> Work[list[tuple[int | str | None, Events]]]:
    """(group, record) in order, numbered from ``n``; ``reasons`` go on the last one. O(changes); pauses after every
    record that could not take all of its piece.
    """
    out: list[tuple[int | str | None, Events]] = []
    for i, piece in enumerate(pieces):
        parts = _cut(piece.changes, bytes_max)
        ahead: tuple[Change, ...] | None = next(parts, ())
        while ahead is not None:
            changes, ahead = ahead, next(parts, None)
            whole = ahead is None
            last = whole and i == len(pieces) - 1
            record = Events(
                schema=SCHEMA,
                owner=covered.owner,
                life=covered.life,
                n=n + len(out),
                seq=covered.seq,
                digest=covered.digest,
                end=last,
                changes=changes,
                unplaced=piece.unplaced if whole else (),
                spec=piece.spec if whole else None,
                uncertain=(piece.uncertain if whole else ()) + (reasons if last else ()),
                scheme=getattr(piece, "scheme", None) if whole else None,
                opaque=getattr(piece, "opaque", ()) if whole else (),
                veiled=getattr(piece, "veiled", ()) if whole else (),
            )
            out.append((piece.group, record))
            if not whole:
                yield
    return out


def _cut(changes: Sequence[Change], bytes_max: int) -> Iterator[tuple[Change, ...]]:
    """Changes in order, in parts of about ``bytes_max``."""
    part: list[Change] = []
    size = 0
    for change in changes:
        for whole in _split(change, bytes_max):
            step = _size(whole)
            if part and size + step > bytes_max:
                yield tuple(part)
                part, size = [], 0
            part.append(whole)
            size += step
    if part:
        yield tuple(part)


def _split(change: Change, bytes_max: int) -> Iterator[Change]:
    """One change as several smaller ones of the same kind, or itself."""
    if _size(change) <= bytes_max:
        yield change
        return
    step = max(64, bytes_max // 2 // 64 * 64)  # eight hashes share a byte of the bitmap
    for at in range(0, len(change.unplaced), step):
        yield msgspec.structs.replace(
            change,
            runs=(),
            unplaced=change.unplaced[at : at + step],
            unplaced_effective=change.unplaced_effective[at // 64 : (at + step) // 64],
        )
    runs: list[Run] = []
    size = 0
    for run in change.runs:
        if runs and size + _run_size(run) > bytes_max // 2:
            yield msgspec.structs.replace(change, runs=tuple(runs), unplaced=b"", unplaced_effective=b"")
            runs, size = [], 0
        runs.append(run)
        size += _run_size(run)
    if runs:
        yield msgspec.structs.replace(change, runs=tuple(runs), unplaced=b"", unplaced_effective=b"")


def _size(change: Change) -> int:
    return _CHANGE_BYTES + len(change.unplaced) + sum(map(_run_size, change.runs))


def _run_size(run: Run) -> int:
    return _RUN_BYTES + len(run.keys) + len(run.hashes) + len(run.digests)
