"""The link fails as told, and only so: a fault kit that breaks differently would prove something else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import proxy as kit
import pytest
from proxy import Proxy

SECONDS = 30.0
QUIET_SECONDS = 0.15
"""How long nothing must come for it to count as held back."""

LARGE = 32 * 2**20
"""More than a paused link and the kernel hold."""


class Echo:
    """A server that sends back what it gets, and remembers what became of its connections."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.ends: list[str] = []
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                self.ends.append("reset")
            else:
                self.ends.append("closed")

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as server:
        yield server


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.address) as running:
        yield running


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), SECONDS)


def exchange(client: socket.socket, data: bytes = b"hello") -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def receive(client: socket.socket, count: int) -> bytes:
    client.settimeout(SECONDS)
    got = bytearray()
    while len(got) < count:
        part = client.recv(count - len(got))
        assert part, "the connection ended"
        got += part
    return bytes(got)


def quiet(client: socket.socket) -> bool:
    """Whether neither bytes nor an end come."""
    client.settimeout(QUIET_SECONDS)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    return False


def test_bytes_and_ends_pass_both_ways(proxy: Proxy, echo: Echo, eventually: Any) -> None:
    with connect(proxy) as client:
        assert exchange(client) == b"hello"
        client.shutdown(socket.SHUT_WR)
        client.settimeout(SECONDS)
        assert client.recv(1) == b""
    eventually(lambda: proxy.status()["connections"] == 0, what="a connection that ended is forgotten")

    assert echo.ends == ["closed"]
    assert (proxy.status()["accepted"], proxy.status()["resets"]) == (1, 0)


def test_a_pause_holds_back_and_loses_nothing(proxy: Proxy) -> None:
    """Sent before | pause, sent, nothing comes | resume: all of it comes, in order."""
    data = bytes(range(256)) * (LARGE // 256)
    with connect(proxy) as client:
        exchange(client)
        proxy.pause()
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        held = quiet(client)
        stuck = sender.is_alive()
        proxy.resume()
        got = receive(client, len(data))
        sender.join(SECONDS)

    assert held
    assert stuck, "whoever sends more than the buffers hold has to wait"
    assert got == data


def test_who_connects_during_a_pause_is_served_after_it(proxy: Proxy, echo: Echo) -> None:
    proxy.pause()
    with connect(proxy) as client:
        client.sendall(b"early")

        assert quiet(client)
        assert echo.connections == 0

        proxy.resume()
        assert receive(client, 5) == b"early"


def test_a_black_hole_swallows_without_a_word_and_resets_once_it_is_over(
    proxy: Proxy, echo: Echo, eventually: Any
) -> None:
    """before: echoed | in it: bytes vanish, an end vanishes, nobody is reset | after: what lost bytes is reset."""
    with connect(proxy) as client, connect(proxy) as leaving, connect(proxy) as silent:
        for one in (client, leaving, silent):
            exchange(one)
        proxy.blackhole()
        client.sendall(b"lost")
        leaving.shutdown(socket.SHUT_WR)
        eventually(lambda: proxy.status()["swallowed_bytes"] == 4, what="the bytes are swallowed")

        assert quiet(client)
        assert quiet(leaving)
        assert echo.ends == []

        proxy.resume()
        client.settimeout(SECONDS)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert exchange(silent) == b"hello", "a connection on which nothing was lost goes on"
    eventually(lambda: len(echo.ends) == 3, what="the other ends hear of it")
    eventually(lambda: proxy.status()["connections"] == 0, what="all are forgotten")

    assert sorted(echo.ends) == ["closed", "reset", "reset"]


def test_who_connects_into_a_black_hole_is_accepted_and_never_answered(
    proxy: Proxy, echo: Echo, eventually: Any
) -> None:
    proxy.blackhole()
    with connect(proxy) as client:
        client.sendall(b"hello")
        eventually(lambda: proxy.status()["swallowed_bytes"] == 5, what="the bytes are swallowed")

        assert quiet(client)
        assert echo.connections == 0
    proxy.resume()
    with connect(proxy) as client:
        assert exchange(client) == b"hello"


def test_a_cut_resets_both_ends_and_lets_the_next_connection_through(proxy: Proxy, echo: Echo, eventually: Any) -> None:
    with connect(proxy) as client:
        exchange(client)
        proxy.cut()
        client.settimeout(SECONDS)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    eventually(lambda: echo.ends == ["reset"], what="the other end is reset too")
    with connect(proxy) as client:
        assert exchange(client) == b"hello"

    assert proxy.status()["resets"] == 1


def test_a_cut_ends_a_pause_for_those_it_hits(proxy: Proxy, eventually: Any) -> None:
    with connect(proxy) as client:
        exchange(client)
        proxy.pause()
        client.sendall(b"held")
        proxy.cut()
        client.settimeout(SECONDS)

        with pytest.raises(ConnectionResetError):
            client.recv(1)
        eventually(lambda: proxy.status()["connections"] == 0, what="it is forgotten although the link is paused")


def test_latency_delays_each_way_and_keeps_bandwidth(proxy: Proxy) -> None:
    """100 small messages one after the other in one direction cost one latency, not a hundred."""
    proxy.latency(0.1)
    with connect(proxy) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.monotonic()
        for number in range(100):
            client.sendall(bytes([number]))
        got = receive(client, 100)
        took = time.monotonic() - start

    assert got == bytes(range(100))
    assert 0.2 <= took < 2
    assert proxy.status()["latency_seconds"] == 0.1


def test_a_target_that_is_down_resets_its_callers() -> None:
    def call(proxy: Proxy) -> None:
        with connect(proxy) as client:  # the reset may meet the caller already here
            client.settimeout(SECONDS)
            client.recv(1)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        with Proxy(f"127.0.0.1:{unused.getsockname()[1]}") as proxy, pytest.raises(ConnectionResetError):
            call(proxy)


def test_a_stop_frees_the_port_and_may_be_repeated(echo: Echo) -> None:
    proxy = Proxy(echo.address).start()
    with connect(proxy) as client:
        exchange(client)
        proxy.pause()
        proxy.stop()
        proxy.stop()
        client.settimeout(SECONDS)

        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with Proxy(echo.address, listen=proxy.address) as again, connect(again) as client:
        assert again.address == proxy.address
        assert exchange(client) == b"hello"
    with pytest.raises(RuntimeError, match="start it first"):
        proxy.cut()


def test_a_port_that_is_taken_is_told(echo: Echo) -> None:
    with pytest.raises(OSError, match="in use"):
        Proxy(echo.address, listen=echo.address).start()
    with pytest.raises(ValueError, match="not host:port"):
        Proxy("nowhere")


def test_it_serves_by_hand(echo: Echo) -> None:
    process = subprocess.Popen(
        [sys.executable, str(Path(kit.__file__)), "127.0.0.1:0", echo.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = []
    with process:
        try:
            for command in ("", "pause", "latency 0.5", "latency never", "explode", "cut", "resume", "status"):
                if command:
                    process.stdin.write(command + "\n")
                    process.stdin.flush()
                said.append(json.loads(process.stdout.readline()))
            process.stdin.close()
            code = process.wait(SECONDS)
        finally:
            process.kill()

    assert said[0]["address"].startswith("127.0.0.1:")
    assert [one.get("mode") for one in said] == ["forward", "pause", "pause", None, None, "pause", "forward", "forward"]
    assert said[2]["latency_seconds"] == 0.5
    assert "unknown command" in said[4]["error"]
    assert code == 0
