"""The log: partitions that retention cuts from the front, the compacted topic of owners, and producers.

A record is on its way (``pending``), then in the log (landed), then acknowledged. A producer that dies leaves records
that may still land, in their order, long after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
from protocol_accept import RankState, accept
from protocol_records import RANKS, Record
from protocol_rules import Rules

Late = dict[int, deque[Callable[[], object]]]
"""Topic partition -> what of a dead producer may still land, in order."""

UNREADABLE_KEEPS = ("Fence",)  # damage of a Fence alone is found by the next record of its owner


class Pointer(msgspec.Struct, frozen=True):
    """Where reading of a rank may start (None: at the log's start)."""

    found: bool
    start: int | None


class Log:
    """Both topics. ``base`` is each partition's first offset that is still there."""

    def __init__(self, rules: Rules, partitions: int) -> None:
        self.rules = rules
        self.partitions: list[list[Record]] = [[] for _ in range(partitions)]
        self.base = [0] * partitions
        self.replicas: list[Record] = []
        self.damage_next: set[int] = set()
        """Ranks whose next record lands unreadable."""

    def partition(self, rank: int) -> int:
        return rank % len(self.partitions)

    def route(self, record: Record) -> int:
        """Its partition; -1: the topic of owners."""
        return -1 if record.kind in {"Claim", "Pointer"} else self.partition(record.rank)

    def append(self, record: Record) -> int:
        """Land a record on the topic that its kind belongs to."""
        if self.route(record) < 0:
            self.replicas.append(record)
            return len(self.replicas) - 1
        partition = self.partitions[self.partition(record.rank)]
        if record.rank in self.damage_next and record.kind not in UNREADABLE_KEEPS:
            self.damage_next.discard(record.rank)
            record = msgspec.structs.replace(record, readable=False)
        partition.append(record)
        return len(partition) - 1

    def top_claim(self, rank: int) -> int:
        """The highest owner that claimed; -1: nobody."""
        return max((r.owner for r in self.replicas if r.kind == "Claim" and r.rank == rank), default=-1)

    def ranks(self, partition: int) -> list[int]:
        """Ranks of a partition that anybody ever claimed."""
        known = {record.rank for record in self.replicas}
        return [rank for rank in RANKS if self.partition(rank) == partition and rank in known]

    def pointer(self, rank: int) -> Pointer:
        """The pointer that counts."""
        best: Record | None = None
        for record in self.replicas:
            if (
                record.kind == "Pointer"
                and record.rank == rank
                and (best is None or not self.rules.pointer_per_owner or record.owner >= best.owner)
            ):
                best = record
        if best is None:
            return Pointer(found=False, start=None)
        partition = self.partition(rank)
        if best.offset is None or best.offset < self.base[partition]:
            return Pointer(found=True, start=None)
        there = self.partitions[partition][best.offset]
        begins = there.kind == "Opened" or (there.kind == "Checkpoint" and there.part == 0)
        if not (there.rank == rank and there.readable and begins):
            return Pointer(found=True, start=None)
        return Pointer(found=True, start=best.offset)

    def ended_before(self, rank: int, start: int) -> int:
        """The highest owner whose Fence lies at or below ``start``: lower ones were ended by it. -1: not known."""
        if not self.rules.pointer_names_fence:
            return -1
        return max(
            (
                record.owner
                for record in self.replicas
                if record.kind == "Pointer"
                and record.rank == rank
                and record.fence is not None
                and record.fence <= start
            ),
            default=-1,
        )

    def rebuild_start(self, partition: int) -> int:
        """The lowest pointer of the partition's ranks; the log's start if one has none."""
        starts = [self.pointer(rank).start for rank in self.ranks(partition)]
        known = [start for start in starts if start is not None]
        if not known or (len(known) < len(starts) and self.rules.pointer_to_opened):
            return self.base[partition]
        return max(self.base[partition], min(known))

    def holds(self, rank: int) -> bool:
        """Whether who reads all that is left of a rank ends with it loaded."""
        partition = self.partition(rank)
        base = self.base[partition]
        state = RankState(owner=self.ended_before(rank, base))
        for offset, record in enumerate(self.partitions[partition][base:], base):
            if record.rank == rank:
                accept(self.rules, state, record, offset)
        return state.loaded and not state.closed

    def truncate(self, partition: int, x: int) -> None:
        """Retention: usually up to the lowest pointer; sometimes it overtakes ranks, or all but the newest pointer."""
        starts = [self.pointer(rank).start for rank in self.ranks(partition)]
        known = [start for start in starts if start is not None]
        if known and (len(known) == len(starts) or x % 4 == 0):
            self.base[partition] = max(self.base[partition], max(known) if x % 8 == 0 else min(known))


Item = TypeVar("Item")


class Pending(msgspec.Struct, Generic[Item]):
    """A record under way; ``offset`` once it landed."""

    item: Item
    offset: int | None = None


class Producer(Generic[Item]):
    """One bridge's records under way, per topic partition (-1 is the topic of owners), each in order."""

    def __init__(
        self,
        partitions: int,
        *,
        route: Callable[[Item], int],
        append: Callable[[Item], int],
        acknowledged: Callable[[Item, int], None],
        landed: Callable[[Item, int], None] = lambda _item, _offset: None,
    ) -> None:
        self.pending: dict[int, deque[Pending[Item]]] = {p: deque() for p in (*range(partitions), -1)}
        self._route, self._append = route, append
        self._acknowledged, self._landed = acknowledged, landed

    def send(self, item: Item) -> None:
        """Put it on its way."""
        self.pending[self._route(item)].append(Pending(item))

    def land(self, where: int, count: int | None = None) -> None:
        """The next ``count`` records reach the broker; the acknowledgement is still under way."""
        for entry in list(self.pending[where]):
            if entry.offset is None and (count is None or count > 0):
                entry.offset = self._append(entry.item)
                self._landed(entry.item, entry.offset)
                count = None if count is None else count - 1

    def ack(self, where: int, count: int | None = None) -> None:
        """Acknowledgements of what landed arrive."""
        queue = self.pending[where]
        while queue and queue[0].offset is not None and (count is None or count > 0):
            entry = queue.popleft()
            assert entry.offset is not None
            self._acknowledged(entry.item, entry.offset)
            count = None if count is None else count - 1

    def flush(self) -> None:
        """All lands and is acknowledged, and what follows from that, too."""
        for _ in range(4):
            for where in self.pending:
                self.land(where)
                self.ack(where)

    def resend(self) -> None:
        """Without idempotence: what was not acknowledged is sent again, in order."""
        for queue in self.pending.values():
            for entry in queue:
                entry.offset = None

    def duplicate(self) -> None:
        """Without idempotence: what landed lands once more."""
        for where, queue in self.pending.items():
            for entry in list(queue):
                if entry.offset is not None and where >= 0:
                    self._append(entry.item)

    def lost(self, keep: Callable[[], int]) -> Late:
        """The producer is gone. What may still land: per partition a prefix of what had not landed."""
        late: Late = {}
        for where, queue in self.pending.items():
            left = [entry.item for entry in queue if entry.offset is None][: keep()]
            late[where] = deque(partial(self._append, item) for item in left)
            queue.clear()
        return late
