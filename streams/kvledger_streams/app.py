"""The Faust worker: group membership, fetching and the agent. The only file that imports Faust.

Stock Faust hands over one record at a time, seeks to Kafka's committed offsets and drops what it has read before. Here
one event is a fetched batch of one partition, places come from the index, and every batch says which seek it follows:

    consumer thread: fetch ──(epoch, end, records)──> getmany ──event──> agent ──> Worker.take
                     seek, new epoch <── perform_seek/assign <── Worker places

The names that this overrides or uses are pinned by version in pyproject and by ``tests/streams/test_app_pins.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import faust
from aiokafka.errors import ConsumerStoppedError, IllegalStateError, KafkaError, OffsetOutOfRangeError
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from kvledger_index.writer import RedisWriter
from kvledger_streams.broker import Broker
from kvledger_streams.errors import Unavailable
from kvledger_streams.pointers import Pointers
from kvledger_streams.settings import Settings
from kvledger_streams.telemetry import Telemetry, take_over_logging
from kvledger_streams.worker import Batch, Worker

POLL_SECONDS = 0.2
"""How long a poll waits for records. A partition that is placed meanwhile joins the next poll."""

FETCH_PAUSE_SECONDS = 0.2
"""After a fetch that raised: whatever it was is asked for again."""

COMMIT_SECONDS_MAX = 2.0
"""For one commit. aiokafka would repeat it for as long as a broker outage lasts."""

TURN_SECONDS = 0.1
"""Between turns without news: the grain of stamps and back-off."""

BUFFERED_BATCHES_MAX = 4
"""Batches between consumer and agent; Faust's default of 4096 would be millions of records."""

NEVER = float("-inf")

MAX_POLL_SECONDS = 86_400.0
"""A worker that is blocked by a lost Redis keeps its partitions: nobody else could write either."""


class _Drained(NamedTuple):
    """What one partition's fetch brought, as of one moment in the consumer's thread."""

    epoch: int
    end: int
    records: list[Any]
    asked: float


class _Nothing(dict[Any, None]):
    """Faust's memory of offsets read, which drops what comes again. Ours is the index; a re-read must come through."""

    def __missing__(self, _: Any) -> None:
        return None

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def update(self, *_: Any, **__: Any) -> None:
        pass


class FoldThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust is untyped
    """The thread that owns the Kafka connection. Seeks and fetches run in it, so their order is certain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs: dict[TP, int] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[TP, float] = {}
        """When the fetch was sent whose answer was the last, by the monotonic clock."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Faust asks brokers to hold a fetch for 1.5 s; a partition left out of a fetch in flight would wait that long
        consumer._fetch_max_wait_ms = int(transport.settings.fetch_wait_seconds * 1000)  # noqa: SLF001
        consumer._client.send = self._timed(consumer._client.send)  # noqa: SLF001
        return consumer

    def _timed(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Remember when what is answered was asked. aiokafka dates an answer by when it is read from the socket, where
        it has waited for as long as this process was frozen.
        """

        async def timed(node_id: Any, request: Any, **more: Any) -> Any:
            asked = time.monotonic()
            answer = await send(node_id, request, **more)
            if isinstance(request, FetchRequest):
                places = {TP(topic, row[0]): asked for topic, rows in request.topics for row in rows}
                # behind what the fetcher does with the answer: no end is taken for newer than it is
                asyncio.get_running_loop().call_soon(self._asked.update, places)
            return answer

        return timed

    async def _fetch_records(
        self,
        consumer: Any,
        active_partitions: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - Faust's signature
        max_records: int | None = None,
    ) -> dict[TP, _Drained]:
        try:
            drained = await super()._fetch_records(consumer, active_partitions, timeout, max_records)
        except ConsumerStoppedError:
            raise
        except OffsetOutOfRangeError as error:
            (places,) = error.args
            return {TP(tp.topic, tp.partition): _Drained(-1, offset, [], 0.0) for tp, offset in places.items()}
        except (KafkaError, OSError, ValueError, RuntimeError) as error:
            # a broker's refusal, or bytes that do not unpack; the position has not moved
            self.consumer.telemetry.fetch_failed(f"{type(error).__name__}: {error}")
            await asyncio.sleep(FETCH_PAUSE_SECONDS)
            return {}
        # no await from here to the end: records and epoch belong together
        found: dict[TP, _Drained] = {}
        for place, records in drained.items():
            tp = TP(place.topic, place.partition)
            asked = self._asked.get(tp, NEVER)
            found[tp] = _Drained(self.epochs.get(tp, -1), consumer.highwater(place) or 0, records, asked)
        return found

    async def place(self, tp: TP, offset: int) -> int | None:
        """Seek, and number what comes from there on; None where the partition is not assigned any more."""
        epoch: int | None = await self.call_thread(self._place, tp, offset)
        return epoch

    def _place(self, tp: TP, offset: int) -> int | None:
        try:
            self._ensure_consumer().seek(TopicPartition(*tp), offset)
        except IllegalStateError:
            return None
        self.epochs[tp] = next(self._numbers)
        return self.epochs[tp]

    def end_of(self, tp: TP, age_seconds_max: float) -> tuple[int, float] | None:
        """The log's end, and when a broker was asked that said so: within the last ``age_seconds_max``."""
        asked = self._asked.get(tp, NEVER)
        if time.monotonic() - asked > age_seconds_max:
            return None
        try:
            end = self._ensure_consumer().highwater(TopicPartition(*tp))
        except (AssertionError, IllegalStateError):  # aiokafka's words for "not assigned"
            return None
        return None if end is None else (int(end), asked)

    async def commit_quietly(self, offsets: Mapping[TP, int]) -> None:
        """Commit for lag tools. Faust's own commit ends the process where a broker refuses."""
        places = {TopicPartition(*tp): OffsetAndMetadata(offset, "") for tp, offset in offsets.items()}
        with contextlib.suppress(KafkaError, TimeoutError):
            await self.call_thread(self._commit_within, places)

    async def _commit_within(self, places: Mapping[Any, Any]) -> None:
        await asyncio.wait_for(self._ensure_consumer().commit(places), COMMIT_SECONDS_MAX)


class FoldConsumer(driver.Consumer):  # type: ignore[misc]  # Faust is untyped
    """One event per fetched batch; the worker decides what is read from where."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worker: Worker = self.transport.worker
        self.settings: Settings = self.transport.settings
        self.telemetry: Telemetry = self.transport.telemetry
        self._read_offset = _Nothing()
        self.worker.attach(_ThreadSource(self._thread, self.settings))

    def _new_consumer_thread(self) -> FoldThread:
        return FoldThread(self, loop=self.loop, beacon=self.beacon)

    # -- what Faust calls --------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """All partitions are revoked at each rebalance; what was fetched of them is void."""
        self.worker.revoke()
        await super().on_partitions_revoked(revoked)

    async def perform_seek(self) -> None:
        """The last hook of a rebalance: hand the assignment over. Places come from the index, not from Kafka."""
        self.worker.assign(tp.partition for tp in self.assignment() if tp.topic == self.settings.topic)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, Any]]:  # noqa: ASYNC109 - Faust's signature
        """One poll: a message per partition that brought something, in the order of the fetch."""
        if not self.flow_active:
            await self.wait(self.can_resume_flow)
            return
        readable = {TP(self.settings.topic, number) for number in self.worker.readable()}
        if not readable:
            await self.wait(self.worker.wait_readable(), timeout=timeout)
            return
        drained = await self._getmany(active_partitions=readable, timeout=POLL_SECONDS)
        for tp, (epoch, end, records, asked) in drained.items():
            if not records:
                self.worker.lost(tp.partition, f"offset {end} is not in the log any more")
                continue
            message = self._to_message(tp, records[-1])
            message.key, message.value = None, Batch(tp.partition, epoch, end, records, asked)
            yield tp, message

    def on_buffer_full(self, tp: TP) -> None:
        """A full buffer holds the fetch back by itself; Faust would stop reading the partition for a second."""

    def on_buffer_drop(self, tp: TP) -> None:
        """The other end of that."""

    async def verify_all_partitions_active(self) -> None:
        """Faust's alarm takes idle partitions for stuck ones."""


class _ThreadSource:
    """The worker's view of the consumer's thread: partitions of one topic, by number."""

    def __init__(self, thread: FoldThread, settings: Settings) -> None:
        self._thread = thread
        self._settings = settings

    async def seek(self, partition: int, offset: int) -> int | None:
        """``Source.seek``."""
        return await self._thread.place(self._tp(partition), offset)

    def end_of(self, partition: int) -> tuple[int, float] | None:
        """``Source.end_of``."""
        return self._thread.end_of(self._tp(partition), self._settings.end_age_seconds_max)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """``Source.commit``."""
        await self._thread.commit_quietly({self._tp(number): offset for number, offset in offsets.items()})

    def _tp(self, partition: int) -> TP:
        return TP(self._settings.topic, partition)


class FoldTransport(driver.Transport):  # type: ignore[misc]  # Faust is untyped
    """Makes our consumer, and tells it what it works for."""

    Consumer = FoldConsumer

    def __init__(self, app: Any, *, worker: Worker, settings: Settings, telemetry: Telemetry) -> None:
        super().__init__([*app.conf.broker_consumer], app)
        self.worker, self.settings, self.telemetry = worker, settings, telemetry


class _Raw(faust.Codec):  # type: ignore[misc]  # Faust is untyped
    """Hands a batch through as it is; records are decoded by the fold."""

    def _loads(self, s: Any) -> Any:
        return s

    def _dumps(self, s: Any) -> Any:
        return s


class FoldApp(faust.App):  # type: ignore[misc]  # Faust is untyped
    """An app without tables needs no folder, and a container's file system may be read-only."""

    def _create_directories(self) -> None:
        """Faust would make ``<group>-data`` in the working folder."""


def build(settings: Settings, worker: Worker, telemetry: Telemetry) -> Any:
    """The Faust app: one fixed topic, one agent, no tables, no leader topic, no web server."""
    app = FoldApp(
        settings.consumer_group,
        broker=[f"kafka://{address}" for address in settings.kafka.split(",")],
        store="memory://",
        autodiscover=False,
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        # never jump: a position that is not in the log is a rebuild, and the worker decides
        consumer_auto_offset_reset="none",
        consumer_max_fetch_size=settings.fetch_bytes_max,
        consumer_metadata_max_age_ms=int(settings.topic_check_seconds * 1000),
        broker_max_poll_records=settings.poll_records_max,
        broker_max_poll_interval=MAX_POLL_SECONDS,
        broker_session_timeout=settings.session_seconds,
        broker_heartbeat_interval=settings.session_seconds / 4,
        broker_request_timeout=max(20.0, settings.session_seconds),
        broker_rebalance_timeout=max(15.0, settings.session_seconds),
        stream_buffer_maxsize=BUFFERED_BATCHES_MAX,
        stream_wait_empty=False,
    )
    app.transport = FoldTransport(app, worker=worker, settings=settings, telemetry=telemetry)
    topic = app.topic(settings.topic, key_serializer="raw", value_serializer=_Raw(), acks=False)

    @app.agent(topic, name="fold")  # type: ignore[untyped-decorator]  # Faust is untyped
    async def fold(stream: Any) -> None:
        async for event in stream.events():
            await worker.take(event.value)

    return app


async def serve(settings: Settings, telemetry: Telemetry) -> int:
    """Run a worker until a signal; returns the exit code.

    Raises before it reads anything: Unavailable (either server is silent), Refused (Redis would lose the index),
    WrongTopic (missing or misshapen), InvalidInput (the Redis URL).
    """
    writer = RedisWriter.from_url(
        settings.redis, namespace=settings.namespace, timeout_seconds=settings.request_seconds
    )
    pointers = Pointers(
        settings.kafka, settings.topic, settings.replicas_topic, request_seconds=settings.request_seconds
    )
    try:
        await writer.check()
        log = Broker(settings.kafka, settings.topic, request_seconds=settings.request_seconds)
        topic = await log.check(settings.partitions)
        worker = Worker(settings, writer=writer, log=log, pointers=pointers, telemetry=telemetry)
        app = build(settings, worker, telemetry)
        stop = _on_signals(telemetry)
        try:
            app.finalize()
            await app.start()
        except (KafkaError, OSError) as error:
            await _end(app, settings.stop_seconds)
            msg = f"Kafka does not take a consumer at {settings.kafka}: {error}"
            raise Unavailable(msg) from error
        telemetry.started(
            topic=settings.topic,
            partitions=topic.partitions,
            group=settings.consumer_group,
            redis=writer.address,
            kafka=settings.kafka,
            namespace=settings.namespace,
        )
        why = await _loop(worker, app, stop)
        if why is not None:
            telemetry.crashed(why)
        clean = await _stop(settings, worker, app) and why is None
    finally:
        pointers.stop()
        await writer.aclose()
    telemetry.stopped(worker.tally, clean=clean)
    return 0 if clean else 1


async def _loop(worker: Worker, app: Any, stop: asyncio.Event) -> str | None:
    """Turn until a signal (None), or until Faust gives up or we find a defect of ours (why)."""
    while not stop.is_set():
        if app.crashed:
            return repr(app.crash_reason)
        try:
            await worker.turn()
        except Exception as error:  # noqa: BLE001 - the process ends in order, its supervisor starts another
            return repr(error)
        waits = [asyncio.ensure_future(each.wait()) for each in (worker.changed, stop)]
        await asyncio.wait(waits, timeout=TURN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
    return None


async def _stop(settings: Settings, worker: Worker, app: Any) -> bool:
    """Intake first, then what is in flight, then the group; one deadline for all. False: not all in time."""
    deadline = time.monotonic() + settings.stop_seconds
    done = await worker.stop(settings.stop_seconds / 2)
    return await _end(app, max(0.5, deadline - time.monotonic())) and done


async def _end(app: Any, seconds: float) -> bool:
    """Stop Faust: leave the group, end its thread. False: not in time."""
    try:
        await asyncio.wait_for(app.stop(), seconds)
    except TimeoutError:
        return False
    return True


def _on_signals(telemetry: Telemetry) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process."""
    stop = asyncio.Event()

    def heard(name: str) -> None:
        if stop.is_set():
            telemetry.aborted(name)
            os._exit(1)
        telemetry.stopping(name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, heard, number.name)
    return stop


def run(settings: Settings) -> int:
    """The process: everything that it says is a JSON line on stdout."""
    telemetry = Telemetry()
    take_over_logging(telemetry)
    return asyncio.run(serve(settings, telemetry))
