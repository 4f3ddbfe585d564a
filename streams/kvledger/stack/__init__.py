"""A Kafka and a Redis for the demo, the tests and ``kvledger up``: one code for all three.

Each service comes from the first of: its address in the environment (``KVLEDGER_KAFKA``, ``KVLEDGER_REDIS``); a
container engine that answers; a local process. Local processes end with us, also if we are killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from kvledger.errors import Unavailable
from kvledger.stack.cache import cache_folder, find_java, kafka_jars
from kvledger.stack.containers import ContainerKafka, ContainerRedis, engine_answers
from kvledger.stack.folders import DataFolder
from kvledger.stack.kafka import LocalKafka, broker_answers
from kvledger.stack.process import Process, Progress, silent
from kvledger.stack.redis import LocalRedis, find_redis, redis_answers

__all__ = ["DataFolder", "LocalKafka", "LocalRedis", "Process", "Progress", "Stack", "silent"]

KAFKA_VARIABLE: Final = "KVLEDGER_KAFKA"
REDIS_VARIABLE: Final = "KVLEDGER_REDIS"
GIVEN_SECONDS_MAX: Final = 10.0
"""An address that the user gave must answer within this, else the user hears that it does not."""


class Service(Protocol):
    """Something with a start and a stop."""

    def start(self, progress: Progress = silent) -> None: ...
    def stop(self) -> None: ...


class Stack:
    """Kafka and Redis, each started on first need or together by ``start``; ``stop`` ends what was started here.

    ``data`` is a folder that stays (one process at a time may use it) and makes Redis append-only; without it data is
    temporary. ``local`` skips environment and containers, for tests that kill servers. Not for several threads at once.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        progress: Progress = silent,
        environment: Mapping[str, str] | None = None,
        local: bool = False,
    ) -> None:
        self._data = data
        self._progress = progress
        self._environment = dict(os.environ if environment is None else environment)
        self._local = local
        self._folder: DataFolder | None = None
        self._started: list[Service] = []
        self._containers: bool | None = None
        self._kafka: str | None = None
        self._redis: str | None = None
        self.origins: dict[str, str] = {}

    @property
    def kafka(self) -> str:
        """``host:port`` of Kafka, started if it was not. Raises Unavailable."""
        if self._kafka is None:
            self._kafka = self._start_kafka()
        return self._kafka

    @property
    def redis(self) -> str:
        """The URL of Redis, started if it was not. Raises Unavailable."""
        if self._redis is None:
            self._redis = self._start_redis()
        return self._redis

    def prepare(self) -> None:
        """Download what a local Kafka needs, where one will be used and it is not in the cache yet; starts nothing.

        For callers with a deadline on the start itself. Minutes at worst, 0.1 s if all is there. Raises Unavailable.
        """
        if self._kafka is None and not self._given(KAFKA_VARIABLE) and not self._engine():
            cache = cache_folder(self._environment)
            kafka_jars(cache, self._progress)
            find_java(cache, self._progress)

    def start(self) -> None:
        """Start both; what one start left is stopped if the other fails."""
        try:
            _ = self.redis, self.kafka
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop what was started here, last first, and delete temporary data; harmless if repeated.

        A local process on temporary data is killed: nothing of it is kept, and a broker takes seconds to leave.
        One that cannot be stopped does not keep the others; its error is raised at the end.
        """
        started, folder = self._started, self._folder
        self._started, self._folder, self._kafka, self._redis = [], None, None, None
        with ExitStack() as stops:
            if folder is not None:
                stops.callback(folder.close)
            for one in started:
                stops.callback(_end_of(one, temporary=folder is not None and folder.temporary))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def new_kafka(self, name: str = "kafka", *, advertised: str | None = None) -> LocalKafka:
        """A local broker, not started, whose files live in this stack's folder; ``stop`` of the stack ends it.

        ``advertised`` is the address that clients are told to go to, where that is not the broker's own.
        """
        cache = cache_folder(self._environment)
        jars = kafka_jars(cache, self._progress)
        broker = LocalKafka(self.folder, jars, find_java(cache, self._progress), name=name, advertised=advertised)
        self._started.append(broker)
        return broker

    def new_redis(self, name: str = "redis", *, append_only: bool = False, settings: Sequence[str] = ()) -> LocalRedis:
        """A local server, not started, whose files live in this stack's folder; ``stop`` of the stack ends it."""
        server = LocalRedis(self.folder, find_redis(), name=name, append_only=append_only, settings=settings)
        self._started.append(server)
        return server

    @property
    def processes(self) -> list[Process]:
        """The local servers that were started here, for those who watch whether they live."""
        return [one.process for one in self._started if isinstance(one, LocalKafka | LocalRedis)]

    @property
    def folder(self) -> DataFolder:
        """The folder with data and logs, made and locked on first need."""
        if self._folder is None:
            self._folder = DataFolder(self._data)
        return self._folder

    def _start_kafka(self) -> str:
        given = self._given(KAFKA_VARIABLE)
        if given:
            _insist(broker_answers(given, GIVEN_SECONDS_MAX), "Kafka", KAFKA_VARIABLE, given)
            self.origins["kafka"] = "environment"
            return given
        if self._engine():
            container = ContainerKafka()
            if self._try_container(container):
                self.origins["kafka"] = "container"
                return container.bootstrap
        broker = self.new_kafka()
        broker.start(self._progress)
        self.origins["kafka"] = "local process"
        return broker.bootstrap

    def _start_redis(self) -> str:
        given = self._given(REDIS_VARIABLE)
        if given:
            _insist(redis_answers(given, GIVEN_SECONDS_MAX), "Redis", REDIS_VARIABLE, given)
            self.origins["redis"] = "environment"
            return given
        if self._engine():
            container = ContainerRedis()
            if self._try_container(container):
                self.origins["redis"] = "container"
                return container.url
        server = self.new_redis(append_only=self._data is not None)
        server.start(self._progress)
        self.origins["redis"] = "local process"
        return server.url

    def _given(self, variable: str) -> str:
        return "" if self._local else self._environment.get(variable, "").strip()

    def _engine(self) -> bool:
        """Whether containers are to be tried; data that must stay is kept by local processes only."""
        if self._containers is None:
            self._containers = not self._local and self._data is None and engine_answers()
        return self._containers

    def _try_container(self, container: ContainerKafka | ContainerRedis) -> bool:
        """Start it; where the engine answers but cannot (no such image to be had), local processes serve instead."""
        try:
            container.start(self._progress)
        except Unavailable as error:
            self._progress(f"{error}; using a local process instead")
            self._containers = False
            return False
        self._started.append(container)
        return True


def _end_of(one: Service, *, temporary: bool) -> Callable[[], None]:
    """How a service is ended."""
    return one.kill if temporary and isinstance(one, LocalKafka | LocalRedis) else one.stop


def _insist(answered: bool, service: str, variable: str, address: str) -> None:  # noqa: FBT001 - a private guard
    if not answered:
        shown = address.rpartition("@")[2]
        msg = (
            f"{service} does not answer at {shown} ({variable}); "
            f"start it there, or unset {variable} to have one started here"
        )
        raise Unavailable(msg)
