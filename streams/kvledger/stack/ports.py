"""Free ports: asked from the kernel, never guessed."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import Final

HOST = "127.0.0.1"

FREE_SECONDS_MAX: Final = 20.0
"""A port that a stopped service had may meanwhile serve somebody's short-lived socket; the kernel hands out any."""

POLL_SECONDS: Final = 0.05


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different; a caller whose service finds one taken asks again."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def is_free(port: int) -> bool:
    """Whether a service could listen there now; connections of a former service that linger do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def await_free(*ports: int, seconds_max: float = FREE_SECONDS_MAX) -> bool:
    """Wait until a service could listen on all of them; False where one is still taken after ``seconds_max``."""
    deadline = time.monotonic() + seconds_max
    while not all(is_free(port) for port in ports):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def answers(host: str, port: int, seconds_max: float = 0.5) -> bool:
    """Whether something accepts TCP connections there."""
    try:
        socket.create_connection((host, port), timeout=seconds_max).close()
    except OSError:
        return False
    return True
