"""The implementations of the index under contract, found by what they are, and a small driver for both ends."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any, Protocol

import msgspec

import kvledger_index
from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.contract import IndexReader, IndexWriter
from kvledger_index.keyspace import Keyspace
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import MEDIA, Medium
from kvledger_index.reader import RedisReader
from kvledger_index.units import (
    NEVER,
    STEP_OPS_MAX,
    Bind,
    Card,
    Now,
    Op,
    Outcome,
    Piece,
    Put,
    RankUnit,
    Stamp,
    Step,
    piece_of,
)
from kvledger_index.views import Catalogue, Reading
from kvledger_index.writer import RedisWriter

MODEL = "gemma-3-1b-it"
TOPIC = "topic-a"
Where = tuple[str, str, int]
"""(rank, medium, lane) of a holder."""


class Pair(Protocol):
    """Both ends over one store that can be rolled back."""

    writer: IndexWriter
    reader: IndexReader

    async def snapshot(self) -> Any: ...
    async def restore(self, snapshot: Any) -> None: ...


class MemoryPair:
    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.writer: IndexWriter = self.index
        self.reader: IndexReader = self.index

    async def snapshot(self) -> Any:
        return self.index.snapshot()

    async def restore(self, snapshot: Any) -> None:
        self.index.restore(snapshot)


class RedisPair:
    """``raw`` is a client for looking at keys."""

    def __init__(self, writer: RedisWriter, reader: RedisReader, namespace: str) -> None:
        self.redis_writer, self.redis_reader = writer, reader
        self.writer: IndexWriter = writer
        self.reader: IndexReader = reader
        self.keyspace = Keyspace(namespace)
        self.raw: Any = writer._client

    async def keys(self) -> list[bytes]:
        return sorted([key async for key in self.raw.scan_iter(match=self.keyspace.prefix + b"*", count=1000)])

    async def snapshot(self) -> Any:
        keys = await self.keys()
        async with self.raw.pipeline() as pipe:
            for key in keys:
                pipe.dump(key)
            return dict(zip(keys, await pipe.execute(), strict=True))

    async def restore(self, snapshot: Any) -> None:
        keys = await self.keys()
        async with self.raw.pipeline() as pipe:
            for key in keys:
                pipe.delete(key)
            for key, value in snapshot.items():
                pipe.restore(key, 0, value)
            await pipe.execute()


@asynccontextmanager
async def _memory(url: Callable[[], str], namespace: str) -> AsyncIterator[MemoryPair]:
    yield MemoryPair()


@asynccontextmanager
async def redis_pair(url: Callable[[], str], namespace: str) -> AsyncIterator[RedisPair]:
    async with (
        RedisWriter.from_url(url(), namespace=namespace) as writer,
        RedisReader.from_url(url(), namespace=namespace, deadline_seconds=5) as reader,
    ):
        await writer.check()
        pair = RedisPair(writer, reader, namespace)
        try:
            yield pair
        finally:
            await pair.raw.config_set("maxmemory", 0)  # a test may have filled the server
            await pair.restore({})


Opener = Callable[[Callable[[], str], str], AbstractAsyncContextManager[Pair]]

OPENERS: dict[type, Opener] = {MemoryIndex: _memory, RedisWriter: redis_pair, RedisReader: redis_pair}
"""How each implementation is opened. Which ones there are is not said here: see ``found``."""


def found(package: ModuleType = kvledger_index) -> set[type]:
    """Every class of a package's modules that has all methods of one end of the contract."""
    ends = [_methods(end) for end in (IndexWriter, IndexReader)]
    classes: set[type] = set()
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        classes |= {
            each
            for _, each in inspect.getmembers(module, inspect.isclass)
            if each.__module__ == module.__name__ and each not in {IndexWriter, IndexReader}
            if any(end <= _methods(each) for end in ends)
        }
    return classes


def _methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


def pairs() -> dict[str, Opener]:
    """One opener per store: two ends that open the same way are one pair."""
    by_opener: dict[Opener, list[str]] = {}
    for kind in found():
        by_opener.setdefault(OPENERS[kind], []).append(kind.__name__)
    return {"+".join(sorted(names)): opener for opener, names in by_opener.items()}


def card(model: str = MODEL, partition: int = 0, **changes: Any) -> Card:
    facts: dict[str, Any] = {
        "stride": 16,
        "loaded": True,
        "suspended": False,
        "partial": False,
        "uncertain": (),
        "closed": False,
    }
    return Card(model=model, partition=partition, **facts | changes)


def put(
    path: Sequence[int],
    start: int = 0,
    stop: int | None = None,
    *,
    mask: int | None = None,
    add: bool = True,
    medium: Medium = "gpu",
    lane: int = 0,
) -> Put:
    """Set or clear the keys at start..stop-1 of a segment's path; ``mask`` (bit 0 = start) defaults to all of them."""
    keys = tuple(path[start : len(path) if stop is None else stop])
    every = (1 << len(keys)) - 1
    return Put(
        add, medium, lane, path[0], start, path[start - 1] if start else 0, keys, every if mask is None else mask
    )


def take(path: Sequence[int], start: int = 0, stop: int | None = None, **changes: Any) -> Put:
    """A removing :func:`put`."""
    return put(path, start, stop, add=False, **changes)


class Fold:
    """What a worker remembers of one partition; its calls move on only where they were applied."""

    _nonces = itertools.count(1)

    def __init__(self, writer: IndexWriter, *, partition: int = 0, topic: str = TOPIC) -> None:
        self.writer, self.partition, self.topic = writer, partition, topic
        self.restart = 0
        self.stamps: dict[str, Stamp] = {}
        self.clock_ms = 1_000_000

    async def seek(self, restart: int = 0, target: int = 0, *, drop: bool = True) -> None:
        await self.writer.seek(self.partition, self.topic, restart, target, drop=drop)
        self.restart = restart

    async def reload(self) -> None:
        """Take over what is stored, as a refused worker does."""
        stored = await self.writer.load(self.partition)
        self.restart = stored.progress.restart if stored.progress else 0
        self.stamps = {rank: stamp for rank, (stamp, _) in stored.ranks.items()}

    def unit(self, rank: str, *ops: Op, model: str = MODEL, **changes: Any) -> RankUnit:
        before: Stamp = changes.pop("before", self.stamps.get(rank, NEVER))
        after: Stamp = changes.pop("after", Stamp(7, 7, 1, before.n + 1))
        facts: dict[str, Any] = {
            "now": Now(*after, after.n + 100),
            "state": b"state of %d" % after.n,
            "card": card(model, self.partition) if before == NEVER else None,
            "broker_ms": self.clock_ms,
        }
        return RankUnit(rank=rank, model=model, before=before, after=after, ops=ops, **facts | changes)

    def step(self, *units: RankUnit, **changes: Any) -> Step:
        facts: dict[str, Any] = {
            "topic_id": self.topic,
            "restart_before": self.restart,
            "restart": self.restart + 1,
            "read": self.restart + 1,
            "at_end": False,
            "broker_ms": self.clock_ms,
            "nonce": next(self._nonces).to_bytes(16, "big"),
        }
        return Step(partition=self.partition, units=units, **facts | changes)

    def pieces(self, unit: RankUnit, *sizes: int) -> list[Step]:
        """A unit in pieces of so many ops, and one of what is left."""
        whole, token = self.step(unit), next(self._nonces).to_bytes(16, "big")
        ends = list(itertools.accumulate(sizes))
        steps = []
        for number, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            nonce = next(self._nonces).to_bytes(16, "big")
            steps.append(piece_of(whole, unit.ops[start:end], number, token, nonce))
        rest = msgspec.structs.replace(unit, ops=unit.ops[ends[-1] :])
        return [*steps, msgspec.structs.replace(whole, units=(rest,), piece=Piece(token, len(sizes), last=True))]

    async def apply(self, *units: RankUnit, **changes: Any) -> Outcome:
        return await self.send(self.step(*units, **changes))

    async def send(self, step: Step) -> Outcome:
        outcome = await self.writer.apply(step)
        if outcome.verdict == "applied" and (step.piece is None or step.piece.last):
            self.restart = step.restart
            for unit in step.units:
                self.stamps[unit.rank] = max(unit.after, self.stamps.get(unit.rank, NEVER))
        return outcome

    async def do(self, rank: str, *ops: Op, **changes: Any) -> Outcome:
        """One step of one unit; in pieces where it is larger."""
        unit = self.unit(rank, *ops, **changes)
        sizes = [STEP_OPS_MAX] * ((len(ops) - 1) // STEP_OPS_MAX)
        *firsts, last = self.pieces(unit, *sizes) if sizes else [self.step(unit)]
        for step in firsts:
            await self.send(step)
        return await self.send(last)

    async def open(self, *ranks: str, **changes: Any) -> None:
        """New lives."""
        await self.apply(*(self.unit(rank, Bind(), **changes) for rank in ranks))


async def look(
    reader: IndexReader, keys: Sequence[int], model: str = MODEL, *, catalogue: Catalogue | None = None
) -> tuple[list[set[Where]], Reading]:
    """Holders by key of a prompt, as a router sees them."""
    catalogue = catalogue or await reader.catalogue(model)
    reading = await reader.read(catalogue, model, keys)
    owners = {
        slot: (name, MEDIA[code])
        for name, view in catalogue.ranks.items()
        for code, slot in enumerate(view.slots)
        if slot
    }
    holders: list[set[Where]] = [set() for _ in keys]
    for number, segment in enumerate(reading.segments):
        named = [(slot, lane) for slot, lane, _ in segment.holders]
        assert len(named) == len(set(named)), "a holder is named once"
        for slot, lane, mask in segment.holders:
            assert 0 < mask < 1 << len(keys[number * SEGMENT_STRIDES :][:SEGMENT_STRIDES]), "bits of the prompt only"
            for position in range(SEGMENT_STRIDES):
                if slot in owners and mask >> position & 1:
                    holders[number * SEGMENT_STRIDES + position].add((*owners[slot], lane))
    return holders, reading


async def claims(reader: IndexReader, model: str | None = None, rank: str | None = None) -> set[tuple[Where, int]]:
    """What ``dump`` lists: ((rank, medium, lane), key); lane 255 for none. No claim comes twice."""
    listed = [
        ((claim.rank, claim.medium, 255 if claim.group is None else claim.group), claim.key)
        async for claim in reader.dump(model, rank)
    ]
    assert len(listed) == len(set(listed))
    return set(listed)
