"""A writer of valid logs for tests of the fold: ranks that store, remove and clear, and the truth about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import xxhash

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.model import MEDIA, GroupSpec, ModelEntry
from kvledger_wire import records as wire
from kvledger_wire.partition import partition_of, record_key

NO_PARENT = bytes(8)
Group = int | None
Claim = tuple[Group, str, int]
"""(group, medium, block key), as ``dump`` lists them."""


def prompt(name: str, strides: int, fork: int = 0, branch: str = "") -> list[int]:
    """Block keys of a made-up prompt; those from stride ``fork`` on belong to ``branch``."""
    keys: list[int] = []
    seed = 0
    for i in range(strides):
        word = f"{name}/{branch if i >= fork else ''}/{i}"
        seed = xxhash.xxh3_64_intdigest(word.encode(), seed)
        keys.append(seed)
    return keys


def runs(keys: Sequence[int], start: int, stop: int, wanted: set[int] | None = None) -> tuple[wire.Run, ...]:
    """Strides ``start``..``stop`` of a path as runs; only keys in ``wanted`` are effective (None: all)."""
    out = []
    while start < stop:
        segment = start - start % SEGMENT_STRIDES
        end = min(stop, segment + SEGMENT_STRIDES)
        part = keys[start:end]
        bits = sum(1 << j for j, key in enumerate(part) if wanted is None or key in wanted)
        out.append(
            wire.Run(
                row=keys[segment].to_bytes(8, "big"),
                position=start - segment,
                parent=keys[start - 1].to_bytes(8, "big") if start > segment else NO_PARENT,
                keys=b"".join(key.to_bytes(8, "big") for key in part),
                blocks=(1 << len(part)) - 1,
                effective=bits,
                hashes=b"\0" * 8 * len(part),
            )
        )
        start = end
    return tuple(out)


class RankLog:
    """One rank: appends (key, value) to ``log`` as a bridge would, and keeps ``held``, what a reader must end with."""

    def __init__(
        self,
        log: list[tuple[bytes | None, bytes | None]],
        replica: str = "pod-a",
        rank: int = 0,
        *,
        owner: int = 1,
        entry: ModelEntry | None = None,
    ) -> None:
        self.log = log
        self.replica, self.rank, self.owner = replica, rank, owner
        self.entry = entry or ModelEntry(model="m", groups=(GroupSpec(0, "full_attention", 16),))
        self.opened = 0
        self.life: wire.Life = (owner, 0)
        self.paths: dict[int, tuple[Sequence[int], int]] = {}
        self.suspended = self.partial = False
        self.n = -1
        self.seq = -1
        self.loaded = False
        self.held: set[Claim] = set()

    @property
    def id(self) -> str:
        return f"{self.replica}/{self.rank}"

    def partition(self, partitions: int) -> int:
        return partition_of(self.replica, self.rank, partitions)

    def put(self, record: wire.EventRecord, group: int | str | None = "*") -> None:
        self.log.append((record_key(self.replica, self.rank, group), wire.encode(record)))

    def take_over(self, owner: int) -> None:
        """A new bridge: Fence; its life goes on, or it opens a new one."""
        self.owner, self.opened, self.suspended = owner, 0, True
        self.put(wire.Fence(0, owner, "bridge", "0", "start"))

    def open(self, *, partial: bool = False, seq: int = -1) -> None:
        self.opened += 1
        self.life, self.suspended, self.partial = (self.owner, self.opened), False, partial
        self.n, self.seq, self.loaded, self.held = 0, seq, True, set()
        self.put(wire.Opened(0, self.owner, self.life, 0, self.entry, self.entry.stride, seq, b"", partial, "test"))

    def next(self) -> tuple[int, int, wire.Life, int]:
        """(schema, owner, life, n) of the next record."""
        self.n += 1
        return 0, self.owner, self.life, self.n

    def events(self, *changes: wire.Change, group: int | str | None = 0, end: bool = True, **more: Any) -> None:
        """One record as it is, the truth unchanged."""
        schema, owner, life, n = self.next()
        self.put(wire.Events(schema, owner, life, n, self.seq, b"d", end, changes, **more), group)

    def batch(self, *changes: tuple[Group, str, str, Sequence[int], int, int]) -> None:
        """One engine batch of (group, medium, "store" | "remove", path, start, stop); one record per change."""
        self.seq += 1
        for i, (group, medium, what, path, start, stop) in enumerate(changes):
            self.paths |= {path[place]: (path, place) for place in range(start, stop)}
            claims = {(group, medium, key) for key in path[start:stop]}
            moved = claims - self.held if what == "store" else claims & self.held
            self.held = self.held | claims if what == "store" else self.held - claims
            op = wire.STORED if what == "store" else wire.REMOVED
            parts = runs(path, start, stop, {key for _, _, key in moved})
            change = wire.Change(op, MEDIA.index(medium), self.seq, 0.0, parts)
            record = wire.Events(*self.next(), self.seq, b"d", i == len(changes) - 1, (change,))
            self.put(record, group)

    def clear(self, medium: str = "gpu") -> None:
        self.seq += 1
        self.held = {claim for claim in self.held if claim[1] != medium}
        self.partial = self.partial and medium != "gpu"
        change = wire.Change(wire.CLEARED, MEDIA.index(medium), self.seq, 0.0)
        self.put(wire.Events(*self.next(), self.seq, b"d", True, (change,)))

    def beat(self) -> None:
        self.put(wire.Heartbeat(*self.next(), self.seq, b"d"))

    def suspend(self) -> None:
        self.suspended = True
        self.put(wire.Suspended(*self.next(), "test"))

    def resume(self) -> None:
        self.suspended = False
        self.put(wire.Resumed(*self.next(), "test"))

    def gap(self) -> None:
        self.put(wire.Gap(*self.next(), self.seq + 1, self.seq + 1, "test", "invalidate"))
        self.loaded, self.held = False, set()

    def close(self) -> None:
        self.put(wire.Closed(*self.next(), "test"))
        self.held = set()

    def holdings(self) -> list[wire.Held]:
        """What is held, a block each: the dullest checkpoint that says everything."""
        out = []
        for group, medium, key in sorted(self.held, key=str):
            path, place = self.paths[key]
            change = wire.Change(wire.STORED, MEDIA.index(medium), self.seq, 0.0, runs(path, place, place + 1))
            out.append(wire.Held(group, change))
        return out

    def part(self, number: int, *, last: bool, lanes: Sequence[wire.Held] = (), **more: Any) -> None:
        """One part of a checkpoint."""
        facts: dict[str, Any] = {"suspended": self.suspended, "partial": self.partial, "lanes": tuple(lanes)} | more
        head = (*self.next(), number, last, self.entry, self.entry.stride, self.seq, b"d" if self.seq >= 0 else b"")
        self.put(wire.Checkpoint(*head, **facts))

    def checkpoint(self, parts: int = 1, **more: Any) -> None:
        """All that is held, in so many parts; the groups heard are those that a reader from zero would know."""
        lanes = self.holdings()
        size = -(-len(lanes) // parts) or 1
        for number in range(parts):
            held = lanes[number * size : (number + 1) * size]
            self.part(number, last=number == parts - 1, lanes=held, **more)

    def act(self, rnd: random.Random, prompts: Sequence[Sequence[int]], groups: Sequence[Group] = (0, 1)) -> None:
        """Something that a bridge might write next."""
        if not self.loaded:
            self.open(partial=rnd.random() < 0.5, seq=self.seq)
            return
        roll = rnd.random()
        if roll < 0.80:
            changes = []
            for _ in range(rnd.randint(1, 4)):
                path = rnd.choice(prompts)
                start = rnd.randrange(len(path))
                stop = rnd.randint(start + 1, min(len(path), start + 24))
                what = "store" if rnd.random() < 0.65 else "remove"
                medium = "gpu" if rnd.random() < 0.8 else "cpu"
                changes.append((rnd.choice(groups), medium, what, path, start, stop))
            self.batch(*changes)
        elif roll < 0.84:
            self.clear("gpu" if rnd.random() < 0.7 else "cpu")
        elif roll < 0.90:
            self.beat()
        elif roll < 0.94:
            self.suspend()
        elif roll < 0.98:
            self.resume()
        elif roll < 0.99:
            self.gap()
        else:
            self.open(seq=-1)
