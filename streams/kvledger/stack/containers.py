"""Kafka and Redis in containers, where an engine answers. The command-line program's presence proves nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Final

from kvledger.errors import Unavailable
from kvledger.stack.process import Progress, silent

PING_SECONDS_MAX: Final = 2
"""Long enough for a busy engine, short enough that machines without one start as fast as before."""

DEFAULT_ENGINE: Final = "unix:///var/run/docker.sock"
KAFKA_IMAGE: Final = "confluentinc/cp-kafka:7.9.0"
REDIS_IMAGE: Final = "redis:7.4"
START_SECONDS_MAX: Final = 120

KAFKA_ENVIRONMENT: Final = {
    "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
    "KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS": "1000",
    "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
    "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
}
"""The same choices as for the local broker; the rest testcontainers sets itself."""


def engine_answers() -> bool:
    """Whether a container engine answers a ping in time; False also where its client library is not installed."""
    try:
        import docker
    except ImportError:
        return False
    if not _socket_answers(os.environ.get("DOCKER_HOST") or DEFAULT_ENGINE):
        return False
    with contextlib.suppress(Exception):
        client = docker.from_env(timeout=PING_SECONDS_MAX)
        try:
            return bool(client.ping())
        finally:
            client.close()
    return False


def _socket_answers(engine: str) -> bool:
    """Whether someone listens at a unix address; the client library leaks its socket where nobody does."""
    scheme, _, path = engine.partition("://")
    if scheme != "unix":
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PING_SECONDS_MAX)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


class _Container:
    """What both containers share: started once, removed by ``stop``, and by the engine's reaper if we die."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._container: Any = None

    @property
    def running(self) -> bool:
        return self._container is not None

    def start(self, progress: Progress = silent) -> None:
        """Pull where needed and start. Raises Unavailable with the engine's own words."""
        progress(f"starting {self._image} in a container (the first time it is pulled)…")
        try:
            self._container = self._run()
        except Exception as error:
            msg = f"container {self._image} did not start: {error}"
            raise Unavailable(msg) from error

    def stop(self) -> None:
        """Stop and remove the container."""
        if self._container is not None:
            self._container.stop()
            self._container = None

    def _run(self) -> Any:
        raise NotImplementedError


class ContainerKafka(_Container):
    """A broker in a container."""

    def __init__(self) -> None:
        super().__init__(KAFKA_IMAGE)

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients on this machine."""
        return str(self._container.get_bootstrap_server())

    def _run(self) -> Any:
        from testcontainers.community.kafka import KafkaContainer

        container = KafkaContainer(KAFKA_IMAGE).with_kraft()
        for name, value in KAFKA_ENVIRONMENT.items():
            container.with_env(name, value)
        return container.start(timeout=START_SECONDS_MAX)


class ContainerRedis(_Container):
    """A Redis in a container."""

    def __init__(self) -> None:
        super().__init__(REDIS_IMAGE)

    @property
    def url(self) -> str:
        """``redis://host:port/0`` for clients on this machine."""
        port = self._container.get_exposed_port(self._container.port)
        return f"redis://{self._container.get_container_host_ip()}:{port}/0"

    def _run(self) -> Any:
        from testcontainers.community.redis import RedisContainer

        return RedisContainer(REDIS_IMAGE).start()
