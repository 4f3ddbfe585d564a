"""The table of claims and pointers, and what a pointer may point at."""

from __future__ import annotations

import msgspec
import pytest
from foldlog import KEYS, key_of, opened_rank
from ranklog import RankLog

from kvledger_wire.partition import claim_key, partition_of, pointer_key, rank_id, record_key
from kvledger_wire.records import SCHEMA, Claim, Pointer, Restoring, encode
from kvledger_wire.replicas import ReplicaTable, begins

PARTITIONS = 4
HOME = partition_of("pod-a", 0, PARTITIONS)


def claim(table: ReplicaTable, replica: str = "pod-a") -> None:
    table.take(claim_key(replica, 0), encode(Claim(0, -1, "bridge", "0")))


def point(table: ReplicaTable, owner: int, offset: int, replica: str = "pod-a") -> None:
    table.take(pointer_key(replica, 0, owner), encode(Pointer(0, owner, offset - 1, offset)))


def test_the_highest_owner_that_has_a_pointer_counts() -> None:
    """Also where a newer owner has claimed and not pointed yet, and whatever the order that compaction left."""
    table = ReplicaTable()
    point(table, 7, 40)
    claim(table)
    point(table, 5, 90)
    claim(table)

    assert table.pointers(HOME, PARTITIONS) == {"pod-a/0": Pointer(0, 7, 39, 40)}


def test_a_newer_pointer_of_an_owner_replaces_its_older_one() -> None:
    table = ReplicaTable()
    claim(table)
    point(table, 7, 40)
    point(table, 7, 60)

    assert table.newest("pod-a", 0) == Pointer(0, 7, 59, 60)


def test_a_rank_that_never_pointed_is_told_and_one_that_never_claimed_is_not() -> None:
    table = ReplicaTable()
    claim(table)
    others = [f"pod-{i}" for i in range(40) if partition_of(f"pod-{i}", 0, PARTITIONS) == HOME]
    point(table, 3, 9, replica=others[0])

    assert table.pointers(HOME, PARTITIONS) == {"pod-a/0": None}


def test_ranks_of_other_partitions_are_left_out() -> None:
    table = ReplicaTable()
    names = [f"pod-{i}" for i in range(20)]
    for name in names:
        claim(table, name)
    found = [table.pointers(number, PARTITIONS) for number in range(PARTITIONS)]

    assert sorted(name for each in found for name in each) == sorted(rank_id(name, 0) for name in names)
    assert all(len(each) < len(names) for each in found)


def test_a_rank_of_which_nothing_was_said_since_the_log_begins_is_left_out() -> None:
    """Its pod is long gone and left no tombstone; it must not send every rebuild to the log's start."""
    table = ReplicaTable()
    key, value = claim_key("pod-a", 0), encode(Claim(0, -1, "bridge", "0"))
    table.take(key, value, 1_000)
    table.take(pointer_key("pod-a", 0, 7), encode(Pointer(0, 7, 39, 40)), 2_000)
    seen = [list(table.pointers(HOME, PARTITIONS, since)) for since in (0, 2_000, 2_001)]
    table.take(key, value, 3_000)

    assert seen == [["pod-a/0"], ["pod-a/0"], []]
    assert list(table.pointers(HOME, PARTITIONS, 2_001)) == ["pod-a/0"]


def test_a_tombstone_takes_a_rank_out_and_a_new_claim_brings_it_back() -> None:
    table = ReplicaTable()
    claim(table)
    point(table, 7, 40)
    table.take(claim_key("pod-a", 0), None)
    assert table.pointers(HOME, PARTITIONS) == {}

    claim(table)
    assert table.pointers(HOME, PARTITIONS) == {"pod-a/0": Pointer(0, 7, 39, 40)}


def test_a_tombstone_of_a_pointer_uncovers_that_of_a_lower_owner() -> None:
    table = ReplicaTable()
    claim(table)
    point(table, 5, 20)
    point(table, 7, 40)
    table.take(pointer_key("pod-a", 0, 7), None)
    assert table.newest("pod-a", 0) == Pointer(0, 5, 19, 20)

    table.take(pointer_key("pod-a", 0, 5), b"")
    assert table.newest("pod-a", 0) is None


@pytest.mark.parametrize("value", [b"junk", encode(Restoring(0, 7)), encode(Pointer(SCHEMA + 1, 7, 39, 40))])
def test_a_pointer_that_cannot_be_read_points_at_the_logs_start(value: bytes) -> None:
    """Not at what a lower owner had: that one was fenced."""
    table = ReplicaTable()
    claim(table)
    point(table, 5, 20)
    table.take(pointer_key("pod-a", 0, 7), value)

    assert table.newest("pod-a", 0) == Pointer(SCHEMA, 7, -1, -1)


def test_a_claim_that_cannot_be_read_names_its_rank_all_the_same() -> None:
    table = ReplicaTable()
    table.take(claim_key("pod-a", 0), b"of another version")

    assert table.pointers(HOME, PARTITIONS) == {"pod-a/0": None}


@pytest.mark.parametrize(
    "key", [None, b"", b"pod-a", b"pod-a/x/3", b"pod-a/0/-3", b"pod-a/0/x", b"a/0/3/4", b"a/0/3/restoring", b"\xff/0/1"]
)
def test_keys_that_name_nobody_are_passed_over(key: bytes | None) -> None:
    table = ReplicaTable()
    table.take(key, encode(Pointer(0, 7, 39, 40)))

    assert [table.pointers(number, PARTITIONS) for number in range(PARTITIONS)] == [{}] * PARTITIONS
    assert table.newest("pod-a", 0) is None


def test_a_fence_is_of_the_lowest_owner_that_names_it() -> None:
    """Owner 5 fenced at 10; 7 inherited its pointer and, once it had fenced at 40, named that; 9 has just inherited."""
    table = ReplicaTable()
    for owner, fence, offset in ((5, 10, 12), (7, 40, 12), (9, 40, 12), (11, -1, -1)):
        table.take(pointer_key("pod-a", 0, owner), encode(Pointer(0, owner, fence, offset)))

    assert table.fences(HOME, PARTITIONS) == {"pod-a/0": {10: 5, 40: 7}}
    assert table.fences((HOME + 1) % PARTITIONS, PARTITIONS) == {}


def test_a_pointer_into_the_partition_where_a_rank_was_leads_nowhere() -> None:
    """4 partitions, then 6, then 8: a rank goes from A to B and back to A. What owner 5 fenced in B at 0 says nothing
    of A, where owner 3 began at 1; owner 9 has claimed it there and not pointed yet.
    """
    wanted = (f"pod-{i}" for i in range(1000))
    name = next(n for n in wanted if partition_of(n, 0, 4) == partition_of(n, 0, 8) != partition_of(n, 0, 6))
    home, away = partition_of(name, 0, 4), partition_of(name, 0, 6)
    table = ReplicaTable()
    claim(table, name)
    table.take(pointer_key(name, 0, 3), encode(Pointer(0, 3, 0, 1, 4)))
    table.take(pointer_key(name, 0, 5), encode(Pointer(0, 5, 0, 1, 6)))

    rank = f"{name}/0"
    assert (table.pointers(away, 6), table.fences(away, 6)) == ({rank: Pointer(0, 5, 0, 1, 6)}, {rank: {0: 5}})
    assert (table.pointers(home, 8), table.fences(home, 8)) == ({rank: None}, {rank: {0: 3}})
    table.take(pointer_key(name, 0, 9), encode(Pointer(0, 9, 40, 41, 8)))
    assert table.pointers(home, 8) == {rank: Pointer(0, 9, 40, 41, 8)}
    assert table.fences(home, 8) == {rank: {40: 9, 0: 3}}


def test_fences_are_told_of_ranks_that_left_too() -> None:
    """What their bridges send late counts as little."""
    table = ReplicaTable()
    claim(table)
    point(table, 7, 40)
    table.take(claim_key("pod-a", 0), None)

    assert table.fences(HOME, PARTITIONS) == {"pod-a/0": {39: 7}}


def test_reading_begins_at_opened_and_at_a_first_part_of_that_rank_only() -> None:
    rank, log = opened_rank()
    rank.batch((0, "gpu", "store", KEYS, 0, 1))
    rank.checkpoint(2)
    rank.beat()
    rank.take_over(9)

    assert [begins(rank.id, *row) for row in log] == [True, False, True, False, False, False]
    assert not any(begins("pod-b/0", *row) for row in log)


def test_what_cannot_be_read_begins_nothing() -> None:
    rank, log = opened_rank()
    (key, value), newer = log[0], RankLog([])
    newer.open()
    too_new = msgspec.msgpack.encode(["opened", SCHEMA + 1, *msgspec.msgpack.decode(value or b"")[2:]])

    assert begins(rank.id, key, value)
    assert not begins(rank.id, key, b"junk")
    assert not begins(rank.id, key, None)
    assert not begins(rank.id, key, too_new)
    assert not begins(rank.id, b"junk", value)
    assert key == key_of(rank) == record_key("pod-a", 0)
