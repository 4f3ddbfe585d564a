"""A bridge while Kafka fails under it: nothing is lost without a word, nothing is out of order, nobody is needed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from bridgeworld import SECONDS_MAX, Rank, Setup, play, recording, status, truth
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewPartitions
from proxy import Proxy

from kvledger.admin import connect, create_topics
from kvledger_bridge.bridge import Bridge
from kvledger_bridge.errors import Refused
from kvledger_bridge.publish import Delivery, Publisher
from kvledger_engine.standin import StandIn
from kvledger_index.memory import MemoryIndex
from kvledger_streams.fold import LogRecord, fold, fresh, seed
from kvledger_streams.pointers import Pointers
from kvledger_streams.progress import Bounds, Plan, rebuild
from kvledger_streams.tally import Tally
from kvledger_wire.known import known_of
from kvledger_wire.partition import partition_of
from kvledger_wire.records import Events, Fence, Opened, Suspended, decode_event
from kvledger_wire.topics import EVENTS, REPLICAS, topic_specs

Make = Callable[..., Setup]


@pytest.fixture
def setup(kafka: str, create_topics: Any, topic_prefix: str) -> Iterator[Setup]:
    create_topics(topic_prefix, 4)
    with Setup(kafka, topic_prefix) as setup:
        yield setup


def complete(rank: Rank) -> bool:
    """Whether no record of the rank's last life is missing or out of order; it may have gone on under a new owner."""
    last = rank.records[len(rank.records) - 1 - rank.kinds()[::-1].index("Opened") :]
    numbers = [record.n for record in last if not isinstance(record, Fence)]
    return numbers == list(range(len(numbers)))


@pytest.mark.timeout(240)
def test_a_broker_that_dies_stalls_the_bridge_and_loses_nothing(
    kafka_broker: Any, eventually: Any, topic_prefix: str
) -> None:
    """Batches 0..99 | broker killed, 100..199 until the queue is full, engine not read | broker back, 200..331.

    Then the broker dies for good: a stop ends by its deadline and says what was not sent.
    """
    broker = kafka_broker()
    create_topics(connect(broker.bootstrap), topic_specs(partitions=4, prefix=topic_prefix))
    entry, batches = recording("llama_s11")
    with Setup(broker.bootstrap, topic_prefix, queue_records_max=60, stop_seconds=1.0) as setup:
        engine = setup.engine(entry)
        bridge = setup.bridge()
        play(engine, batches[:100])
        eventually(lambda: status(bridge).last == 99)
        broker.kill()
        play(engine, batches[100:200])
        eventually(lambda: setup.lines(bridge, "kafka_stalled"))
        stopped_at = status(bridge).last
        broker.start()
        play(engine, batches[200:])
        rank = setup.reader().until("r/0", batches[-1].seq, seconds=60)
        told = {line["event"] for line in setup.lines(bridge)}
        eventually(lambda: bridge.telemetry.counters.delivered == bridge.telemetry.counters.records)

        broker.kill()
        engine.restart()
        play(engine, batches[:20])
        eventually(lambda: status(bridge).last == 19)
        started = time.monotonic()
        bridge.stop()
        assert bridge.join(SECONDS_MAX)
        took = time.monotonic() - started
        last = setup.lines(bridge)[-1]

    assert stopped_at < 199
    assert rank.blocks == truth(entry, batches)
    assert complete(rank)
    assert len(rank.of(Opened)) == 1
    assert {"kafka_failed", "kafka_stalled", "kafka_resumed"} <= told
    assert took < 4
    assert (last["event"], last["clean"]) == ("bridge_stopped", False)
    assert last["unsent"] >= 20


def test_a_fatal_producer_is_replaced_and_every_rank_claimed_anew(
    setup: Setup, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, batches = recording("llama_s11")
    for number in range(3):
        play(setup.engine(entry, "r", number), batches[:40])
    broken: list[Publisher] = []
    serve = Publisher.serve

    def remembering(publisher: Publisher, seconds: float = 0.0) -> Any:
        if publisher not in broken:
            broken.append(publisher)
        return serve(publisher, seconds)

    monkeypatch.setattr(Publisher, "serve", remembering)
    bridge = setup.bridge()
    eventually(lambda: all(r.last == 39 for r in bridge.status()))
    owners = [r.owner for r in bridge.status()]
    broken[0]._fatal = "_FATAL"
    for engine in setup.engines.values():
        play(engine, batches[40:])
    eventually(lambda: all(r.owner not in owners and r.last == batches[-1].seq for r in bridge.status()))
    reader = setup.reader()
    seen = [reader.until(f"r/{number}", batches[-1].seq) for number in range(3)]

    for rank in seen:
        assert rank.blocks == truth(entry, batches)
        assert complete(rank)
        assert "the producer was rebuilt: _FATAL" in [fence.why for fence in rank.of(Fence)]
    assert len(setup.lines(bridge, "producer_rebuilt")) == 1


def test_a_record_that_kafka_refuses_makes_its_rank_claim_anew(
    setup: Setup, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record of one rank fails for good; the other rank does not notice."""
    entry, batches = recording("llama_s11")
    for number in range(2):
        play(setup.engine(entry, "r", number), batches[:40])
    write = Publisher.write
    failed: list[Any] = []

    def failing(publisher: Publisher, who: tuple[str, int], group: Any, record: Any, *, known: float | None) -> int:
        if who == ("r", 0) and getattr(record, "seq", -1) == 20 and not failed:
            failed.append(record)
            publisher._done.append(Delivery(who, record, -1, "MSG_SIZE_TOO_LARGE"))
            return 0
        return write(publisher, who, group, record, known=known)

    monkeypatch.setattr(Publisher, "write", failing)
    bridge = setup.bridge()
    eventually(lambda: status(bridge).counts.claims == 2 and all(r.last == 39 for r in bridge.status()))
    reader = setup.reader()
    reader.until("r/1", 39)

    def anew() -> bool:
        reader.poll(0.05)
        return reader.ranks["r/0"].state.owner == status(bridge).owner and reader.ranks["r/0"].state.seq == 39

    eventually(anew)
    rank = reader.ranks["r/0"]

    assert rank.blocks == truth(entry, batches[:40])
    assert complete(rank)
    assert status(bridge, 1).counts.claims == 1


def test_a_re_created_event_topic_gets_every_rank_again(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = setup.bridge(topic_check_seconds=0.2)
    play(engine, batches[:50])
    eventually(lambda: status(bridge).last == 49)
    admin = setup.admin()
    (spec,) = (s for s in topic_specs(partitions=4, prefix=setup.prefix) if s.name.endswith("events"))
    for future in admin.delete_topics([spec.name], operation_timeout=10).values():
        future.result(10)

    eventually(lambda: spec.name not in admin.list_topics(timeout=5).topics)
    eventually(lambda: create_topics(admin, [spec]))
    play(engine, batches[50:])
    eventually(lambda: setup.lines(bridge, "topic_changed"))
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert complete(rank)
    assert [fence.why for fence in rank.of(Fence)] == [f"the producer was rebuilt: topic {spec.name} was re-created"]


def test_an_engine_that_vanishes_is_suspended_and_taken_up_again(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = setup.bridge(replay_seconds_max=0.5)
    play(engine, batches[:20])
    eventually(lambda: status(bridge).last == 19)
    engine.down()
    eventually(lambda: status(bridge).phase == "suspect")
    engine.up()
    play(engine, batches[:3])
    eventually(lambda: status(bridge).last == 2)
    reader = setup.reader()

    def fresh() -> bool:
        reader.poll(0.05)
        rank = reader.ranks.get("r/0")
        return rank is not None and rank.state.life[1] == 2 and rank.state.seq == 2

    eventually(fresh)

    assert reader.ranks["r/0"].blocks == truth(entry, batches[:3])
    assert reader.ranks["r/0"].of(Suspended)


def test_no_rank_waits_for_a_busy_one(setup: Setup, eventually: Any) -> None:
    """One engine has 3000 batches to tell; another's single batch is on the log long before they are."""
    entry, batches = recording("llama_s11")
    busy, calm = setup.engine(entry, "busy"), setup.engine(entry, "calm")
    bridge = setup.bridge(turn_batches_max=8)
    eventually(lambda: all(rank.phase == "following" for rank in bridge.status()))
    busy.faults.drop = calm.faults.drop = lambda _seq: False
    for _ in range(9):
        play(busy, batches, own_sequence=False)
    play(calm, batches[:1])
    eventually(lambda: status(bridge, 1).last == 0)
    behind = status(bridge, 0).last

    assert behind < busy.head
    eventually(lambda: status(bridge, 0).last == busy.head)


@pytest.mark.timeout(180)
def test_partitions_that_are_added_end_a_bridge_whose_successor_follows_every_rank(
    setup: Setup, kafka: str, eventually: Any
) -> None:
    """4 partitions become 6 and then 8 while batches come: ranks belong elsewhere, where readers look from then on.

    batches          0 ... 19 | 20 ... 39 | 40 ... 59 ... 79 | 80 ... 99
    partitions              4 | 6         | 6       |      8 | 8
    who writes          first | nobody    | second, | nobody | third, which got what was missing by replay
    """
    entry, batches = recording("llama_s11")
    names = ranks_that_move()
    assert len(names) == 4
    for name in names:
        play(setup.engine(entry, name), batches[:20])
    bridge, admin = setup.bridge(topic_check_seconds=0.2), setup.admin()
    follows(bridge, eventually, 19)
    for before, partitions, last in ((4, 6, 60), (6, 8, 100)):
        for future in admin.create_partitions([NewPartitions(setup.prefix + EVENTS, partitions)]).values():
            future.result(SECONDS_MAX)
        eventually(lambda ended=bridge: isinstance(ended.error, Refused))
        (said,) = setup.lines(bridge, "bridge_refused")
        assert f"has {partitions} partitions instead of {before}: this bridge ends" in said["why"]
        play_all(setup, batches[last - 40 : last - 20])
        bridge = setup.bridge(topic_check_seconds=0.2)
        follows(bridge, eventually, last - 21)
        play_all(setup, batches[last - 20 : last])
        setup.partitions = partitions
        reader = setup.reader(misplaced=True)
        held = {f"{name}/0": reader.until(f"{name}/0", last - 1) for name in names}
        assert all(rank.blocks == truth(entry, batches[:last]) and complete(rank) for rank in held.values())

    keys = {key for _, _, key in truth(entry, batches[:100])}
    for partition in {partition_of(name, 0, 8) for name in names}:
        here = {f"{name}/0" for name in names if partition_of(name, 0, 8) == partition}
        assert rebuilt(kafka, setup, partition) == {(name, key) for name in here for key in keys}


def ranks_that_move() -> list[str]:
    """Replicas that come back, stay and move, as 4 partitions become 6 and then 8. None shares one with another before
    the last, and who moves finds an empty one: their records have the same offsets there, and what points into one
    partition seems to fit another.
    """
    found: list[str] = []
    taken: set[tuple[int, int]] = set()
    for kind in ((False, True), (True, True), (False, False), (True, False)):
        for name in map(str, range(1000)):
            before, then, now = (partition_of(name, 0, count) for count in (4, 6, 8))
            places = {(4, before), (6, then)}
            fresh = then in {before, 4, 5}
            if (then == before, now == before) == kind and fresh and not places & taken:
                found.append(name)
                taken |= places
                break
    return found


def follows(bridge: Bridge, eventually: Any, seq: int) -> None:
    eventually(lambda: all(rank.phase == "following" and rank.last == seq for rank in bridge.status()))


def play_all(setup: Setup, batches: list[Any]) -> None:
    for engine in setup.engines.values():
        play(engine, batches)


def rebuilt(kafka: str, setup: Setup, partition: int) -> set[tuple[str, bytes]]:
    """(rank, key) of an index that was rebuilt from this partition of 8 as a worker does it."""
    pointers = Pointers(kafka, setup.prefix + EVENTS, setup.prefix + REPLICAS, request_seconds=10.0)
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "none", "log_level": 0})
    place = TopicPartition(setup.prefix + EVENTS, partition)
    try:
        starts = asyncio.run(pointers.starts(partition, 8))
        end = consumer.get_watermark_offsets(place, timeout=10.0)[1]
        plan = rebuild(Bounds("t", 0, end, 0), "a test", starts)
        consumer.assign([TopicPartition(place.topic, partition, plan.restart)])
        log: list[LogRecord] = []
        while len(log) < end - plan.restart:
            log += [(m.offset(), m.timestamp()[1], m.key(), m.value(), None) for m in consumer.consume(1000, 0.2)]
    finally:
        pointers.stop()
        consumer.close()
    return asyncio.run(folded(log, plan, partition, end))


async def folded(log: list[LogRecord], plan: Plan, partition: int, end: int) -> set[tuple[str, bytes]]:
    """What such a rebuild makes of these records."""
    index, nonce = MemoryIndex(), itertools.count(1)
    await index.seek(partition, "t", plan.restart, end, drop=True)
    facts: dict[str, Any] = {"partitions": 8, "topic_id": "t", "restart": plan.restart, "broker_ms": 0}
    state = fresh(partition, starts=plan.starts, **facts)
    options: dict[str, Any] = {"nonce": lambda: next(nonce).to_bytes(16, "big")}
    for step in seed(state, plan.owners, **options):
        assert (await index.apply(step)).verdict == "applied"
    for step in fold(state, log, end=end, tally=Tally(), **options):
        assert (await index.apply(step)).verdict == "applied"
    return {(claim.rank, claim.key.to_bytes(8, "big")) async for claim in index.dump()}


@pytest.mark.timeout(120)
def test_a_record_that_waited_for_kafka_says_so(kafka_broker: Any, eventually: Any, topic_prefix: str) -> None:
    """The link to Kafka stands still for 3 s. Log time is when a record arrived; its header tells how old its news is.

    batches     0 ... 9 | 10 ... 19, one every 0.2 s, in the bridge's queue | 20 ... 29
    log - known  ~0     | 3 s ... 1 s                                      | ~0
    """
    entry, batches = recording("llama_s11")
    published: dict[int, float] = {}

    def play_one_by_one(engine: StandIn, first: int, last: int) -> None:
        for batch in batches[first:last]:
            published[batch.seq] = time.time()
            play(engine, [batch])
            eventually(lambda seq=batch.seq: status(bridge).last == seq)
            eventually(lambda at=published[batch.seq]: time.time() > at + 0.2)

    with Proxy("127.0.0.1:9") as near, ExitStack() as exits:
        broker = kafka_broker(advertised=near.address)
        near.aim(broker.bootstrap)
        create_topics(connect(near.address), topic_specs(partitions=1, prefix=topic_prefix))
        setup = exits.enter_context(Setup(near.address, topic_prefix, partitions=1))
        engine = setup.engine(entry)
        bridge = setup.bridge()
        # a quiet rank was asked for its last batch: what its bridge read before it was ready is not whole, and says so
        eventually(lambda: status(bridge).phase == "following" and status(bridge).counts.probes)
        play_one_by_one(engine, 0, 10)
        near.pause()
        play_one_by_one(engine, 10, 20)
        eventually(lambda: time.time() > published[10] + 3.0)
        near.resume()
        resumed = time.time()
        play_one_by_one(engine, 20, 30)
        setup.reader().until("r/0", 29)
        told = [
            (record.seq, message.timestamp()[1], known_of(message.headers()))
            for message in setup.messages(EVENTS, bridge.telemetry.counters.delivered // 2)
            if isinstance(record := decode_event(message.value()), Events)
        ]

    assert {seq for seq, _, _ in told} >= set(range(25))
    for seq, log_ms, known_ms in told:
        assert known_ms is not None
        waited_ms = (resumed - published[seq]) * 1000 if 10 <= seq < 20 else 0
        assert log_ms >= published[seq] * 1000 + waited_ms - 50
        assert waited_ms - 300 < log_ms - known_ms < waited_ms + 700, (seq, log_ms - known_ms, waited_ms)
