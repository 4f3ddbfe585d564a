"""Both topics as lists of real keys and values, and what workers look up there."""

from __future__ import annotations

from typing import NamedTuple

from protocol_parts import Setup
from protocol_records import RANKS

from kvledger_streams.progress import Bounds, Starts, rebuild
from kvledger_wire.accept import RankState, accept
from kvledger_wire.errors import Poison
from kvledger_wire.partition import claim_key, parse_key, partition_of, rank_id
from kvledger_wire.records import Claim, EventRecord, Fence, ReplicaRecord, decode_event, decode_replica
from kvledger_wire.replicas import ReplicaTable, begins

TOPIC_ID = "topic"
NOW_MS = 1_000_000
"""All records are of one moment: nothing here goes stale by age."""

JUNK = b"\xc1"


def _replicas() -> tuple[str, ...]:
    """A name per rank, such that of two partitions each has one."""
    names = (f"r{i}" for i in range(100))
    return tuple(next(name for name in names if partition_of(name, rank, 2) == rank) for rank in RANKS)


REPLICAS = _replicas()


def name_of(rank: int) -> str:
    """``replica/rank``."""
    return rank_id(REPLICAS[rank], rank)


class Item(NamedTuple):
    """A record under way; ``record`` None is a tombstone."""

    partition: int
    key: bytes
    value: bytes | None
    record: EventRecord | ReplicaRecord | None
    rank: int


Read = tuple[int, int | str | None, EventRecord | None]
"""(offset, group, record or None where it cannot be read)."""


class RealLog:
    """The broker."""

    def __init__(self, setup: Setup) -> None:
        self.count = setup.partitions
        self.partitions: list[list[tuple[bytes, bytes | None]]] = [[] for _ in range(setup.partitions)]
        self.base = [0] * setup.partitions
        self.replicas: list[tuple[bytes, bytes | None]] = []
        self.damage_next: set[int] = set()

    def partition(self, rank: int) -> int:
        return partition_of(REPLICAS[rank], rank, self.count)

    def append(self, item: Item) -> int:
        """Land a record."""
        if item.partition < 0:
            self.replicas.append((item.key, item.value))
            return len(self.replicas) - 1
        value = item.value
        if item.rank in self.damage_next and not isinstance(item.record, Fence):
            self.damage_next.discard(item.rank)
            value = JUNK
        self.partitions[item.partition].append((item.key, value))
        return len(self.partitions[item.partition]) - 1

    def claims(self, rank: int) -> list[tuple[int, str]]:
        """(owner, bridge) of every claim of a rank."""
        found = []
        for offset, (key, value) in enumerate(self.replicas):
            record = decode_replica(value) if value else None
            if isinstance(record, Claim) and key == claim_key(REPLICAS[rank], rank):
                found.append((offset, record.bridge))
        return found

    def top_claim(self, rank: int) -> int:
        return max((owner for owner, _ in self.claims(rank)), default=-1)

    def table(self, end: int | None = None) -> ReplicaTable:
        """The topic of owners, read to its end or to before ``end``."""
        table = ReplicaTable()
        for key, value in self.replicas[:end]:
            table.take(key, value, NOW_MS)
        return table

    def verified(self, rank: int, offset: int) -> bool:
        """Whether reading of a rank may start at an offset."""
        partition = self.partition(rank)
        inside = self.base[partition] <= offset < len(self.partitions[partition])
        return inside and begins(name_of(rank), *self.partitions[partition][offset])

    def starts(self, partition: int) -> Starts:
        """What ``kvledger_streams.pointers`` finds."""
        table = self.table()
        fences = table.fences(partition, self.count)
        if self.base[partition] >= len(self.partitions[partition]):
            return Starts({}, "the log is empty", fences)
        ranks = {name_of(rank): rank for rank in RANKS}
        starts: dict[str, int] = {}
        for name, pointer in table.pointers(partition, self.count, NOW_MS).items():
            if pointer is None or not self.verified(ranks[name], pointer.offset):
                return Starts({}, f"{name} has no pointer", fences)
            starts[name] = pointer.offset
        return Starts(starts, "" if starts else "nobody", fences)

    def bounds(self, partition: int) -> Bounds:
        return Bounds(TOPIC_ID, self.base[partition], len(self.partitions[partition]), NOW_MS)

    def read(self, rank: int, start: int, end: int | None = None) -> list[Read]:
        """A rank's records."""
        found: list[Read] = []
        for offset, (key, value) in enumerate(self.partitions[self.partition(rank)][start:end], start):
            home = parse_key(key)
            if home.rank_id == name_of(rank):
                try:
                    found.append((offset, home.group, decode_event(value)))
                except Poison:
                    found.append((offset, None, None))
        return found

    def holds(self, rank: int) -> bool:
        """Whether who reads all that is left of a rank ends with it loaded."""
        partition = self.partition(rank)
        owners = rebuild(self.bounds(partition), "", self.starts(partition)._replace(ranks={})).owners
        state = RankState(owner=owners.get(name_of(rank), -1))
        for offset, group, record in self.read(rank, self.base[partition]):
            accept(state, group, record, offset)
        return state.loaded and not state.closed

    def truncate(self, partition: int, x: int) -> None:
        """Retention: usually up to the lowest pointer; sometimes it overtakes ranks, or all but the newest pointer."""
        table = self.table()
        pointers = [table.newest(REPLICAS[r], r) for r in RANKS if self.partition(r) == partition and self.claims(r)]
        known = [p.offset for p in pointers if p is not None and p.offset >= self.base[partition]]
        if known and (len(known) == len(pointers) or x % 4 == 0):
            self.base[partition] = max(self.base[partition], max(known) if x % 8 == 0 else min(known))
