"""What an engine has published so far, all of it and in order: a subscription of our own beside the bridge's.

How "all of it" is known. vLLM's publisher thread serves at most one replay request and then publishes at most one batch
per turn, and a step's events are queued before its outputs are returned. So if two replay requests in a row, the first
sent after a response arrived, find nothing new, nothing was queued when the first one was served:

    response ─> replay(n) ─> END ─ turn publishes what is queued ─> replay(n) ─> END: nothing was

An engine without a replay endpoint can only be listened to until it is silent for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

import zmq

from kvledger.errors import Unavailable
from kvledger_engine.recording import Published

ANSWER_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""How long each try of a replay request is waited for. An engine's publisher answers within 0.1 s when idle; while it
computes on few cores, later. A request that was sent as the connection broke is lost with it: a further try brings it.
"""

SUBSCRIPTION_SECONDS_MAX: Final = 2.0
"""A batch that replay has and the subscription has not shown by then is taken from replay (a late subscription)."""

ROUNDS_MAX: Final = 1000
"""Replay requests for one catching up: an engine that never comes to rest is not read for ever."""

SILENT_ANSWERS: Final = 2
"""In a row, without anything new: see above."""

HOLE_TRIES: Final = 3
"""How often a hole in replay answers is asked for again before it counts as the engine's."""

SEQUENCE_BYTES: Final = 8
Clock = Callable[[], float]


class Tap:
    """Subscribe at once; then ``catch_up`` as often as wanted. One thread. Close it at the end.

    ``data`` and ``replay`` are addresses to connect to. ``quiet_seconds``: silence that must have passed before the
    engine counts as at rest. ``first`` is the sequence that the record starts with: above 0, the engine had published
    more than it still had.
    """

    def __init__(
        self,
        data: str,
        replay: str | None,
        *,
        topic: bytes = b"",
        quiet_seconds: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.first: int | None = None
        self.taken_from_replay = 0
        self._last: Published | None = None
        self._topic = topic
        self._quiet = quiet_seconds
        self._clock = clock
        self._late: set[int] = set()
        self._live: deque[Published] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set(zmq.RCVHWM, 0)
        self._sub.subscribe(b"")
        self._sub.connect(data)
        self._replay_address = replay
        self._replay = self._dealer() if replay else None

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def catch_up(self) -> list[Published]:
        """Every batch since the last call, up to now, in order of sequence and without a hole.

        Raises Unavailable where the engine restarted, lost something for good, or never comes to rest.
        """
        batches = self._by_silence() if self._replay is None else self._by_replay()
        if batches:
            if self.first is None:
                self.first = batches[0].seq
            self._last = batches[-1]
        return batches

    # ---- without replay

    def _by_silence(self) -> list[Published]:
        found: list[Published] = []
        while (batch := self._receive(self._quiet)) is not None:
            last = found[-1] if found else self._last
            if last is not None and batch.seq != last.seq + 1:
                msg = f"the engine's messages jump from {last.seq} to {batch.seq}, and no replay can fill that"
                raise Unavailable(msg)
            found.append(batch)
        return found

    # ---- with replay

    def _by_replay(self) -> list[Published]:
        while (batch := self._receive(self._quiet)) is not None:
            self._live.append(batch)
        replayed: list[Published] = []
        silent = stuck = 0
        for _ in range(ROUNDS_MAX):
            last = replayed[-1] if replayed else self._last
            answer = self._after(last)
            fresh = _contiguous(answer, last)
            replayed += fresh
            silent = 0 if answer else silent + 1
            stuck = stuck + 1 if answer and not fresh else 0
            if silent == SILENT_ANSWERS:
                return self._merged(replayed)
            if stuck == HOLE_TRIES:
                msg = f"the engine has no batch after {last.seq if last else -1} but {answer[0].seq}: it lost one"
                raise Unavailable(msg)
        msg = f"the engine published on and on, {len(replayed)} batches; record while nothing else uses it"
        raise Unavailable(msg)

    def _after(self, last: Published | None) -> list[Published]:
        """What replay has after ``last``, holes included; asked for from it on, as only its bytes prove the engine.

        With None all that the engine has kept, which may be less than all.
        """
        answer = self._ask(0 if last is None else last.seq)
        if last is None:
            return answer
        if not answer or answer[0].seq != last.seq or answer[0].payload != last.payload:
            found = f"starts at {answer[0].seq}" if answer else "is empty"
            msg = (
                f"replay from batch {last.seq} {found} or has other bytes: the engine restarted, or keeps too few "
                f"batches (buffer_steps)"
            )
            raise Unavailable(msg)
        return answer[1:]

    def _merged(self, replayed: list[Published]) -> list[Published]:
        """The same batches as the subscription showed them, which has the topic; from replay where it did not."""
        wanted = {batch.seq for batch in replayed}
        live: dict[int, Published] = {}
        newer: list[Published] = []
        deadline = self._clock() + SUBSCRIPTION_SECONDS_MAX
        while len(live) < len(wanted):
            batch = self._live.popleft() if self._live else self._receive(max(0.0, deadline - self._clock()))
            if batch is None:
                break
            if batch.seq in wanted:
                live[batch.seq] = batch
            elif replayed and batch.seq > replayed[-1].seq:
                newer.append(batch)
            elif batch.seq in self._late:
                self._late.discard(batch.seq)
            else:
                msg = f"the engine sent batch {batch.seq}, which its replay does not have in that place: it restarted"
                raise Unavailable(msg)
        self._live.extendleft(reversed(newer))
        return [self._checked(batch, live.get(batch.seq)) for batch in replayed]

    def _checked(self, replayed: Published, live: Published | None) -> Published:
        if live is None:
            self.taken_from_replay += 1
            self._late.add(replayed.seq)
            return Published(replayed.seq, replayed.payload, self._topic)
        if live.payload != replayed.payload:
            msg = f"batch {live.seq} differs between subscription and replay: the engine restarted"
            raise Unavailable(msg)
        self._topic = live.topic
        return live

    # ---- sockets

    def _receive(self, seconds: float) -> Published | None:
        """The next live batch, or None after ``seconds`` of silence."""
        while self._sub.poll(int(seconds * 1000)):
            frames = self._sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                return Published(int.from_bytes(frames[1], "big"), frames[2], frames[0])
        return None

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.RCVHWM, 0)  # engines before 0.33 drop what a slow reader leaves in the socket
        socket.connect(self._replay_address or "")
        return socket

    def _ask(self, start: int) -> list[Published]:
        """One replay request and its answer, as far as it came. Raises Unavailable where there is none."""
        for seconds in ANSWER_SECONDS:
            if self._replay is None:
                break
            self._replay.send_multipart((b"", start.to_bytes(SEQUENCE_BYTES, "big")))
            found, ended = _answer(self._replay, seconds)
            if ended:
                return found
            # no connection any more, or the end mark was dropped with what did not fit: what came late is stale
            self._replay.close(linger=0)
            self._replay = self._dealer()
            if found:
                return found  # it is good, the rest is asked for again
        msg = (
            f"{self._replay_address} does not answer replay requests within {sum(ANSWER_SECONDS):.0f} s; "
            f"is it the replay_endpoint of the engine's kv_events_config?"
        )
        raise Unavailable(msg)


def _answer(replay: zmq.Socket[bytes], seconds: float) -> tuple[list[Published], bool]:
    """The batches that come without a pause of ``seconds``, and whether the end mark came behind them."""
    found: list[Published] = []
    while replay.poll(int(seconds * 1000)):
        *_, seq, payload = replay.recv_multipart()
        if not payload:
            return found, True
        found.append(Published(int.from_bytes(seq, "big"), payload))
    return found, False


def _contiguous(batches: list[Published], after: Published | None) -> list[Published]:
    """Up to the first hole: engines before 0.33 leave out what their socket cannot hold."""
    due = after.seq + 1 if after is not None else batches[0].seq if batches else 0
    for at, batch in enumerate(batches):
        if batch.seq != due + at:
            return batches[:at]
    return batches
