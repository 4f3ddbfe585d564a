"""The ZMQ shell of all ranks of a node: live SUB sockets, their monitors and replay DEALERs in one poller (DESIGN §4).

``Link.pump`` is the one place that knows the order which makes restarts visible: read, then drain the monitor, and on a
disconnect throw away what SUB had queued. Options are set before connecting, as later ones have no effect. A SUB that
binds or reconnects greets its peer only while somebody looks at it, so every link is looked at in every turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

LIVE_MESSAGES_MAX = 10_000
"""RCVHWM of a SUB: as many batches as vLLM's replay buffer holds, so what is dropped above can be replayed."""

MESSAGE_BYTES_MAX = 256 * 2**20
"""A peer that announces a larger message is disconnected by ZMQ."""

HEARTBEAT_SECONDS = 5.0
HEARTBEAT_TIMEOUT_SECONDS = 10.0
"""A half-open connection shows after at most their sum: within the 30 s that are promised."""

RECONNECT_MS_MIN, RECONNECT_MS_MAX = 100, 1000

CONNECT_SECONDS_MAX = 2.0
"""After so long without a peer the other address family of a host name is tried."""

SOCKETS_MAX = 8192
END_SEQ_MIN = 2**63
"""Sequences from here on are no sequences: END is 2^64-1."""

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_V4 = re.compile(r"tcp://(?:[^;/]+;)?\d{1,3}(?:\.\d{1,3}){3}:")

Socket = zmq.Socket[bytes]


class Endpoints(msgspec.Struct, frozen=True):
    """Where one rank is reached. ``topic`` is a prefix, as ZMQ filters by prefix."""

    data: str
    replay: str | None = None
    mode: Literal["connect", "bind"] = "connect"
    topic: str = ""


class Sink(Protocol):
    """Who takes what was read: a session."""

    @property
    def wants_live(self) -> bool:
        """Whether to read further live frames."""

    @property
    def wants_replay(self) -> bool:
        """Whether to read further replay frames."""

    def live(self, seq: int, payload: bytes) -> None:
        """A live batch."""

    def drained(self, moment: float) -> None:
        """The live socket holds nothing more that was sent before this moment."""

    def replayed(self, seq: int, payload: bytes) -> None:
        """A replayed batch."""

    def replay_ended(self) -> None:
        """END."""

    def malformed(self) -> None:
        """A message that is none."""

    def connected(self) -> None:
        """The live socket has a peer."""

    def disconnected(self) -> None:
        """It lost it."""


def families(address: str) -> tuple[int, ...]:
    """Values of the IPV6 option to try in turn: literals have one, names both.

    IPv4 first: an engine that binds ``tcp://*`` listens there only, and ZMQ tries one address of a name.
    """
    if not address.startswith("tcp://"):
        return (0,)
    if "[" in address:
        return (1,)
    return (0,) if _V4.match(address) else (0, 1)


def parse_live(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(sequence, payload) of a live message; None if it is none: three frames, the second of 8 bytes."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    seq = int.from_bytes(frames[1], "big")
    return (seq, frames[2]) if seq < END_SEQ_MIN else None


def parse_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(sequence, payload) of one reply in either framing, an empty payload is END; None if it is none.

    Releases up to 0.25 send (sequence, payload), later ones (topic, sequence, payload), after an empty delimiter.
    """
    body = frames[1:] if len(frames) > 2 and not frames[0] else frames
    if not 2 <= len(body) <= 3 or len(body[-2]) != 8:
        return None
    seq = int.from_bytes(body[-2], "big")
    if body[-1] and seq >= END_SEQ_MIN:
        return None
    return seq, body[-1]


class Watched:
    """The poller, and whose each socket in it is."""

    def __init__(self, anchor: Socket) -> None:
        self._poller = zmq.Poller()
        self._poller.register(anchor, zmq.POLLIN)  # without any socket a poller does not wait
        self._owners: dict[Socket, Link] = {}

    def add(self, socket: Socket, link: Link) -> None:
        """From here on it wakes the poller up."""
        self._owners[socket] = link
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: Socket) -> None:
        """No longer."""
        del self._owners[socket]
        self._poller.unregister(socket)

    def poll(self, seconds: float) -> set[Link]:
        """Whose sockets have something, after at most ``seconds``."""
        return {self._owners[socket] for socket, _ in self._poller.poll(max(0, int(seconds * 1000)))}


class Link:
    """The sockets of one rank. Single-threaded; every method returns at once."""

    def __init__(self, context: zmq.Context[Socket], watched: Watched, to: Endpoints) -> None:
        self.to = to
        self._context = context
        self._poller = watched
        self._data: Socket | None = None
        self._monitor: Socket | None = None
        self._watched = False
        self._replay: Socket | None = None
        self._heard = False
        self._attached = False
        self._opened_at = 0.0
        self._data_family = self._replay_family = 0
        self._failed = False

    # ---- commands of a session

    def open_data(self, now: float) -> None:
        """Close the live socket and open a new one; a port that cannot be bound yet is tried again by ``pump``."""
        self.close_data()
        self._opened_at = now
        kinds = families(self.to.data) if self.to.mode == "connect" else (1, 0)
        socket = self._socket(zmq.SUB, kinds[self._data_family % len(kinds)])
        socket.rcvhwm = LIVE_MESSAGES_MAX
        socket.subscribe(self.to.topic.encode())
        monitor: Socket = socket.get_monitor_socket(_EVENTS)
        monitor.linger = 0
        try:
            if self.to.mode == "bind":
                socket.bind(self.to.data)
            else:
                socket.connect(self.to.data)
        except zmq.ZMQError:
            self._failed = True
            self._data_family += 1
            _close(socket, monitor)
            return
        self._failed = False
        self._data, self._monitor = socket, monitor
        self._poller.add(monitor, self)
        self.watch(live=True)

    def close_data(self) -> None:
        """Close the live socket with all it had queued."""
        if self._data is None or self._monitor is None:
            return
        self.watch(live=False)
        self._poller.remove(self._monitor)
        _close(self._data, self._monitor)
        self._data = self._monitor = None
        self._attached = False

    def ask(self, start: int) -> None:
        """Send one request for every batch from ``start`` on. Answers to earlier ones are thrown away first."""
        if self.to.replay is None:
            return
        if self._replay is None:
            kinds = families(self.to.replay)
            self._replay = self._socket(zmq.DEALER, kinds[self._replay_family % len(kinds)])
            self._replay.rcvhwm = 0  # an answer is read as fast as it comes; the engine's buffer bounds it
            self._heard = False
            self._replay.connect(self.to.replay)
            self._poller.add(self._replay, self)
        _discard(self._replay)
        self._replay.send_multipart((b"", start.to_bytes(8, "big")), zmq.DONTWAIT)

    def drop_replay(self) -> None:
        """Throw the replay socket away with whatever still comes on it."""
        if self._replay is None:
            return
        if not self._heard:
            self._replay_family += 1
        self._poller.remove(self._replay)
        self._replay.close(linger=0)
        self._replay = None

    def close(self) -> None:
        """Close everything."""
        self.close_data()
        self.drop_replay()

    # ---- one turn

    @property
    def failed(self) -> bool:
        """Whether the live socket could not be opened; it is tried again."""
        return self._failed

    def rest(self, sink: Sink, moment: float) -> None:
        """The poller had nothing of this link at that moment."""
        if self._watched:
            sink.drained(moment)

    def pump(self, sink: Sink, *, live_max: int, replay_max: int, moment: float | None) -> None:
        """Hand over what is there, in the order that makes restarts visible; bounded by the two counts. ``moment``: a
        live socket that is empty had nothing then; None: that cannot be told.

        Frames first, then the monitor: a disconnect that happened before the last frame was read is seen. What SUB
        still had queued then is thrown away, so nothing of a dead connection is read after the event.
        """
        self._read_live(sink, live_max, moment)
        self._read_replay(sink, replay_max)
        for event in self._events():
            if event == zmq.EVENT_DISCONNECTED:
                self._attached = False
                if self._data is not None:
                    _discard(self._data)
                sink.disconnected()
            else:
                self._attached = True
                sink.connected()
        self.watch(live=sink.wants_live)

    def watch(self, *, live: bool) -> None:
        """Whether the poller wakes up for live frames; without, they stay where they are."""
        if self._data is None or live == self._watched:
            return
        self._watched = live
        if live:
            self._poller.add(self._data, self)
        else:
            self._poller.remove(self._data)

    def _read_live(self, sink: Sink, left: int, moment: float | None) -> None:
        if self._data is None:
            return
        while left > 0 and sink.wants_live:
            left -= 1
            try:
                message = parse_live(self._data.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                if moment is not None:
                    sink.drained(moment)
                return
            if message is None:
                sink.malformed()
            else:
                sink.live(*message)
        _ = self._data.events  # also a socket that is not read has to greet its peers

    def _read_replay(self, sink: Sink, left: int) -> None:
        while self._replay is not None and left > 0 and sink.wants_replay:
            left -= 1
            try:
                message = parse_replay(self._replay.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            self._heard = True
            if message is None:
                sink.malformed()
            elif message[1]:
                sink.replayed(*message)
            else:
                sink.replay_ended()

    def _events(self) -> Iterable[int]:
        while self._monitor is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield int(parse_monitor_message(frames)["event"])

    def tick(self, sink: Sink, now: float) -> None:
        """Follow what the sink wants, and try again: a bind that failed, a family that does not answer."""
        self.watch(live=sink.wants_live)
        if self._attached or now - self._opened_at < CONNECT_SECONDS_MAX:
            return
        if self._failed or (self.to.mode == "connect" and len(families(self.to.data)) > 1):
            self._data_family += 1
            self.open_data(now)

    def _socket(self, kind: int, ipv6: int) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, ipv6)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_SECONDS * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        return socket


class Sockets:
    """The context, the poller and the links of one process. Make it in the thread that uses it."""

    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._anchor = self._context.socket(zmq.PAIR)
        self._watched = Watched(self._anchor)
        self._links: list[Link] = []

    def link(self, to: Endpoints) -> Link:
        """The sockets of one more rank, none of them open."""
        link = Link(self._context, self._watched, to)
        self._links.append(link)
        return link

    def wait(self, seconds: float) -> set[Link]:
        """Wait until any socket has something, at most ``seconds``; whose have.

        Polling looks at every socket, which also lets those greet their peers that are not read.
        """
        return self._watched.poll(seconds)

    def close(self) -> None:
        """Close everything at once; nothing lingers."""
        for link in self._links:
            link.close()
        self._links.clear()
        self._anchor.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(socket: Socket, monitor: Socket) -> None:
    """Both ends of a monitor and the socket: one that stays open would keep the context from ending."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)


def _discard(socket: Socket) -> None:
    """Read away what is queued."""
    try:
        while True:
            socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return
