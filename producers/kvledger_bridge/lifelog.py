"""What one owner writes about one rank: lives, numbered records, and the ledger behind them. Pure.

Every method appends to ``out`` what has to be produced, in order. Records of a life are numbered without holes from
0 (Opened). Whether something may be written at all is the session's business, not this module's. What is written is
read here, too, as any reader reads it: a checkpoint restates what readers know.

A batch is covered in bounded pieces. Its unit is written, and its records numbered, when it is whole: what has to be
said of the rank at once is said before it, of the batch before. If the life ends meanwhile, the ledger goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import xxhash
from msgspec import structs

from kvledger_bridge.commands import Command, Counts, DeadLetter, Ledger, Note, Rank, Write
from kvledger_bridge.continuity import Known
from kvledger_bridge.errors import Undecodable
from kvledger_bridge.pace import Work
from kvledger_bridge.snapshot import Part, restated
from kvledger_bridge.unit import Covered, Piece, record_unit
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import NO_LIFE, RankState, accept
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import (
    LIVE,
    SCHEMA,
    Checkpoint,
    EventRecord,
    Fence,
    Gap,
    Heartbeat,
    Life,
    Opened,
    Resumed,
    Suspended,
)

Policy = Literal["invalidate", "keep"]


def digest_of(payload: bytes) -> bytes:
    """XXH3-128 of a batch's raw bytes."""
    return xxhash.xxh3_128_digest(payload)


class LifeLog:
    """One owner's view of one rank. ``seq`` and ``digest`` are the last covered batch; -1 and empty: none.

    ``state`` is what a reader of the log knows once it has read everything that was written.
    """

    def __init__(
        self,
        rank: Rank,
        out: list[Command],
        counts: Counts,
        *,
        decode: Callable[[bytes], Work[Any]],
        ledger: Callable[[ModelEntry], Ledger],
        snapshot: Callable[[Any, int], Iterator[Part]],
    ) -> None:
        self.rank = rank
        self.owner = -1
        self.life: Life = NO_LIFE
        self.n = -1
        self.seq = -1
        self.digest = b""
        self.process: str | None = None
        self.state = RankState()
        self._opened = 0
        self._out = out
        self._counts = counts
        self._decode = decode
        self._new_ledger = ledger
        self._ledger = ledger(rank.entry)
        self._snapshot = snapshot
        self._parts: Iterator[Part] | None = None
        self._part = 0
        self._work: Work[None] | None = None
        self._reasons: list[str] = []
        self._noted: set[str] = set()

    def own(self, owner: int) -> None:
        """A new owner number (-1: none yet); its lives are counted from 1."""
        self.owner, self._opened = owner, 0
        self.forget()

    def forget(self) -> None:
        """The life is over; the next record has to be an Opened."""
        self.life, self.n, self.seq, self.digest, self.process = NO_LIFE, -1, -1, b"", None
        self.state = RankState(owner=self.owner)
        self.leave()

    def leave(self) -> None:
        """Whatever is half done is not finished: after this nothing may be written before the next life."""
        self._parts = self._work = None

    def take_up(self, state: RankState, ledger: Ledger) -> None:
        """Go on with a life that earlier owners wrote, as the log up to the own Fence tells it: suspended."""
        accept(state, RANK_WIDE, Fence(SCHEMA, self.owner, "", "", ""), state.at + 1)
        self.state, self._ledger = state, ledger
        self.life, self.n, self.seq, self.digest, self.process = (
            state.life,
            state.n,
            state.seq,
            state.digest,
            state.process,
        )
        self._reasons, self._noted = [], set(state.uncertain)

    def known(self) -> Known:
        """What a proof of the same life is held against."""
        return Known(self.seq, self.digest, self.process)

    # ---- records

    def open(self, seq: int, digest: bytes, *, partial: bool, why: str, process: str | None) -> None:
        """A new, empty life that begins after batch ``seq`` (-1: before the first)."""
        self._opened += 1
        self._counts.lives += 1
        self.life = (self.owner, self._opened)
        self.n, self.seq, self.digest, self.process = 0, seq, digest, process
        self._ledger = self._new_ledger(self.rank.entry)
        self._reasons, self._noted = [], set()
        entry = self.rank.entry
        opened = Opened(
            schema=SCHEMA,
            owner=self.owner,
            life=self.life,
            n=0,
            entry=entry,
            stride=entry.stride,
            seq=seq,
            digest=digest,
            partial=partial,
            why=why,
            process=process,
        )
        self._emit(RANK_WIDE, opened)

    def suspend(self, why: str) -> None:
        """Continuity is unknown from here on."""
        self._counts.suspended += 1
        self._emit(RANK_WIDE, Suspended(SCHEMA, self.owner, self.life, self._next(), why))

    def resume(self, how: str) -> None:
        """It is proven."""
        self._emit(RANK_WIDE, Resumed(SCHEMA, self.owner, self.life, self._next(), how))

    def beat(self, *, alive: bool = False) -> None:
        """Everything up to the last covered batch is in the log, and the engine was heard; ``alive``: only its process
        was seen.
        """
        n = self._next()
        beat = Heartbeat(SCHEMA, self.owner, self.life, n, self.seq, self.digest, self._take_reasons(), alive)
        self._emit(RANK_WIDE, beat)

    @property
    def checkpointing(self) -> bool:
        """Whether parts of a checkpoint are due: any other record ends it."""
        return self._parts is not None

    def begin_checkpoint(self) -> None:
        """From here on nothing may be applied until the last part was written.

        None begins where readers have given the rank up: what it would restate is not known here either.
        """
        if self.state.loaded:
            self._parts, self._part = self._snapshot(self._ledger, self.seq), 0

    def write_part(self) -> None:
        """The next part of the checkpoint that was begun. O(part)."""
        if self._parts is None:
            return
        part = next(self._parts)
        checkpoint = restated(self.rank.entry, self.state, part, self._part)
        self.n, self._part = checkpoint.n, self._part + 1
        if part.last:
            self._parts = None
            self._counts.checkpoints += 1
        self._emit(RANK_WIDE, checkpoint)

    @property
    def covering(self) -> bool:
        """Whether a batch is covered in part: until it is whole, no other may be, and no checkpoint may begin."""
        return self._work is not None

    def cover(self, seq: int, payload: bytes, digest: bytes, origin: int) -> None:
        """The next batch, or its first piece: its changes, or a heartbeat, or what a batch that cannot be read leads
        to.
        """
        self._work = self._cover(seq, payload, digest, origin)
        self.go_on()

    def go_on(self) -> None:
        """The next piece of the batch that is being covered. O(piece)."""
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration:
            self._work = None

    def lose(self, seq: int, payload: bytes) -> None:
        """The batches before ``seq`` are gone for good, the engine lives on: go on at ``seq``."""
        first = self.seq + 1
        self._counts.lost += seq - first
        self._gap(first, seq - 1, "lost on the way, and replay cannot bring it back", self.rank.entry.loss)
        digest = digest_of(payload)
        if self.rank.entry.loss == "invalidate":
            why = f"batches {first}..{seq - 1} are lost"
            self.open(seq, digest, partial=True, why=why, process=self.process)
        else:
            self.cover(seq, payload, digest, LIVE)

    # ---- inside

    def _cover(self, seq: int, payload: bytes, digest: bytes, origin: int) -> Work[None]:
        try:
            batch = yield from self._decode(payload)
        except Undecodable as error:
            self._counts.undecodable += 1
            self._spoilt(seq, payload, digest, str(error), self.rank.entry.loss)
            if self.rank.entry.loss == "keep":
                yield from self._write(seq, digest, ())
            return
        self._look(batch)
        strange = [tag for tag in batch.unknown if tag not in self.rank.entry.harmless_tags]
        if strange:
            self._out.append(DeadLetter(seq, f"unknown event tag {strange[0]}", digest, payload))
        if batch.failures:
            first = batch.failures[0]
            self._spoilt(seq, payload, digest, f"event {first.index}: {first.reason}", self.rank.entry.loss)
            if self.rank.entry.loss == "invalidate":
                return
        try:
            pieces = yield from self._ledger.work(seq, batch, origin)
        except Exception as error:  # noqa: BLE001  one rank's poison must not stop the node; its type is told, no value
            kind = type(error).__name__
            self._out.append(Note("ledger_failed", kind))
            self._spoilt(seq, payload, digest, f"the ledger failed: {kind}", "invalidate")
            return
        yield from self._write(seq, digest, pieces)

    def _look(self, batch: Any) -> None:
        """Count what the batch says beside its events."""
        self._counts.unknown_events += len(batch.unknown)
        self._counts.failed_events += len(batch.failures)
        if batch.rank is not None and batch.rank != self.rank.rank:
            self._counts.contradictions += 1
            self._note(
                f"events say data-parallel rank {batch.rank}, the replicas file says {self.rank.rank}: "
                "correct the data address or the rank"
            )

    def _write(self, seq: int, digest: bytes, pieces: Sequence[Piece]) -> Work[None]:
        if not pieces:
            self.seq, self.digest = seq, digest
            self.beat()
            return
        covered, first = Covered(self.owner, self.life, seq, digest), self.n + 1
        unit = yield from record_unit(covered, first, pieces, self._take_reasons())
        self.seq, self.digest = seq, digest
        said = self.n + 1 - first
        self.n += len(unit)
        for group, record in unit:  # of a unit all or nothing may be written: any other record would end it
            self._emit(group, structs.replace(record, n=record.n + said) if said else record)

    def _spoilt(self, seq: int, payload: bytes, digest: bytes, reason: str, policy: Policy) -> None:
        """A batch that cannot be read as a whole: a hole of one sequence, with a dead letter."""
        self._out.append(DeadLetter(seq, reason, digest, payload))
        self._gap(seq, seq, reason, policy)
        if policy == "invalidate":
            doubted = self.state.suspended
            self.open(seq, digest, partial=True, why=f"batch {seq} cannot be read", process=self.process)
            if doubted:
                self.suspend("continuity was lost before that batch was read")

    def _gap(self, first: int, last: int, cause: str, policy: Policy) -> None:
        gap = Gap(SCHEMA, self.owner, self.life, self._next(), first, last, cause, policy)
        self._emit(RANK_WIDE, gap)

    def _emit(self, group: int | str | None, record: EventRecord) -> None:
        if not isinstance(record, Checkpoint):
            self._parts = None
        accept(self.state, group, record, self.state.at + 1)
        self._out.append(Write(group, record))

    def _next(self) -> int:
        self.n += 1
        return self.n

    def _note(self, reason: str) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            self._reasons.append(reason)

    def _take_reasons(self) -> tuple[str, ...]:
        reasons, self._reasons = (*self._reasons, *self._ledger.take_uncertain()), []
        return reasons
