"""Record keys and the one function that places a rank on a partition (DESIGN §5).

Key = ``replica/rank/group``; ``group`` is a number, ``none`` (events without a group) or ``*`` (the rank as a whole).
Partition = XXH3_64(``replica/rank``) mod partitions: all groups of a rank stay in one partition, in engine order.
Clients differ in their default partitioners, so producers always name the partition.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import xxhash

from kvledger_wire.errors import Poison

RANK_WIDE = "*"
GROUP_NONE = "none"
RESTORING_SUFFIX = b"/restoring"
REPLICA_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@\[\]%-]{0,252}\Z")
"""Replica names: letters, digits and ``._:@[]%-``, at most 253 characters: Kubernetes names and IPv6 addresses fit."""


class RecordKey(NamedTuple):
    """Who a record is about; ``group`` None is the group ``none``, ``"*"`` the whole rank."""

    replica: str
    rank: int
    group: int | str | None

    @property
    def rank_id(self) -> str:
        """``replica/rank``."""
        return f"{self.replica}/{self.rank}"


def rank_id(replica: str, rank: int) -> str:
    """``replica/rank``: the unit of order, ownership and recovery."""
    return f"{replica}/{rank}"


def record_key(replica: str, rank: int, group: int | str | None = RANK_WIDE) -> bytes:
    """The bytes of a record's key."""
    word = GROUP_NONE if group is None else str(group)
    return f"{replica}/{rank}/{word}".encode()


def parse_key(raw: bytes | None) -> RecordKey:
    """Read a record's key; raises Poison."""
    try:
        replica, rank, word = (raw or b"").decode().split("/")
        number = int(rank)
        group = None if word == GROUP_NONE else RANK_WIDE if word == RANK_WIDE else int(word)
    except ValueError as error:
        msg = f"record key of {len(raw or b'')} bytes is not replica/rank/group"
        raise Poison(msg) from error
    if not REPLICA_PATTERN.match(replica) or number < 0:
        msg = "record key names no valid replica and rank"
        raise Poison(msg)
    return RecordKey(replica, number, group)


def partition_of(replica: str, rank: int, partitions: int) -> int:
    """The partition of every record of a rank."""
    return xxhash.xxh3_64_intdigest(f"{replica}/{rank}".encode()) % partitions


def claim_key(replica: str, rank: int) -> bytes:
    """The key of a rank's ``Claim`` on ``kvledger.replicas``: its newest one survives compaction."""
    return rank_id(replica, rank).encode()


def pointer_key(replica: str, rank: int, owner: int) -> bytes:
    """The key of one owner's ``Pointer`` of a rank."""
    return f"{replica}/{rank}/{owner}".encode()


def restoring_key(replica: str, rank: int, owner: int) -> bytes:
    """The key under which an owner says that it is still restoring: neither its claim nor its pointer may go by it."""
    return pointer_key(replica, rank, owner) + RESTORING_SUFFIX


def parse_pointer_key(raw: bytes | None) -> tuple[str, int, int] | None:
    """(replica, rank, owner) of a pointer's key; None for a claim's key and anything else."""
    rank, _, word = (raw or b"").rpartition(b"/")
    who = parse_claim_key(rank)
    return (*who, int(word)) if who is not None and word.isdigit() else None


def parse_claim_key(raw: bytes | None) -> tuple[str, int] | None:
    """(replica, rank) of a claim's key; None for a pointer's key and anything else."""
    try:
        replica, rank = (raw or b"").decode().split("/")
        number = int(rank)
    except ValueError:
        return None
    return (replica, number) if REPLICA_PATTERN.match(replica) and number >= 0 else None
