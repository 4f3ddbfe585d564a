"""The engine: steps that store, remove and clear, a lossy PUB link per bridge, a short replay buffer, restarts.

Its whole history is kept as a ghost: ``truth`` is what every exact answer is compared with.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Literal

import msgspec
from protocol_records import GPU_LANES, HASHES, LANES, MEDIUM

BUFFER_STEPS = 4
COPIES_MAX = 3

Residency = dict[int, Counter[int]]
"""Lane -> hash -> copies."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event on the wire; a clear names no lane."""

    op: Literal["store", "remove", "clear"]
    lane: int = -1
    hash: int = -1


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One step's events; ``digest`` stands for the raw bytes, ``ghost`` is the life that published it."""

    seq: int
    digest: int
    events: tuple[Event, ...]
    ghost: int
    readable: bool = True


DISCONNECTED: Literal["disconnected"] = "disconnected"
CONNECTED: Literal["connected"] = "connected"
"""Sessions of the model need not be told; real ones are."""


class Link:
    """One SUB connection: what is under way, in order."""

    def __init__(self) -> None:
        self.wire: deque[Batch | Literal["disconnected", "connected"]] = deque()
        self.connected = False

    def cut(self) -> None:
        """The connection breaks; what is under way still arrives."""
        if self.connected:
            self.wire.append(DISCONNECTED)
            self.connected = False

    def reset(self) -> None:
        """The socket is closed and opened anew."""
        self.wire.clear()
        self.connected = False


def empty() -> Residency:
    return {lane: Counter() for lane in LANES}


def wipe_gpu(residency: Residency) -> None:
    for lane in GPU_LANES:
        residency[lane].clear()


class Engine:
    """One rank's engine, process after process at the same address. ``calm``: nothing is lost and all is kept."""

    def __init__(self, rank: int, *, calm: bool) -> None:
        self.rank, self.calm = rank, calm
        self.life, self.up, self.published = 0, True, 0
        self.announced = 0
        """The life that a slow observer, as an orchestrator is, last heard of."""
        self.history: dict[int, list[Batch]] = {0: []}
        self.buffer: deque[Batch] = self._buffer()
        self.cache = empty()
        self.links: list[Link] = []

    def _buffer(self) -> deque[Batch]:
        return deque(maxlen=None if self.calm else BUFFER_STEPS)

    def step(self, rnd: random.Random, *, clear: bool = False, lossless: bool = False) -> None:
        """One scheduler step and its batch."""
        events: list[Event] = []
        cut = rnd.randint(0, 2) if clear else -1
        for i in range(rnd.randint(0 if clear else 1, 3)):
            if i == cut:
                events.append(self._clear())
                cut = -1
            events += self._change(rnd)
        if cut >= 0:
            events.append(self._clear())
        self._publish(tuple(events), None if lossless or self.calm else rnd)

    def _change(self, rnd: random.Random) -> list[Event]:
        lane, block = rnd.choice(LANES), rnd.choice(HASHES)
        copies = self.cache[lane]
        have = [each for each in HASHES if copies[each] > 0]
        if have and rnd.random() < 0.45:
            block = rnd.choice(have)
            copies[block] -= 1
            return [Event("remove", lane, block)]
        if copies[block] >= COPIES_MAX:
            return []
        copies[block] += 1
        return [Event("store", lane, block)]

    def _clear(self) -> Event:
        wipe_gpu(self.cache)
        return Event("clear")

    def _publish(self, events: tuple[Event, ...], rnd: random.Random | None) -> None:
        """``rnd`` decides what is lost; without it nothing is."""
        self.published += 1
        readable = rnd is None or rnd.random() > 0.02
        batch = Batch(len(self.history[self.life]), self.published, events, self.life, readable)
        self.history[self.life].append(batch)
        self.buffer.append(batch)
        for link in self.links:
            if link.connected and (rnd is None or rnd.random() > 0.2):
                link.wire.append(batch)

    def restart(self, *, up: bool = True) -> None:
        """A new process with an empty cache and an empty replay buffer."""
        self.life += 1
        self.history[self.life] = []
        self.buffer = self._buffer()
        self.cache = empty()
        self.up = up
        for link in self.links:
            link.cut()

    def replay(self, start: int, rnd: random.Random | None) -> list[Batch] | None:
        """What the ROUTER answers, after the first batch perhaps with holes; None: no answer."""
        if not self.up:
            return None
        got = [batch for batch in self.buffer if batch.seq >= start]
        if rnd is None or self.calm:
            return got
        return [batch for i, batch in enumerate(got) if i == 0 or rnd.random() > 0.15]

    def identity(self, *, from_engine: bool) -> int | None:
        """Which process this is; from elsewhere it may be the one before."""
        if not self.up:
            return None
        return self.life if from_engine else self.announced

    def truth(self, lane: int, life: int | None = None, seq: int | None = None) -> set[int]:
        """What was resident in a life right after ``seq``; by default now."""
        copies: Counter[int] = Counter()
        for batch in self.history[self.life if life is None else life]:
            if seq is not None and batch.seq > seq:
                break
            for event in batch.events:
                if event.op == "clear":
                    if MEDIUM[lane] == "gpu":
                        copies.clear()
                elif event.lane == lane:
                    copies[event.hash] += 1 if event.op == "store" else -1
        return {block for block, count in copies.items() if count > 0}
