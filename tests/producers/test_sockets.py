"""The ZMQ shell over real sockets, with the stand-in engine at the other end."""

from __future__ import annotations

import itertools
import json
import socket as plain_sockets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import kvledger_bridge.sockets as shell
from kvledger_bridge.sockets import Endpoints, Link, Sockets, families, parse_live, parse_replay
from kvledger_engine.standin import END, Faults, StandIn

SECONDS_MAX = 30.0


class Recorder:
    """A sink that writes down what it is given, in order."""

    def __init__(self) -> None:
        self.wants_live = self.wants_replay = True
        self.seen: list[Any] = []
        self.drained_at: float | None = None
        self.drained_after = 0

    def live(self, seq: int, payload: bytes) -> None:
        self.seen.append(("live", seq, payload))

    def drained(self, moment: float) -> None:
        self.drained_at, self.drained_after = moment, len(self.seen)

    def replayed(self, seq: int, payload: bytes) -> None:
        self.seen.append(("replayed", seq, payload))

    def replay_ended(self) -> None:
        self.seen.append("end")

    def malformed(self) -> None:
        self.seen.append("malformed")

    def connected(self) -> None:
        self.seen.append("connected")

    def disconnected(self) -> None:
        self.seen.append("disconnected")


class Rig:
    """One link and its recorder; ``until`` turns the shell until a condition holds."""

    def __init__(self, sockets: Sockets, to: Endpoints) -> None:
        self.sockets = sockets
        self.link: Link = sockets.link(to)
        self.sink = Recorder()
        self.link.open_data(0.0)

    @property
    def seen(self) -> list[Any]:
        return self.sink.seen

    def until(self, condition: Callable[[], Any], *, live_max: int = 100, replay_max: int = 100) -> None:
        end = time.monotonic() + SECONDS_MAX
        while not condition():
            assert time.monotonic() < end, self.seen
            if self.link in self.sockets.wait(0.05):
                self.link.pump(self.sink, live_max=live_max, replay_max=replay_max, moment=time.monotonic())

    def sequences(self, kind: str) -> list[int]:
        return [item[1] for item in self.seen if item[0] == kind]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with Sockets() as sockets:
        yield sockets


def joined(sockets: Sockets, engine: StandIn, **options: Any) -> Rig:
    rig = Rig(sockets, Endpoints(engine.data, engine.replay, **options))
    rig.until(engine.subscribers)
    rig.until(lambda: "connected" in rig.seen)
    return rig


def test_live_batches_arrive_after_the_connection_is_told(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        for payload in (b"a", b"b"):
            engine.publish(payload, b"topic")
        rig.until(lambda: len(rig.seen) == 3)

        assert rig.seen == ["connected", ("live", 0, b"a"), ("live", 1, b"b")]


def test_messages_that_are_none_are_counted_and_not_fatal(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        engine.send_raw(b"", b"two frames only")
        engine.send_raw(b"", b"short", b"x")
        engine.send_raw(b"", END, b"x")
        engine.send_raw(b"", bytes(8), b"x", b"four")
        engine.publish(b"good")
        rig.until(lambda: rig.sequences("live"))

        assert rig.seen[1:] == ["malformed"] * 4 + [("live", 0, b"good")]


def test_a_topic_is_a_prefix(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine, topic="kv")
        engine.publish(b"other", b"metrics")
        engine.publish(b"mine", b"kv@pod")
        rig.until(lambda: rig.sequences("live"))

        assert rig.sequences("live") == [1]


@pytest.mark.parametrize("framing", ["old", "new"])
def test_a_replay_is_read_to_its_end_in_both_framings(sockets: Sockets, framing: Any) -> None:
    with StandIn(framing=framing) as engine:
        rig = joined(sockets, engine)
        for _ in range(5):
            engine.publish(b"x", b"topic")
        rig.link.ask(2)
        rig.until(lambda: "end" in rig.seen)

        assert rig.sequences("replayed") == [2, 3, 4]
        assert rig.seen[-1] == "end"


def test_a_long_answer_is_complete_although_the_router_has_little_room(sockets: Sockets) -> None:
    """A thousand messages wait at the engine at most: read quickly, 3000 arrive, or what is missing is seen missing."""
    with StandIn() as engine:
        rig = joined(sockets, engine)
        for _ in range(3000):
            engine.publish(b"x" * 100)
        rig.link.ask(0)
        rig.until(lambda: "end" in rig.seen or len(rig.sequences("replayed")) >= 1000, replay_max=4000, live_max=0)

        assert rig.sequences("replayed")[:1000] == list(range(1000))


def test_a_stale_answer_is_thrown_away_before_the_next_request(sockets: Sockets) -> None:
    with StandIn(faults=Faults(replay_twice=True)) as engine:
        rig = joined(sockets, engine)
        engine.publish(b"x")
        rig.link.ask(0)
        rig.until(lambda: "end" in rig.seen, replay_max=2)
        engine.faults = Faults()
        end = time.monotonic() + SECONDS_MAX
        while not sockets.wait(0.5):  # until the second answer has arrived; none of it is read
            assert time.monotonic() < end
        rig.link.ask(7)
        rig.until(lambda: rig.seen.count("end") == 2)

        assert rig.sequences("replayed") == [0]


def test_a_dropped_replay_socket_brings_nothing_more(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        engine.publish(b"x")
        rig.until(lambda: rig.sequences("live"))
        rig.link.ask(0)
        rig.link.drop_replay()
        engine.publish(b"y")
        rig.until(lambda: rig.sequences("live") == [0, 1])
        rig.link.ask(1)
        rig.until(lambda: "end" in rig.seen)

        assert rig.sequences("replayed") == [1]


def test_malformed_replies_do_not_end_an_answer(sockets: Sockets) -> None:
    """A ROUTER of our own sends one frame, an odd sequence, and then what it should."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        rig = Rig(sockets, Endpoints("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}"))
        rig.link.ask(0)
        assert router.poll(int(SECONDS_MAX * 1000))
        peer, empty, start = router.recv_multipart()
        for body in ([b"only"], [b"odd", b"x"], [END, b"payload"], [bytes(8), b"x"], [END, b""]):
            router.send_multipart([peer, b"", *body])
        rig.until(lambda: "end" in rig.seen)

    assert (empty, start) == (b"", bytes(8))
    assert rig.seen == ["malformed"] * 3 + [("replayed", 0, b"x"), "end"]


def test_a_restart_is_told_before_its_batches_and_the_queue_is_thrown_away(sockets: Sockets) -> None:
    """Old 0 1 2 queued | restart: read one, drain the monitor, and 1 2 are gone."""
    with StandIn() as engine:
        rig = joined(sockets, engine)
        for _ in range(3):
            engine.publish(b"old")
        rig.until(lambda: rig.sequences("live"), live_max=1)
        engine.restart()
        rig.until(lambda: "disconnected" in rig.seen, live_max=0)
        rig.until(engine.subscribers)
        rig.until(lambda: rig.seen.count("connected") == 2)
        engine.publish(b"new")
        rig.until(lambda: len(rig.sequences("live")) == 2)

        assert rig.seen == ["connected", ("live", 0, b"old"), "disconnected", "connected", ("live", 0, b"new")]


def test_a_reopened_live_socket_has_nothing_of_before(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        for _ in range(3):
            engine.publish(b"old")
        rig.until(lambda: rig.sequences("live"), live_max=1)
        rig.link.open_data(1.0)
        rig.until(lambda: rig.seen.count("connected") == 2)

        def told() -> bool:
            engine.publish(b"new")  # until the new subscription has arrived there, it reaches nobody
            return len(rig.sequences("live")) > 1

        rig.until(told)
        first, *later = rig.sequences("live")

        assert first == 0
        assert min(later) > 2


def test_an_engine_that_connects_is_bound_for_and_bound_again(sockets: Sockets) -> None:
    with plain_sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    with StandIn(data=address, mode="connect", replay=None) as engine:
        rig = Rig(sockets, Endpoints(address, None, "bind"))
        rig.until(engine.subscribers)
        engine.publish(b"a")
        rig.until(lambda: rig.sequences("live") == [0])
        rig.link.open_data(time.monotonic())
        end = time.monotonic() + SECONDS_MAX
        while rig.link.failed:  # the old socket is still giving the port back
            assert time.monotonic() < end
            rig.link.tick(rig.sink, time.monotonic() + shell.CONNECT_SECONDS_MAX)
        rig.until(lambda: rig.seen.count("connected") == 2)
        rig.until(engine.subscribers)
        while rig.sequences("live") == [0]:
            engine.publish(b"b")
            rig.sockets.wait(0.05)
            rig.link.pump(rig.sink, live_max=10, replay_max=0, moment=None)

    assert rig.sequences("live")[1] >= 1


def test_a_port_in_use_is_told_and_taken_once_it_is_free(sockets: Sockets) -> None:
    with plain_sockets.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        rig = Rig(sockets, Endpoints(address, None, "bind"))
        assert rig.link.failed
        rig.link.tick(rig.sink, 1.0)
        assert rig.link.failed
    rig.link.tick(rig.sink, 10.0)

    assert not rig.link.failed


def test_an_ipv6_address_is_reached(sockets: Sockets) -> None:
    with StandIn(data="tcp://[::1]:0", replay="tcp://[::1]:0") as engine:
        rig = joined(sockets, engine)
        engine.publish(b"six")
        rig.link.ask(0)
        rig.until(lambda: "end" in rig.seen and rig.sequences("live"))

        assert rig.sequences("replayed") == [0]


def test_a_sink_that_wants_nothing_is_not_woken_for_frames(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        rig.sink.wants_live = False
        rig.link.tick(rig.sink, 0.0)
        engine.publish(b"x")
        idle = [rig.sockets.wait(0.05) for _ in range(4)]
        rig.sink.wants_live = True
        rig.link.tick(rig.sink, 0.0)
        rig.until(lambda: rig.sequences("live"))

    assert idle == [set()] * 4


def test_reading_is_bounded_per_call(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        for _ in range(10):
            engine.publish(b"x")
        steps = [0]

        def all_read() -> bool:
            steps.append(len(rig.sequences("live")))  # between two calls
            return steps[-1] == 10

        rig.until(all_read, live_max=3)

        assert max(after - before for before, after in itertools.pairwise(steps)) <= 3


def test_options_stand_before_the_connection(sockets: Sockets) -> None:
    with StandIn() as engine:
        rig = joined(sockets, engine)
        rig.link.ask(0)
        data, replay = rig.link._data, rig.link._replay

        assert data is not None
        assert replay is not None
        assert (data.rcvhwm, replay.rcvhwm) == (shell.LIVE_MESSAGES_MAX, 0)
        for socket in (data, replay):
            beats = [socket.getsockopt(o) for o in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.LINGER)]
            assert beats == [shell.HEARTBEAT_SECONDS * 1000, shell.HEARTBEAT_TIMEOUT_SECONDS * 1000, 0]
    assert shell.HEARTBEAT_SECONDS + shell.HEARTBEAT_TIMEOUT_SECONDS < 30


class Proxy:
    """Forwards one TCP port to another until it is told to forward nothing, without closing anything."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = plain_sockets.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.silent = threading.Event()
        self._ends: list[plain_sockets.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = plain_sockets.create_connection(("127.0.0.1", self._to))
            self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._copy, args=(one, other), daemon=True))
                self._threads[-1].start()

    def _copy(self, one: plain_sockets.socket, other: plain_sockets.socket) -> None:
        try:
            while data := one.recv(65536):
                if not self.silent.is_set():
                    other.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self._server.shutdown(plain_sockets.SHUT_RDWR)
        for socket in (self._server, *self._ends):
            socket.close()


def test_a_half_open_connection_shows_by_heartbeats(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node vanishes without a FIN: nothing arrives any more, and nothing is closed."""
    monkeypatch.setattr(shell, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(shell, "HEARTBEAT_TIMEOUT_SECONDS", 0.2)
    with StandIn() as engine:
        proxy = Proxy(int(engine.data.rsplit(":", 1)[1]))
        try:
            rig = Rig(sockets, Endpoints(f"tcp://127.0.0.1:{proxy.port}"))
            rig.until(lambda: "connected" in rig.seen)
            proxy.silent.set()
            rig.until(lambda: rig.seen[-1] == "disconnected")
        finally:
            proxy.close()

    # on a machine that stands still for so long, a beat is missed before as well
    assert rig.seen == ["connected", "disconnected"] * (len(rig.seen) // 2)


@pytest.mark.parametrize(
    ("address", "values"),
    [
        ("tcp://10.0.0.7:5557", (0,)),
        ("tcp://[fd00::12]:5557", (1,)),
        ("tcp://pod-a.svc:5557", (0, 1)),
        ("ipc:///tmp/x", (0,)),
    ],
)
def test_names_are_tried_in_both_families_and_literals_in_theirs(address: str, values: tuple[int, ...]) -> None:
    assert families(address) == values


def test_a_name_that_does_not_answer_is_tried_in_the_other_family(sockets: Sockets) -> None:
    rig = Rig(sockets, Endpoints("tcp://localhost:1"))
    first = rig.link._data
    assert first is not None
    was = first.getsockopt(zmq.IPV6)
    rig.link.tick(rig.sink, 1.0)
    assert rig.link._data is first
    rig.link.tick(rig.sink, 3.0)
    now = rig.link._data

    assert now is not None
    assert (was, now.getsockopt(zmq.IPV6)) == (0, 1)


def test_recorded_replies_of_both_eras_are_parsed(recordings: Path) -> None:
    for era in json.loads((recordings / "wire" / "replay_frames.json").read_text())["eras"]:
        replies = [parse_replay([bytes.fromhex(frame) for frame in reply]) for reply in era["dealer_sees"]]

        assert [r and r[0] for r in replies[:2]] == [3, 4]
        assert replies[2] == (2**64 - 1, b"")


@pytest.mark.parametrize("frames", [[], [b""], [b"", b""], [b"", b"1234567", b"x"], [b"a", b"b", bytes(8), b"x"]])
def test_replies_that_are_none_are_refused(frames: list[bytes]) -> None:
    assert parse_replay(frames) is None


@pytest.mark.parametrize("frames", [[], [b""], [b"", bytes(8)], [b"", bytes(7), b"x"], [b"", b"\x80" + bytes(7), b"x"]])
def test_live_messages_that_are_none_are_refused(frames: list[bytes]) -> None:
    assert parse_live(frames) is None
