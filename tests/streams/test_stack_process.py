"""Children: they are watched while they start, stopped hard if need be, and never outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvledger.errors import Unavailable
from kvledger.stack.folders import FileLock
from kvledger.stack.process import TAIL_BYTES_MAX, Process, run, tail

Eventually = Callable[..., Any]
Start = Callable[..., Process]

IDLE = "import time; print('up', flush=True); time.sleep(600)"
POLITE = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python child; all are gone after the test."""
    started: list[Process] = []

    def factory(code: str, **settings: Any) -> Process:
        log = tmp_path / f"{len(started)}.log"
        process = Process("the child", [sys.executable, "-c", code], log=log, **settings)
        started.append(process)
        process.start()
        return process

    yield factory
    for process in started:
        process.kill()


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_children_end_when_their_parent_is_killed(tmp_path: Path, eventually: Eventually) -> None:
    """Nobody gets to clean up after SIGKILL, so the kernel does."""
    code = (
        "import sys, time; from pathlib import Path; from kvledger.stack.process import Process\n"
        f"child = Process('child', [sys.executable, '-c', {IDLE!r}], log=Path({str(tmp_path / 'log')!r}))\n"
        "child.start(); child.wait_ready(lambda: 'up' in child.tail(), 20)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)

        parent.kill()
        eventually(lambda: not alive(child))


def test_a_child_outlives_the_thread_that_started_it(start: Start) -> None:
    """The parent-death signal follows threads: a stack started by a helper thread would die with it."""
    started: list[Process] = []
    thread = threading.Thread(target=lambda: started.append(start(IDLE)))
    thread.start()
    thread.join()
    (child,) = started
    child.wait_ready(lambda: "up" in child.tail(), 20)

    assert child.running


def test_a_child_that_dies_while_starting_is_quoted(start: Start) -> None:
    child = start("import sys; print('no such setting: colour'); sys.exit(3)")

    with pytest.raises(Unavailable, match=r"(?s)the child ended with code 3 while starting.*no such setting: colour"):
        child.wait_ready(lambda: False, 20)


def test_a_child_that_is_never_ready_is_given_up(start: Start) -> None:
    child = start(IDLE)

    with pytest.raises(Unavailable, match="was not ready after 0 s"):
        child.wait_ready(lambda: False, 0.1)


def test_a_child_that_ignores_sigterm_is_killed(start: Start) -> None:
    child = start(STUBBORN)
    child.wait_ready(lambda: "up" in child.tail(), 20)

    child.stop(0.2)

    assert child.returncode == -signal.SIGKILL


def test_a_child_that_heeds_sigterm_ends_by_itself(start: Start) -> None:
    child = start(POLITE)
    child.wait_ready(lambda: "up" in child.tail(), 20)

    child.stop()

    assert child.returncode == 7


def test_stop_ends_grandchildren_too(start: Start, eventually: Eventually) -> None:
    child = start("import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)")
    child.wait_ready(lambda: child.tail().strip().isdigit(), 20)
    grandchild = int(child.tail())

    child.stop()

    eventually(lambda: not alive(grandchild))


def test_a_stopped_child_starts_again_and_appends_to_its_log(start: Start) -> None:
    child = start(IDLE)
    child.wait_ready(lambda: child.tail() == "up", 20)
    child.kill()

    child.start()
    child.wait_ready(lambda: child.tail() == "up\nup", 20)

    assert child.running


def test_a_running_child_is_not_started_twice(start: Start) -> None:
    child = start(IDLE)

    with pytest.raises(RuntimeError, match=f"already runs as {child.pid}"):
        child.start()


def test_a_lock_that_a_child_holds_lasts_until_it_is_gone(start: Start, tmp_path: Path) -> None:
    """Else a new owner of a data folder could meet a server that is still writing to it."""
    lock = FileLock(tmp_path / "lock")
    assert lock.try_acquire()
    child = start(IDLE, held=(lock.descriptor,))
    child.wait_ready(lambda: "up" in child.tail(), 20)
    os.close(lock.descriptor)  # as if we had been killed
    other = FileLock(tmp_path / "lock")

    assert not other.try_acquire()
    child.kill()
    assert other.try_acquire()
    other.release()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"(?s)failed with code 127.*cannot run /no/such/program: No such file"):
        run("the tool", ["/no/such/program"], log=tmp_path / "log", seconds_max=20)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="the tool took more than 0 s"):
        run("the tool", [sys.executable, "-c", IDLE], log=tmp_path / "log", seconds_max=0.3)


def test_a_tail_reads_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * (TAIL_BYTES_MAX * 3) + "\nbefore\nlast\n")

    assert tail(path, 2) == "before\nlast"
    assert len(tail(path, 100)) <= TAIL_BYTES_MAX
    assert tail(tmp_path / "absent") == ""
