"""What the world needs of its parts: the abstract model has one set of them, the real code another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from protocol_engine import Engine, Link
from protocol_log import Late


class Setup(msgspec.Struct, frozen=True):
    """How large the world is. ``calm``: nothing is lost, so that every loss is the protocol's own."""

    partitions: int = 1
    shards: int = 1
    calm: bool = False


class AsOf(NamedTuple):
    """The engine's own life and sequence that an answer covers; ``ghost`` None: no batch was covered yet."""

    ghost: int | None
    seq: int


class Answer(NamedTuple):
    """What a router was told is exact: what it was told, and what the engine says it had to be."""

    rank: int
    told: object
    true: object


class LogPart(Protocol):
    """Both topics."""

    damage_next: set[int]

    def partition(self, rank: int) -> int: ...
    def top_claim(self, rank: int) -> int: ...
    def truncate(self, partition: int, x: int) -> None: ...
    def holds(self, rank: int) -> bool: ...


class ProducerPart(Protocol):
    """Records under way; topic partition -1 is the topic of owners."""

    def land(self, where: int, count: int | None = None) -> None: ...
    def ack(self, where: int, count: int | None = None) -> None: ...
    def flush(self) -> None: ...
    def resend(self) -> None: ...
    def duplicate(self) -> None: ...
    def lost(self, keep: Callable[[], int]) -> Late: ...


class SessionPart(Protocol):
    """One rank in a bridge."""

    link: Link

    @property
    def owner(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def deliver(self, count: int) -> None: ...
    def turn(self, rnd: random.Random | None, *, idle: bool = False) -> None: ...
    def beat(self) -> None: ...
    def checkpoint(self) -> None: ...
    def close(self) -> None: ...


class BridgePart(Protocol):
    """A process with sessions and a producer."""

    alive: bool

    @property
    def producer(self) -> ProducerPart: ...
    @property
    def sessions(self) -> Mapping[int, SessionPart]: ...
    def restore(self, rank: int) -> None: ...
    def rebuild(self, keep: Callable[[], int]) -> tuple[Late, BridgePart]: ...
    def supersede(self) -> None: ...
    def die(self) -> None: ...


class ShardPart(Protocol):
    """One Redis. ``unsettled``: partitions that rolled back, whose worker has not noticed: no protocol sees that."""

    number: int
    unsettled: set[int]

    def copied(self) -> ShardPart: ...
    def status(self, rank: int, partition: int) -> str: ...
    def as_of(self, rank: int) -> AsOf: ...
    def bits(self, rank: int, lane: int) -> set[int]: ...


class WorkerPart(Protocol):
    """Of one (partition, shard)."""

    def forget(self) -> None: ...
    def stage_apart(self, shard: Any, count: int) -> Any: ...
    def commit(self, shard: Any, job: Any) -> bool: ...
    def fold(self, shard: Any, count: int) -> None: ...


class QueryPart(Protocol):
    """A question that was asked and not answered yet."""

    def answers(self, shards: list[Any]) -> Iterator[Answer]: ...


class Parts(Protocol):
    """Makes them. ``duplicates``: producers are not idempotent. ``turns`` of a session in a round of coming to rest.

    ``fit`` makes the world one that these parts can be in.
    """

    duplicates: bool
    turns: int

    def fit(self, setup: Setup) -> Setup: ...
    def log(self, setup: Setup) -> Any: ...
    def bridge(self, log: Any, engines: Mapping[int, Engine], without_replay: Iterable[int]) -> BridgePart: ...
    def worker(self, log: Any, partition: int) -> WorkerPart: ...
    def shard(self, setup: Setup, number: int) -> ShardPart: ...
    def query(self, log: Any, engines: Mapping[int, Engine], shards: list[Any]) -> QueryPart: ...
