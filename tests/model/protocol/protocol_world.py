"""The world: two engines, bridges, the log, workers, Redis and routers, and what may happen to them.

    engine --lossy PUB, replay buffer--> bridge --> partition --> worker --> shard --> query

Every action takes one number and decides by it, so that a schedule is a list of (action, number).
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from protocol_engine import Engine
from protocol_log import Late
from protocol_parts import BridgePart, LogPart, Parts, QueryPart, Setup, ShardPart, WorkerPart
from protocol_records import LANES, MEDIUM, RANKS

BRIDGES_MAX = 3
SETTLE_ROUNDS = 9
ALL = 1_000_000


class Violation(Exception):
    """What did not hold."""


def _prefix(rnd: random.Random) -> Callable[[], int]:
    """How many records of a dead producer may still land, per partition."""
    return lambda: rnd.randint(0, 4)


class World:
    """Everything that is, and the ghosts that the checks need."""

    def __init__(self, parts: Parts, setup: Setup) -> None:
        self.parts, self.setup = parts, parts.fit(setup)
        setup = self.setup
        self.log: LogPart = parts.log(setup)
        self.engines = {rank: Engine(rank, calm=setup.calm) for rank in RANKS}
        self.without_replay: set[int] = set()
        self.bridges: list[BridgePart] = []
        self.late: list[Late] = []
        """Records of dead producers that may still land."""
        self.shards = [parts.shard(setup, s) for s in range(setup.shards)]
        self.snapshots: list[list[ShardPart]] = [[] for _ in self.shards]
        self.workers: dict[tuple[int, int], WorkerPart] = {
            (p, s): parts.worker(self.log, p) for p in range(setup.partitions) for s in range(setup.shards)
        }
        self.zombies: list[tuple[int, int, Any]] = []
        self.queries: deque[QueryPart] = deque()
        self.newest: dict[tuple[int, int], int] = {}
        """(shard, rank) -> the newest life of the engine that was served."""

    # ---- who a number means

    def _rank(self, x: int) -> int:
        return x % 2

    def _partition(self, x: int) -> int:
        return x // 4 % self.setup.partitions

    def _shard(self, x: int) -> int:
        return x // 8 % self.setup.shards

    def _count(self, x: int) -> int:
        return 1 + x // 16 % 3

    def _topic(self, x: int) -> int:
        topic: int = x // 4 % (self.setup.partitions + 1)
        return topic if topic < self.setup.partitions else -1

    def alive(self) -> list[BridgePart]:
        return [bridge for bridge in self.bridges if bridge.alive]

    def _bridge(self, x: int) -> BridgePart | None:
        alive = self.alive()
        return alive[x // 2 % len(alive)] if alive else None

    def act(self, name: str, x: int) -> None:
        """Do one action of a schedule; a calm world has no losses."""
        if self.setup.calm and name in {"down", "rollback", "flush", "truncate", "close", "damage"}:
            return
        getattr(self, name)(x)

    # ---- engines

    def configure(self, x: int) -> None:
        """Which engines have no replay endpoint: settled before the first bridge."""
        if not self.bridges:
            self.without_replay |= [{0, 1}, {1}, set(), set()][x % 4]

    def step(self, x: int) -> None:
        if self.engines[self._rank(x)].up:
            self.engines[self._rank(x)].step(random.Random(x))

    def clear(self, x: int) -> None:
        if self.engines[self._rank(x)].up:
            self.engines[self._rank(x)].step(random.Random(x), clear=True)

    def restart(self, x: int) -> None:
        self.engines[self._rank(x)].restart()

    def down(self, x: int) -> None:
        self.engines[self._rank(x)].restart(up=False)

    def come_up(self, x: int) -> None:
        self.engines[self._rank(x)].up = True

    def announce(self, x: int) -> None:
        """The orchestrator catches up with which process runs."""
        engine = self.engines[self._rank(x)]
        engine.announced = engine.life

    # ---- bridges

    def start_bridge(self, ranks: tuple[int, ...]) -> None:
        engines = {rank: self.engines[rank] for rank in ranks}
        self.bridges.append(self.parts.bridge(self.log, engines, frozenset(self.without_replay)))

    def start(self, x: int) -> None:
        if len(self.alive()) < BRIDGES_MAX:
            self.start_bridge([(0,), (1,), (0, 1), (0, 1)][x % 4])

    def deliver(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge and self._rank(x) in bridge.sessions:
            bridge.sessions[self._rank(x)].deliver(self._count(x))

    def turn(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge and self._rank(x) in bridge.sessions:
            bridge.sessions[self._rank(x)].turn(random.Random(x), idle=x % 7 == 0)

    def land(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.producer.land(self._topic(x), self._count(x))

    def ack(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.producer.ack(self._topic(x), self._count(x))

    def pump(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.producer.flush()
            for rank in bridge.sessions:
                bridge.restore(rank)

    def resend(self, x: int) -> None:
        """The producer is rebuilt: it claims anew, or sends again what was not acknowledged."""
        bridge = self._bridge(x)
        if bridge and self.parts.duplicates:
            bridge.producer.resend()
        elif bridge:
            late, successor = bridge.rebuild(_prefix(random.Random(x)))
            self.late.append(late)
            if successor is not bridge:
                self.bridges.append(successor)

    def duplicate(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge and self.parts.duplicates:
            bridge.producer.duplicate()

    def restore(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.restore(self._rank(x))

    def beat(self, x: int) -> None:
        bridge, rank = self._bridge(x), self._rank(x)
        if bridge and rank in bridge.sessions and rank not in self.without_replay:
            bridge.sessions[rank].beat()

    def checkpoint(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge and self._rank(x) in bridge.sessions:
            bridge.sessions[self._rank(x)].checkpoint()

    def close(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge and self._rank(x) in bridge.sessions:
            bridge.sessions[self._rank(x)].close()

    def flap(self, x: int) -> None:
        """A connection breaks; some of the last batches on it are lost."""
        bridge, rnd = self._bridge(x), random.Random(x)
        if bridge and self._rank(x) in bridge.sessions:
            link = bridge.sessions[self._rank(x)].link
            if link.connected:
                keep = rnd.randint(0, len(link.wire))
                while len(link.wire) > keep:
                    link.wire.pop()
                link.cut()

    def supersede(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.supersede()

    def sync(self, x: int) -> None:
        """A healthy stretch from engine to Redis."""
        bridge, rnd = self._bridge(x), random.Random(x)
        if not bridge:
            return
        bridge.producer.flush()
        for rank, session in bridge.sessions.items():
            bridge.restore(rank)
            session.deliver(9)
            for _ in range(4):
                session.turn(rnd)
                bridge.producer.flush()
        for p, s in self.workers:
            self._fold(p, s, 8)

    def kill(self, x: int) -> None:
        bridge = self._bridge(x)
        if bridge:
            bridge.die()
            self.late.append(bridge.producer.lost(_prefix(random.Random(x))))

    def land_late(self, x: int) -> None:
        """A record of a dead producer lands after all."""
        waiting = [queue for queues in self.late for queue in queues.values() if queue]
        if waiting:
            random.Random(x).choice(waiting).popleft()()

    # ---- the log

    def truncate(self, x: int) -> None:
        self.log.truncate(self._partition(x), x // 64)

    def damage(self, x: int) -> None:
        """The rank's next record lands unreadable."""
        self.log.damage_next.add(self._rank(x))

    # ---- workers and Redis

    def fold(self, x: int) -> None:
        self._fold(self._partition(x), self._shard(x), self._count(x))

    def _fold(self, partition: int, shard: int, count: int) -> None:
        self.workers[partition, shard].fold(self.shards[shard], count)
        self.check_served(shard)

    def reassign(self, x: int) -> None:
        self.workers[self._partition(x), self._shard(x)].forget()

    def stage_late(self, x: int) -> None:
        """A worker computes a call that a zombie makes later."""
        partition, s = self._partition(x), self._shard(x)
        job = self.workers[partition, s].stage_apart(self.shards[s], self._count(x))
        if job is not None:
            self.zombies.append((partition, s, job))

    def commit_late(self, x: int) -> None:
        if self.zombies:
            partition, shard, job = self.zombies.pop(x % len(self.zombies))
            self.workers[partition, shard].commit(self.shards[shard], job)
            self.check_served(shard)

    def snapshot(self, x: int) -> None:
        self.snapshots[self._shard(x)].append(self.shards[self._shard(x)].copied())

    def rollback(self, x: int) -> None:
        """Redis comes back with an older picture."""
        s = self._shard(x)
        if self.snapshots[s]:
            self.shards[s] = self.snapshots[s][x // 64 % len(self.snapshots[s])].copied()
            self.shards[s].unsettled = set(range(self.setup.partitions))

    def flush(self, x: int) -> None:
        """Redis comes back empty."""
        s = self._shard(x)
        self.shards[s] = self.parts.shard(self.setup, s)
        self.shards[s].unsettled = set(range(self.setup.partitions))

    # ---- routers

    def ask(self, _x: int) -> None:
        self.queries.append(self.parts.query(self.log, self.engines, self.shards))

    def hear(self, _x: int) -> None:
        """The second read of the oldest question."""
        if not self.queries:
            return
        for answer in self.queries.popleft().answers(self.shards):
            if answer.told != answer.true:
                msg = f"I1 answer: rank {answer.rank} is told to hold exactly {answer.told}, true is {answer.true}"
                raise Violation(msg)

    # ---- what must hold

    def status(self, shard: int, rank: int) -> str:
        return self.shards[shard].status(rank, self.log.partition(rank))

    def check_served(self, s: int) -> None:
        """I1: what is called exact is the truth at its time, nothing is claimed above it. I2: no older life again."""
        shard = self.shards[s]
        for rank in RANKS:
            status = self.status(s, rank)
            if status not in {"exact", "at_least"} or self.log.partition(rank) in shard.unsettled:
                continue
            ghost, seq = shard.as_of(rank)
            if ghost is None:
                continue
            if ghost < self.newest.get((s, rank), -1):
                msg = f"I2 old life: rank {rank} shows life {ghost} of the engine after {self.newest[s, rank]}"
                raise Violation(msg)
            self.newest[s, rank] = ghost
            for lane in LANES:
                self._compare("served", s, rank, lane, self.engines[rank].truth(lane, ghost, seq))

    def _compare(self, when: str, s: int, rank: int, lane: int, truth: set[int]) -> None:
        status, held = self.status(s, rank), self.shards[s].bits(rank, lane)
        truth = {block for block in truth if block % self.setup.shards == s}
        over = held - truth
        if over or (status == "exact" and MEDIUM[lane] == "gpu" and held != truth):
            msg = f"I1 {when}: {status} rank {rank} lane {lane} holds {held}, true is {truth}"
            raise Violation(msg)

    def check_quiet(self) -> None:
        """After everything that is under way arrived: no claims of a dead engine, and the truth of now."""
        for s, rank in itertools.product(range(self.setup.shards), RANKS):
            status, engine = self.status(s, rank), self.engines[rank]
            if rank in self.without_replay or status not in {"exact", "at_least"}:
                continue  # an idle rank without replay goes stale by age: it has no heartbeat
            if not engine.up and any(self.shards[s].bits(rank, lane) for lane in LANES):
                msg = f"I2 dead engine: rank {rank} is {status}"
                raise Violation(msg)
            for lane in LANES:
                self._compare("quiet", s, rank, lane, engine.truth(lane))

    def check_cleared(self) -> None:
        """L1: after a lossless clear everything is exact."""
        for s, rank in itertools.product(range(self.setup.shards), RANKS):
            if self.status(s, rank) != "exact":
                msg = f"L1 stuck: rank {rank} is {self.status(s, rank)}"
                raise Violation(msg)
            for lane in LANES:
                self._compare("cleared", s, rank, lane, self.engines[rank].truth(lane))

    def check_folded(self) -> None:
        """L2: nothing is stale at the log's end. L3: in a calm world nothing was ever unloaded.

        L4: what the log holds is in the index.
        """
        for s, rank in itertools.product(range(self.setup.shards), RANKS):
            status = self.status(s, rank)
            if status == "stale":
                msg = f"L2 stale at the log's end: rank {rank}"
                raise Violation(msg)
            if self.setup.calm and rank not in self.without_replay and status == "loading":
                msg = f"L3 unloaded without a fault: rank {rank}"
                raise Violation(msg)
            if status in {"unknown", "loading"} and self.log.holds(rank):
                msg = f"L4 not in the index although the log holds it: rank {rank} is {status}"
                raise Violation(msg)

    # ---- coming to rest

    def settle(self) -> None:
        """All that is under way arrives, every rank has a bridge that works, and time passes."""
        for queues in self.late:
            for queue in queues.values():
                for land in queue:
                    land()
        self.late = []
        self.log.damage_next.clear()
        for partition, s, job in self.zombies:
            self.workers[partition, s].commit(self.shards[s], job)
            self.check_served(s)
        self.zombies = []
        if sum(engine.published for engine in self.engines.values()) % 2:
            for worker in self.workers.values():
                worker.forget()
        self._fold_all()
        self.check_folded()
        self._staff()
        for round_ in range(SETTLE_ROUNDS):
            for bridge in self.alive():
                self._work(bridge, round_)
        for engine in self.engines.values():
            engine.announced = engine.life
        self._fold_all()

    def _staff(self) -> None:
        """Every rank whose newest owner is gone gets a new one."""
        for rank in RANKS:
            top = self.log.top_claim(rank)
            working = (bridge.sessions.get(rank) for bridge in self.alive())
            if not any(session and session.owner == top and not session.closed for session in working):
                self.start_bridge((rank,))

    def _work(self, bridge: BridgePart, round_: int) -> None:
        bridge.producer.flush()
        for rank, session in bridge.sessions.items():
            for _ in range(3):
                bridge.restore(rank)
                bridge.producer.flush()
            session.deliver(99)
            for _ in range(self.parts.turns):
                session.turn(None, idle=True)
                bridge.producer.flush()
                session.deliver(99)
            if round_ % 3 == 2 and rank not in self.without_replay:
                session.beat()
            if round_ == 6:
                session.checkpoint()
        bridge.producer.flush()

    def _fold_all(self) -> None:
        for _ in range(3):
            for partition, s in self.workers:
                self._fold(partition, s, ALL)

    def finish(self) -> None:
        """Rest, then a clean step and a clean clear of every engine, with rest in between: that ends every doubt."""
        self.settle()
        self.check_quiet()
        self.queries.clear()
        for engine in self.engines.values():
            engine.up = True
        self.settle()
        rnd = random.Random(1)
        for clear in (False, True):
            for engine in self.engines.values():
                engine.step(rnd, clear=clear, lossless=True)
            self.settle()
            self.ask(0)
            self.hear(0)
        self.check_cleared()
