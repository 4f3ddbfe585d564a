"""The session of one rank: frames and events in, records and commands out (DESIGN §4). Pure; the caller owns all I/O.

One turn of the caller, for each rank:

    read live frames      -> live()                       queued only
    read replay frames    -> replayed(), replay_ended()   queued only
    drain the monitor     -> connected(), disconnected()  a disconnect throws away what was queued
    step(now)             -> commands to execute, in order; only here batches are applied

Reading before draining and draining before stepping is what makes a restart visible that looks contiguous
(``...4 | 5...``). Batches are applied in sequence order, exactly once:

* every replay request starts at the last covered batch, whose bytes must be equal, else it is another life;
* on a connection live batches count once one of them is byte-equal to a batch that is covered (the *seam*);
* a hole has one replay in flight, every sequence of its answer is checked, and after bounded tries it becomes a Gap;
* a quiet rank is asked again and again for its last batch, as that may be the lost one;
* a disconnect or an unanswered request suspends the rank at once; only proof or a new life ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvledger_bridge.commands import (
    AskProcess,
    AskReplay,
    Command,
    DropReplay,
    Ledger,
    Limits,
    Note,
    OpenData,
    Rank,
    Write,
)
from kvledger_bridge.continuity import OWNING, First, Move, Nothing, Phase, Process, Request, judge
from kvledger_bridge.inbox import Inbox
from kvledger_bridge.lifelog import digest_of
from kvledger_bridge.pace import Work
from kvledger_bridge.snapshot import Part, parts
from kvledger_bridge.tenure import Tenure
from kvledger_bridge.whole import Whole
from kvledger_index.model import ModelEntry
from kvledger_wire.records import LIVE, REPLAYED

ANOTHER = "the engine restarted, or no longer remembers it"
"""What a replay that does not show the last batch means: which of the two, nobody can tell."""


class Session(Tenure):
    """One rank from claim to close. Not thread-safe; see the module's docstring for the order of calls."""

    def __init__(
        self,
        rank: Rank,
        *,
        decode: Callable[[bytes], Work[Any]],
        ledger: Callable[[ModelEntry], Ledger],
        snapshot: Callable[[Any, int], Iterator[Part]] = parts,
        bridge: str,
        version: str = "",
        limits: Limits | None = None,
    ) -> None:
        bounds = limits or Limits()
        super().__init__(
            rank, decode=decode, ledger=ledger, snapshot=snapshot, bridge=bridge, version=version, limits=bounds
        )
        self.attached = False
        self._out.append(OpenData())
        self._checkpoint_wanted = False
        # what was read and not applied
        self._live = Inbox(messages_max=bounds.live_batches_max, bytes_max=bounds.live_bytes_max)
        self._answers = Inbox(messages_max=bounds.replay_batches_max, bytes_max=bounds.replay_bytes_max)
        # the present connection
        self._sewn, self._stale = False, True
        self._followed = False  # a live batch that follows was applied
        self._whole = Whole()
        self._seen: dict[int, bytes] = {}
        self._identity: str | None = None
        self._identity_read = self._identity_asked = False
        # requests
        self._ask: Request | None = None
        self._again = False
        self._stuck = self._silent = 0
        self._retry_at = self._probe_at = self._alive_at = 0.0
        self._room = 0
        """Bytes that this step may still apply; the last batch may exceed it."""

    # ---- what the caller saw

    def live(self, seq: int, payload: bytes) -> None:
        """A batch on the live socket."""
        if self._stale or (self.rank.replay and self.phase not in OWNING):
            return  # of a socket that is about to be closed, or replay will bring it
        self._live.put(seq, payload)

    def replayed(self, seq: int, payload: bytes) -> None:
        """A batch of the answer to the replay in flight; without one it is stale, and dropped."""
        if self._ask is None:
            self.counts.malformed += 1
            return
        self._ask.fresh = True
        self._answers.put(seq, payload)

    def replay_ended(self) -> None:
        """The END marker of an answer."""
        if self._ask is None:
            self.counts.malformed += 1
            return
        self._ask.fresh = True
        self._answers.put(-1, b"")

    def malformed(self) -> None:
        """A message that is none: counted, never fatal."""
        self.counts.malformed += 1

    def drained(self, moment: float) -> None:
        """The live socket held nothing more that was sent before this moment; after what it held was handed over."""
        if not self._stale:
            self._whole.drained(moment)

    def connected(self) -> None:
        """The live socket has a peer. What it sends counts only once the seam is closed."""
        if self.attached:
            self.disconnected()  # a second publisher on one address: nothing tells their batches apart
        if self._stale:
            return
        self.attached, self._sewn, self._followed = True, False, False
        if self.rank.replay:
            self._live.clear()  # replay brings it; without a replay endpoint it may be the start of a life
        self._forget_identity()
        self._retry_at = self._probe_at = 0.0

    def disconnected(self) -> None:
        """The live socket lost its peer: everything read so far, on both sockets, proves nothing any more."""
        if self._stale:
            return
        self.attached = self._sewn = False
        self._live.clear()
        self._forget_identity()
        self._drop_ask()
        self._doubt("disconnected")
        self._retry_at = 0.0
        if not self.rank.replay and self.phase is not Phase.SUSPECT:
            self._reopen()  # a batch of the old connection that is still on its way must not open a life

    def identified(self, identity: str | None) -> None:
        """The answer to AskProcess; None: it could not be read."""
        if not self._identity_asked:
            return  # it was read on an earlier connection
        self._identity_asked = False
        if self.phase is Phase.FOLLOWING:
            self._still(identity)
            return
        if self.phase is not Phase.SUSPECT:
            # an engine publishes before its server listens: what it does not tell yet, it may before the first batch
            self._identity, self._identity_read = identity, identity is not None or bool(self._live)
            if not self._identity_read:
                self._back_off()
            return
        self._identity, self._identity_read = identity, True
        same = judge(self._log.known(), Process(identity))
        if same is None and self._log.process is not None:
            self._identity_read = False
            self._back_off()
        elif same:
            self._prove("process")
        else:
            self._new_life("the engine's process is another one")

    # ---- what the caller asks

    @property
    def wants_live(self) -> bool:
        """False: leave further live frames where they are."""
        return not self._live.full

    @property
    def wants_replay(self) -> bool:
        """False: leave further replay frames where they are."""
        return not self._answers.full

    @property
    def known(self) -> float | None:
        """Up to when all that the engine sent is in what was written so far; None: never."""
        return self._whole.known

    @property
    def loading(self) -> bool:
        """Whether a whole replay buffer is being read."""
        return self._ask is not None and self._ask.load

    @property
    def ready(self) -> bool:
        """Whether another step would do something at once."""
        live = self._live and self.phase is Phase.FOLLOWING
        due = live and (not self.rank.replay or (self._sewn and self._live.first <= self.last + 1))
        return bool(self._answers or self._out or self._log.covering or self._log.checkpointing or due)

    @property
    def covering(self) -> bool:
        """Whether a large batch is applied in part: the next steps apply the rest of it, a piece each."""
        return self._log.covering

    @property
    def checkpointing(self) -> bool:
        """Whether a checkpoint is being written, or will be with the next step."""
        return self.phase in OWNING and (self._checkpoint_wanted or self._log.checkpointing)

    def checkpoint(self) -> None:
        """Write the ledger as it stands, one part per step; nothing is applied meanwhile.

        Given up if there is no life, or anything else has to be said of the rank: then ask again.
        """
        self._checkpoint_wanted = self.phase in OWNING

    def step(self, now: float, *, batches_max: int, may_load: bool = True) -> list[Command]:
        """Apply at most ``batches_max`` batches, fewer of long ones, and return the commands due, in order.

        Of a batch with more than ``pace.PIECE_BLOCKS`` blocks it is a piece that counts. While one is applied in part,
        nothing is asked of the engine, nothing else is applied, and what the caller saw is written before it.
        ``may_load`` False defers reading a whole replay buffer: the bridge reads enough of them. O(batches).
        """
        if self._ask is not None and (self._ask.fresh or now - self._now > self._limits.replay_seconds_max / 2):
            # an answer is not late because nobody was looking
            self._ask.fresh, self._ask.heard_at = False, now
        self._now = now
        self._room = self._limits.step_bytes_max
        before = (self.life, self._log.n)
        if self.phase is Phase.CLAIMING:
            self._claim()
        elif self.phase in OWNING and self._log.covering:
            if batches_max > 0:
                self._log.go_on()
        elif self.phase in OWNING:
            if not self._checkpoint():
                left = self._take_answers(batches_max)
                self._take_live(left)
            if not self._log.covering:
                self._watch_answer()
                self._request(may_load=may_load)
        known = self._whole.known
        if self._whole.look(whole=self._is_whole(), wrote=before != (self.life, self._log.n)):
            self._log.beat()
        out = self._dated(known)
        self._out.clear()
        self._stale = False
        return out

    def _dated(self, known: float | None) -> list[Command]:
        """What is due. Behind every record but the last more of what was read is to come, and the link to Kafka may
        break between the two: only the last one says what is known now.
        """
        out: list[Command] = []
        moment = self._whole.known
        for each in reversed(self._out):
            if isinstance(each, Write):
                out.append(each._replace(known=moment))
                moment = known
            else:
                out.append(each)
        return out[::-1]

    def _is_whole(self) -> bool:
        """Whether all that was read is applied, and nothing is known to be missing. Without a replay endpoint only a
        batch that follows says that none was lost before it.
        """
        if self.phase is not Phase.FOLLOWING or self._live or self._answers or self._again or self._log.covering:
            return False
        if not self.rank.replay:
            return self._followed
        return self._ask is None or self._ask.probe

    def _begin(self, why: str, claim_at: float) -> None:
        super()._begin(why, claim_at)
        self._whole = Whole()  # of what was written something may be lost: what the log gives back may be older

    def _quit(self) -> None:
        self._live.clear()
        self._drop_answers()

    # ---- checkpoints

    def _checkpoint(self) -> bool:
        """Write a part, if one is due; whether one was."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        if wanted and self.phase in {Phase.FOLLOWING, Phase.SUSPECT} and not self._log.checkpointing:
            self._log.begin_checkpoint()
        if not self._log.checkpointing:
            return False
        self._log.write_part()
        return True

    # ---- answers of the replay endpoint

    def _take_answers(self, left: int) -> int:
        while self._answers and self._ask is not None and min(left, self._room) > 0 and not self._log.covering:
            seq, payload = self._answers.pop()
            self._room -= len(payload)
            if not payload:
                self._finish(self._ask, ended=True)
            else:
                left -= 1
                self._answer(self._ask, seq, payload)
        return left

    def _answer(self, ask: Request, seq: int, payload: bytes) -> None:
        """One batch of the answer, in the order of the answer; the first one is the proof."""
        digest = digest_of(payload)
        ask.frames += 1
        if self.phase is Phase.OPENING:
            if seq > 0:  # the buffer begins later: start at the oldest batch at hand
                self._open(seq, digest, partial=True, why=f"{self._why}; the replay buffer begins at {seq}")
                return
            self._open(-1, b"", partial=False, why=self._why)
        elif ask.frames == 1:
            if not judge(ask.known, First(seq, digest)):
                self._new_life(f"replay({ask.start}) does not begin with the batch that was covered last: {ANOTHER}")
                return
            self._prove("replay")
        self._remember(seq, digest)
        if seq <= self.last or ask.beyond is not None:
            return
        if seq > self.last + 1:
            self.counts.holes += 1
            ask.beyond = (seq, payload)
            return
        self.counts.replayed += 1
        self.counts.late += ask.probe
        self._log.cover(seq, payload, digest, REPLAYED)

    def _finish(self, ask: Request, *, ended: bool) -> None:
        """The answer is over, by END or by silence after some of it; what is missing is asked for again."""
        self._drop_answers()
        self._silent = 0
        self._probe_at = self._now + self._limits.idle_probe_seconds
        if ask.frames == 0:
            if self.phase is Phase.OPENING:
                self._open(-1, b"", partial=False, why=self._why)
            elif not judge(ask.known, Nothing()):
                self._new_life(f"replay({ask.start}) does not hold the batch that was covered last: {ANOTHER}")
                return
            else:
                self._prove("replay")
        complete = ended and ask.beyond is None and self.last >= ask.expected
        self._again = not complete
        if complete or self.last > ask.known.seq:
            self._stuck = 0
        else:
            self._stuck += 1
            self._retry_at = self._now + self._pause(self._stuck)
        if self._stuck >= self._limits.hole_tries_max:
            self._give_up(ask)
        elif complete and ask.written == (self.life, self._log.n):
            self._log.beat()

    def _give_up(self, ask: Request) -> None:
        """Replay does not help. A batch beyond the hole starts a partial life; without one the rank is suspect."""
        self._stuck, self._again = 0, False
        at = ask.beyond
        if self._sew() and self._live and (at is None or self._live.first < at[0]):
            at = self._live.head()
        if at is not None and at[0] > self.last + 1:
            self._log.lose(*at)
            self._again, self._retry_at = True, self._now
        elif self._live and not self._sewn:
            self._part("the live socket shows batches that replay does not have")
        else:
            self._doubt("replay does not finish")
            self._back_off()

    def _watch_answer(self) -> None:
        ask = self._ask
        if ask is None or self._answers or self._now - ask.heard_at <= self._limits.replay_seconds_max:
            return
        self._out.append(DropReplay())
        if ask.frames:
            self._finish(ask, ended=False)
            return
        self._drop_answers()
        self.counts.unanswered += 1
        self._doubt("replay unanswered")
        self._back_off()

    def _request(self, *, may_load: bool) -> None:
        """Ask for what is due now, if anything: one replay in flight, or the process."""
        if not self.rank.replay:
            self._request_process()
            return
        load = probe = self.phase is Phase.OPENING
        if self._ask is not None or self._now < self._retry_at or (load and not may_load) or not self._provable():
            return
        expected = -1
        if self.phase is Phase.FOLLOWING:
            hole = bool(self._live) and self._live.first > self.last + 1
            probe = not (self._again or hole or (self._live and not self._sewn))
            if probe and self._now < self._probe_at:
                return
            self.counts.holes += hole and self._sewn
            self.counts.probes += probe
            expected = self._live.newest if self._live else -1
        start = 0 if load else max(self.last, 0)
        written = (self.life, self._log.n)
        self._ask = Request(start, self._log.known(), self._now, expected, written, load, probe and not load)
        self._out.append(AskReplay(start))

    def _provable(self) -> bool:
        """Whether an answer may end a suspicion: proven while SUB is away, a restart before it is back would go unseen
        until the next probe.
        """
        return self.attached or self.phase is not Phase.SUSPECT

    def _request_process(self) -> None:
        if self.phase is Phase.SUSPECT and not self.rank.process:
            self._new_life("without a replay endpoint nothing proves the same engine")
        if self.phase is Phase.FOLLOWING:
            due = self._log.process is not None and self._now >= self._alive_at
        else:
            due = not self._identity_read and self._now >= self._retry_at
        if due and self.rank.process and self.attached and not self._identity_asked:
            self._identity_asked = True
            self._out.append(AskProcess())

    def _still(self, identity: str | None) -> None:
        """An idle engine's process was read again, on the connection on which it was proven."""
        self._alive_at = self._now + self._limits.alive_seconds
        same = judge(self._log.known(), Process(identity))
        if same is None:
            return  # it could not be read: the rank goes stale, and then gone, unless it can be again
        if same:
            self._log.beat(alive=True)
        else:
            self._new_life("the engine's process is another one")

    # ---- live batches

    def _take_live(self, left: int) -> None:
        if self.phase is Phase.OPENING and not self.rank.replay:
            self._open_live()
        while self._live and min(left, self._room) > 0 and self._may_apply_live():
            if self._live.first > self.last + 1 and self.rank.replay:
                return  # a hole: replay first
            seq, payload = self._live.pop()
            self._room -= len(payload)
            if seq <= self.last:
                self._overlap(seq, payload)
                continue
            left -= 1
            self._followed = True
            self.counts.live += 1
            self._probe_at = self._now + self._limits.idle_probe_seconds
            self._alive_at = self._now + self._limits.alive_seconds
            if seq > self.last + 1:
                self.counts.holes += 1
                self._log.lose(seq, payload)
            else:
                digest = digest_of(payload)
                self._remember(seq, digest)
                self._log.cover(seq, payload, digest, LIVE)

    def _may_apply_live(self) -> bool:
        return not self._log.covering and self.phase is Phase.FOLLOWING and self._sew()

    def _open_live(self) -> None:
        """Without a replay endpoint a life opens with the first live batch."""
        if not self._live or (self.rank.process and not self._identity_read):
            return
        if self._live.first == 0:
            self._open(-1, b"", partial=False, why=self._why)
            return
        seq, payload = self._live.pop()
        self._open(seq, digest_of(payload), partial=True, why=f"{self._why}; the first live batch is {seq}")
        self._followed = True

    def _overlap(self, seq: int, payload: bytes) -> None:
        """A sequence that is covered already: a duplicate, unless its bytes are known to be others."""
        self.counts.overlaps += 1
        known = self._seen.get(seq)
        if known is not None and known != digest_of(payload):
            self._part(f"batch {seq} came again with other bytes")

    def _sew(self) -> bool:
        """Close the seam if a waiting live batch is byte-equal to a known one; a mismatch parts live and replay."""
        if self._sewn or not self.rank.replay:
            return True  # without replay: the life began on this connection, or its process was read on it
        while self._live:
            seq, payload = self._live.head()
            known = self._seen.get(seq)
            if known is None and seq > self.last:
                return False  # replay has to bring it first
            if known is None:
                self._live.pop()
            elif known == digest_of(payload):
                self._sewn = True
                self._shorten(self._limits.sewn_known_max)
                return True
            else:
                self._part(f"live and replay differ in batch {seq}")
                return False
        return False

    def _part(self, why: str) -> None:
        """Live and replay show different lives: which of them is there now only new connections can tell."""
        self.counts.seam_mismatches += 1
        self._out.append(Note("seam_mismatch", why))
        self._doubt(why)
        self._reopen()
        self._back_off()

    # ---- lives

    def _open(self, seq: int, digest: bytes, *, partial: bool, why: str) -> None:
        self._move(Move.OPENED)
        self._log.open(seq, digest, partial=partial, why=why, process=self._identity)
        if self.rank.replay and not self.attached:
            self._doubt("read from replay, and no live socket would show a restart")
        self._seen.clear()
        if seq >= 0:
            self._remember(seq, digest)
        self._probe_at = self._now + self._limits.idle_probe_seconds
        self._alive_at = self._now + self._limits.alive_seconds

    def _doubt(self, why: str) -> None:
        """Continuity is unknown from here on; written at once, and once."""
        if self.phase is Phase.FOLLOWING:
            self._move(Move.DOUBTED)
            self._log.suspend(why)

    def _prove(self, how: str) -> None:
        if self.phase is Phase.SUSPECT:
            self._move(Move.PROVEN)
            self._log.resume(how)

    def _new_life(self, why: str) -> None:
        """Not the life that we know: a new socket first, then from the start."""
        self._doubt(why)
        self._move(Move.BROKEN)
        self._log.forget()
        self._why = why
        self._reopen()
        self._retry_at = self._now

    def _reopen(self) -> None:
        self._live.clear()
        self._drop_ask()
        self._seen.clear()
        self._forget_identity()
        self.attached = self._sewn = self._again = False
        self._stuck, self._retry_at = 0, 0.0
        self._stale = True  # until the caller has the command, what it reads is of the old socket
        self._out.append(OpenData())

    # ---- small ones

    def _remember(self, seq: int, digest: bytes) -> None:
        self._seen[seq] = digest
        self._shorten(self._limits.sewn_known_max if self._sewn else self._limits.open_known_max)

    def _shorten(self, batches_max: int) -> None:
        while len(self._seen) > batches_max:
            del self._seen[next(iter(self._seen))]

    def _forget_identity(self) -> None:
        self._identity, self._identity_read, self._identity_asked = None, False, False

    def _drop_answers(self) -> None:
        self._ask = None
        self._answers.clear()

    def _drop_ask(self) -> None:
        if self._ask is not None:
            self._drop_answers()
            self._out.append(DropReplay())

    def _back_off(self) -> None:
        self._silent += 1
        self._retry_at = self._now + self._pause(self._silent)
