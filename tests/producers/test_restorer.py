"""Reading ranks back between turns: one pass per partition, bounded, and from the log's start where a pointer fails."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError
from ledger_rank import removed, stored, text
from ranklife import Life

from kvledger_bridge import reading as reading_module
from kvledger_bridge.decode import Batch
from kvledger_bridge.restorer import Restored, Restorer
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry
from kvledger_index.model import ModelEntry
from kvledger_wire.partition import RANK_WIDE, record_key
from kvledger_wire.records import SCHEMA, Fence, encode

ENTRY = ModelEntry(model="m")


class Message:
    """What the client hands over."""

    def __init__(self, offset: int, key: bytes, value: bytes | None, error: Any = None) -> None:
        self._offset, self._key, self._value, self._error = offset, key, value, error

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def error(self) -> Any:
        return self._error

    def timestamp(self) -> tuple[int, int]:
        return 2, 1_000_000 + 1000 * self._offset


class Log:
    """One partition. ``consumers`` are the offsets at which readers began."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.base = 0
        self.consumers: list[int] = []

    def write(self, replica: str, group: int | str | None, record: Any) -> int:
        raw = b"\xc1" if record is None else encode(record)
        self.messages.append(Message(len(self.messages), record_key(replica, 0, group), raw))
        return len(self.messages) - 1

    def life(self, replica: str) -> tuple[Life, int]:
        """A rank with a block that stays and one that goes; and where it begins."""
        life = Life(ENTRY)
        life.take(0, Batch(1.0, 0, (stored([1, 2], text(2)),)))
        life.take(1, Batch(1.0, 0, (removed(2),)))
        offsets = [self.write(replica, *each) for each in life.log]
        return life, offsets[1]

    def fence(self, replica: str, owner: int = 9) -> int:
        return self.write(replica, RANK_WIDE, Fence(SCHEMA, owner, "b", "", ""))


class Client:
    """A consumer of one partition, which is given one message at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._next = 0
        self.closed = False

    def assign(self, partitions: list[Any]) -> None:
        start = partitions[0].offset
        self._log.consumers.append(start)
        self._next = self._log.base if start == OFFSET_BEGINNING else start

    def consume(self, count: int, timeout: float) -> list[Message]:
        assert timeout == 0
        assert not self.closed
        if self._next < self._log.base:
            self._next = self._log.base
            return [Message(-1, b"", None, KafkaError(KafkaError._AUTO_OFFSET_RESET))]
        found = self._log.messages[self._next : self._next + min(count, 3)]
        self._next += len(found)
        return found

    def close(self) -> None:
        self.closed = True


class Clock:
    """Each look at it takes ``step`` seconds."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Bench:
    """A restorer over a made-up partition."""

    def __init__(self) -> None:
        self.log = Log()
        self.clock = Clock()
        self.said = io.StringIO()
        self.restorer = Restorer(
            Settings(kafka="k:1"),
            Telemetry(self.said),
            {},
            partitions=1,
            clock=self.clock,
            logger=logging.getLogger("test"),
        )

    def ask(self, replica: str, start: int, end: int, owner: int = 9, entry: ModelEntry = ENTRY) -> None:
        self.restorer.ask((replica, 0), entry, owner=owner, start=start, end=end)

    def done(self) -> dict[str, Restored]:
        """Turns until nothing waits."""
        found: dict[str, Restored] = {}
        for _ in range(1000):
            if not self.restorer.busy:
                return found
            found.update((each.who[0], each) for each in self.restorer.work())
        pytest.fail("the restorer does not end")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(reading_module, "Consumer", lambda _options, logger: Client(bench.log))  # noqa: ARG005
    yield bench
    bench.restorer.close()


def placed(restored: Restored) -> dict[int, int]:
    assert restored.recalled is not None, restored.why
    return restored.recalled.ledger.placed(0)


def test_ranks_that_wait_for_one_partition_are_read_in_one_pass(bench: Bench) -> None:
    ends: dict[str, tuple[int, int]] = {}
    starts = {replica: bench.log.life(replica)[1] for replica in "abc"}
    for replica in "abc":
        ends[replica] = (starts[replica], bench.log.fence(replica))
        bench.ask(replica, *ends[replica])
    done = bench.done()

    assert bench.log.consumers == [starts["a"]]
    assert [list(placed(done[replica])) for replica in "abc"] == [[1]] * 3
    assert {restored.owner for restored in done.values()} == {9}


def test_what_stands_behind_the_fence_is_not_read(bench: Bench) -> None:
    life, start = bench.log.life("a")
    end = bench.log.fence("a")
    life.take(2, Batch(1.0, 0, (removed(1),)))
    bench.log.write("a", *life.log[-1])
    bench.ask("a", start, end)

    assert list(placed(bench.done()["a"])) == [1]


def test_age_and_size_of_a_checkpoint_are_told(bench: Bench) -> None:
    life, _ = bench.log.life("a")
    since = life.checkpoint(entries_max=1)
    offsets = [bench.log.write("a", *each) for each in life.log[since:]]
    for _ in range(20):
        bench.log.fence("b", 1)
    end = bench.log.fence("a")
    bench.ask("a", offsets[0], end)
    restored = bench.done()["a"]

    assert restored.age == end - offsets[0]
    assert restored.bytes == sum(len(encode(record)) for _, record in life.log[since:])
    assert list(placed(restored)) == [1]


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_pointer_to_anything_but_a_beginning_is_the_logs_start(bench: Bench, wrong: int) -> None:
    """The Fence before Opened, and the record behind it."""
    _, start = bench.log.life("a")
    bench.ask("a", start - 1 + wrong, bench.log.fence("a"))
    restored = bench.done()["a"]

    assert bench.log.consumers == [start - 1 + wrong, OFFSET_BEGINNING]
    assert (restored.start, list(placed(restored))) == (-1, [1])


def test_a_pointer_below_the_log_is_the_logs_start(bench: Bench) -> None:
    life, start = bench.log.life("a")
    bench.log.base = bench.log.fence("x")
    since = life.checkpoint()
    for each in life.log[since:]:
        bench.log.write("a", *each)
    bench.ask("a", start, bench.log.fence("a"))
    restored = bench.done()["a"]

    assert bench.log.consumers == [start, OFFSET_BEGINNING]
    assert list(placed(restored)) == [1]


def test_a_pointer_beyond_the_fence_is_one_of_another_log(bench: Bench) -> None:
    bench.log.life("a")
    end = bench.log.fence("a")
    bench.ask("a", end + 5, end)

    assert list(placed(bench.done()["a"])) == [1]


def test_what_is_not_there_is_not_restored_and_says_why(bench: Bench) -> None:
    bench.log.fence("a", 3)
    bench.ask("a", -1, bench.log.fence("a"))
    restored = bench.done()["a"]

    assert (restored.recalled, restored.why) == (None, "no whole life is in the log")
    assert "rank_not_restored" in bench.said.getvalue()


def test_a_record_that_cannot_be_read_costs_its_rank_and_no_other(bench: Bench) -> None:
    _, one = bench.log.life("a")
    _, two = bench.log.life("b")
    bench.log.write("a", 0, None)
    bench.ask("a", one, bench.log.fence("a"))
    bench.ask("b", two, bench.log.fence("b"))
    done = bench.done()

    assert done["a"].recalled is None
    assert list(placed(done["b"])) == [1]


def test_a_turn_takes_its_time_and_no_more(bench: Bench) -> None:
    """Each look at the clock takes as long as a turn may: one record a turn."""
    _, start = bench.log.life("a")
    bench.clock.step = 0.02
    bench.ask("a", start, bench.log.fence("a"))
    turns = 0
    while bench.restorer.busy:
        bench.restorer.work()
        turns += 1

    assert turns == len(bench.log.messages) - start


def test_ranks_that_take_long_are_named_so_that_others_do_not_take_them(bench: Bench) -> None:
    _, start = bench.log.life("a")
    bench.ask("a", start, bench.log.fence("a"))
    before = bench.restorer.owners(5.0)
    bench.clock.now += 5.0
    late, again = bench.restorer.owners(5.0), bench.restorer.owners(5.0)

    assert (before, late, again) == ([], [(("a", 0), 9)], [])
    assert "rank_restoring" in bench.said.getvalue()


def test_a_later_request_replaces_the_one_before(bench: Bench) -> None:
    _, start = bench.log.life("a")
    bench.ask("a", start, bench.log.fence("a", 8), owner=8)
    bench.clock.step = 0.02
    bench.restorer.work()
    bench.ask("a", start, bench.log.fence("a"), owner=9)

    assert bench.done()["a"].owner == 9


def test_nobody_waits_after_a_clear(bench: Bench) -> None:
    _, start = bench.log.life("a")
    bench.ask("a", start, bench.log.fence("a"))
    bench.restorer.clear()

    assert not bench.restorer.busy
    assert bench.restorer.work() == []


def test_a_partition_that_lost_everything_is_not_waited_for(bench: Bench) -> None:
    """The topic was re-created under its name while its start was asked for."""
    bench.ask("a", -1, 5)
    bench.restorer.work()
    message = Message(-1, b"", None, KafkaError(KafkaError.OFFSET_OUT_OF_RANGE))
    bench.log.messages.append(message)

    assert bench.done()["a"].recalled is None
