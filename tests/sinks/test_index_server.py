"""How a Redis is reached and what its errors mean, without one."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions
from redis.asyncio.sentinel import Sentinel

from kvledger_index.errors import InvalidInput, Refused, Unavailable
from kvledger_index.keyspace import Keyspace
from kvledger_index.server import address_of, connect, failures, faults, meaning
from kvledger_index.writer import RedisWriter, library

SOUND = {
    "redis_version": "7.0.15",
    "maxmemory_policy": "noeviction",
    "cluster_enabled": 0,
    "role": "master",
}


def test_a_sound_server_has_no_faults() -> None:
    assert faults(SOUND) == []
    assert faults({**SOUND, "redis_version": "7.2.4", "server_name": "valkey"}) == []
    assert faults({**SOUND, "redis_version": "8.4.0"}) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"redis_version": "6.2.14"}, "6.2.14 < 7.0"),
        ({"redis_version": "unknown"}, "unknown < 7.0"),
        ({"maxmemory_policy": "allkeys-lru"}, "CONFIG SET maxmemory-policy noeviction"),
        ({"maxmemory_policy": "volatile-ttl"}, "CONFIG SET maxmemory-policy noeviction"),
        ({"cluster_enabled": 1}, "Cluster"),
        ({"role": "slave", "master_host": "10.0.0.7", "master_port": 6379}, "10.0.0.7:6379"),
    ],
)
def test_each_fault_says_what_to_change(change: dict[str, Any], words: str) -> None:
    (fault,) = faults({**SOUND, **change})

    assert words in fault


def test_all_faults_are_named_at_once() -> None:
    assert len(faults({"redis_version": "5.0", "maxmemory_policy": "allkeys-lfu", "role": "slave"})) == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.AuthenticationError("invalid username-password pair"), Refused),
        (exceptions.AuthenticationError("Authentication required."), Refused),
        (exceptions.NoPermissionError("no permissions to run fcall"), Refused),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), Unavailable),
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), Unavailable),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), Unavailable),
        (exceptions.MaxConnectionsError("Too many connections"), Unavailable),
        (exceptions.ConnectionError("Error 111 connecting"), Unavailable),
        (exceptions.TimeoutError("Timeout reading"), Unavailable),
        (OSError("gone"), Unavailable),
        (exceptions.MasterDownError("link down"), Unavailable),
        (exceptions.TryAgainError("during rehashing"), Unavailable),
        (exceptions.ResponseError("BUSY Redis is busy running a script"), Unavailable),
        (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), Unavailable),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), Unavailable),
        (exceptions.MovedError("3999 127.0.0.1:6381"), Refused),
        (exceptions.ClusterDownError("Hash slot not served"), Refused),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), Refused),
        (exceptions.ResponseError("KVSLOTS all slots are used up"), Refused),
        (exceptions.ResponseError("unknown command 'FCALL'"), Refused),
        (exceptions.InvalidResponse("Protocol Error: HTTP/1.1"), Refused),
        (exceptions.ResponseError("something new"), Refused),
    ],
)
def test_every_error_has_a_meaning_and_names_the_address(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="cache-0:6379") as raised, failures("cache-0:6379/0"):
        raise error

    assert type(raised.value) is kind
    assert raised.value.__cause__ is error
    assert len(str(meaning(error, "cache-0:6379/0"))) < 200


def test_what_is_not_the_server_s_passes() -> None:
    with pytest.raises(KeyError), failures("here"):
        raise KeyError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache-0", "cache-0:6379/0"),
        ("redis://user:secret@cache-0:7000/3", "cache-0:7000/3"),
        ("rediss://:secret@[::1]:7001", "::1:7001/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix://user:secret@/run/redis.sock?db=2", "unix:///run/redis.sock"),
    ],
)
async def test_an_address_has_no_password(url: str, address: str) -> None:
    client = connect(url, timeout_seconds=1, connections_max=2)

    assert address_of(client) == address
    await client.aclose()


async def test_a_client_of_sentinel_is_named_after_its_service() -> None:
    client = Sentinel([("sentinel-0", 26379)]).master_for("kvledger")  # type: ignore[no-untyped-call]  # redis-py

    assert RedisWriter(client).address == "sentinel service kvledger"
    await client.aclose()


@pytest.mark.parametrize(
    "url", ["cache-0:6379", "http://cache-0", "redis://:secret@cache-0:port", "redis://:secret@cache-0?colour=red", ""]
)
def test_what_is_no_redis_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidInput, match="redis://host:port/db") as raised:
        connect(url, timeout_seconds=1, connections_max=2)

    assert "secret" not in str(raised.value)


async def test_the_client_neither_repeats_nor_waits_without_bound() -> None:
    client = connect("redis://cache-0", timeout_seconds=0.25, connections_max=3)
    connection = client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)

    assert connection.retry.get_retries() == 0
    assert (connection.socket_timeout, connection.socket_connect_timeout) == (0.25, 0.25)
    assert client.connection_pool.max_connections == 3
    await client.aclose()


@pytest.mark.parametrize("namespace", ["", "-x", "a b", "a/b", "ä", "x" * 65, "a{b}", "a*", "a\n"])
def test_a_namespace_that_would_not_stay_apart_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        Keyspace(namespace)


def test_the_library_is_named_after_its_source() -> None:
    lines = library().source.splitlines()

    assert lines[0] == f"#!lua name=kvledger0_{library().build}"
    assert library().name("apply") == f"kvledger0_apply_{library().build}"
    assert library().build in lines[1]
