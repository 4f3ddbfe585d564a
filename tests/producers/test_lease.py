"""Who counts as gone of those that claimed a rank over."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError

from kvledger_bridge import reading as reading_module
from kvledger_bridge.lease import LEASE_SECONDS_MAX, Lapse, Leases
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_wire.partition import record_key
from kvledger_wire.records import SCHEMA, Heartbeat, encode

R = ("r", 0)


class Message:
    """What the client hands over."""

    def __init__(self, key: bytes, value: bytes, error: Any = None) -> None:
        self._key, self._value, self._error = key, value, error

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes:
        return self._value

    def error(self) -> Any:
        return self._error


class Client:
    """A consumer that is told what comes."""

    def __init__(self) -> None:
        self.assigned: dict[int, int] = {}
        self.queue: list[Message] = []
        self.closed = False

    def incremental_assign(self, partitions: list[Any]) -> None:
        self.assigned.update((each.partition, each.offset) for each in partitions)

    def incremental_unassign(self, partitions: list[Any]) -> None:
        for each in partitions:
            del self.assigned[each.partition]

    def consume(self, _count: int, timeout: float) -> list[Message]:
        assert timeout == 0
        found, self.queue = self.queue, []
        return found

    def close(self) -> None:
        self.closed = True


class Bench:
    """Leases of 30 s over a made-up topic."""

    def __init__(self, client: Client) -> None:
        self.client = client
        telemetry = Telemetry(io.StringIO())
        self.leases = Leases(Settings(kafka="k:1"), telemetry, {}, partitions=4, logger=logging.getLogger("test"))

    def says(self, owner: int, replica: str = "r") -> None:
        beat = Heartbeat(SCHEMA, owner, (owner, 1), 1, 0, b"")
        self.client.queue.append(Message(record_key(replica, 0), encode(beat)))

    def poll(self, now: float, *, kafka: bool = True) -> list[Lapse]:
        return self.leases.poll(now, kafka_answers=kafka)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    client = Client()
    monkeypatch.setattr(reading_module, "Consumer", lambda _options, logger: client)  # noqa: ARG005
    bench = Bench(client)
    yield bench
    bench.leases.close()


def test_an_owner_that_is_silent_for_a_lease_lapses_once(bench: Bench) -> None:
    bench.leases.watch(R, 7, 0.0)

    assert bench.poll(29.9) == []
    assert bench.poll(30.0) == [Lapse(R, 7, 30.0)]
    assert bench.poll(90.0) == []
    assert bench.client.assigned == {}


def test_every_record_of_the_owner_counts_and_none_of_others(bench: Bench) -> None:
    """At 20 s a record of the owner, at 40 s of a lower one, of another rank, of nobody, and an error."""
    bench.leases.watch(R, 7, 0.0)
    bench.says(7)
    bench.poll(20.0)
    bench.says(6)
    bench.says(7, "other")
    bench.client.queue += [
        Message(record_key(*R), b"\xc1"),
        Message(b"", b""),
        Message(b"", b"", KafkaError(KafkaError._TRANSPORT)),
    ]
    bench.poll(40.0)

    assert bench.poll(49.9) == []
    assert bench.poll(50.0) == [Lapse(R, 7, 30.0)]


def test_a_word_on_the_replicas_topic_counts(bench: Bench) -> None:
    bench.leases.watch(R, 7, 0.0)
    bench.leases.heard(R, 7, 25.0)
    bench.leases.heard(R, 6, 50.0)
    bench.leases.heard(("unwatched", 0), 9, 50.0)

    assert bench.poll(54.9) == []
    assert bench.poll(55.0) != []


def test_a_still_higher_owner_has_a_lease_of_its_own(bench: Bench) -> None:
    bench.leases.watch(R, 7, 0.0)
    bench.leases.watch(R, 9, 20.0)
    bench.says(7)
    bench.poll(25.0)

    assert bench.poll(49.9) == []
    assert bench.poll(50.0) == [Lapse(R, 9, 30.0)]


def test_silence_during_an_outage_of_kafka_proves_nothing(bench: Bench) -> None:
    bench.leases.watch(R, 7, 0.0)

    assert bench.poll(100.0, kafka=False) == []
    assert bench.poll(129.9) == []
    assert bench.poll(130.0) != []


def test_whoever_is_claimed_over_again_and_again_waits_twice_as_long_each_time(bench: Bench) -> None:
    waits, now = [], 0.0
    for owner in range(7, 16):
        bench.leases.watch(R, owner, now)
        lapsed: list[Lapse] = []
        start = now
        while not lapsed:
            now += 10.0
            lapsed = bench.poll(now)
        waits.append(now - start)

    assert waits == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_a_rank_that_was_kept_for_long_starts_with_the_shortest_wait(bench: Bench) -> None:
    bench.leases.watch(R, 7, 0.0)
    assert bench.poll(30.0) != []
    bench.leases.watch(R, 9, 30.0 + LEASE_SECONDS_MAX)

    assert bench.poll(60.0 + LEASE_SECONDS_MAX) == [Lapse(R, 9, 30.0)]


def test_only_partitions_of_such_ranks_are_listened_to_from_their_end_on(bench: Bench) -> None:
    """``pod-a/0`` is in partition 0 of 12, so in 0 of 4; ``pod-b/0`` in 9, so in 1."""
    bench.leases.watch(("pod-a", 0), 7, 0.0)
    bench.leases.watch(("pod-b", 0), 7, 10.0)
    both = dict(bench.client.assigned)
    bench.poll(30.0)

    assert both == {0: OFFSET_END, 1: OFFSET_END}
    assert bench.client.assigned == {1: OFFSET_END}
