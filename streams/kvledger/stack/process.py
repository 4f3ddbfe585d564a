"""A child process that cannot outlive us: log on disk, readiness with a deadline, stop by SIGTERM then SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kvledger.errors import Unavailable

LAUNCHER: Final = Path(__file__).with_name("launch.py")
TAIL_LINES: Final = 12
"""How much of a log an error quotes."""

TAIL_BYTES_MAX: Final = 16_384
POLL_SECONDS: Final = 0.03
STOP_SECONDS_MAX: Final = 15.0
"""A broker with data and a live producer needs 2 to 3 s after SIGTERM; a busy machine several times that."""

_spawner: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawn")
"""Children start on one thread that lives as long as we do: the kernel sends the parent-death signal when the *thread*
that started a child ends, not when the process does."""

Progress = Callable[[str], None]
"""Told what takes long, one sentence at a time."""


def silent(_sentence: str) -> None:
    """A ``Progress`` that tells nobody."""


class Process:
    """One child in a session of its own, killed by the kernel if we die; it can be started again after it ended.

    ``held`` are descriptors that the child inherits, so that locks on them last until the child is gone too.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        held: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._folder = folder
        self._environment = None if environment is None else dict(environment)
        self._held = tuple(held)
        self._child: subprocess.Popen[bytes] | None = None
        self._swept = True

    @property
    def pid(self) -> int:
        """The child's process id; raises if it was never started."""
        if self._child is None:
            msg = f"{self.name} was not started"
            raise RuntimeError(msg)
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the child lives."""
        return self._child is not None and self._child.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code once the child ended; negative for a signal."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start the child; its output is appended to the log. Raises Unavailable if there is nothing to run."""
        if self.running:
            msg = f"{self.name} already runs as {self.pid}"
            raise RuntimeError(msg)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._child = _spawner.submit(self._spawn, output.fileno()).result()
        self._swept = False

    def _spawn(self, output: int) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *self._command]
        return subprocess.Popen(
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env=self._environment,
            pass_fds=self._held,
            start_new_session=True,
        )

    def wait_ready(self, probe: Callable[[], bool], seconds_max: float) -> None:
        """Poll ``probe`` until it is true. Raises Unavailable, with the log's end, if the child ends or time does."""
        deadline = time.monotonic() + seconds_max
        while not probe():
            if not self.running:
                raise Unavailable(self.obituary(f"ended with code {self.returncode} while starting"))
            if time.monotonic() > deadline:
                raise Unavailable(self.obituary(f"was not ready after {seconds_max:.0f} s"))
            time.sleep(POLL_SECONDS)

    def join(self, seconds_max: float) -> bool:
        """Wait for the end; False if the child still lives after ``seconds_max``."""
        if self._child is None:
            return True
        try:
            self._child.wait(seconds_max)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, seconds_max: float = STOP_SECONDS_MAX) -> None:
        """SIGTERM, wait, SIGKILL what is left of the session; returns once the child is gone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.join(seconds_max)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the child and what it left of its session, then wait; once per start, as numbers are reused."""
        if self._child is None or self._swept:
            return
        self._swept = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log."""
        return tail(self.log, lines)

    def obituary(self, what: str) -> str:
        """What became of the child, with the end of its log, for an error's text."""
        words = self.tail().rstrip() or "(it wrote nothing)"
        return f"{self.name} {what}; the end of {self.log.name}:\n{words}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last ``lines`` lines of a text file, reading at most its last ``TAIL_BYTES_MAX`` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES_MAX))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def run(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    seconds_max: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command to its end. Raises Unavailable, with the end of its output, if it fails or takes too long."""
    process = Process(name, command, log=log, environment=environment)
    process.start()
    try:
        in_time = process.join(seconds_max)
    finally:
        process.kill()
    if not in_time:
        raise Unavailable(process.obituary(f"took more than {seconds_max:.0f} s"))
    if process.returncode != 0:
        raise Unavailable(process.obituary(f"failed with code {process.returncode}"))
