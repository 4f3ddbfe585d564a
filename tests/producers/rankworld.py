"""A made-up engine, a lossy link and a session between them, for tests without sockets.

Payloads are JSON, so that a test can say what a batch does in a word: ``+a`` stores a copy of block a, ``-a`` removes
one, ``!`` clears. Reading the session's records through ``accept`` gives what any reader of the log would believe.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvledger_bridge.commands import (
    Announce,
    AskProcess,
    AskReplay,
    CloseAll,
    Command,
    DeadLetter,
    DropReplay,
    Limits,
    Note,
    OpenData,
    Rank,
    Restore,
    Write,
)
from kvledger_bridge.continuity import Phase
from kvledger_bridge.engine import Session
from kvledger_bridge.errors import Undecodable
from kvledger_bridge.lifelog import digest_of
from kvledger_bridge.pace import Work
from kvledger_bridge.snapshot import Part
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.accept import Applied, Dropped, Loading, Opening, RankState, accept
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import (
    CLEARED,
    REMOVED,
    STORED,
    Change,
    Checkpoint,
    Events,
    Gap,
    Held,
    Pointer,
    decode_event,
    encode,
)

ENTRY = ModelEntry(model="m")
KEEP = ModelEntry(model="m", loss="keep")
WORDS_AT_ONCE = 1


class Batch(msgspec.Struct, frozen=True):
    """What ``decode`` returns here."""

    words: tuple[str, ...]
    rank: int | None
    unknown: tuple[str, ...] = ()
    failures: tuple[Any, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """An event that could not be read."""

    index: int
    reason: str


class Piece(msgspec.Struct, frozen=True):
    """What the ledger here returns."""

    group: int | str | None
    changes: tuple[Change, ...]
    unplaced: tuple[tuple[int, int], ...] = ()
    spec: GroupSpec | None = None
    uncertain: tuple[str, ...] = ()


def payload(*words: str, tag: int = 0, rank: int | None = 0) -> bytes:
    """A batch; ``tag`` makes equal words of different lives different bytes, as engine clocks do."""
    return json.dumps({"words": words, "tag": tag, "rank": rank}).encode()


def decode(raw: bytes) -> Work[Batch]:
    """``?`` alone is no batch at all; the word ``?`` is an event that cannot be read; ``u:x`` is an unknown tag."""
    if raw.startswith(b"?"):
        msg = "not an engine batch"
        raise Undecodable(msg)
    yield from ()
    content = json.loads(raw)
    words = content["words"]
    return Batch(
        tuple(w for w in words if w[0] in "+-!x"),
        content["rank"],
        tuple(w for w in words if w[0] == "u"),
        tuple(Failure(i, "unreadable") for i, w in enumerate(words) if w == "?"),
    )


class Counting:
    """A ledger of one group that counts copies; changes name blocks in ``unplaced`` for brevity, one each.

    Work on a batch of more than WORDS_AT_ONCE words pauses before each further one.
    """

    def __init__(self, _entry: ModelEntry) -> None:
        self.copies: Counter[str] = Counter()
        self.doubts: list[str] = []

    def work(self, seq: int, batch: Batch, origin: int) -> Work[Sequence[Piece]]:
        """``x`` is a defect of the ledger."""
        self.doubts += batch.unknown
        pieces: list[Piece] = []
        for place, word in enumerate(batch.words):
            if place >= WORDS_AT_ONCE:
                yield
            if word == "x":
                msg = "secret"
                raise ValueError(msg)
            block = word[1:]
            if word == "!":
                self.copies.clear()
                pieces.append(Piece(RANK_WIDE, (Change(CLEARED, 0, seq, 0.0, origin=origin),)))
            elif word[0] == "+":
                self.copies[block] += 1
                pieces.append(self._piece(STORED, seq, block, origin, effective=self.copies[block] == 1))
            elif self.copies[block]:
                self.copies[block] -= 1
                pieces.append(self._piece(REMOVED, seq, block, origin, effective=not self.copies[block]))
        return pieces

    def take_uncertain(self) -> tuple[str, ...]:
        """Once each."""
        doubts, self.doubts = tuple(self.doubts), []
        return doubts

    @staticmethod
    def _piece(op: int, seq: int, block: str, origin: int, *, effective: bool) -> Piece:
        bit = bytes([effective])
        return Piece(0, (Change(op, 0, seq, 0.0, unplaced=block.encode(), origin=origin, unplaced_effective=bit),))


def snapshot(ledger: Counting, seq: int) -> Iterator[Part]:
    """One part per block."""
    for block, copies in ledger.copies.items():
        if copies:
            change = Change(STORED, 0, seq, 0.0, unplaced=block.encode())
            yield Part((), lanes=(Held(0, change, copies.to_bytes(2, "big")),))
    yield Part((), last=True)


def recount(log: Sequence[tuple[int | str | None, Any]], start: int, end: int) -> tuple[RankState, Counting]:
    """What the log says from offset ``start`` to ``end``."""
    state, ledger = RankState(), Counting(ENTRY)
    for offset in range(max(0, start), end):
        group, record = log[offset]
        due = state.load
        effects = accept(state, group, record, offset)
        if any(isinstance(effect, Opening | Loading | Dropped) for effect in effects):
            ledger.copies.clear()
        if isinstance(record, Checkpoint):
            if state.n == record.n and (any(isinstance(e, Loading) for e in effects) or 0 < due == record.part):
                for held in record.lanes:
                    ledger.copies[held.change.unplaced.decode()] = int.from_bytes(held.copies, "big")
            continue
        for effect in effects:
            for change in effect.changes if isinstance(effect, Applied) else ():
                name = change.unplaced.decode()
                if change.op == CLEARED:
                    ledger.copies.clear()
                else:
                    ledger.copies[name] += 1 if change.op == STORED else -1
    return state, ledger


class Reader:
    """Anyone who reads the rank's log."""

    def __init__(self) -> None:
        self.state = RankState()
        self.blocks: set[str] = set()
        self.offset = 0
        self.log: list[tuple[int | str | None, Any]] = []

    def read(self, group: int | str | None, record: Any) -> int:
        """Take one record as it would come off the wire; returns its offset."""
        copy = decode_event(encode(record))
        assert copy == record
        self.log.append((group, copy))
        for effect in accept(self.state, group, copy, self.offset):
            match effect:
                case Opening() | Loading() | Dropped():
                    self.blocks.clear()
                case Applied(changes=changes):
                    self._apply(changes)
        self.offset += 1
        return self.offset - 1

    def _apply(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            name = change.unplaced.decode()
            if change.op == CLEARED:
                self.blocks.clear()
            elif not any(change.unplaced_effective):
                pass
            elif change.op == STORED:
                self.blocks.add(name)
            else:
                self.blocks.discard(name)

    @property
    def status(self) -> str:
        """What an answer from this rank could be called at best."""
        state = self.state
        if not state.loaded or state.closed:
            return "unknown"
        if state.suspended:
            return "suspended"
        return "uncertain" if state.uncertain else "at_least" if state.partial else "exact"

    def kinds(self, since: int = 0) -> list[str]:
        """Names of the records from offset ``since`` on, in order."""
        return [type(record).__name__ for _, record in self.log[since:]]

    def of(self, kind: type) -> list[Any]:
        """Records of one kind, in order."""
        return [record for _, record in self.log if isinstance(record, kind)]


def newest_pointer(replicas: Sequence[Any], owner: int) -> Pointer | None:
    """The pointer of the highest owner below ``owner``; the newest of that one."""
    found = [each for each in replicas if isinstance(each, Pointer) and each.owner < owner]
    return max(reversed(found), key=lambda each: each.owner) if found else None


class Engine:
    """One engine process after another at the same addresses, with a replay buffer."""

    def __init__(self, buffer_steps: int = 1000) -> None:
        self.life = 0
        self.up = True
        self.next = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.copies: Counter[str] = Counter()
        self.truth: dict[bytes, frozenset[str]] = {}
        """What was resident right after the batch with this digest: the ghost that answers are compared with."""

    def step(self, *words: str, raw: bytes | None = None) -> tuple[int, bytes]:
        """Do what ``words`` say and return the batch's (sequence, payload)."""
        for word in words:
            if word == "!":
                self.copies.clear()
            elif word[0] == "+":
                self.copies[word[1:]] += 1
            elif word[0] == "-":
                self.copies[word[1:]] -= 1
        data = payload(*words, tag=self.life * 1_000_000 + self.next) if raw is None else raw
        self.truth[digest_of(data)] = self.resident
        message = (self.next, data)
        self.buffer.append(message)
        self.next += 1
        return message

    @property
    def resident(self) -> frozenset[str]:
        """Blocks with at least one copy."""
        return frozenset(block for block, copies in self.copies.items() if copies > 0)

    def restart(self) -> None:
        """A new process: nothing is left."""
        self.life += 1
        self.next = 0
        self.buffer.clear()
        self.copies.clear()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What an honest answer holds."""
        return [message for message in self.buffer if message[0] >= start]


class Desk:
    """A session with its shell played by the test: ``turn`` executes what it asks for and collects the rest."""

    def __init__(
        self,
        *,
        entry: ModelEntry = ENTRY,
        replay: bool = True,
        process: bool = False,
        limits: Limits | None = None,
        rank: int = 0,
        after: Desk | None = None,
    ) -> None:
        """``after``: an earlier bridge of the same rank, whose log and replicas topic go on."""
        self.session = Session(
            Rank("r", rank, entry, replay, process),
            decode=decode,
            ledger=Counting,
            snapshot=snapshot,
            bridge="b",
            limits=limits,
        )
        self.reader: Reader = Reader() if after is None else after.reader
        self.now = 0.0
        self.replicas: list[Any] = [] if after is None else after.replicas
        self.commands: list[Command] = []
        """Those of the last turn that the test has to act on: requests, sockets, dead letters, notes."""
        self.hold: Callable[[Any], bool] = lambda _record: False
        """Records that Kafka does not acknowledge yet."""
        self.dates: list[tuple[str, float | None]] = []
        """(kind, up to when all is known) of each record."""
        self.restores: Callable[[int, int, int], object] | None = None
        """What answers a Restore; None: ``restore``."""

    def turn(self, dt: float = 0.0, *, batches_max: int = 1000, may_load: bool = True) -> list[Command]:
        """One step ``dt`` later; records reach the reader and are acknowledged at once."""
        self.now += dt
        self.commands = []
        self._look()
        while True:
            commands = self.session.step(self.now, batches_max=batches_max, may_load=may_load)
            for command in commands:
                self._execute(command)
            self._look()
            if batches_max < 1000 or not (commands or self.session.covering):
                return self.commands

    def _look(self) -> None:
        """The replicas topic, as far as the claim it waits for is acknowledged."""
        session = self.session
        if session.phase is Phase.POINTING:
            session.pointed(newest_pointer(self.replicas, session.owner))

    def wait(self, seconds: float) -> list[Command]:
        """Time passes while the loop turns; the commands of all those turns."""
        seen: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            seen += self.turn(0.25)
        self.commands = seen
        return seen

    def _execute(self, command: Command) -> None:
        match command:
            case Write(group=group, record=record, known=known):
                self.dates.append((type(record).__name__, known))
                offset = self.reader.read(group, record)
                if not self.hold(record):
                    self.session.acknowledged(record, offset)
            case Announce(record=record):
                self.replicas.append(record)
                if not self.hold(record):
                    self.session.acknowledged(record, len(self.replicas) - 1)
            case Restore(owner=owner, start=start, end=end):
                (self.restores or self.restore)(owner, start, end)
            case _:
                self.commands.append(command)

    def restore(self, owner: int, start: int, end: int) -> None:
        """Read the log as it stands."""
        state, ledger = recount(self.reader.log, start, end)
        if state.loaded and not state.closed:
            self.session.restored(owner, state, ledger)
        else:
            self.session.unrestorable(owner, "not loaded")

    def answer(self, messages: Sequence[tuple[int, bytes]], *, end: bool = True) -> None:
        """Frames of the replay socket."""
        for message in messages:
            self.session.replayed(*message)
        if end:
            self.session.replay_ended()

    def serve(self, engine: Engine) -> int | None:
        """Answer the request of the last turn honestly; returns where it started, None without one."""
        starts = self.asked()
        if not starts:
            return None
        self.answer(engine.replay(starts[-1]))
        return starts[-1]

    def asked(self) -> list[int]:
        """Starts of the replay requests of the last turn."""
        return [command.start for command in self.commands if isinstance(command, AskReplay)]

    def did(self, kind: type) -> int:
        """How many commands of one kind the last turn brought."""
        return sum(isinstance(command, kind) for command in self.commands)

    def follow(self, engine: Engine) -> Desk:
        """Claim, connect, replay from the start: the usual beginning."""
        self.turn()
        self.session.connected()
        self.serve(engine)
        self.turn()
        return self

    def sew(self, engine: Engine, *words: str) -> Desk:
        """Publish a live batch and close the seam with it."""
        self.session.live(*engine.step(*words))
        self.turn()
        self.serve(engine)
        self.turn()
        return self


__all__ = [
    "ENTRY",
    "KEEP",
    "AskProcess",
    "AskReplay",
    "CloseAll",
    "Counting",
    "DeadLetter",
    "Desk",
    "DropReplay",
    "Engine",
    "Events",
    "Gap",
    "Note",
    "OpenData",
    "Reader",
    "payload",
]
