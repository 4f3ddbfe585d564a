"""Random losses, restarts, cuts, killed bridges and rebuilt producers: what the log calls exact is, and it recovers.

    engine --PUB, lossy--> wire --+--> session --> pending --> log --> accept
           --ROUTER------> dealer-+            (a rebuilt producer drops what is pending)

The engine keeps, per batch, what was resident right after it. After every step a reader whose status is ``exact`` must
hold exactly that set for the batch it says it covers, and one that is ``at_least`` no more. In the end, with everything
well again, the reader must have caught up with the engine.

Schedules are lists of (action, number) from a seed, weighted so that rare orders come up: far more per second
than a state machine of Hypothesis plays here. A failing one is shortened before it is shown.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from rankworld import ENTRY, KEEP, Desk, Engine

import kvledger_bridge.engine as engine_module
from kvledger_bridge.commands import (
    Announce,
    AskProcess,
    AskReplay,
    Command,
    DropReplay,
    OpenData,
    Restore,
    Write,
)
from kvledger_bridge.continuity import Phase
from kvledger_bridge.engine import Session
from kvledger_bridge.lifelog import LifeLog
from kvledger_wire.accept import RankState
from kvledger_wire.records import Resumed

SCHEDULES = 800
LENGTH_MAX = 90
DISC, CONN = "disconnected", "connected"
WORDS = ("+a", "+b", "+c", "+d", "-a", "-b", "-c", "-d")

WEIGHTS = {
    "publish": 12,
    "publish_badly": 0.4,
    "restart": 1.2,
    "come_up": 1,
    "flap": 1,
    "join": 4,
    "serve": 8,
    "read_process": 2,
    "turn": 14,
    "sync": 5,
    "slip": 0.7,
    "land": 4,
    "rebuild": 0.3,
    "kill": 0.5,
    "land_late": 0.5,
    "checkpoint": 0.7,
}

Schedule = list[tuple[str, int]]


class Pending(Desk):
    """A desk whose Kafka takes records when it likes; a rebuilt producer loses those that it has not taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pending: deque[tuple[bool, Any, Any]] = deque()

    def _execute(self, command: Command) -> None:
        match command:
            case Write(group=group, record=record):
                self.pending.append((True, group, record))
            case Announce(record=record):
                self.pending.append((False, None, record))
            case Restore(owner=owner, start=start, end=end):
                (self.restores or self.restore)(owner, start, end)
            case _:
                self.commands.append(command)

    def land(self, count: int) -> None:
        """Kafka takes the next records and says so."""
        for _ in range(min(count, len(self.pending))):
            events, group, record = self.pending.popleft()
            if events:
                offset = self.reader.read(group, record)
            else:
                self.replicas.append(record)
                offset = len(self.replicas) - 1
            self.session.acknowledged(record, offset)


class World:
    """Engine, wire, dealer, shell and log of one rank. Every action takes one number and decides by it."""

    def __init__(self, seed: int) -> None:
        rnd = random.Random(seed)
        mode = rnd.choice(["replay", "replay", "replay", "none", "process"])
        self.engine = Engine(buffer_steps=rnd.choice([2, 4, 1000]))
        entry = rnd.choice([ENTRY, ENTRY, KEEP])
        self.options = {"entry": entry, "replay": mode == "replay", "process": mode == "process"}
        self.desk = Pending(**self.options)
        self.limbo: deque[tuple[bool, Any, Any]] = deque()
        self.wire: deque[Any] = deque()
        self.joined = False
        self.request: int | None = None
        self.frames: deque[Any] = deque()
        self.identity: list[str | None] = []
        self.process_wanted = False
        self.time = self.served_at = self.cut_at = 0
        self.linked = False
        """Whether the session was told that its live socket has a peer."""

    # ---- the engine

    def publish(self, x: int) -> None:
        """A batch of up to three events, live unless it is lost; some come twice."""
        rnd = random.Random(x)
        if not self.engine.up:
            return
        have, words = dict(self.engine.copies), []
        for word in rnd.choices(WORDS, k=rnd.randint(0, 3)):
            name = word[1:]
            if word[0] == "-" and have.get(name, 0) < 1:
                continue  # an engine removes only what it has
            have[name] = have.get(name, 0) + (1 if word[0] == "+" else -1)
            words.append(word)
        if rnd.random() < 0.03:
            words.insert(0, "!")
            words = [w for w in words if w[0] != "-"]
        message = self.engine.step(*words)
        if self.joined and rnd.random() > 0.2:
            self.wire.extend([message] * (1 + (rnd.random() < 0.05)))

    def publish_badly(self, x: int) -> None:
        """Bytes that are no batch, a batch with an unreadable event, or a sequence that is never sent."""
        if not self.engine.up:
            return
        if x % 3 == 0:
            self.engine.next += 1
            return
        number = self.engine.life * 1000 + self.engine.next
        message = self.engine.step("+a", "?") if x % 3 == 1 else self.engine.step(raw=b"?%d" % number)
        if self.joined:
            self.wire.append(message)

    def restart(self, x: int) -> None:
        """A new process; an answer under way is cut, a request that was not read may reach the new one."""
        self.flap(x)
        self.engine.restart()
        self.engine.up = x % 5 > 0
        while len(self.frames) > x // 8 % 4:
            self.frames.pop()
        if x % 2:
            self.request = None

    def come_up(self, _x: int) -> None:
        """After a restart that left it down."""
        self.engine.up = True

    def flap(self, x: int) -> None:
        """The live connection breaks; the last batches on it may be lost."""
        if not self.joined:
            return
        lost = x // 16 % 4
        while lost and self.wire and self.wire[-1] not in (DISC, CONN):
            self.wire.pop()
            lost -= 1
        self.wire.append(DISC)
        self.joined = False
        self.time += 1
        self.cut_at = self.time

    # ---- the shell

    def join(self, _x: int) -> None:
        """SUB finds the engine."""
        if self.engine.up and not self.joined:
            self.joined = True
            self.wire.append(CONN)

    def serve(self, x: int) -> None:
        """The ROUTER answers, perhaps not at all, with holes, or without END."""
        rnd = random.Random(x)
        if self.request is None or not self.engine.up:
            return
        if rnd.random() < 0.05:
            self.request = None
            return
        lossy = rnd.random() < 0.3
        self._answer(lambda i: i == 0 or not lossy or rnd.random() > 0.2, end=rnd.random() > 0.05)

    def _answer(self, keep: Callable[[int], bool] = lambda _i: True, *, end: bool = True) -> None:
        if self.request is None or not self.engine.up:
            return
        self.frames.extend(m for i, m in enumerate(self.engine.replay(self.request)) if keep(i))
        if end:
            self.frames.append(None)
        self.request = None
        self.time += 1
        self.served_at = self.time

    def read_process(self, _x: int) -> None:
        """Somebody asks the engine who it is; the answer reaches the session with the next turn."""
        if self.process_wanted:
            self.process_wanted = False
            self.identity.append(f"p{self.engine.life}" if self.engine.up else None)

    def turn(self, x: int) -> None:
        """One turn of the shell: read some, drain the monitor, step."""
        self._turn(live=x % 7, replay=x // 8 % 10, dt=(0.0, 0.0, 0.3, 1.1)[x // 128 % 4],
                   batches_max=(1, 3, 1000)[x // 512 % 3], leftover=x // 2048 % 3)  # fmt: skip

    def _turn(self, *, live: int, replay: int, dt: float, batches_max: int, leftover: int) -> None:
        session = self.desk.session
        events: list[str] = []
        for _ in range(min(live, len(self.wire))):
            item = self.wire.popleft()
            if item in (DISC, CONN):
                events.append(item)
            elif session.wants_live:
                session.live(*item)
        for _ in range(min(replay, len(self.frames))):
            frame = self.frames.popleft()
            if frame is None:
                session.replay_ended()
            else:
                session.replayed(*frame)
        for identity in self.identity:
            session.identified(identity)
        self.identity.clear()
        events += [item for item in self.wire if item in (DISC, CONN)]
        self._discard(leftover if DISC in events else None)
        for event in events:
            (session.disconnected if event == DISC else session.connected)()
            self.linked = event == CONN
        before = len(self.desk.pending)
        for command in self.desk.turn(dt, batches_max=batches_max):
            self._obey(command)
        for _, _, record in list(self.desk.pending)[before:]:
            if isinstance(record, Resumed) and record.how == "replay":
                assert self.served_at > self.cut_at, "proven by an answer from before the disconnect"

    def _discard(self, leftover: int | None) -> None:
        """The monitor was drained. After a disconnect the queue is thrown away, but for batches of the old connection
        that reach it just after the event.
        """
        items = list(self.wire)
        if leftover is not None:
            items = items[: items.index(DISC)] if DISC in items else []
            items = [item for item in items if item != CONN][:leftover]
        self.wire = deque(item for item in items if item not in (DISC, CONN))

    def _obey(self, command: Command) -> None:
        match command:
            case OpenData():
                self.wire.clear()
                self.joined = self.linked = False
            case AskReplay(start=start):
                self.request = start
            case DropReplay():
                self.request, self.frames = None, deque()
            case AskProcess():
                self.process_wanted = True
            case _:
                pass

    def sync(self, x: int) -> None:
        """A healthy stretch."""
        for _ in range(2):
            self.join(x)
            self._answer()
            self.read_process(x)
            self._turn(live=9, replay=9, dt=0.0, batches_max=1000, leftover=0)
            self.desk.land(9)

    def slip(self, x: int) -> None:
        """A connection breaks and the engine is proven; then it restarts before anybody is connected again."""
        self.flap(x)
        for _ in range(2):
            self._turn(live=9, replay=9, dt=0.0, batches_max=1000, leftover=x % 2)
            self._answer()
        self._turn(live=9, replay=9, dt=0.0, batches_max=1000, leftover=0)
        self.desk.land(9)
        self.restart(x)
        for i in range(x // 4 % 4):
            self.publish(x + i)
        self.join(x)

    def land(self, x: int) -> None:
        """Kafka takes some records."""
        self.desk.land(1 + x % 12)

    def rebuild(self, x: int) -> None:
        """The producer turns fatal: a prefix of what was under way may have landed."""
        self.desk.land(x % 4)
        self.desk.pending.clear()
        self.desk.session.release("the producer was rebuilt")

    def kill(self, x: int) -> None:
        """The bridge dies, another one takes over; a prefix of what was under way may land, some of it later."""
        self.limbo = deque(list(self.desk.pending)[: x % 12])
        self.land_late(x // 16)
        self.desk = Pending(after=self.desk, **self.options)
        self.wire.clear()
        self.identity.clear()
        self.joined = self.linked = self.process_wanted = False
        self.request, self.frames = None, deque()

    def land_late(self, x: int) -> None:
        """Kafka takes what a dead bridge had sent."""
        for _ in range(min(x % 12, len(self.limbo))):
            events, group, record = self.limbo.popleft()
            if events:
                self.desk.reader.read(group, record)
            else:
                self.desk.replicas.append(record)

    def checkpoint(self, _x: int) -> None:
        """The shell thinks that one is due."""
        self.desk.session.checkpoint()

    # ---- what must hold

    def check(self) -> None:
        """Safety, after every action."""
        reader, session = self.desk.reader, self.desk.session
        if session.phase is Phase.FOLLOWING and session.rank.replay:
            assert self.linked, "called exact while no live socket would show a restart"
        truth = self.engine.truth[reader.state.digest] if reader.state.digest else frozenset()
        if reader.status == "exact":
            assert reader.blocks == truth, f"exact at {reader.state.seq}: {reader.blocks} is not {set(truth)}"
        elif reader.status == "at_least":
            assert reader.blocks <= truth, f"over at {reader.state.seq}: {reader.blocks} above {set(truth)}"

    def settle(self) -> None:
        """Liveness: everything is well again, and time passes."""
        self.engine.up = True
        for i in range(24):
            if i in {16, 20}:
                self.wire.append(self.engine.step("+a"))
            self.sync(0)
            self.desk.now += 0.75
            self.check()
        self.desk.land(1000)
        state = self.desk.reader.state
        assert self.desk.session.phase is Phase.FOLLOWING
        assert self.desk.reader.status in {"exact", "at_least", "uncertain"}
        assert state.seq == self.engine.next - 1
        assert self.engine.truth[state.digest] == self.engine.resident


def schedule(seed: int, boost: str = "") -> Schedule:
    rnd = random.Random(seed)
    weights = [weight * (8 if name == boost else 1) for name, weight in WEIGHTS.items()]
    names = rnd.choices(list(WEIGHTS), weights, k=rnd.randint(10, LENGTH_MAX))
    return [("sync", 0)] + [(name, rnd.randrange(1 << 16)) for name in names]


def violation(seed: int, steps: Schedule) -> str | None:
    """Play one schedule; the text of what did not hold."""
    world = World(seed)
    try:
        for name, x in steps:
            getattr(world, name)(x)
            world.check()
        world.settle()
    except Exception as error:  # noqa: BLE001  a crash of the session is a violation like any other
        return f"{type(error).__name__}: {error}"
    return None


def shortened(seed: int, steps: Schedule) -> Schedule:
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if violation(seed, fewer):
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def hunt(schedules: int, boost: str = "") -> tuple[int, Schedule] | None:
    """The first seed whose schedule violates something; ``boost`` names an action to play more often."""
    for seed in range(schedules):
        steps = schedule(seed, boost)
        if violation(seed, steps):
            return seed, steps
    return None


def test_the_log_never_claims_too_much_and_always_recovers() -> None:
    found = hunt(SCHEDULES)
    if found:
        seed, steps = found
        few = shortened(seed, steps)
        pytest.fail(f"seed {seed}: {violation(seed, few)}\n{few}")


def _blind_disconnect(session: Session) -> None:
    session.attached = session._sewn = False
    session._doubt("disconnected")
    session._retry_at = 0.0


def _keep_answers(session: Session) -> None:
    session.attached = session._sewn = False
    session._live.clear()
    session._doubt("disconnected")
    session._retry_at = 0.0


_open = LifeLog.open
_take_up = LifeLog.take_up
_restored = Session.restored


def _empty_ledger(log: LifeLog, state: RankState, ledger: Any) -> None:
    ledger.copies.clear()
    _take_up(log, state, ledger)


def _resumed_blindly(session: Session, owner: int, state: RankState, ledger: Any) -> None:
    _restored(session, owner, state, ledger)
    session._prove("restored")


def _never_partial(log: LifeLog, seq: int, digest: bytes, *, partial: bool, why: str, process: str | None) -> None:
    _open(log, seq, digest, partial=False, why=why, process=process)


SABOTAGES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "proven without a live socket": (Session, "_provable", lambda _s: True, "slip"),
    "restored without its ledger": (LifeLog, "take_up", _empty_ledger, "kill"),
    "restored without proof": (Session, "restored", _resumed_blindly, "kill"),
    "any bytes prove the same life": (engine_module, "judge", lambda _k, _a: True, ""),
    "disconnects are ignored": (Session, "disconnected", lambda _s: None, ""),
    "a disconnect keeps what was read": (Session, "disconnected", _blind_disconnect, ""),
    "a disconnect keeps the answer under way": (Session, "disconnected", _keep_answers, "flap"),
    "no life is partial": (LifeLog, "open", _never_partial, ""),
    "a rebuilt producer goes on": (Session, "release", lambda _s, _why: None, ""),
    "a new life keeps the sockets": (Session, "_reopen", lambda s: s._drop_ask(), ""),
    "silence is no reason for doubt": (Session, "_watch_answer", lambda _s: None, ""),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_model_notices_a_rule_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary per rule: without it the same schedules must find a violation."""
    where, what, instead, boost = SABOTAGES[name]
    monkeypatch.setattr(where, what, instead)

    found = hunt(SCHEDULES, boost)
    assert found is not None
    assert (violation(*found) or "").startswith("AssertionError")
