"""The names inside Faust, mode and aiokafka that ``app.py`` overrides or uses.

They promise nothing to us. Where an upgrade moves one, these tests say which, before a worker finds out at run time.
Versions are pinned exactly in pyproject; raise them together with whatever this says.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import aiokafka
import faust
import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher as AIOFetcher
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.consumer.subscription_state import TopicPartitionState
from aiokafka.protocol.fetch import FetchRequest
from faust.tables.recovery import Recovery
from faust.transport import consumer as base
from faust.transport.conductor import ConductorCompiler
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.threads import QueueServiceThread

from kvledger_streams import app as ours
from kvledger_streams.settings import Settings
from kvledger_streams.worker import Worker


def names_in(function: Any) -> set[str]:
    """Every attribute and name that a function's source mentions."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
    }


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("package", "pinned"), [("faust-streaming", "0.15.3"), ("mode-streaming", "0.7.1"), ("aiokafka", "0.14.0")]
)
def test_the_versions_under_us_are_those_we_know(package: str, pinned: str) -> None:
    assert version(package) == pinned


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (driver.AIOKafkaConsumerThread._create_worker_consumer, ["self", "transport"]),
        (
            driver.AIOKafkaConsumerThread._fetch_records,
            ["self", "consumer", "active_partitions", "timeout", "max_records"],
        ),
        (driver.AIOKafkaConsumerThread.__post_init__, ["self"]),
        (driver.AIOKafkaConsumerThread._ensure_consumer, ["self"]),
        (driver.Consumer._new_consumer_thread, ["self"]),
        (driver.Consumer._to_message, ["self", "tp", "record"]),
        (base.ThreadDelegateConsumer._getmany, ["self", "active_partitions", "timeout"]),
        (base.Consumer.getmany, ["self", "timeout"]),
        (base.Consumer.perform_seek, ["self"]),
        (base.Consumer.on_partitions_revoked, ["self", "revoked"]),
        (base.Consumer.on_buffer_full, ["self", "tp"]),
        (base.Consumer.on_buffer_drop, ["self", "tp"]),
        (base.Consumer.verify_all_partitions_active, ["self"]),
        (QueueServiceThread.call_thread, ["self", "fun", "args", "kwargs"]),
        (aiokafka.AIOKafkaConsumer.seek, ["self", "partition", "offset"]),
        (aiokafka.AIOKafkaConsumer.highwater, ["self", "partition"]),
        (AIOKafkaClient.send, ["self", "node_id", "request", "group"]),
    ],
    ids=lambda value: value.__qualname__ if callable(value) else "",
)
def test_a_name_that_we_override_or_call_takes_what_it_took(function: Any, expected: list[str]) -> None:
    assert parameters(function) == expected


@pytest.mark.parametrize(
    ("kind", "new"),
    [
        (ours.FoldThread, {"place", "_place", "end_of", "commit_quietly", "_commit_within", "_timed"}),
        (ours.FoldConsumer, set()),
        (ours.FoldTransport, set()),
        (ours.FoldApp, set()),
    ],
    ids=["thread", "consumer", "transport", "app"],
)
def test_every_method_of_ours_overrides_one_of_faust_or_is_new_on_purpose(kind: type, new: set[str]) -> None:
    defined = {name for name, member in vars(kind).items() if inspect.isfunction(member)}
    inherited = {name for name in defined if any(hasattr(parent, name) for parent in kind.__mro__[1:])}

    assert defined - inherited == new


def test_a_fetch_is_sent_through_the_client_and_says_what_it_asks_for() -> None:
    assert {"_client", "send"} <= names_in(AIOFetcher._proc_fetch_request)
    assert FetchRequest(1, 1, 1, 0, [("t", [(3, 7, 9)])]).topics == [("t", [(3, 7, 9)])]


async def test_an_end_is_as_old_as_the_question_and_not_as_the_reading_of_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sent at 100; frozen with the answer in the socket until 107. The next one is asked and answered at 107."""
    now = 100.0
    monkeypatch.setattr(ours, "time", SimpleNamespace(monotonic=lambda: now))
    thread = object.__new__(ours.FoldThread)
    thread._asked = {}
    thread._ensure_consumer = lambda: SimpleNamespace(highwater=lambda _: 42)
    request, tp = FetchRequest(1, 1, 1, 0, [("t", [(3, 7, 9)])]), TP("t", 3)

    async def send(_node: int, _request: Any) -> None:
        nonlocal now
        now = 107.0

    ends = [thread.end_of(tp, 2.0)]
    for _ in range(2):
        await thread._timed(send)(1, request)
        await asyncio.sleep(0)
        ends.append(thread.end_of(tp, 2.0))

    assert ends == [None, None, (42, 107.0)]


def test_the_worker_makes_no_folder(tmp_path: Any, monkeypatch: Any) -> None:
    """Faust makes one per app where it stands; a read-only file system would end the worker there."""
    monkeypatch.chdir(tmp_path)
    app = ours.FoldApp("some-app", store="memory://")

    app._create_directories()

    assert "_create_directories" in names_in(faust.App.on_first_start)
    assert list(tmp_path.iterdir()) == []


def test_faust_reads_through_getmany_and_remembers_offsets_where_we_forget_them() -> None:
    drain = names_in(base.Consumer._drain_messages)

    assert {"getmany", "_read_offset", "callback"} <= drain
    assert "_read_offset" in names_in(base.Consumer.__init__)


def test_our_memory_of_offsets_forgets_whatever_it_is_told() -> None:
    nothing = ours._Nothing()
    nothing["tp"] = 7
    nothing.update({"tp": 7})

    assert nothing["tp"] is None
    assert nothing.pop("tp", None) is None


def test_perform_seek_is_the_last_hook_of_a_rebalance_and_comes_before_the_flow_resumes() -> None:
    source = inspect.getsource(Recovery._resume_streams)

    assert source.index("on_rebalance_complete") < source.index("perform_seek") < source.index("resume_flow")


def test_a_fetch_reaches_our_thread() -> None:
    assert {"_fetch_records", "call_thread"} <= names_in(driver.AIOKafkaConsumerThread.getmany)
    assert "fetched_records" in names_in(driver.AIOKafkaConsumerThread._fetch_records)


def test_records_are_handed_over_without_a_pause_after_they_are_taken() -> None:
    """Our epoch is read right after ``fetched_records`` returns: it must not wait between draining and returning."""
    source = textwrap.dedent(inspect.getsource(AIOFetcher.fetched_records))
    loop = source[source.index("for tp in list(self._records.keys())") : source.index("if drained or not timeout")]

    assert "await" not in loop
    assert not inspect.iscoroutinefunction(FetchResult.getall)


def test_a_seek_throws_away_what_was_fetched_before_it() -> None:
    source = inspect.getsource(AIOFetcher.seek_to)

    assert "del self._records[tp]" in source
    assert not inspect.iscoroutinefunction(AIOFetcher.seek_to)
    assert not inspect.iscoroutinefunction(aiokafka.AIOKafkaConsumer.seek)


def test_an_answer_to_a_fetch_is_stamped_also_where_it_brings_nothing() -> None:
    source = inspect.getsource(AIOFetcher._proc_fetch_request)

    assert source.index("tp_state.timestamp = now_ms") < source.index("if records.has_next()")
    assert {"highwater", "timestamp"} <= names_in(TopicPartitionState.__init__)


def test_the_fetch_wait_that_faust_fixes_can_be_set_before_the_consumer_starts() -> None:
    assert "fetch_max_wait_ms" in inspect.getsource(driver.AIOKafkaConsumerThread._create_worker_consumer)
    assert "_fetch_max_wait_ms" in names_in(aiokafka.AIOKafkaConsumer.start)


def test_a_buffer_that_is_full_holds_the_fetch_back() -> None:
    source = inspect.getsource(ConductorCompiler.build)

    assert "queue.full()" in source
    assert "dest_chan.put(dest_event)" in source


async def test_the_app_is_built_as_it_must_be() -> None:
    settings = Settings(kafka="localhost:1,localhost:2", redis="-", topic_prefix="x.")
    worker = Worker(settings, writer=None, log=None, pointers=None, telemetry=None)  # type: ignore[arg-type]
    app = ours.build(settings, worker, None)  # type: ignore[arg-type]
    conf = app.conf

    assert conf.id == "x.kvledger.streams.kvl"
    assert conf.consumer_auto_offset_reset == "none"
    assert (conf.topic_disable_leader, conf.topic_allow_declare, conf.web_enabled) == (True, False, False)
    assert str(conf.store) == "memory:"
    assert [str(url) for url in conf.broker] == ["kafka://localhost:1", "kafka://localhost:2"]
    assert (conf.broker_max_poll_records, conf.stream_buffer_maxsize) == (1000, ours.BUFFERED_BATCHES_MAX)
    assert app.transport.Consumer is ours.FoldConsumer
    assert list(app.agents) == ["fold"]
    assert app.agents["fold"].channel.get_topic_name() == "x.kvledger.events"
    assert not app.tables
