"""The topic contract: what records, keys and partitions look like on the wire, and how readers take what is odd."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.errors import Poison
from kvledger_wire.partition import RecordKey, parse_key, partition_of, rank_id, record_key
from kvledger_wire.records import (
    ATTACHED,
    SCHEMA,
    STORED,
    Change,
    Checkpoint,
    Claim,
    Closed,
    EventRecord,
    Events,
    Fence,
    Gap,
    Heartbeat,
    Held,
    Opened,
    Pointer,
    ReplicaRecord,
    Restoring,
    Resumed,
    Run,
    Suspended,
    decode_event,
    decode_replica,
    encode,
)
from kvledger_wire.topics import EVENTS, topic_specs

ENTRY = ModelEntry(model="m", aliases=("n",), groups=(GroupSpec(0, "full_attention", 16), GroupSpec(None)), loss="keep")
RUN = Run(b"r" * 8, 3, b"p" * 8, b"k" * 16, 0b11, 0b01, b"h" * 16, 2, b"D" * 64)
CHANGE = Change(STORED, 0, 9, 1.5, (RUN,), b"u" * 8, ATTACHED)

EVENT_RECORDS: list[EventRecord] = [
    Fence(0, 5, "bridge-1", "0.1.0", "start"),
    Opened(0, 5, (5, 1), 0, ENTRY, 16, -1, b"", False, "first contact", "0.32.0", "uid/1"),
    Events(
        0,
        5,
        (5, 1),
        1,
        9,
        b"d" * 16,
        True,
        (CHANGE,),
        ((0, 1),),
        GroupSpec(0),
        ("odd",),
    ),
    Suspended(0, 5, (5, 1), 2, "disconnect"),
    Resumed(0, 5, (5, 1), 3, "replay"),
    Gap(0, 5, (5, 1), 4, 10, -1, "lost", "invalidate"),
    Heartbeat(0, 5, (5, 1), 5, 9, b"d" * 16, ("odd",)),
    Closed(0, 5, (5, 1), 6, "drained"),
    Checkpoint(
        0,
        5,
        (5, 1),
        7,
        1,
        True,
        ENTRY,
        16,
        9,
        b"d" * 16,
        False,
        False,
        unplaced=((0, 0, 1),),
        lanes=(Held(0, CHANGE, b"\0\2" * 3, b"", b"\1"),),
        parents=(RUN,),
        ambiguous=b"a" * 8,
    ),
]
REPLICA_RECORDS: list[ReplicaRecord] = [Claim(0, -1, "bridge-1", "0.1.0"), Restoring(0, 5), Pointer(0, 5, 40, -1, 12)]
RUN_FIELDS = [b"r" * 8, 3, b"p" * 8, b"k" * 16, 3, 1, b"h" * 16, 2, b"D" * 64]
CHANGE_FIELDS = [1, 0, 9, 1.5, [RUN_FIELDS], b"u" * 8, 2, b""]
ENTRY_FIELDS = msgspec.msgpack.decode(msgspec.msgpack.encode(ENTRY))
NAMES = [type(record).__name__ for record in (*EVENT_RECORDS, *REPLICA_RECORDS)]


@pytest.mark.parametrize("record", EVENT_RECORDS, ids=NAMES[: len(EVENT_RECORDS)])
def test_an_event_record_comes_back_as_it_was(record: EventRecord) -> None:
    assert decode_event(encode(record)) == record


@pytest.mark.parametrize("record", REPLICA_RECORDS, ids=NAMES[len(EVENT_RECORDS) :])
def test_a_replica_record_comes_back_as_it_was(record: ReplicaRecord) -> None:
    assert decode_replica(encode(record)) == record


def test_every_record_kind_is_under_test() -> None:
    assert {type(record) for record in EVENT_RECORDS} == set(EventRecord.__args__)
    assert {type(record) for record in REPLICA_RECORDS} == set(ReplicaRecord.__args__)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (EVENT_RECORDS[0], ["fence", 0, 5, "bridge-1", "0.1.0", "start"]),
        (EVENT_RECORDS[3], ["suspended", 0, 5, [5, 1], 2, "disconnect"]),
        (EVENT_RECORDS[5], ["gap", 0, 5, [5, 1], 4, 10, -1, "lost", "invalidate"]),
        (
            EVENT_RECORDS[2],
            [
                "events",
                0,
                5,
                [5, 1],
                1,
                9,
                b"d" * 16,
                True,
                [CHANGE_FIELDS],
                [[0, 1]],
                [0, None, None, None, None, False],
                ["odd"],
                None,
                [],
                [],
            ],
        ),
        (
            EVENT_RECORDS[8],
            [
                *["checkpoint", 0, 5, [5, 1], 7, 1, True, ENTRY_FIELDS, 16, 9, b"d" * 16, False, False],
                *[[], None, None, [], [], [], None, [[0, 0, 1]], [], []],
                [[0, CHANGE_FIELDS, b"\0\2" * 3, b"", b"\1"]],
                [RUN_FIELDS],
                b"a" * 8,
                [],
            ],
        ),
        (REPLICA_RECORDS[2], ["pointer", 0, 5, 40, -1, 12]),
    ],
    ids=["fence", "suspended", "gap", "events", "checkpoint", "pointer"],
)
def test_the_layout_on_the_topic_is_pinned(record: EventRecord | ReplicaRecord, fields: list[Any]) -> None:
    """Tag, schema, owner, life, n, then the kind's own fields: readers of other versions count on the places."""
    assert msgspec.msgpack.decode(encode(record)) == fields


def test_fields_that_a_later_version_appends_are_skipped() -> None:
    fields = [*msgspec.msgpack.decode(encode(EVENT_RECORDS[3])), "new", {"more": 1}]

    assert decode_event(msgspec.msgpack.encode(fields)) == EVENT_RECORDS[3]


def test_fields_that_an_earlier_version_lacks_take_their_defaults() -> None:
    fields = msgspec.msgpack.decode(encode(EVENT_RECORDS[2]))[:9]
    record = decode_event(msgspec.msgpack.encode(fields))

    assert isinstance(record, Events)
    assert (record.unplaced, record.spec, record.uncertain) == ((), None, ())


def test_a_newer_schema_is_poison_and_says_what_to_do() -> None:
    record = Suspended(SCHEMA + 1, 5, (5, 1), 2, "disconnect")
    with pytest.raises(Poison, match="upgrade this reader first"):
        decode_event(encode(record))


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"\xc1",
        b"\x93",
        encode(EVENT_RECORDS[0])[:-1],
        encode(EVENT_RECORDS[0]) + b"\0",
        encode(REPLICA_RECORDS[0]),
        b"\x91" * 5000,
    ],
    ids=["none", "empty", "invalid", "cut", "truncated", "trailing", "other topic", "deep"],
)
def test_bytes_that_are_no_event_are_poison(raw: bytes | None) -> None:
    with pytest.raises(Poison):
        decode_event(raw)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_poison(raw: bytes) -> None:
    with suppress(Poison):
        decode_event(raw)


@pytest.mark.parametrize("record", EVENT_RECORDS, ids=NAMES[: len(EVENT_RECORDS)])
def test_a_record_cut_anywhere_is_poison(record: EventRecord) -> None:
    raw = encode(record)
    for cut in range(len(raw)):
        with pytest.raises(Poison):
            decode_event(raw[:cut])


def test_poison_never_quotes_what_it_could_not_read() -> None:
    fields = msgspec.msgpack.decode(encode(EVENT_RECORDS[3]))
    fields[5] = b"secret-salt"
    with pytest.raises(Poison) as caught:
        decode_event(msgspec.msgpack.encode(fields))

    assert "secret" not in str(caught.value)


# -- keys and partitions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        (RecordKey("pod-a", 0, 3), b"pod-a/0/3"),
        (RecordKey("ns:pod-a.svc", 12, None), b"ns:pod-a.svc/12/none"),
        (RecordKey("fd00::1%eth0", 0, "*"), b"fd00::1%eth0/0/*"),
    ],
)
def test_keys_have_three_parts(key: RecordKey, raw: bytes) -> None:
    assert record_key(*key) == raw
    assert parse_key(raw) == key
    assert key.rank_id == rank_id(key.replica, key.rank)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"a",
        b"a/0",
        b"a/0/1/2",
        b"a/x/1",
        b"a/0/x",
        b"a/-1/0",
        b"/0/0",
        b" a/0/0",
        b"a\n/0/0",
        b"\xff/0/0",
        b"a" * 254 + b"/0/0",
    ],
)
def test_other_bytes_are_no_key(raw: bytes | None) -> None:
    with pytest.raises(Poison):
        parse_key(raw)


def test_the_partition_of_a_rank_is_pinned() -> None:
    """Another answer would move ranks between partitions of a topic that exists."""
    assert [partition_of("pod-a", rank, 12) for rank in range(4)] == [0, 6, 0, 2]
    assert partition_of("pod-b", 0, 12) == 9


@given(st.integers(0, 500), st.integers(1, 64))
def test_a_rank_has_a_partition_of_the_topic(rank: int, partitions: int) -> None:
    assert 0 <= partition_of("pod", rank, partitions) < partitions


def test_all_topics_of_an_installation_take_its_prefix() -> None:
    specs = topic_specs(partitions=3, prefix="blue.")

    assert [spec.name for spec in specs] == [
        "blue.kvledger.events",
        "blue.kvledger.replicas",
        "blue.kvledger.dead-letter",
    ]
    assert specs[0].name.endswith(EVENTS)
    assert [spec.partitions for spec in specs] == [3, 1, 1]


def test_a_pointer_of_a_bridge_that_did_not_say_how_many_partitions_there_were_is_read() -> None:
    old = msgspec.msgpack.encode(["pointer", 0, 5, 40, -1])

    assert decode_replica(old) == Pointer(0, 5, 40, -1, 0)
