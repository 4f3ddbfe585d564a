"""An engine's two sockets without the engine: PUB for live batches, ROUTER for replay.

Framing, order, buffering and addressing are those of vLLM's publisher: three live frames (topic, sequence, payload);
a replay request of exactly ``[identity, "", 8 bytes]`` is answered with every buffered batch from that sequence on and
an END marker; anything else is dropped. The publishing socket is an XPUB, which is a PUB on the wire and lets tests
wait for subscribers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Literal, Self

import msgspec
import zmq

from kvledger_engine.errors import NoAddress

BUFFER_STEPS_DEFAULT = 10_000
"""Batches kept for replay; vLLM's default ``buffer_steps``."""

PUB_MESSAGES_MAX = 100_000
"""Unsent messages per subscriber before new ones are dropped; vLLM's default ``hwm``."""

REPLAY_MESSAGES_MAX = 1000
"""Unsent replies before the ROUTER drops silently: ZMQ's default, which vLLM kept up to 0.32."""

REBIND_SECONDS_MAX = 20.0
COMMAND_SECONDS_MAX = 30.0
END = b"\xff" * 8

Framing = Literal["old", "new"]
"""Replies up to vLLM 0.25 are (sequence, payload), from 0.26 on (topic, sequence, payload)."""

Mode = Literal["auto", "bind", "connect"]


def _never(_seq: int) -> bool:
    return False


class Faults(msgspec.Struct):
    """What goes wrong, by sequence; changed at any time through ``StandIn.faults``."""

    drop: Callable[[int], bool] = _never
    """Buffered, but not sent live."""
    duplicate: Callable[[int], bool] = _never
    """Sent live twice."""
    forget: Callable[[int], bool] = _never
    """Sent live, but not kept for replay."""
    replay_drop: Callable[[int], bool] = _never
    """Left out of replay answers, as a full ROUTER does."""
    replay_silent: bool = False
    """Requests are read and not answered."""
    replay_batches_max: int | None = None
    """An answer stops after so many batches, without END."""
    replay_twice: bool = False
    """Every answer is sent again: a stale answer for the next request."""


def binds(address: str) -> bool:
    """Whether vLLM's publisher binds this endpoint; it connects to all others."""
    return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


class StandIn:
    """One rank's publisher. Start it, publish, stop it; all methods may be called from any thread.

    With ``mode`` auto the data address follows vLLM's rule, except that port 0 is always bound. ``replay`` None: no
    replay endpoint. Actual addresses are in ``data`` and ``replay`` once started, and stay over a restart.
    """

    def __init__(
        self,
        *,
        data: str = "tcp://127.0.0.1:0",
        replay: str | None = "tcp://127.0.0.1:0",
        mode: Mode = "auto",
        framing: Framing = "new",
        buffer_steps: int = BUFFER_STEPS_DEFAULT,
        replay_messages_max: int = REPLAY_MESSAGES_MAX,
        faults: Faults | None = None,
    ) -> None:
        self.data = data
        self.replay = replay
        self.faults = faults or Faults()
        self.framing: Framing = framing
        self.requests = 0
        self.malformed = 0
        self._bind = mode == "bind" or (mode == "auto" and (binds(data) or data.endswith(":0")))
        self._replay_messages_max = replay_messages_max
        self._buffer: deque[tuple[int, bytes, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0
        self._subscribers = 0
        self._lock = threading.RLock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._commands: SimpleQueue[tuple[Callable[[], bool], _Reply]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # ---- life cycle

    def start(self) -> Self:
        """Open the sockets; raises NoAddress. Idempotent."""
        with self._lock:
            if self._thread is not None:
                return self
            self._context = zmq.Context()
            self._wake_in = self._context.socket(zmq.PAIR)
            self._wake_out = self._context.socket(zmq.PAIR)
            self._wake_out.bind("inproc://wake")
            self._wake_in.connect("inproc://wake")
            try:
                self._open()
            except NoAddress:
                self._context.destroy(linger=0)
                raise
            self._thread = threading.Thread(target=self._serve, name="stand-in", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Close the sockets at once, as a killed process does: what is still queued is lost. Idempotent."""
        if self._thread is None:
            return
        self._command(lambda: False)
        self._thread.join(COMMAND_SECONDS_MAX)
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- what an engine does

    def publish(self, payload: bytes, topic: bytes = b"", seq: int | None = None) -> int:
        """Publish one batch and return its sequence: ``seq``, else one above the last.

        Never blocks on subscribers: as with vLLM, one that is slow or not there yet misses it.
        """
        with self._lock:
            number = self._next if seq is None else seq
            self._next = number + 1
            if not self.faults.forget(number):
                self._buffer.append((number, topic, payload))
            if self._pub is not None and not self.faults.drop(number):
                frames = (topic, number.to_bytes(8, "big"), payload)
                for _ in range(2 if self.faults.duplicate(number) else 1):
                    self._pub.send_multipart(frames, zmq.DONTWAIT)
            return number

    def skip(self, count: int = 1) -> None:
        """Consume sequences without a batch, as an engine does whose batch cannot be encoded."""
        with self._lock:
            self._next += count

    def send_raw(self, *frames: bytes) -> None:
        """Send any frames on the live socket; for what an engine should not send."""
        with self._lock:
            if self._pub is not None:
                self._pub.send_multipart(frames, zmq.DONTWAIT)

    def restart(self) -> None:
        """The process ends and comes back at the same addresses: sequence 0, empty buffer."""
        self.down()
        self.up()

    def down(self) -> None:
        """The process ends: sockets closed, nothing remembered."""
        self._command(self._die)

    def up(self) -> None:
        """It comes back at the same addresses."""
        self._command(self._rise)

    def flap(self) -> None:
        """The live connection breaks and comes back; the engine and its buffer live on."""
        self._command(self._reconnect)

    # ---- what tests ask

    @property
    def head(self) -> int:
        """The last sequence that was published; -1 before the first."""
        return self._next - 1

    def subscribers(self) -> int:
        """Subscriptions that reached the live socket, less those that went away."""
        with self._lock:
            while self._pub is not None and self._pub.poll(0):
                self._subscribers += 1 if self._pub.recv()[:1] == b"\x01" else -1
            return self._subscribers

    def wait_subscribers(self, count: int = 1, seconds: float = 30.0) -> bool:
        """Wait until at least ``count`` subscriptions are in place; False where the time ran out."""
        end = time.monotonic() + seconds
        pause = threading.Event()
        while self.subscribers() < count:
            if time.monotonic() > end:
                return False
            pause.wait(0.005)
        return True

    # ---- the service thread: owns the ROUTER, opens and closes every socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        running = True
        while running:
            router = self._router
            if router is not None:
                poller.register(router, zmq.POLLIN)
            ready = dict(poller.poll())
            if router is not None:
                poller.unregister(router)
                if router in ready:
                    self._answer(router)
            if self._wake_out in ready:
                self._wake_out.recv()
                running = self._obey()
        with self._lock:
            self._close()
            self._wake_in.close(linger=0)
            self._wake_out.close(linger=0)
            if self._context is not None:
                self._context.term()
                self._context = None

    def _command(self, action: Callable[[], bool]) -> None:
        reply = _Reply()
        with self._lock:
            self._commands.put((action, reply))
            self._wake_in.send(b"")
        reply.wait()

    def _obey(self) -> bool:
        action, reply = self._commands.get()
        try:
            with self._lock:
                return action()
        except NoAddress as error:
            reply.error = error
            return True
        finally:
            reply.done.set()

    def _die(self) -> bool:
        self._close()
        self._buffer.clear()
        self._next = 0
        return True

    def _rise(self) -> bool:
        if self._pub is None:
            self._open()
        return True

    def _reconnect(self) -> bool:
        self._close_pub()
        self._open_pub()
        return True

    def _open(self) -> None:
        self._open_pub()
        if self.replay is not None:
            router = self._socket(zmq.ROUTER)
            router.sndhwm = self._replay_messages_max
            self.replay = self._attach(router, self.replay, bind=True)
            self._router = router

    def _open_pub(self) -> None:
        pub = self._socket(zmq.XPUB)
        pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # one message per subscriber, also where several ask for one topic
        pub.sndhwm = PUB_MESSAGES_MAX
        self.data = self._attach(pub, self.data, bind=self._bind)
        self._pub, self._subscribers = pub, 0

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        if self._context is None:
            msg = "the stand-in engine is not running: start it first"
            raise NoAddress(msg)
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _attach(self, socket: zmq.Socket[bytes], address: str, *, bind: bool) -> str:
        """Bind or connect and return the actual address; a port of ours that is just being freed is waited for."""
        socket.setsockopt(zmq.IPV6, int("[" in address))
        end = time.monotonic() + (REBIND_SECONDS_MAX if self._thread is not None else 0.0)
        pause = threading.Event()
        while True:
            try:
                if not bind:
                    socket.connect(address)
                    return address
                socket.bind(address)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and time.monotonic() < end:
                    pause.wait(0.02)
                    continue
                socket.close(linger=0)
                msg = f"cannot {'bind' if bind else 'connect to'} {address}: {error}"
                raise NoAddress(msg) from error
            if not address.startswith("tcp://"):
                return address
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def _close(self) -> None:
        self._close_pub()
        if self._router is not None:
            self._router.close(linger=0)
            self._router = None

    def _close_pub(self) -> None:
        if self._pub is not None:
            self._pub.close(linger=0)
            self._pub = None

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """One request per turn. Live publishing waits while the answer is written, as in vLLM's one thread."""
        with self._lock:
            frames = router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                self.malformed += 1
                return
            self.requests += 1
            if self.faults.replay_silent:
                return
            start = int.from_bytes(frames[2], "big")
            for _ in range(2 if self.faults.replay_twice else 1):
                self._write_answer(router, frames[0], start)

    def _write_answer(self, router: zmq.Socket[bytes], peer: bytes, start: int) -> None:
        sent = 0
        for seq, topic, payload in self._buffer:
            if seq < start or self.faults.replay_drop(seq):
                continue
            if sent == self.faults.replay_batches_max:
                return
            self._reply(router, peer, topic, seq.to_bytes(8, "big"), payload)
            sent += 1
        self._reply(router, peer, b"", END, b"")

    def _reply(self, router: zmq.Socket[bytes], peer: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        body = (topic, seq, payload) if self.framing == "new" else (seq, payload)
        router.send_multipart((peer, b"", *body), zmq.DONTWAIT)


class _Reply:
    """How a command of another thread ended."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: NoAddress | None = None

    def wait(self) -> None:
        if not self.done.wait(COMMAND_SECONDS_MAX):
            msg = f"the stand-in engine did not answer within {COMMAND_SECONDS_MAX} s"
            raise NoAddress(msg)
        if self.error is not None:
            raise self.error
