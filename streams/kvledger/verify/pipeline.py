"""The real parts, as processes: stand-in engines here, one bridge per engine, one fold, Kafka and Redis.

Everything between an engine's socket and a router's answer is what operators run: ``kvledger bridge`` and
``kvledger streams``. Topics and Redis keys carry a name of their own and are deleted at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import yaml
from confluent_kafka import KafkaException
from redis import Redis
from redis.exceptions import RedisError

from kvledger.admin import connect, create_topics
from kvledger.errors import Unavailable
from kvledger.stack import Process, Progress, Stack, silent
from kvledger_bridge.discovery import checked_entry
from kvledger_bridge.errors import InvalidConfig
from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import Media as Item
from kvledger_engine.recording import Meta, Published
from kvledger_engine.standin import BUFFER_STEPS_DEFAULT, StandIn
from kvledger_index.model import ModelEntry
from kvledger_router import Holder, Index, Match, Media
from kvledger_router.standing import MOVED
from kvledger_wire.topics import topic_specs

VISIBLE_SECONDS_MAX = 30.0
"""An engine's batch must be in the index after this, else something of the pipeline is stuck and says so."""

QUERY_SECONDS_MAX = 5.0
"""Deadline of a query here: a busy machine must not turn a prediction into "no opinion"."""

POLL_SECONDS = 0.002
PARTITIONS = 4
UNLINK_KEYS_MAX = 500
DELETE_SECONDS_MAX = 10.0
GIVEN = "environment"
"""Where a service comes from that was not started here."""
SETTLED = frozenset({"exact", "at_least", "uncertain"})
"""Statuses that say what is known; stale and unknown ones are waited out."""


class Pipeline:
    """Kafka, Redis and a fold for any number of engines, one after the other or side by side."""

    def __init__(self, stack: Stack, *, progress: Progress = silent) -> None:
        self._stack = stack
        self._progress = progress
        self.name = f"verify-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self.fold = self._process("streams", ["--redis", stack.redis, "--namespace", self.name])

    def start(self) -> None:
        """Create topics, start the fold. Raises Unavailable."""
        create_topics(connect(self._stack.kafka), topic_specs(partitions=PARTITIONS, prefix=self.prefix))
        self.fold.start()

    def stop(self) -> None:
        """Stop the fold and delete what was made on services that outlive us, as far as they are still there."""
        self.fold.stop()
        if self._stack.origins.get("kafka") == GIVEN:
            specs = topic_specs(partitions=PARTITIONS, prefix=self.prefix)
            with contextlib.suppress(Unavailable, KafkaException, TimeoutError):
                client = connect(self._stack.kafka)  # named, because its answers die with it
                deleted = client.delete_topics([spec.name for spec in specs])
                for future in deleted.values():
                    future.result(DELETE_SECONDS_MAX)
        if self._stack.origins.get("redis") == GIVEN:
            with contextlib.suppress(RedisError), Redis.from_url(self._stack.redis) as client:
                keys = list(client.scan_iter(f"{self.name}*", count=1000))
                for at in range(0, len(keys), UNLINK_KEYS_MAX):
                    client.unlink(*keys[at : at + UNLINK_KEYS_MAX])

    @property
    def prefix(self) -> str:
        """Goes before each topic's name."""
        return f"{self.name}."

    def index(self, model: str) -> Index:
        """A router's view of one model."""
        url, space = self._stack.redis, self.name
        return Index.from_url(url, model=model, namespace=space, deadline_seconds=QUERY_SECONDS_MAX)

    async def engine(self, meta: Meta, *, buffer_steps: int = BUFFER_STEPS_DEFAULT) -> RunningEngine:
        """A stand-in for the recorded engine with a bridge of its own; its life is open when this returns.

        ``buffer_steps``: batches that its replay endpoint remembers.
        """
        entry = meta.entry()
        try:
            checked_entry(models_entry(entry))
        except InvalidConfig as error:
            msg = f"the meta line makes no model entry: {error}"
            raise BadRecording(msg) from error
        (running,) = self.attach({f"engine-{next(self._numbers)}": entry}, buffer_steps=buffer_steps)
        await running.settle()
        return running

    def attach(
        self, entries: Mapping[str, ModelEntry], *, buffer_steps: int = BUFFER_STEPS_DEFAULT
    ) -> list[RunningEngine]:
        """Stand-in engines by replica name, and one bridge for all of them; their lives open in a moment."""
        standins = {replica: StandIn(buffer_steps=buffer_steps).start() for replica in entries}
        bridge = self._bridge(entries, {name: (standin.data, standin.replay) for name, standin in standins.items()})
        engines = [RunningEngine(self, name, entries[name], standin, bridge) for name, standin in standins.items()]
        for engine in engines:
            engine.neighbours = engines
        return engines

    def follow(self, replica: str, entry: ModelEntry, *, data: str, replay: str | None) -> Followed:
        """A bridge for an engine that runs elsewhere, by its addresses; its life opens in a moment."""
        return Followed(self, replica, entry, self._bridge({replica: entry}, {replica: (data, replay)}))

    def _bridge(self, entries: Mapping[str, ModelEntry], addresses: Mapping[str, tuple[str, str | None]]) -> Process:
        """One bridge, started, for the engines at ``addresses`` (data, replay), both by replica name."""
        folder = self._stack.folder.path / f"{self.name}-bridge-{next(self._numbers)}"
        folder.mkdir()
        replicas = [
            {"id": replica, "model": entries[replica].model, "data": data, **({"replay": replay} if replay else {})}
            for replica, (data, replay) in addresses.items()
        ]
        models = {entry.model: models_entry(entry) for entry in entries.values()}
        write_yaml(folder / "replicas.yaml", {"replicas": replicas})
        write_yaml(folder / "models.yaml", {"models": list(models.values())})
        files = ["--replicas", str(folder / "replicas.yaml"), "--models", str(folder / "models.yaml")]
        bridge = self._process("bridge", files, log=folder / "bridge.log")
        bridge.start()
        return bridge

    def check(self) -> None:
        """Raise Unavailable if the fold or a server has ended."""
        for process in (self.fold, *self._stack.processes):
            if not process.running:
                raise Unavailable(process.obituary(f"ended with code {process.returncode}"))

    def _process(self, command: str, flags: list[str], *, log: Path | None = None) -> Process:
        shared = ["--kafka", self._stack.kafka, "--topic-prefix", self.prefix]
        return Process(
            f"kvledger {command}",
            [sys.executable, "-m", "kvledger", command, *shared, *flags],
            log=log or self._stack.folder.path / f"{self.name}-{command}.log",
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Followed:
    """One engine, the bridge that follows it, and what the index says of it.

    Whoever knows what the engine published tells ``heard``; predictions wait until the index covers that.
    """

    def __init__(self, pipeline: Pipeline, replica: str, entry: ModelEntry, bridge: Process) -> None:
        self.replica, self.entry, self.bridge = replica, entry, bridge
        self.published = 0
        self.closed = False
        self.neighbours: Sequence[Followed] = (self,)
        """Those with the same bridge, this one among them."""
        self._pipeline = pipeline
        self._index = pipeline.index(entry.model)
        self._last = -1

    def heard(self, seq: int) -> None:
        """The engine published one more batch."""
        self._last = seq
        self.published += 1

    async def predict(
        self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None, media: Sequence[Item] = ()
    ) -> Answer:
        """What the index says of this engine once all that it published is visible there."""
        items = [Media(identifier, position, length) for position, length, identifier in media]
        await self.settle()  # waiting costs a look at nothing, not at the whole prompt again and again
        holder = await self._visible(tokens, lora, salt, items)
        return Answer(holder.hit_tokens, holder.status, -1 if holder.as_of is None else holder.as_of, holder.reason)

    async def settle(self) -> None:
        """Wait until the index covers all that was published."""
        await self._visible((), None, None, ())

    async def unplaced(self) -> int:
        """Hashes that are resident without a key, by the index."""
        explained = await self._index.explain((), replicas=[self.replica])
        return sum(report.unplaced for report in explained.ranks)

    async def close(self) -> None:
        """Stop the bridge with its last engine; the log keeps what was said."""
        self.closed = True
        if all(other.closed for other in self.neighbours):
            await asyncio.to_thread(self.bridge.stop)
        await self._index.aclose()

    async def _visible(
        self, tokens: Sequence[int], lora: str | None, salt: str | None, media: Sequence[Media]
    ) -> Holder:
        deadline = time.monotonic() + VISIBLE_SECONDS_MAX
        while True:
            match = await self._index.match(tokens, lora=lora, salt=salt, media=media, replicas=[self.replica])
            holder = match.holders[0]
            settled = holder.status in SETTLED and holder.reason != MOVED  # a heartbeat that came between moves it too
            if match.opinion and holder.as_of == self._last and settled:
                return holder
            self._watch(match, holder, late=time.monotonic() > deadline)
            await asyncio.sleep(POLL_SECONDS)

    def _watch(self, match: Match, holder: Holder, *, late: bool) -> None:
        """Raise Unavailable, with the last words of whoever is at fault, where waiting on is in vain."""
        self._pipeline.check()
        if not self.bridge.running:
            raise Unavailable(self.bridge.obituary(f"ended with code {self.bridge.returncode}"))
        if late:
            seen = match.reason or f"{holder.status} as of {holder.as_of}: {holder.reason}"
            what = f"batch {self._last} is not in the index after {VISIBLE_SECONDS_MAX:.0f} s ({seen})"
            raise Unavailable(
                f"{what}; {self.bridge.obituary('is running')}\n{self._pipeline.fold.obituary('is running')}"
            )


class RunningEngine(Followed):
    """A stand-in engine that says what it is told to."""

    def __init__(self, pipeline: Pipeline, replica: str, entry: ModelEntry, standin: StandIn, bridge: Process) -> None:
        super().__init__(pipeline, replica, entry, bridge)
        self.standin = standin
        self._payload = b""

    async def publish(self, batch: Published) -> None:
        """One batch, as the engine sent it. A sequence that goes back is the engine's restart; the same message again
        is a line that stands twice, and nothing.
        """
        if batch.seq == self._last and batch.payload == self._payload:
            return
        if batch.seq <= self._last:
            await asyncio.to_thread(self.standin.restart)
            self._last = -1
            await self.settle()  # the new life is open and empty: from here on no sequence means the old one
        self.standin.publish(batch.payload, topic=batch.topic, seq=batch.seq)
        self._payload = batch.payload
        self.heard(batch.seq)

    async def close(self) -> None:
        """Stop the engine, and the bridge with its last engine; the log keeps what they said."""
        await super().close()
        await asyncio.to_thread(self.standin.stop)


class Answer(msgspec.Struct, frozen=True):
    """One prediction."""

    hit_tokens: int
    status: str
    as_of: int
    reason: str


def models_entry(entry: ModelEntry) -> dict[str, object]:
    """A model entry as it stands in a models file: what is unset is left out."""
    plain = {name: value for name, value in msgspec.to_builtins(entry).items() if value not in (None, [], ())}
    names = [field.name for field in msgspec.structs.fields(type(entry.groups[0]))] if entry.groups else []
    if entry.groups:
        groups = [dict(zip(names, row, strict=False)) for row in plain["groups"]]
        plain["groups"] = [{k: v for k, v in group.items() if v is not None or k == "group"} for group in groups]
    if entry.hash_scheme is not None:
        scheme = entry.hash_scheme
        plain["hash_scheme"] = {"algorithm": scheme.algorithm, "seed": scheme.seed, "none": scheme.none}
        plain["hash_scheme"] |= {"extras": scheme.extras, "paths": dict(scheme.paths)}
    return plain


def write_yaml(path: Path, content: dict[str, object]) -> None:
    """Write a configuration file for a process of ours."""
    path.write_text(yaml.safe_dump(content, sort_keys=False))


@contextlib.contextmanager
def open_pipeline(*, kafka: str | None, redis: str | None, progress: Progress = silent) -> Iterator[Pipeline]:
    """A pipeline on given services, or on those that :class:`Stack` finds or starts."""
    environment = dict(os.environ)
    if kafka:
        environment["KVLEDGER_KAFKA"] = kafka
    if redis:
        environment["KVLEDGER_REDIS"] = redis
    with Stack(progress=progress, environment=environment) as stack:
        stack.start()
        with Pipeline(stack, progress=progress) as pipeline:
            yield pipeline
