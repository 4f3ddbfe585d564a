"""The stand-in speaks as vLLM's publisher does, over real sockets."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvledger_engine.errors import NoAddress
from kvledger_engine.play import play
from kvledger_engine.recording import Begin, Published, Step
from kvledger_engine.standin import END, Faults, Framing, StandIn, binds

RECEIVE_MS = 30_000


class Sockets:
    """Makes sockets that end with the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.made: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.rcvtimeo = RECEIVE_MS
        self.made.append(socket)
        return socket


@pytest.fixture
def context() -> Iterator[Sockets]:
    with zmq.Context() as context:
        sockets = Sockets(context)
        yield sockets
        for socket in sockets.made:
            socket.close(linger=0)


def subscriber(context: Sockets, engine: StandIn, topic: bytes = b"") -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.subscribe(topic)
    before = engine.subscribers()
    socket.connect(engine.data)
    assert engine.wait_subscribers(before + 1)
    return socket


def greet(engine: StandIn, sub: zmq.Socket[bytes]) -> None:
    """Wait for the subscription: a SUB that binds or reconnects sends it only while someone looks at the socket."""
    end = time.monotonic() + RECEIVE_MS / 1000
    while not engine.subscribers():
        assert time.monotonic() < end
        sub.poll(10)


def dealer(context: Sockets, engine: StandIn) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.connect(engine.replay or "")
    return socket


def ask(socket: zmq.Socket[bytes], start: int) -> None:
    socket.send_multipart((b"", start.to_bytes(8, "big")))


def answer(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Every message up to and with END."""
    out = [socket.recv_multipart()]
    while out[-1][-1]:
        out.append(socket.recv_multipart())
    return out


def sequences(messages: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(m[-2], "big") for m in messages if m[-1]]


def test_a_live_message_has_topic_sequence_and_payload(context: Sockets) -> None:
    with StandIn() as engine:
        sub = subscriber(context, engine)
        first, second = engine.publish(b"one", b"kv"), engine.publish(b"two", b"kv")

        assert (first, second, engine.head) == (0, 1, 1)
        assert sub.recv_multipart() == [b"kv", bytes(8), b"one"]
        assert sub.recv_multipart() == [b"kv", (1).to_bytes(8, "big"), b"two"]


def test_a_late_subscriber_misses_what_was_before(context: Sockets) -> None:
    with StandIn() as engine:
        engine.publish(b"early")
        sub = subscriber(context, engine)
        engine.publish(b"late")

        assert sub.recv_multipart()[2] == b"late"


@pytest.mark.parametrize("framing", ["old", "new"])
def test_replay_frames_are_those_of_the_releases(context: Sockets, recordings: Path, framing: Framing) -> None:
    eras = json.loads((recordings / "wire" / "replay_frames.json").read_text())["eras"]
    truth = [[bytes.fromhex(f) for f in m] for m in eras[framing == "new"]["dealer_sees"]]
    with StandIn(framing=framing) as engine:
        for seq in range(5):
            engine.publish(truth[0][-1], truth[0][1] if framing == "new" else b"t", seq)
        socket = dealer(context, engine)
        ask(socket, 3)

        assert answer(socket) == truth


def test_a_start_beyond_the_head_gets_only_the_end(context: Sockets) -> None:
    with StandIn() as engine:
        engine.publish(b"x")
        socket = dealer(context, engine)
        ask(socket, 7)

        assert answer(socket) == [[b"", b"", END, b""]]


def test_an_old_start_gets_the_oldest_that_is_buffered(context: Sockets) -> None:
    with StandIn(buffer_steps=10) as engine:
        for _ in range(50):
            engine.publish(b"x")
        socket = dealer(context, engine)
        ask(socket, 0)

        assert sequences(answer(socket)) == list(range(40, 50))


def test_a_request_without_the_delimiter_is_dropped(context: Sockets) -> None:
    with StandIn() as engine:
        socket = dealer(context, engine)
        socket.send(bytes(8))
        ask(socket, 0)

        assert len(answer(socket)) == 1
        assert (engine.malformed, engine.requests) == (1, 1)


def test_a_restart_keeps_addresses_and_forgets_the_rest(context: Sockets) -> None:
    with StandIn() as engine:
        sub = subscriber(context, engine)
        engine.publish(b"old")
        assert sub.recv_multipart()[2] == b"old"
        addresses = (engine.data, engine.replay)
        engine.restart()
        greet(engine, sub)
        engine.publish(b"new")

        assert (engine.data, engine.replay) == addresses
        assert sub.recv_multipart()[1:] == [bytes(8), b"new"]
        socket = dealer(context, engine)
        ask(socket, 0)
        assert [m[-1] for m in answer(socket)] == [b"new", b""]


def test_a_flap_breaks_the_connection_and_keeps_the_life(context: Sockets) -> None:
    with StandIn() as engine:
        sub = subscriber(context, engine)
        engine.publish(b"a")
        assert sub.recv_multipart()[2] == b"a"
        engine.flap()
        greet(engine, sub)
        engine.publish(b"b")

        assert sub.recv_multipart()[1] == (1).to_bytes(8, "big")


def test_faults_hit_the_sequences_they_name(context: Sockets) -> None:
    faults = Faults(drop=lambda s: s == 1, duplicate=lambda s: s == 2, forget=lambda s: s == 3)
    with StandIn(faults=faults) as engine:
        sub = subscriber(context, engine)
        for _ in range(5):
            engine.publish(b"x")
        live = [int.from_bytes(sub.recv_multipart()[1], "big") for _ in range(5)]
        socket = dealer(context, engine)
        ask(socket, 0)

        assert live == [0, 2, 2, 3, 4]
        assert sequences(answer(socket)) == [0, 1, 2, 4]


def test_replay_can_stay_silent_be_cut_or_come_twice(context: Sockets) -> None:
    with StandIn(faults=Faults(replay_silent=True)) as engine:
        for _ in range(4):
            engine.publish(b"x")
        socket = dealer(context, engine)
        ask(socket, 0)
        assert not socket.poll(200)

        engine.faults = Faults(replay_batches_max=2)
        ask(socket, 0)
        assert sequences([socket.recv_multipart(), socket.recv_multipart()]) == [0, 1]
        assert not socket.poll(200)

        engine.faults = Faults(replay_twice=True)
        ask(socket, 3)
        assert sequences(answer(socket) + answer(socket)) == [3, 3]


def test_skipped_sequences_are_nowhere(context: Sockets) -> None:
    with StandIn() as engine:
        engine.publish(b"x")
        engine.skip(2)
        engine.publish(b"y")
        socket = dealer(context, engine)
        ask(socket, 0)

        assert sequences(answer(socket)) == [0, 3]


def test_it_connects_where_vllm_would(context: Sockets) -> None:
    """``tcp://0.0.0.0:5557`` and other concrete addresses are connected to: the consumer has to bind."""
    assert [binds(a) for a in ("tcp://*:5557", "tcp://[::]:1", "ipc:///x", "tcp://0.0.0.0:5557")] == [True] * 3 + [
        False
    ]
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    with StandIn(data=f"tcp://127.0.0.1:{port}", replay=None) as engine:
        greet(engine, sub)
        engine.publish(b"x")

        assert sub.recv_multipart()[2] == b"x"
        assert engine.replay is None


def test_a_taken_port_is_named() -> None:
    with StandIn() as engine, pytest.raises(NoAddress, match=engine.data):
        StandIn(data=engine.data, mode="bind", replay="tcp://127.0.0.1:1").start()


def test_play_keeps_the_pace_against_the_start() -> None:
    """wait(0.0) before the first; a late batch does not delay those after it."""
    now, waits = [0.0], []

    def wait(seconds: float) -> bool:
        waits.append(round(seconds, 6))
        now[0] += seconds + (0.15 if len(waits) == 1 else 0)  # the first one comes late
        return len(waits) == 5

    with StandIn() as engine:
        steps: list[Step] = [Begin(), *(Published(s, b"x") for s in range(9))]
        count = play(engine, steps, batches_per_second=10, clock=lambda: now[0], wait=wait)

    assert waits == [0.0, 0.0, 0.05, 0.1, 0.1]
    assert count == 4


def test_the_command_prints_its_addresses_plays_and_serves_replay(context: Sockets, recordings: Path) -> None:
    trace = recordings / "engine-traces" / "llama_s11.jsonl.gz"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvledger", "engine", "play", str(trace), "--framing", "old"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            listening = json.loads(process.stdout.readline())
            played = json.loads(process.stdout.readline())
            socket = context.socket(zmq.DEALER)
            socket.connect(listening["replay"])
            ask(socket, 330)
            replayed = sequences(answer(socket))
            process.send_signal(signal.SIGTERM)
            last = json.loads(process.stdout.readline())
            code = process.wait(10)
        finally:
            process.kill()

    assert listening["event"] == "listening"
    assert (listening["model"], listening["vllm"]) == ("llama", "0.32.0")
    assert played == {"event": "played", "batches": 332, "head": 331}
    assert replayed == [330, 331]
    assert (last, code) == ({"event": "stopped"}, 0)
