"""A TCP link that can fail: between an engine and its bridge, a process and Kafka, a router and Redis.

By hand, one command per line on stdin (``pause``, ``blackhole``, ``cut``, ``resume``, ``latency SECONDS``,
``aim HOST:PORT``, ``status``), one JSON object per line on stdout; the first one names the address to connect to:

    python tests/faults/proxy.py 127.0.0.1:0 127.0.0.1:6379

What each fault is on a real network:

    pause      packets wait: nothing is forwarded, nothing is lost, senders fill their buffers. New connections wait too
    blackhole  packets vanish: bytes are swallowed, nobody is told, not even of an end. New connections are accepted
    cut        both ends of every connection get a reset; new connections are forwarded as before
    resume     the link works again; connections that lost bytes meanwhile are reset, as TCP never delivers with a hole
    latency    every byte comes so much later, in both directions
    aim        new connections lead to another target; open ones stay where they are

Kafka's clients follow the addresses that a broker advertises, so behind this proxy they leave it after the first
answer, unless the broker advertises the proxy (``Stack.new_kafka(advertised=…)``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

T = TypeVar("T")
Mode = Literal["forward", "pause", "blackhole"]

CHUNK_BYTES = 16 * 1024
CHUNKS_MAX = 256
"""Read and not forwarded, per direction: with the kernel's buffers all that a paused link holds."""

CALL_SECONDS_MAX = 30.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: closing sends a reset instead of an end."""


class Proxy:
    """One link. Start it, use ``address``, let it fail, stop it; methods may be called from any thread.

    It runs on a thread with a loop of its own, so that a test's loop that stands still does not stop the link.
    ``target`` may be down: who connects then is reset.
    """

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0") -> None:
        """Both ``host:port``, IPv6 in brackets; port 0 takes a free one."""
        self._target = _split(target)
        self._listen = _split(listen)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._link: _Link | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """``host:port`` to connect to, the same until ``stop``."""
        return self._address

    def start(self) -> Self:
        """Listen. Raises OSError where the address cannot be taken."""
        loop = asyncio.new_event_loop()
        self._loop, self._thread = loop, threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._link = _Link(*self._target)
        try:
            self._address = self._call(self._link.listen(*self._listen))
        except OSError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Close the port and reset what is connected. Idempotent."""
        if self._loop is None or self._thread is None or self._link is None:
            return
        self._call(self._link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS_MAX)
        self._loop.close()
        self._loop = self._thread = self._link = None

    def pause(self) -> None:
        """Forward nothing and lose nothing."""
        self._do(lambda link: link.become("pause"))

    def blackhole(self) -> None:
        """Swallow everything, ends of connections too."""
        self._do(lambda link: link.become("blackhole"))

    def cut(self) -> None:
        """Reset what is connected; the link itself stays as it is."""
        self._do(lambda link: link.cut())

    def resume(self) -> None:
        """Work again; what has lost bytes is reset."""
        self._do(lambda link: link.become("forward"))

    def latency(self, seconds: float) -> None:
        """Deliver what is read from now on so much later, each way."""
        self._do(lambda link: link.delay(seconds))

    def aim(self, target: str) -> None:
        """Lead new connections to another ``host:port``, as a service does after a failover; open ones stay."""
        where = _split(target)
        self._do(lambda link: link.aim(*where))

    def status(self) -> dict[str, Any]:
        """Mode, latency, and counts: open, accepted and reset connections; bytes forwarded and swallowed."""
        return self._do(lambda link: link.status()) | {"address": self._address}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _do(self, action: Callable[[_Link], T]) -> T:
        """Run ``action`` on the loop, and return once it has taken effect there."""
        link = self._link
        if link is None:
            raise RuntimeError("the proxy is not running: start it first")

        async def act() -> T:
            return action(link)

        return self._call(act())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS_MAX)


class _Link:
    """All connections of a proxy. Lives on the proxy's loop."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], _Pair] = {}
        self.mode: Mode = "forward"
        self.delay_seconds = 0.0
        self.changed = asyncio.Event()
        self.accepted = self.resets = self.forwarded = self.swallowed = 0

    async def listen(self, host: str, port: int) -> str:
        self._server = await asyncio.start_server(self._accept, host, port, limit=CHUNK_BYTES)
        name = self._server.sockets[0].getsockname()
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def become(self, mode: Mode) -> None:
        self.mode = mode
        if mode == "forward":
            for pair in self._pairs.values():
                if pair.torn:
                    pair.reset()
        self.changed.set()
        self.changed = asyncio.Event()

    def delay(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"latency {seconds} s is below 0")
        self.delay_seconds = seconds

    def cut(self) -> None:
        for pair in self._pairs.values():
            pair.reset()

    def aim(self, host: str, port: int) -> None:
        self._target = host, port

    def status(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "latency_seconds": self.delay_seconds,
            "connections": len(self._pairs),
            "accepted": self.accepted,
            "resets": self.resets,
            "forwarded_bytes": self.forwarded,
            "swallowed_bytes": self.swallowed,
        }

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._pairs)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def passing(self) -> None:
        """Return once nothing is held back."""
        while self.mode == "pause":
            await self.changed.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        pair = self._pairs[task] = _Pair(self, task, reader, writer)
        self.accepted += 1
        try:
            await pair.run(*self._target)
        except (OSError, asyncio.CancelledError):
            # one end is gone, or it was reset from here; a handler that raises would be reported as a defect
            self.resets += 1
        finally:
            pair.abort()
            del self._pairs[task]


class _Pair:
    """Two sockets and what flows between them."""

    def __init__(
        self, link: _Link, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._link = link
        self._task = task
        self._reader = reader
        self._writers = [writer]
        self.torn = False
        """Bytes, or an end, were swallowed: it can only be reset."""

    async def run(self, host: str, port: int) -> None:
        await self._link.passing()
        if self._link.mode == "blackhole":
            self.torn = True
            await self._swallow(self._reader)
        reader, writer = await asyncio.open_connection(host, port, limit=CHUNK_BYTES)
        self._writers.append(writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._flow(self._reader, writer))
                group.create_task(self._flow(reader, self._writers[0]))
        except* OSError as errors:
            raise ConnectionResetError(str(errors.exceptions[0])) from errors

    def reset(self) -> None:
        self.abort()
        self._task.cancel()

    def abort(self) -> None:
        for writer in self._writers:
            if writer.transport.is_closing():
                continue
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    async def _flow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: reading goes on while earlier chunks wait for their time, within bounds."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, chunks))
            group.create_task(self._write(chunks, writer))

    async def _read(self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            data = await reader.read(CHUNK_BYTES)
            if self.torn or self._link.mode == "blackhole":
                self.torn = True
                self._link.swallowed += len(data)
                if not data:
                    await asyncio.Event().wait()  # the end is not passed on; only a reset ends this
                continue
            await chunks.put((clock() + self._link.delay_seconds, data))
            if not data:
                return

    async def _write(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await chunks.get()
            if due > clock():
                await asyncio.sleep(due - clock())
            await self._link.passing()
            if self.torn or self._link.mode == "blackhole":  # it was on its way when the link broke
                self.torn = True
                self._link.swallowed += len(data)
                continue
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            self._link.forwarded += len(data)
            await writer.drain()

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        """A connection that was made into a black hole: nobody is ever dialled for it."""
        while data := await reader.read(CHUNK_BYTES):
            self._link.swallowed += len(data)
        await asyncio.Event().wait()


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def main(words: list[str]) -> int:
    """Serve commands from stdin until its end."""
    if len(words) != 2:
        sys.stderr.write("usage: proxy.py LISTEN TARGET, each host:port; then commands on stdin\n")
        return 2
    listen, target = words
    with Proxy(target, listen=listen) as proxy:
        commands: dict[str, Callable[[], None]] = {
            "pause": proxy.pause,
            "blackhole": proxy.blackhole,
            "cut": proxy.cut,
            "resume": proxy.resume,
            "status": lambda: None,
        }
        _say(proxy.status())
        for line in sys.stdin:
            match line.split():
                case [name] if name in commands:
                    commands[name]()
                    _say(proxy.status())
                case ["latency" | "aim" as name, value]:
                    try:
                        proxy.latency(float(value)) if name == "latency" else proxy.aim(value)
                    except ValueError as error:
                        _say({"error": str(error)})
                        continue
                    _say(proxy.status())
                case []:
                    pass
                case _:
                    _say({"error": f"unknown command; there are {', '.join(commands)}, latency SECONDS and aim TARGET"})
    return 0


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
