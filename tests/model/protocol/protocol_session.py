"""The bridge's session with one rank: which batches count, and which records they become."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from protocol_accept import RankState
from protocol_engine import DISCONNECTED, Batch, Engine, Link, Residency, empty, wipe_gpu
from protocol_records import GROUP, GROUPS, LANES, NO_LIFE, Change, Kind, Life, Put, Record
from protocol_rules import Rules

FAILURES_MAX = 2
PARTS = (0, 1)

Doubt = Literal["suspect", "fresh"]
"""``suspect``: continuity is to be proven. ``fresh``: it is refuted, a new life opens."""


class Session:
    """One rank under one owner. ``send`` hands a record to the producer."""

    def __init__(
        self, rules: Rules, engine: Engine, owner: int, send: Callable[[Record], None], *, replay: bool
    ) -> None:
        self.rules, self.engine, self.owner, self._send, self.replay = rules, engine, owner, send, replay
        self.rank = engine.rank
        self.link = Link()
        engine.links.append(self.link)
        self.inbox: deque[Batch] = deque()
        self.monitor = False
        self.phase: Literal["claimed", "running", "closed"] = "claimed"
        self.doubt: Doubt | None = "fresh"
        self.life: Life = NO_LIFE
        self.opened, self.n = 0, -1
        self.last = -1
        self.digest: int | None = None
        self.process: int | None = None
        self.ghost: int | None = None
        self.any_bytes = False
        """A restored life is believed without a proof."""
        self.partial = self.suspended = self.sewn = False
        self.failures = 0
        self.ledger = empty()
        self.parts: list[Record] = []
        """Parts of a checkpoint that wait, where they need not be consecutive."""
        self.seen: int | None = None
        """The process identity read on this connection."""

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self.phase == "closed"

    # ---- taking over

    def start(self) -> None:
        """Nothing could be restored."""
        self.phase = "running"

    def resume_from(self, state: RankState, ledger: Residency) -> None:
        """Go on in the life that the log knows, once it is proven."""
        self.phase, self.doubt = "running", "suspect"
        self.life, self.n = state.life, state.n
        self.last, self.digest, self.process, self.ghost = state.seq, state.digest, state.process, state.ghost
        self.partial, self.ledger = state.partial, ledger
        if self.rules.restore_suspended:
            self.suspended = state.suspended or self.rules.fence_suspends
        self.any_bytes = not self.rules.restore_digest

    # ---- turns

    def deliver(self, count: int) -> None:
        """Bytes arrive; the monitor is another queue than the data."""
        for _ in range(min(count, len(self.link.wire))):
            item = self.link.wire.popleft()
            if item == DISCONNECTED:
                self.monitor = True
            else:
                assert isinstance(item, Batch)
                self.inbox.append(item)
        if self.engine.up:
            self.link.connected = True

    def turn(self, rnd: random.Random | None, *, idle: bool = False) -> None:
        """One step. ``rnd`` decides what a replay loses; ``idle``: the rank has been quiet for a while."""
        if self.phase != "running":
            return
        if self.parts and not self.inbox:
            self._record(self.parts.pop(0))
        elif self.monitor and (self.rules.monitor_first or not self.inbox or self.doubt):
            self._disconnected()
        elif not self.replay:
            self._turn_without_replay()
        elif self.doubt == "fresh":
            self._fresh(self.engine.replay(0, rnd))
        elif self.doubt:
            self._probe(self._replayed(rnd))
        elif self.rules.seam and not self.sewn and self.inbox:
            self._sew(self._replayed(rnd))
        else:
            self._follow(rnd, idle=idle)

    def _replayed(self, rnd: random.Random | None) -> list[Batch] | None:
        return self.engine.replay(max(self.last, 0), rnd)

    def _disconnected(self) -> None:
        self.monitor, self.sewn, self.seen = False, False, None
        self.doubt = self.doubt or "suspect"
        if self.rules.fresh_sockets:
            self.inbox.clear()
        if not self.replay:
            self._suspend()

    def _follow(self, rnd: random.Random | None, *, idle: bool) -> None:
        self._drop_applied()
        if not self.inbox:
            if idle and self.rules.idle_probe:
                self._probe(self._replayed(rnd))
        elif self.inbox[0].seq == self.last + 1:
            self._apply(self._take(two=idle))
        elif self.rules.replay_overlaps:
            self._probe(self._replayed(rnd), hole=True)
        else:
            before = self.last
            for batch in self.engine.replay(self.last + 1, rnd) or ():
                if batch.seq == self.last + 1:
                    self._apply([batch])
            self._stuck(before)

    def _drop_applied(self) -> None:
        while self.inbox and self.inbox[0].seq <= self.last:
            self.inbox.popleft()

    def _take(self, *, two: bool) -> list[Batch]:
        """Batches of one turn may share records."""
        out = [self.inbox.popleft()]
        if two and self.inbox and self.inbox[0].seq == out[0].seq + 1:
            out.append(self.inbox.popleft())
        return out

    def _turn_without_replay(self) -> None:
        if self.doubt:
            self._prove_by_identity()
            return
        self._drop_applied()
        if not self.inbox:
            return
        if self.inbox[0].seq > self.last + 1:
            self._lost(self.inbox[0].seq - 1, None)
        else:
            self._apply(self._take(two=bool(self.inbox[0].digest % 2)))

    def _prove_by_identity(self) -> None:
        if self.rules.identity_after_connect and not self.link.connected:
            return
        process = self.engine.identity(from_engine=self.rules.identity_from_engine)
        if process is None:
            self._suspend()
        elif self.doubt == "suspect":
            if self.process in {None, process}:  # None: the log did not tell, so nothing contradicts
                self._resume()
            else:
                self._suspend()
                self._new_life()
        elif self.seen is None:
            self.seen = process  # read on this connection; now wait for the first batch
        elif not self.rules.open_with_first_batch and self.life == NO_LIFE:
            self._open(-1, None, partial=False, ghost=self.engine.life, process=self.seen)
        elif self.inbox:
            first = self.inbox[0]
            partial = first.seq > 0 and self.rules.open_with_first_batch
            self._open(first.seq - 1, None, partial=partial, ghost=first.ghost, process=self.seen)

    # ---- proofs

    def _sew(self, got: list[Batch] | None) -> None:
        """Find one live batch in the answer: only then PUB and ROUTER are known to show one life."""
        self._probe(got, hole=self.inbox[0].seq > self.last + 1)
        if not got or self.doubt or not self.inbox:
            return
        known = {batch.seq: batch.digest for batch in got}
        while self.inbox and self.inbox[0].seq not in known and self.inbox[0].seq <= self.last:
            self.inbox.popleft()
        if not self.inbox:
            return
        if self.inbox[0].seq not in known:
            self._stuck(self.last)
        elif known[self.inbox[0].seq] == self.inbox[0].digest:
            self.sewn = True
        else:
            self._reopen()
            self.doubt = "suspect"

    def _probe(self, got: list[Batch] | None, *, hole: bool = False) -> None:
        """Judge an answer to replay(last)."""
        if got is None:
            self.doubt = self.doubt or "suspect"
            self._suspend()
            return
        before = self.last
        same = bool(got) and got[0].seq == before and (self.any_bytes or got[0].digest == self.digest)
        if before >= 0 and not same:
            self._new_life()
            return
        self._resume()
        for batch in got:
            if batch.seq in {self.last, self.last + 1} and not self.doubt:
                self._apply([batch])
        if hole or any(batch.seq > self.last for batch in got):
            self._stuck(before)

    def _stuck(self, before: int) -> None:
        """Replay brought nothing new too often: what is missing is lost."""
        self.failures = 0 if self.last > before else self.failures + 1
        if self.failures > FAILURES_MAX:
            self._new_life()
            self._record(self._next("Gap"))

    def _suspend(self) -> None:
        if self.rules.suspect and not self.suspended and self.n >= 0:
            self.suspended = True
            self._record(self._next("Suspended"))

    def _resume(self) -> None:
        self.doubt = None
        if self.suspended:
            self.suspended = False
            self._record(self._next("Resumed"))

    # ---- lives

    def _reopen(self) -> None:
        self.link.reset()
        self.inbox.clear()
        self.monitor = self.sewn = False

    def _new_life(self) -> None:
        self.doubt, self.failures, self.seen = "fresh", 0, None
        if self.rules.fresh_sockets:
            self._reopen()

    def _fresh(self, got: list[Batch] | None) -> None:
        """A new life from the replay buffer. What follows the first batch comes with the next probe."""
        if got is None:
            self._probe(None)
            return
        lost = [i for i, batch in enumerate(got) if not batch.readable]
        first = got[lost[-1]] if lost else got[0] if got else None
        ghost = first.ghost if first else self.engine.life
        if first is None or (first.seq == 0 and not lost):
            self._open(-1, None, partial=False, ghost=ghost, process=ghost)
        else:  # AT the oldest usable batch: its digest is a proof
            self._open(first.seq, first.digest, partial=True, ghost=ghost, process=ghost)

    def _lost(self, seq: int, digest: int | None) -> None:
        """Policy ``invalidate``: the engine's life goes on, ours starts empty and partial."""
        self._record(self._next("Gap"))
        self._open(seq, digest, partial=True, ghost=self.ghost, process=self.process)

    def _open(self, seq: int, digest: int | None, *, partial: bool, ghost: int | None, process: int | None) -> None:
        self.doubt = None
        self.opened += 1
        self.life = (self.owner, self.opened)
        self.n, self.failures, self.last, self.digest = 0, 0, seq, digest
        self.partial, self.ghost, self.process, self.suspended = partial, ghost, process, False
        self.any_bytes, self.parts, self.ledger = False, [], empty()
        self._record(self._make("Opened", 0))

    # ---- records

    def _next(self, kind: Kind, **more: Any) -> Record:
        self.n += 1
        return self._make(kind, self.n, **more)

    def _make(self, kind: Kind, n: int, **more: Any) -> Record:
        return Record(
            kind, self.rank, self.owner, self.life, n,
            seq=self.last, digest=self.digest, process=self.process if self.rules.identity_on_log else None,
            partial=self.partial, suspended=self.suspended, ghost=self.ghost, **more,
        )  # fmt: skip

    def _record(self, record: Record) -> None:
        if record.kind == "Checkpoint" and record.n < 0:  # a part that waited: it is numbered as it leaves
            self.n += 1
            record = msgspec.structs.replace(record, n=self.n)
        self._send(record)

    def _apply(self, batches: Sequence[Batch]) -> None:
        if batches[0].seq <= self.last:
            return
        rows: list[dict[int, list[Change]]] = [{group: [] for group in GROUPS}]
        lost: Batch | None = None
        for batch in batches:
            if not batch.readable:
                lost = batch
                break
            self._cover(batch)
            self._count(batch, rows)
        records = [tuple(part[group]) for part in rows for group in GROUPS if part[group]]
        for i, changes in enumerate(records):
            self._record(self._next("Events", changes=changes, end=i == len(records) - 1))
        if lost:
            self._cover(lost)  # not before: what was applied stands at the batch before it
            self._lost(lost.seq, lost.digest)
        elif not records:
            self._record(self._next("Heartbeat"))

    def _cover(self, batch: Batch) -> None:
        self.last, self.digest, self.ghost, self.any_bytes = batch.seq, batch.digest, batch.ghost, False

    def _count(self, batch: Batch, rows: list[dict[int, list[Change]]]) -> None:
        """Copies are counted: only the first and the last of a block are effective."""
        for event in batch.events:
            if event.op == "clear":
                self.partial = False
                wipe_gpu(self.ledger)
                if self.rules.cut_at_clear:
                    rows += [{0: [Change("clear", 0, -1)], 1: []}, {group: [] for group in GROUPS}]
                else:
                    for group in GROUPS:
                        rows[-1][group].append(Change("clear", group, -1))
                continue
            copies = self.ledger[event.lane]
            if event.op == "store":
                copies[event.hash] += 1
                effective = copies[event.hash] == 1
            else:
                effective = copies[event.hash] == 1
                copies[event.hash] = max(0, copies[event.hash] - 1)
            rows[-1][GROUP[event.lane]].append(Change(event.op, event.lane, event.hash, effective))

    def beat(self) -> None:
        """An answered probe without news."""
        if self.phase == "running" and not self.doubt and self.n >= 0:
            self._record(self._next("Heartbeat"))

    def checkpoint(self) -> None:
        """The ledger in two parts."""
        if self.phase != "running" or self.doubt == "fresh" or self.n < 0 or self.parts or self.any_bytes:
            return
        if self.doubt:
            self._suspend()
        for part in PARTS:
            puts = tuple(
                Put(lane, block, copies)
                for lane in LANES
                for block, copies in self.ledger[lane].items()
                if copies and block // 2 == part
            )
            more = {"part": part, "last": part == PARTS[-1], "puts": puts}
            if part and not self.rules.parts_consecutive:
                self.parts.append(self._make("Checkpoint", -1, **more))
            else:
                self._record(self._next("Checkpoint", **more))

    def close(self) -> None:
        """The rank is taken away."""
        if self.phase == "running" and self.n >= 0 and self.doubt != "fresh":
            self._record(self._next("Closed"))
            self.phase = "closed"

    def stop(self) -> None:
        """The bridge is gone or was claimed over."""
        self.phase = "closed"
