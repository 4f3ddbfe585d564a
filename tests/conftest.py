"""Fixtures for every room: one Kafka and one Redis for the whole run.

They start when the first test asks. With several workers (``-n 2``) the process that hands out the tests starts them
before its workers, and ends them after the last one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from kvledger.stack import LocalKafka, LocalRedis, Progress, Stack, silent

FIXTURES = Path(__file__).parent / "fixtures"
POLL_SECONDS = 0.02
EVENTUALLY_SECONDS = 30.0
"""Guards against hanging only: a machine that does other work is no failure. What is promised in time is measured."""

SERVICE_FIXTURES = frozenset({"stack", "kafka", "redis_url", "create_topics", "redis_server", "kafka_broker"})
"""Tests that ask for one of these are marked ``services``."""

ENVIRONMENT = dict(os.environ)
"""As it was at the start: the stack may be told by it which services and which cache to use; tests see none of it."""
for _name in [name for name in os.environ if name.startswith("KVLEDGER_")]:
    del os.environ[_name]

SHARED = pytest.StashKey[Stack]()
"""The services of a run with several workers."""

_numbers = itertools.count(1)

# A machine that does other work at the same time is no failure of a property; a blob reproduces those that are.
settings.register_profile("kvledger", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvledger")


class CreateTopics(Protocol):
    """``create_topics(prefix, partitions=4)`` makes one installation's topics."""

    def __call__(self, prefix: str, partitions: int = 4) -> None: ...


class RedisServer(Protocol):
    """``redis_server(append_only=True)`` starts a private server that the test may kill."""

    def __call__(self, *, append_only: bool = False, settings: tuple[str, ...] = ()) -> LocalRedis: ...


class Eventually(Protocol):
    """``eventually(condition)`` polls until the condition's value is true and returns it; fails at the deadline."""

    def __call__(self, condition: Callable[[], Any], seconds: float = EVENTUALLY_SECONDS, what: str = "") -> Any: ...


class EventuallyAsync(Protocol):
    """The same for coroutine functions, on the running loop."""

    def __call__(
        self, condition: Callable[[], Awaitable[Any]], seconds: float = EVENTUALLY_SECONDS, what: str = ""
    ) -> Awaitable[Any]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SERVICE_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.services)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Download what the services need before the clock of the first test runs that wants them."""
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if session.config.option.collectonly or not asked & {"kafka", "kafka_broker"}:
        return
    with Stack(progress=_teller(session.config), environment=ENVIRONMENT, local="kafka_broker" in asked) as stack:
        stack.prepare()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that hands out the tests
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the run's services are; the first one makes them start."""
    if SHARED not in node.config.stash:
        shared = node.config.stash[SHARED] = Stack(progress=_teller(node.config), environment=ENVIRONMENT)
        node.config.add_cleanup(shared.stop)
        shared.start()
    shared = node.config.stash[SHARED]
    node.workerinput["services"] = {"KVLEDGER_KAFKA": shared.kafka, "KVLEDGER_REDIS": shared.redis}


def _teller(config: pytest.Config) -> Progress:
    """Where a stack says what it does: the terminal, if this process has it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")

    def tell(sentence: str) -> None:
        if reporter is not None:
            reporter.write_line(f"stack: {sentence}")

    return tell


@pytest.fixture(scope="session")
def stack(pytestconfig: pytest.Config) -> Iterator[Stack]:
    """The run's services; nothing runs before ``.kafka`` or ``.redis`` is asked for."""
    progress = _teller(pytestconfig) if pytestconfig.getoption("verbose") > 0 else silent
    services: dict[str, str] = getattr(pytestconfig, "workerinput", {}).get("services", {})
    with Stack(progress=progress, environment=ENVIRONMENT | services) as running:
        yield running


@pytest.fixture(scope="session")
def kafka(stack: Stack) -> str:
    """``host:port`` of the run's Kafka."""
    return stack.kafka


@pytest.fixture(scope="session")
def redis_url(stack: Stack) -> str:
    """The URL of the run's Redis; tests keep apart by ``namespace``."""
    return stack.redis


@pytest.fixture
def topic_prefix() -> str:
    """A topic prefix that no other test uses, also not on a Kafka that outlives the run."""
    return f"t{os.getpid()}-{time.time_ns():x}-{next(_numbers)}."


@pytest.fixture
def namespace() -> str:
    """A Redis namespace that no other test uses, also not on a Redis that outlives the run."""
    return f"t{os.getpid()}-{time.time_ns():x}-{next(_numbers)}"


@pytest.fixture(scope="session")
def create_topics(kafka: str) -> CreateTopics:
    """A factory for the topics of one installation."""
    from kvledger.admin import connect
    from kvledger.admin import create_topics as create
    from kvledger_wire.topics import topic_specs

    client = connect(kafka)

    def factory(prefix: str, partitions: int = 4) -> None:
        create(client, topic_specs(partitions=partitions, prefix=prefix))

    return factory


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A factory for private Redis servers, all gone after the test."""
    with Stack(environment=ENVIRONMENT, local=True) as private:

        def factory(*, append_only: bool = False, settings: tuple[str, ...] = ()) -> LocalRedis:
            server = private.new_redis(f"redis-{next(_numbers)}", append_only=append_only, settings=settings)
            server.start()
            return server

        yield factory


@pytest.fixture
def kafka_broker() -> Iterator[Callable[..., LocalKafka]]:
    """A factory for private brokers that a test may kill and start again; each costs about 4 s."""
    with Stack(environment=ENVIRONMENT, local=True) as private:

        def factory(advertised: str | None = None) -> LocalKafka:
            broker = private.new_kafka(f"kafka-{next(_numbers)}", advertised=advertised)
            broker.start()
            return broker

        yield factory


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder with ``engine-traces``, ``manager-traces`` and ``wire``."""
    return FIXTURES


@pytest.fixture(scope="session")
def eventually() -> Eventually:
    """Wait for a condition with a deadline."""

    def wait(condition: Callable[[], Any], seconds: float = EVENTUALLY_SECONDS, what: str = "") -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {what or condition}")
            time.sleep(POLL_SECONDS)
        return value

    return wait


@pytest.fixture(scope="session")
def eventually_async() -> EventuallyAsync:
    """Wait for a condition with a deadline, letting the loop run."""

    async def wait(condition: Callable[[], Awaitable[Any]], seconds: float = EVENTUALLY_SECONDS, what: str = "") -> Any:
        deadline = time.monotonic() + seconds
        while not (value := await condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {what or condition}")
            await asyncio.sleep(POLL_SECONDS)
        return value

    return wait
