"""Kafka and Redis as real processes that can fail, over what ``kvledger.stack`` starts.

By hand: the named ones are started, one JSON object per line on stdout, the first one tells addresses and commands; one
command per line on stdin, the server and what happens to it (``redis freeze``, ``kafka restart``):

    python tests/faults/servers.py redis kafka

What each fault is on a real machine:

    kill       SIGKILL: the process is gone, what it had not written is lost. ``start`` brings it back on its data
    freeze     SIGSTOP: connections stay, nobody answers, not even to say so. ``thaw`` goes on where it was
    restart    kill and start: a crash, or a pod that is replaced and keeps its volume

and of Redis only:

    empty      restart without the volume: nothing is there
    snapshot   keep a copy of the data as it is now. ``restore`` starts on it: whatever came later is gone
    flushall   every key is gone, the server and its functions stay
    functions  FUNCTION FLUSH: the keys stay, the functions are gone
    promote    a replica becomes a primary; ``follow`` makes a server a replica (from tests)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis

from kvledger.stack import LocalKafka, LocalRedis, Process, Stack

REPLY_SECONDS_MAX = 10.0
SYNC_SECONDS_MAX = 20.0
POLL_SECONDS = 0.01
REDIS_DATA = ("appendonlydir", "dump.rdb")
"""What a server writes into its folder, beside our log and port."""


def freeze(process: Process) -> None:
    """SIGSTOP."""
    os.kill(process.pid, signal.SIGSTOP)


def thaw(process: Process) -> None:
    """SIGCONT; harmless where it was not frozen or is gone."""
    if process.running:
        os.kill(process.pid, signal.SIGCONT)


class _Control:
    """One started server: what is the same for both."""

    def __init__(self, service: LocalRedis | LocalKafka) -> None:
        self._service = service

    def start(self) -> None:
        """Start on what is there and wait until it answers; Kafka takes 6 to 14 s after ``kill``."""
        self._service.start()

    def kill(self) -> None:
        """SIGKILL, also of a frozen one."""
        self._service.kill()

    def freeze(self) -> None:
        """SIGSTOP."""
        freeze(self._service.process)

    def thaw(self) -> None:
        """SIGCONT."""
        thaw(self._service.process)

    def restart(self) -> None:
        """Crash and come back on its data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Thaw it, so that it can be stopped."""
        self.thaw()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RedisControl(_Control):
    """One started Redis. Append-only data survive ``kill``; without it every restart is an empty one."""

    def __init__(self, server: LocalRedis) -> None:
        super().__init__(server)
        self.server = server
        self._home = server.process.log.parent
        self._kept: list[tempfile.TemporaryDirectory[str]] = []

    @property
    def url(self) -> str:
        """``redis://host:port/0``, the same over restarts."""
        return self.server.url

    @property
    def address(self) -> str:
        """``host:port``."""
        return self.url.removeprefix("redis://").partition("/")[0]

    def restart_empty(self) -> None:
        """Crash and come back without its data."""
        self.kill()
        self._wipe()
        self.start()

    def snapshot(self) -> Path:
        """A copy of the data, for ``restart_from``; the server stands still for the moment. Deleted with ``close``."""
        folder = tempfile.TemporaryDirectory(prefix="redis-snapshot-")
        self._kept.append(folder)
        self.freeze()
        try:
            for name in REDIS_DATA:
                _copy(self._home / name, Path(folder.name) / name)
        finally:
            self.thaw()
        return Path(folder.name)

    def restart_from(self, snapshot: Path) -> None:
        """Crash and come back on older data."""
        self.kill()
        self._wipe()
        for name in REDIS_DATA:
            _copy(snapshot / name, self._home / name)
        self.start()

    def flushall(self) -> None:
        """Delete every key."""
        self.call("FLUSHALL")

    def flush_functions(self) -> None:
        """Delete every function."""
        self.call("FUNCTION", "FLUSH")

    def follow(self, primary: RedisControl) -> None:
        """Become its replica, and wait until all that it holds has arrived."""
        primary.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")  # else it waits 5 s for further replicas
        host, _, port = primary.address.rpartition(":")
        self.call("REPLICAOF", host, port)
        end = time.monotonic() + SYNC_SECONDS_MAX
        while not self._is_level_with(primary):
            if time.monotonic() > end:
                raise TimeoutError(f"not level with its primary after {SYNC_SECONDS_MAX} s: {self.replication()}")
            time.sleep(POLL_SECONDS)

    def promote(self) -> None:
        """Become a primary with what has arrived."""
        self.call("REPLICAOF", "NO", "ONE")

    def replication(self) -> dict[str, Any]:
        """What the server says of its role."""
        with Redis.from_url(self.url, socket_timeout=REPLY_SECONDS_MAX) as client:
            found: dict[str, Any] = client.info("replication")
        return found

    def call(self, *words: str) -> Any:
        """One command on a connection of its own."""
        with Redis.from_url(self.url, socket_timeout=REPLY_SECONDS_MAX) as client:
            return client.execute_command(*words)

    def close(self) -> None:
        """Thaw it, so that it can be stopped, and delete the snapshots."""
        super().close()
        for folder in self._kept:
            folder.cleanup()
        self._kept.clear()

    def _is_level_with(self, primary: RedisControl) -> bool:
        mine, theirs = self.replication(), primary.replication()
        # a replica reports the link as up before it has loaded the last of the first copy
        up = mine.get("master_link_status") == "up" and not mine.get("master_sync_in_progress")
        return up and mine.get("slave_repl_offset", -1) >= theirs["master_repl_offset"]

    def _wipe(self) -> None:
        for name in REDIS_DATA:
            _delete(self._home / name)


class KafkaControl(_Control):
    """One started broker."""

    def __init__(self, broker: LocalKafka) -> None:
        super().__init__(broker)
        self.broker = broker

    @property
    def address(self) -> str:
        """``host:port`` of its listener, the same over restarts."""
        return self.broker.bootstrap


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main(words: list[str]) -> int:
    """Serve commands from stdin until its end."""
    if not words or not set(words) <= {"redis", "kafka"}:
        sys.stderr.write("usage: servers.py redis|kafka …; then commands on stdin\n")
        return 2
    with Stack(local=True) as stack, ExitStack() as frozen:
        commands: dict[tuple[str, str], Callable[[], object]] = {}
        told: dict[str, Any] = {}
        if "redis" in words:
            server = stack.new_redis(append_only=True)
            server.start()
            redis = frozen.enter_context(RedisControl(server))
            commands |= _redis_commands(redis)
            told["redis"] = redis.url
        if "kafka" in words:
            broker = stack.new_kafka()
            broker.start()
            kafka = frozen.enter_context(KafkaControl(broker))
            commands |= {("kafka", name): act for name, act in _process_commands(kafka).items()}
            told["kafka"] = kafka.address
        _say(told | {"commands": sorted(" ".join(command) for command in commands)})
        for line in sys.stdin:
            _obey(line, commands)
    return 0


def _obey(line: str, commands: dict[tuple[str, str], Callable[[], object]]) -> None:
    server, _, what = line.strip().partition(" ")
    if (server, what) not in commands:
        _say({"error": f"unknown command {line.strip()!r}"})
        return
    started = time.monotonic()
    commands[server, what]()
    _say({"done": f"{server} {what}", "seconds": round(time.monotonic() - started, 3)})


def _process_commands(control: RedisControl | KafkaControl) -> dict[str, Callable[[], object]]:
    return {
        "kill": control.kill,
        "start": control.start,
        "freeze": control.freeze,
        "thaw": control.thaw,
        "restart": control.restart,
    }


def _redis_commands(redis: RedisControl) -> dict[tuple[str, str], Callable[[], object]]:
    kept: list[Path] = []
    table = _process_commands(redis) | {
        "empty": redis.restart_empty,
        "snapshot": lambda: kept.append(redis.snapshot()),
        "restore": lambda: redis.restart_from(kept[-1]) if kept else _say({"error": "no snapshot yet"}),
        "flushall": redis.flushall,
        "functions": redis.flush_functions,
    }
    return {("redis", name): act for name, act in table.items()}


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
