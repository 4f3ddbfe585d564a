"""A bridge that takes ranks over from a real Kafka: restored from checkpoint and tail, whatever happened to the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bridgeworld import Setup, play, recording, status, truth
from confluent_kafka import Consumer, Producer, TopicPartition

from kvledger_bridge.bridge import Bridge
from kvledger_wire.partition import RESTORING_SUFFIX, partition_of, record_key
from kvledger_wire.records import Checkpoint, Claim, Fence, Heartbeat, Opened, Pointer, Resumed, decode_replica
from kvledger_wire.replicas import ReplicaTable
from kvledger_wire.topics import EVENTS, REPLICAS

PARTITION = partition_of("r", 0, 4)
BUFFER_STEPS = 4
"""Of the engine's replay buffer: what is older only the log has."""


@pytest.fixture
def setup(kafka: str, create_topics: Any, topic_prefix: str) -> Iterator[Setup]:
    create_topics(topic_prefix, 4)
    with Setup(kafka, topic_prefix) as setup:
        yield setup


def followed(setup: Setup, eventually: Any, last: int, **options: Any) -> Bridge:
    """A bridge that has covered batch ``last`` and is connected."""
    bridge = setup.bridge(**options)
    eventually(lambda: (status(bridge).phase, status(bridge).last) == ("following", last))
    return bridge


def killed(bridge: Bridge) -> None:
    """As a kill does it, from Kafka's side: nothing more is delivered, nobody says goodbye."""
    bridge.abort()
    assert bridge.join(20)


def delivered(bridge: Bridge, eventually: Any) -> Bridge:
    """Wait until Kafka has all: what nobody has but the bridge dies with it."""
    totals = bridge.telemetry.counters
    eventually(lambda: totals.delivered == totals.records)
    return bridge


def pointer(setup: Setup) -> Pointer | None:
    """The rank's pointer, as a reader of the compacted topic has it."""
    return table(setup).newest("r", 0)


def table(setup: Setup) -> ReplicaTable:
    consumer = Consumer({"bootstrap.servers": setup.kafka, "group.id": "none", "log_level": 0})
    _, end = consumer.get_watermark_offsets(TopicPartition(setup.prefix + REPLICAS, 0), timeout=10)
    consumer.close()
    found = ReplicaTable()
    for message in setup.messages(REPLICAS, end) if end else ():
        found.take(message.key(), message.value())
    return found


def claims(setup: Setup) -> set[bytes]:
    """Keys of the newest claims: what else is written must not take their place."""
    last = {m.key(): decode_replica(m.value()) for m in setup.messages(REPLICAS, 8 * 5) if m.value()}
    return {key for key, record in last.items() if isinstance(record, Claim)}


def deleted(setup: Setup, offset: int) -> None:
    """Retention takes the partition's head."""
    head = TopicPartition(setup.prefix + EVENTS, PARTITION, offset)
    admin = setup.admin()  # answers come only while it lives
    for future in admin.delete_records([head]).values():
        future.result(10)


def checkpointed(setup: Setup, bridge: Bridge, eventually: Any) -> int:
    """Wait for a checkpoint of the present state; the offset of its first part."""
    before = len(setup.lines(bridge, "rank_checkpointed"))
    return int(eventually(lambda: setup.lines(bridge, "rank_checkpointed")[before:])[0]["offset"])


@pytest.mark.parametrize("name", ["gemma3_s11", "mistral_s11"])
def test_a_killed_bridge_goes_on_where_the_engine_remembers_four_batches(
    setup: Setup, eventually: Any, name: str
) -> None:
    """Batches 0..h X h+1..   Killed in the middle; the life of the second bridge is the first one's, and whole."""
    entry, batches = recording(name)
    engine = setup.engine(entry, buffer_steps=BUFFER_STEPS)
    half = len(batches) // 2
    first = setup.bridge()
    assert engine.wait_subscribers()
    eventually(lambda: status(first).phase == "following")
    for at in range(0, half, 2):
        play(engine, batches[at : at + 2])
        eventually(lambda at=at: status(first).last >= min(at + 1, half))
    last = status(first).last
    killed(delivered(first, eventually))
    play(engine, batches[last + 1 : last + 3])
    second = followed(setup, eventually, last + 2)
    for at in range(last + 3, len(batches), 2):
        play(engine, batches[at : at + 2])
        eventually(lambda at=at: status(second).last >= min(at + 1, len(batches) - 1))
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert len(rank.of(Opened)) == 1
    assert not rank.state.partial
    assert [record.n for record in rank.records if hasattr(record, "n")] == list(range(rank.state.n + 1))
    assert [resumed.how for resumed in rank.of(Resumed)][-1] == "replay"


def test_a_rank_is_restored_from_its_checkpoint_when_retention_took_what_was_before(
    setup: Setup, eventually: Any
) -> None:
    """Opened 0..59 checkpoint 60..79 X   The log now begins at the checkpoint."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    first = setup.bridge(checkpoint_bytes_min=4_000)
    play(engine, batches[:60])
    checkpointed(setup, first, eventually)
    play(engine, batches[60:80])
    eventually(lambda: status(first).last == 79)
    killed(delivered(first, eventually))
    found = pointer(setup)
    assert found is not None
    at = found.offset
    deleted(setup, at)
    second = followed(setup, eventually, 79)
    line = setup.lines(second, "rank_restored")[0]
    play(engine, batches[80:])
    eventually(lambda: status(second).last == batches[-1].seq)
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert (line["start"], line["life"]) == (at, [0, 1])
    assert rank.blocks == truth(entry, batches)
    assert rank.of(Opened) == []
    assert isinstance(rank.records[0], Checkpoint)


def test_a_pointer_below_the_log_is_the_logs_start_and_the_engine_has_to_tell_the_rest(
    setup: Setup, eventually: Any
) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    play(engine, batches[:20])
    first = followed(setup, eventually, 19)
    killed(delivered(first, eventually))
    deleted(setup, 10)
    second = followed(setup, eventually, 19)
    rank = setup.reader().until("r/0", 19)

    assert setup.lines(second, "rank_not_restored")[0]["start"] == -1
    assert rank.blocks == truth(entry, batches[:20])
    assert rank.of(Opened)[0].why == "first contact; not restored: no whole life is in the log"


def test_a_record_that_cannot_be_read_costs_its_rank_the_restore(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    play(engine, batches[:20])
    first = followed(setup, eventually, 19)
    killed(first)
    producer = Producer({"bootstrap.servers": setup.kafka, "log_level": 0})
    producer.produce(setup.prefix + EVENTS, b"\xc1", record_key("r", 0, 0), PARTITION)
    assert producer.flush(10) == 0
    second = followed(setup, eventually, 19)

    assert "no whole life" in setup.lines(second, "rank_not_restored")[0]["why"]
    assert status(second).life == (status(second).owner, 1)


def test_the_newest_of_an_owners_pointers_counts_and_lower_owners_leave_none(setup: Setup, eventually: Any) -> None:
    """Opened by the first owner, whose pointer the second inherits; it checkpoints, and its pointer stands alone."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    play(engine, batches[:40])
    killed(delivered(followed(setup, eventually, 39), eventually))
    second = followed(setup, eventually, 39, checkpoint_bytes_min=1)
    at = checkpointed(setup, second, eventually)
    eventually(lambda: table(setup).owners("r", 0) == (status(second).owner,))
    found = pointer(setup)

    assert found is not None
    assert found.offset >= at
    records = [decode_replica(m.value()) for m in setup.messages(REPLICAS, 7)[:7]]
    assert [type(record).__name__ for record in records] == ["Claim", *["Pointer"] * 3, "Claim", *["Pointer"] * 2]
    pointed = [(record.fence, record.offset) for record in records if isinstance(record, Pointer)]
    assert pointed[:4] == [(-1, -1), (0, -1), (0, 1), (0, 1)]  # the last one is inherited
    assert pointed[4][0] > pointed[4][1] == 1  # and names the own Fence once that stands


def test_ranks_of_one_partition_are_read_back_in_few_passes(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    for number in range(8):
        play(setup.engine(entry, "pod-a", number, buffer_steps=BUFFER_STEPS), batches[:4])
    first = setup.bridge()
    eventually(lambda: all(rank.last == 3 for rank in first.status()))
    for engine in setup.engines.values():
        play(engine, batches[4:6])
    eventually(lambda: all(rank.last == 5 for rank in first.status()))
    lives = [rank.life for rank in first.status()]
    killed(delivered(first, eventually))
    second = setup.bridge(restoring_seconds=0.001)
    eventually(lambda: all((rank.phase, rank.last) == ("following", 5) for rank in second.status()))

    assert [rank.life for rank in second.status()] == lives
    assert len(setup.lines(second, "rank_restored")) == 8
    words = [m for m in setup.messages(REPLICAS, 8 * 5) if m.key().endswith(RESTORING_SUFFIX)]
    assert {type(decode_replica(m.value())).__name__ for m in words} == {"Restoring"}
    assert claims(setup) == {f"pod-a/{number}".encode() for number in range(8)}


def test_a_bridge_takes_a_rank_back_whose_new_owner_fell_silent(setup: Setup, eventually: Any) -> None:
    """First bridge | second claims over, is killed | a lease later the first goes on, in the same life."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry, buffer_steps=BUFFER_STEPS)
    options = {"lease_seconds": 3.0, "restoring_seconds": 1.0, "topic_check_seconds": 0.2, "idle_probe_seconds": 0.2}
    first = followed(setup, eventually, -1, **options)
    assert engine.wait_subscribers()
    play(engine, batches[:4])
    eventually(lambda: status(first).last == 3)
    life = status(first).life
    second = followed(setup, eventually, 3, **options)
    eventually(lambda: status(first).phase == "closed")
    play(engine, batches[4:6])
    eventually(lambda: status(second).last == 5)
    beats = second.telemetry.counters.delivered + 20
    eventually(lambda: second.telemetry.counters.delivered > beats, 30)  # heartbeats: longer than a lease
    assert status(first).phase == "closed"
    killed(delivered(second, eventually))
    play(engine, batches[6:8])
    eventually(lambda: (status(first).phase, status(first).last) == ("following", 7), 20)
    rank = setup.reader().until("r/0", 7)

    assert status(first).life == life
    assert rank.blocks == truth(entry, batches[:8])
    assert [fence.why for fence in rank.of(Fence)][-1].startswith(f"owner {status(second).owner} was silent")


def test_an_idle_engine_without_replay_is_alive_while_its_process_is_the_same(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry, replay=None)
    bridge = setup.bridge(identity=lambda _page: "container-7", alive_seconds=0.2)
    assert engine.wait_subscribers()
    play(engine, batches[:3])
    eventually(lambda: status(bridge).last == 2)
    rank = setup.reader()
    seen = rank.until("r/0", 2)

    def alive() -> bool:
        rank.poll(0.05)
        return [beat.alive for beat in seen.of(Heartbeat)].count(True) >= 2

    eventually(alive)

    assert seen.blocks == truth(entry, batches[:3])
    assert len(seen.of(Opened)) == 1
