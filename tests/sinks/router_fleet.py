"""A fleet of ranks in an index, written through the same contract as by the fold; what router tests stand on."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from kvledger_index.blockkeys import SEGMENT_STRIDES, Extra, prompt_keys
from kvledger_index.contract import IndexWriter
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import GroupSpec, Medium, lane_code
from kvledger_index.units import NEVER, Bind, Card, Clear, Drop, Now, Op, Put, RankUnit, Stamp, Step, piece_of
from kvledger_router import Holder, Index, Match

MODEL = "gemma-3-1b-it"
STRIDE = 16
FULL = GroupSpec(group=0, kind="full_attention", block_size=16)
WINDOW = GroupSpec(group=1, kind="sliding_window", block_size=16, window=33)
"""A tail of two blocks."""


class Clock:
    """Redis' clock for an index in memory, and the router's for its breaker and hints."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms

    def seconds(self) -> float:
        return self.ms / 1000

    def pass_seconds(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that share no stride with those of another seed."""
    return [(seed * 100_003 + i * 7) % 50_000 for i in range(length)]


PROMPT = prompt(161)
"""Ten blocks of 16 and a token."""


def only(match: Match) -> Holder:
    """The one holder of a match."""
    assert len(match) == 1
    return match.holders[0]


def puts(
    keys: Sequence[int], strides: Iterable[int], *, lane: int, medium: Medium = "gpu", add: bool = True
) -> list[Op]:
    """Changes of the keys at ``strides`` of one prompt, segment by segment."""
    chosen = set(strides)
    ops: list[Op] = []
    for start in range(0, len(keys), SEGMENT_STRIDES):
        segment = tuple(keys[start : start + SEGMENT_STRIDES])
        mask = sum(1 << p for p in range(len(segment)) if start + p in chosen)
        if mask:
            ops.append(Put(add, medium, lane, segment[0], 0, 0, segment, mask))
    return ops


class Fleet:
    """Ranks of one model in one partition; every call is one applied step of a worker at the log's end."""

    _nonces = itertools.count(1)

    def __init__(self, writer: IndexWriter, *, model: str = MODEL, stride: int = STRIDE, partition: int = 0) -> None:
        self.writer, self.model, self.stride, self.partition = writer, model, stride, partition
        self.log_ms = 1_000_000
        self._restart = 0
        self._stamps: dict[str, Stamp] = {}
        self._cards: dict[str, Card] = {}

    async def start(self, *, target: int = 0) -> None:
        await self.writer.seek(self.partition, "topic", 0, target, drop=True)

    async def open(self, *names: str, groups: tuple[GroupSpec, ...] = (FULL,), **changes: Any) -> None:
        """New, empty lives."""
        for name in names:
            card = Card(
                model=self.model,
                partition=self.partition,
                stride=self.stride,
                loaded=True,
                suspended=False,
                partial=False,
                uncertain=(),
                closed=False,
                groups=groups,
                heard=tuple(g.group for g in groups),
            )
            self._cards[name] = msgspec.structs.replace(card, **changes)
            await self._apply(name, Bind(), card=self._cards[name])

    async def store(
        self,
        name: str,
        tokens: Sequence[int],
        blocks: Iterable[int] | None = None,
        *,
        group: int | None = 0,
        size: int = 16,
        medium: Medium = "gpu",
        add: bool = True,
        lora: str | None = None,
        salt: str | None = None,
        media: Sequence[Extra] = (),
        **changes: Any,
    ) -> None:
        """Store (or with ``add=False`` remove) blocks of a prompt, by default all full ones."""
        keys = prompt_keys(self.model, tokens, self.stride, lora=lora, salt=salt, media=media)
        each = range(len(tokens) // size) if blocks is None else blocks
        ratio = size // self.stride
        strides = [(block + 1) * ratio - 1 for block in each]
        await self._apply(name, *puts(keys, strides, lane=lane_code(group), medium=medium, add=add), **changes)

    async def store_hashes(
        self,
        name: str,
        hashes: Iterable[int],
        *,
        group: int | None = 0,
        medium: Medium = "gpu",
        add: bool = True,
        **changes: Any,
    ) -> None:
        """Store (or remove) engine hashes that have no block key; ``unplaced`` and the like as in Now."""
        ops = [Put(add, medium, lane_code(group), each, 0, 0, (each,), 1) for each in hashes]
        await self._apply(name, *ops, **changes)

    async def beat(self, name: str, **changes: Any) -> None:
        """A record without changes; ``unplaced`` as in Now."""
        await self._apply(name, **changes)

    async def become(self, name: str, **changes: Any) -> None:
        """Change facts of a rank's card."""
        self._cards[name] = msgspec.structs.replace(self._cards[name], **changes)
        ops = [Drop()] if changes.get("loaded") is False else []
        await self._apply(name, *ops, card=self._cards[name])

    async def load(self, name: str) -> None:
        """A checkpoint's first part: new slots, and not loaded before its last."""
        self._cards[name] = msgspec.structs.replace(self._cards[name], loaded=False)
        await self._apply(name, Bind(), card=self._cards[name])

    async def clear(self, name: str, medium: Medium = "gpu") -> None:
        await self._apply(name, Clear(medium))

    async def tick(self, *, read: int | None = None, at_end: bool = True) -> None:
        """The worker says that it stands at the log's end, without news of any rank."""
        await self._send((), read=read, at_end=at_end)

    async def _apply(
        self,
        name: str,
        *ops: Op,
        card: Card | None = None,
        seq: int | None = None,
        unplaced: tuple[tuple[int, int, int], ...] = (),
        opaque: tuple[tuple[int, int, int], ...] = (),
        veiled: tuple[tuple[int, int, int], ...] = (),
        silent: tuple[tuple[int, int, int], ...] = (),
        unproven_ms: int = 0,
        at_end: bool = True,
    ) -> None:
        before = self._stamps.get(name, NEVER)
        after = Stamp(7, 7, 1, before.n + 1)
        counts: dict[str, Any] = {"unplaced": unplaced, "opaque": opaque, "silent": silent, "veiled": veiled}
        now = Now(*after, seq=after.n if seq is None else seq, unproven_ms=unproven_ms, **counts)
        await self._send((self._unit(name, before, now, ops, card),), at_end=at_end)
        self._stamps[name] = after

    async def begin(self, name: str) -> None:
        """The first piece of a unit that is larger than a step."""
        before = self._stamps[name]
        unit = self._unit(name, before, Now(*before[:3], before.n + 1, before.n), (), None)
        step = self._step((unit,), at_end=False)
        outcome = await self.writer.apply(piece_of(step, (), 0, bytes(16), step.nonce))
        assert outcome.verdict == "applied", outcome

    def _unit(self, name: str, before: Stamp, now: Now, ops: tuple[Op, ...], card: Card | None) -> RankUnit:
        self.log_ms += 1
        return RankUnit(
            rank=name,
            model=self.model,
            before=before,
            after=Stamp(now.owner, now.life_owner, now.life_count, now.n),
            ops=ops,
            now=now,
            state=b"",
            card=card,
            broker_ms=self.log_ms,
        )

    async def _send(self, units: tuple[RankUnit, ...], *, at_end: bool, read: int | None = None) -> None:
        step = self._step(units, at_end=at_end, read=read)
        outcome = await self.writer.apply(step)
        assert outcome.verdict == "applied", outcome
        self._restart += 1

    def _step(self, units: tuple[RankUnit, ...], *, at_end: bool, read: int | None = None) -> Step:
        return Step(
            partition=self.partition,
            topic_id="topic",
            restart_before=self._restart,
            restart=self._restart + 1,
            read=self._restart + 1 if read is None else read,
            units=units,
            at_end=at_end,
            broker_ms=self.log_ms,
            nonce=next(self._nonces).to_bytes(16, "big"),
        )


@dataclass
class World:
    """A router over a fleet in memory, both on one clock that only tests move."""

    clock: Clock
    memory: MemoryIndex
    fleet: Fleet
    index: Index


@asynccontextmanager
async def new_world(**options: Any) -> AsyncIterator[World]:
    """``options`` go to the index."""
    clock = Clock()
    memory = MemoryIndex(clock_ms=clock)
    fleet = Fleet(memory)
    await fleet.start()
    async with Index(memory, model=MODEL, deadline_seconds=5.0, clock=clock.seconds, **options) as index:
        yield World(clock, memory, fleet, index)
