"""The servers fail as told, and only so: a fault kit that breaks differently would prove something else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers as kit
from proxy import Proxy
from redis import Redis
from redis.exceptions import ReadOnlyError, RedisError
from servers import RedisControl

from kvledger.stack.redis import redis_answers

FUNCTION = "#!lua name=one\nredis.register_function('one', function() return 1 end)"
SILENT_SECONDS = 0.2
"""How long a frozen server may stay silent to count as frozen."""


@pytest.fixture
def make(redis_server: Any) -> Iterator[Callable[[], RedisControl]]:
    """A factory of append-only servers under control."""
    made: list[RedisControl] = []

    def factory() -> RedisControl:
        made.append(RedisControl(redis_server(append_only=True)))
        return made[-1]

    yield factory
    for one in made:
        one.close()


def value(control: RedisControl) -> Any:
    return control.call("GET", "key")


def test_a_frozen_redis_is_silent_and_goes_on_where_it_was(make: Callable[[], RedisControl]) -> None:
    redis = make()
    with Redis.from_url(redis.url, socket_timeout=SILENT_SECONDS) as client:
        client.set("key", "a")
        redis.freeze()
        with pytest.raises(RedisError):
            client.get("key")
        redis.thaw()

        assert value(redis) == b"a"


def test_a_killed_redis_is_gone_and_comes_back_on_its_data(make: Callable[[], RedisControl]) -> None:
    redis = make()
    redis.call("CONFIG", "SET", "appendfsync", "always")
    redis.call("SET", "key", "a")
    redis.call("FUNCTION", "LOAD", FUNCTION)
    before = redis.address, redis.server.process.pid
    redis.kill()
    gone = redis_answers(redis.url)
    redis.start()

    assert not gone
    assert value(redis) == b"a"
    assert redis.call("FCALL", "one", "0") == 1
    assert (redis.address == before[0], redis.server.process.pid == before[1]) == (True, False)


def test_an_empty_restart_loses_keys_and_functions(make: Callable[[], RedisControl]) -> None:
    redis = make()
    redis.call("SET", "key", "a")
    redis.call("FUNCTION", "LOAD", FUNCTION)
    redis.restart_empty()

    assert (value(redis), redis.call("FUNCTION", "LIST")) == (None, [])


def test_an_older_snapshot_forgets_what_came_later(make: Callable[[], RedisControl]) -> None:
    redis = make()
    redis.call("SET", "key", "a")
    older = redis.snapshot()
    redis.call("SET", "key", "b")
    redis.call("SET", "other", "b")
    newer = value(redis)
    redis.restart_from(older)

    assert newer == b"b"
    assert (value(redis), redis.call("GET", "other")) == (b"a", None)


def test_flushes_take_keys_or_functions_and_leave_the_other(make: Callable[[], RedisControl]) -> None:
    redis = make()
    redis.call("SET", "key", "a")
    redis.call("FUNCTION", "LOAD", FUNCTION)
    redis.flush_functions()

    assert (value(redis), redis.call("FUNCTION", "LIST")) == (b"a", [])

    redis.call("FUNCTION", "LOAD", FUNCTION)
    redis.flushall()

    assert (value(redis), redis.call("FCALL", "one", "0")) == (None, 1)


def test_a_failover_leaves_a_primary_and_a_replica_that_refuses_writes(make: Callable[[], RedisControl]) -> None:
    primary, replica = make(), make()
    primary.call("SET", "key", "a")
    replica.follow(primary)
    replicated = value(replica)
    replica.promote()
    primary.follow(replica)

    assert replicated == b"a"
    replica.call("SET", "key", "b")
    with pytest.raises(ReadOnlyError):
        primary.call("SET", "key", "c")
    assert (primary.replication()["role"], replica.replication()["role"]) == ("slave", "master")


def test_a_link_that_is_aimed_elsewhere_leads_new_connections_there(make: Callable[[], RedisControl]) -> None:
    first, second = make(), make()
    first.call("SET", "key", "first")
    second.call("SET", "key", "second")
    with Proxy(first.address) as link, Redis.from_url(f"redis://{link.address}/0") as old:
        before = old.get("key")
        link.aim(second.address)
        with Redis.from_url(f"redis://{link.address}/0") as new:
            after = old.get("key"), new.get("key")
        link.cut()
        with Redis.from_url(f"redis://{link.address}/0") as newest:
            last = newest.get("key")

    assert before == b"first"
    assert after == (b"first", b"second")
    assert last == b"second"


@pytest.mark.services
def test_they_serve_by_hand() -> None:
    command = [sys.executable, str(Path(kit.__file__)), "redis"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            said, _ = process.communicate("redis snapshot\nredis restore\nredis explode\nredis freeze\n", 60)
        finally:
            process.kill()
    lines = [json.loads(line) for line in said.splitlines()]

    assert lines[0]["redis"].startswith("redis://")
    assert "redis flushall" in lines[0]["commands"]
    assert [line.get("done") for line in lines[1:]] == ["redis snapshot", "redis restore", None, "redis freeze"]
    assert "unknown command" in lines[3]["error"]
    assert process.returncode == 0
