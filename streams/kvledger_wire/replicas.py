"""What ``kvledger.replicas`` says: which ranks there are, and where reading of each may start (DESIGN §5, §6). Pure.

The topic is compacted and has one partition: read to its end, the last word for each key counts. A rank with a claim
exists until a tombstone under the claim's key; its newest pointer is that of the highest owner that has one.
"""

from __future__ import annotations

from kvledger_wire.errors import Poison
from kvledger_wire.partition import parse_claim_key, parse_key, parse_pointer_key, partition_of, rank_id
from kvledger_wire.records import SCHEMA, Checkpoint, Opened, Pointer, decode_event, decode_replica


class ReplicaTable:
    """The topic as far as it was read."""

    def __init__(self) -> None:
        self._claimed: set[tuple[str, int]] = set()
        self._pointers: dict[tuple[str, int], dict[int, Pointer]] = {}
        self._heard_ms: dict[tuple[str, int], int] = {}

    def take(self, key: bytes | None, value: bytes | None, log_ms: int = 0) -> None:
        """The next record, of a log time; a key that names nobody is passed over. O(1)."""
        rank = parse_claim_key(key)
        if rank is not None:
            (self._claimed.add if value else self._claimed.discard)(rank)
            self._heard_ms[rank] = log_ms
            return
        pointer = parse_pointer_key(key)
        if pointer is None:
            return
        replica, number, owner = pointer
        self._heard_ms[replica, number] = log_ms
        owners = self._pointers.setdefault((replica, number), {})
        if value:
            owners[owner] = _pointer_of(owner, value)
        else:
            owners.pop(owner, None)

    def pointers(self, partition: int, partitions: int, since_ms: int = 0) -> dict[str, Pointer | None]:
        """Of each rank of a partition (``replica/rank``) the pointer of its highest owner that has one; None: it has
        none, or it points into the partition where the rank was before there were others. O(ranks).

        ``since_ms`` is the log time at which the partition's log begins. Ranks of which nothing was said here since are
        left out: whoever follows a rank points several times in the time that a log reaches back, so nobody does, and
        where it began is not in the log any more. Pods come and go, and not everyone leaves a tombstone.
        """
        return {
            rank_id(*rank): self._within(rank, partition)
            for rank in sorted(self._claimed)
            if partition_of(*rank, partitions) == partition and self._heard_ms[rank] >= since_ms
        }

    def fences(self, partition: int, partitions: int) -> dict[str, dict[int, int]]:
        """Of each rank of a partition that ever had a pointer: offset of a Fence -> whose it is. O(pointers).

        A pointer names the Fence of the owner who wrote what it points at. Who inherits one restates that Fence, so it
        is the lowest owner's that names it.
        """
        found: dict[str, dict[int, int]] = {}
        for rank, owners in self._pointers.items():
            if partition_of(*rank, partitions) == partition:
                here = {owner: each.fence for owner, each in owners.items() if leads_to(each, rank, partition)}
                named = ((here[owner], owner) for owner in sorted(here, reverse=True))
                found[rank_id(*rank)] = {fence: owner for fence, owner in named if fence >= 0}
        return found

    def newest(self, replica: str, rank: int) -> Pointer | None:
        """The pointer of a rank's highest owner that has one."""
        owners = self._pointers.get((replica, rank))
        return owners[max(owners)] if owners else None

    def _within(self, rank: tuple[str, int], partition: int) -> Pointer | None:
        pointer = self.newest(*rank)
        return pointer if pointer is not None and leads_to(pointer, rank, partition) else None

    def owners(self, replica: str, rank: int) -> tuple[int, ...]:
        """Owners of a rank that have a pointer."""
        return tuple(self._pointers.get((replica, rank), ()))


def _pointer_of(owner: int, value: bytes) -> Pointer:
    """A pointer that cannot be read, or is none, points at the log's start."""
    try:
        record = decode_replica(value)
    except Poison:
        record = None
    return record if isinstance(record, Pointer) else Pointer(SCHEMA, owner, -1, -1)


def leads_to(pointer: Pointer, rank: tuple[str, int], partition: int) -> bool:
    """Whether the offsets of a rank's pointer are ones of this partition. Older bridges did not say; then they are."""
    return pointer.partitions <= 0 or partition_of(*rank, pointer.partitions) == partition


def begins(rank: str, key: bytes | None, value: bytes | None) -> bool:
    """Whether a record of the event topic is one at which reading of this rank may start: a readable ``Opened``, or a
    checkpoint's first part. A pointer counts only if such a one stands where it points.
    """
    try:
        home = parse_key(key)
        record = decode_event(value)
    except Poison:
        return False
    first = isinstance(record, Opened) or (isinstance(record, Checkpoint) and record.part == 0)
    return first and home.rank_id == rank
