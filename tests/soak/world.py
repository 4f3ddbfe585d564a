"""Everything that a soak runs: engines and their links here, the rest as processes that somebody restarts.

engine ──link── bridge ──link── Kafka ──link── worker ──link── Redis ──link── asker
(here)          (process)       (process)      (process)       (process)      (process)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from fleet import RANKS, SHAPES, Engine, Seat, build, draw_prompts
from proxy import Proxy
from servers import KafkaControl, RedisControl

from kvledger.admin import connect, create_topics
from kvledger.stack import Process, Stack
from kvledger.verify.pipeline import write_yaml
from kvledger_wire.topics import topic_specs

PARTITIONS = 4
NOWHERE = "127.0.0.1:1"
"""Where a link leads until its server has an address."""

RESTART_SECONDS = 1.0
"""Before a process that ended by itself is started again, as an operator's supervisor does."""

STOP_SECONDS_MAX = 30.0
DUMP_SECONDS_MAX = 60.0
SOAK = Path(__file__).parent


class Plan(NamedTuple):
    """How large a soak is. ``kafka``: the address of a broker that is not to be harmed; None: one of its own."""

    seats: Sequence[Seat]
    bridges: int = 2
    workers: int = 2
    questions_per_second: float = 60.0
    kafka: str | None = None


class Managed:
    """A process that is started again where it ends by itself; ``ends`` are the last words of those that did."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.ends: list[str] = []
        self.wanted = False
        self.process = Process(name, list(words), log=folder / f"{name}.log", environment=environment)
        self._lock = threading.RLock()
        self._ended: float | None = None

    def start(self) -> None:
        """Run, and be kept running."""
        with self._lock:
            self.wanted = True
            if not self.process.running:
                self._spawn()

    def kill(self) -> None:
        """SIGKILL; stays down until ``start``."""
        with self._lock:
            self.wanted = False
            self.process.kill()

    def stop(self) -> None:
        """SIGTERM; stays down until ``start``."""
        with self._lock:
            self.wanted = False
            self.process.stop(STOP_SECONDS_MAX)

    def send(self, number: signal.Signals) -> None:
        """A signal, if it runs."""
        with self._lock:
            if self.process.running:
                os.kill(self.process.pid, number)

    def keep(self, now: float) -> None:
        """Start it again where it ended though it is wanted."""
        with self._lock:
            if not self.wanted or self.process.running:
                self._ended = None
            elif self._ended is None:
                self._ended = now
                self.ends.append(self.process.obituary(f"ended with code {self.process.returncode}"))
            elif now > self._ended + RESTART_SECONDS:
                self._ended = None
                self._spawn()

    def _spawn(self) -> None:
        self.process.kill()  # what it left of its session
        self.process.start()


class Links(NamedTuple):
    """The two links of one engine; ``replay`` None where it has no such endpoint."""

    data: Proxy
    replay: Proxy | None

    @property
    def all(self) -> list[Proxy]:
        """Those that there are."""
        return [link for link in self if link is not None]


class World:
    """Enter it to start everything; what it started ends with it, last first."""

    redis: RedisControl
    redis_read: Proxy
    redis_write: Proxy
    kafka_link: Proxy

    def __init__(self, stack: Stack, plan: Plan, seed: int, name: str) -> None:
        self.plan, self.seed, self.name = plan, seed, name
        self.prompts = draw_prompts(seed)
        self.engines = build(plan.seats, self.prompts, seed)
        self.ranks = list(self.engines.values())
        self.links: dict[str, Links] = {}
        self.managed: list[Managed] = []
        self.kafka: KafkaControl | None = None
        self._standby: RedisControl | None = None
        self._stack = stack
        self._folder = stack.folder.path
        self._exits = ExitStack()
        self._environment = dict(os.environ)
        self._environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def __enter__(self) -> Self:
        try:
            self._start_servers()
            self._start_engines()
            self._start_processes()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def prefix(self) -> str:
        """Goes before each topic's name."""
        return f"{self.name}."

    @property
    def targets(self) -> list[str]:
        """What can be harmed, as schedules name it."""
        kinds = {"rank": len(self.ranks), "bridge": self.plan.bridges, "worker": self.plan.workers}
        named = [f"{kind} {number}" for kind, count in kinds.items() for number in range(count)]
        return [*named, "redis", *(["kafka"] if self.kafka else [])]

    def bridge(self, number: int) -> Managed:
        """The bridge of that number, as of now."""
        return self._bridges[number]

    def worker(self, number: int) -> Managed:
        """The worker of that number."""
        return self._workers[number]

    def twin(self, number: int) -> Managed:
        """Another bridge for the same ranks takes that number, and is started; the former one runs on."""
        self._twins += 1
        fresh = self._new_bridge(number, f"bridge-{number}-{self._twins}")
        self._bridges[number] = fresh
        fresh.start()
        return fresh

    def replicate(self) -> RedisControl:
        """A replica that has all that the primary held a moment ago."""
        if self._standby is None:
            server = self._stack.new_redis(f"{self.name}-standby", append_only=True)
            server.start()
            self._standby = self._exits.enter_context(RedisControl(server))
        self._standby.follow(self.redis)
        return self._standby

    def fail_over(self) -> None:
        """The replica becomes the primary, new connections lead to it, and the old primary lives on as its replica."""
        assert self._standby is not None, "replicate first"
        old, new = self.redis, self._standby
        new.promote()
        for link in (self.redis_read, self.redis_write):
            link.aim(new.address)
        self.redis, self._standby = new, old
        old.follow(new)

    def keep(self) -> None:
        """Start again what ended by itself."""
        now = time.monotonic()
        for one in self.managed:
            one.keep(now)

    def dump(self) -> set[tuple[str, int | None, str, int]]:
        """(rank, group, medium, block key) of all that ``kvledger dump`` lists."""
        command = [sys.executable, "-m", "kvledger", "dump", "--json"]
        command += ["--redis", self.redis.url, "--namespace", self.name]
        done = subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DUMP_SECONDS_MAX,
            check=True,
        )
        lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        return {(f"{x['replica']}/{x['rank']}", x["group"], x["medium"], int(x["block_key"], 16)) for x in lines}

    def _link(self, target: str) -> Proxy:
        return self._exits.enter_context(Proxy(target.removeprefix("tcp://")))

    def _start_servers(self) -> None:
        server = self._stack.new_redis(f"{self.name}-redis", append_only=True)
        server.start()
        self.redis = self._exits.enter_context(RedisControl(server))
        self.redis_write, self.redis_read = self._link(self.redis.address), self._link(self.redis.address)
        self.bootstrap = self.plan.kafka or self._start_kafka()
        create_topics(connect(self.bootstrap), topic_specs(partitions=PARTITIONS, prefix=self.prefix))

    def _start_kafka(self) -> str:
        self.kafka_link = self._link(NOWHERE)
        broker = self._stack.new_kafka(f"{self.name}-kafka", advertised=self.kafka_link.address)
        broker.start()
        self.kafka = self._exits.enter_context(KafkaControl(broker))
        self.kafka_link.aim(broker.bootstrap)
        return self.kafka_link.address

    def _start_engines(self) -> None:
        for name, engine in self.engines.items():
            engine.start()
            self._exits.callback(engine.stop)
            replay = engine.standin.replay
            self.links[name] = Links(self._link(engine.standin.data), self._link(replay) if replay else None)

    def _start_processes(self) -> None:
        models = [{"model": shape.model} for shape in SHAPES.values()]
        write_yaml(self._folder / "models.yaml", {"models": models})
        self._twins = 0
        self._bridges = [self._new_bridge(number, f"bridge-{number}") for number in range(self.plan.bridges)]
        flags = ["--redis", f"redis://{self.redis_write.address}/0", "--namespace", self.name]
        self._workers = [self._kvledger(f"worker-{number}", "streams", flags) for number in range(self.plan.workers)]
        asked = sorted({seat.shape.model for seat in self.plan.seats})
        words = [f"redis://{self.redis_read.address}/0", self.name, str(self.seed)]
        words += [str(self.plan.questions_per_second), *asked]
        self.asker = self._manage("asker", [sys.executable, "-u", str(SOAK / "asker.py"), *words])
        for one in self.managed:
            one.start()

    def _new_bridge(self, number: int, name: str) -> Managed:
        """A bridge for its share of the replicas."""
        path = self._folder / f"replicas-{number}.yaml"
        write_yaml(path, {"replicas": [self._row(seat, rank) for seat, rank in self._share(number)]})
        files = ["--replicas", str(path), "--models", str(self._folder / "models.yaml"), "--bridge-id", name]
        return self._kvledger(name, "bridge", files)

    def _share(self, number: int) -> list[tuple[Seat, int]]:
        seats = self.plan.seats[number :: self.plan.bridges]
        return [(seat, rank) for seat in seats for rank in range(RANKS)]

    def _row(self, seat: Seat, rank: int) -> dict[str, object]:
        links = self.links[f"{seat.replica}/{rank}"]
        row: dict[str, object] = {"id": seat.replica, "rank": rank, "model": seat.shape.model}
        row["data"] = f"tcp://{links.data.address}"
        return row | ({"replay": f"tcp://{links.replay.address}"} if links.replay else {})

    def _kvledger(self, name: str, command: str, flags: Sequence[str]) -> Managed:
        shared = ["--kafka", self.bootstrap, "--topic-prefix", self.prefix]
        return self._manage(name, [sys.executable, "-m", "kvledger", command, *shared, *flags])

    def _manage(self, name: str, words: Sequence[str]) -> Managed:
        one = Managed(name, words, self._folder, self._environment)
        self.managed.append(one)
        self._exits.callback(one.kill)
        return one


def rank_of(world: World, target: str) -> tuple[Engine, Links]:
    """The engine that a target names, and its links."""
    engine = world.ranks[number_of(target)]
    return engine, world.links[engine.name]


def number_of(target: str) -> int:
    """Of ``rank 3``: 3."""
    return int(target.rpartition(" ")[2])
