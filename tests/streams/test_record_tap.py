"""The subscription of our own: everything that an engine published so far, in order, or a clear word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvledger.errors import Unavailable
from kvledger.live import tap as tap_module
from kvledger.live.tap import Tap
from kvledger_engine.recording import Published
from kvledger_engine.standin import Faults, StandIn

Open = Callable[..., Tap]

QUIET_SECONDS = 0.5
"""Loopback needs a thousandth of it, a machine that does other work perhaps a fifth."""


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn(faults=Faults()) as running:
        yield running


@pytest.fixture
def open_tap(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """A tap whose subscription is in place, and that asks once: requests are counted, and a machine may be slow."""
    monkeypatch.setattr(tap_module, "ANSWER_SECONDS", (30.0,))
    taps = []

    def make(*, replay: bool = True, quiet_seconds: float = 0.0) -> Tap:
        tap = Tap(engine.data, engine.replay if replay else None, quiet_seconds=quiet_seconds)
        taps.append(tap)
        assert engine.wait_subscribers(len(taps))
        return tap

    yield make
    for tap in taps:
        tap.close()


def seqs(tap: Tap) -> list[int]:
    return [batch.seq for batch in tap.catch_up()]


def test_each_call_returns_what_came_since_the_last(engine: StandIn, open_tap: Open) -> None:
    tap = open_tap()
    engine.publish(b"a", b"topic")
    engine.publish(b"b", b"topic")

    first = tap.catch_up()

    engine.publish(b"c", b"topic")

    assert [(batch.seq, batch.payload, batch.topic) for batch in first] == [(0, b"a", b"topic"), (1, b"b", b"topic")]
    assert seqs(tap) == [2]
    assert seqs(tap) == []
    assert tap.first == 0
    assert tap.taken_from_replay == 0


def test_an_engine_at_rest_is_asked_twice(engine: StandIn, open_tap: Open) -> None:
    """One silent answer proves nothing: what was queued when it was served is published after it."""
    open_tap().catch_up()

    assert engine.requests == 2


def test_a_batch_between_the_two_answers_is_not_missed(engine: StandIn, open_tap: Open) -> None:
    """Replay gives END | the publisher sends what was queued | replay -> that batch, and twice END."""
    tap = open_tap()
    late = iter([b"queued"])
    ask = tap._ask

    def asking(start: int) -> object:
        answer = ask(start)
        for payload in late:
            engine.publish(payload)
        return answer

    tap._ask = asking  # type: ignore[method-assign,assignment]  # the moment between two requests has no other handle

    assert seqs(tap) == [0]
    assert engine.requests == 4


def test_what_the_subscription_missed_comes_from_replay(
    engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "SUBSCRIPTION_SECONDS_MAX", 0.05)
    engine.faults.drop = lambda seq: seq == 1
    tap = open_tap()
    for payload in (b"a", b"b", b"c"):
        engine.publish(payload, b"topic")

    batches = tap.catch_up()

    assert [(batch.seq, batch.payload) for batch in batches] == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert tap.taken_from_replay == 1


def test_a_batch_after_the_last_answer_waits_for_the_next_call(
    engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub shows 1 while 0, which it missed, is still waited for."""
    monkeypatch.setattr(tap_module, "SUBSCRIPTION_SECONDS_MAX", 0.1)
    engine.faults.drop = lambda seq: seq == 0
    tap = open_tap()
    engine.publish(b"a")
    merged = tap._merged

    def merging(replayed: list[Published]) -> list[Published]:
        engine.publish(b"b")
        return merged(replayed)

    with monkeypatch.context() as moment:
        moment.setattr(tap, "_merged", merging)
        assert seqs(tap) == [0]
    assert seqs(tap) == [1]
    assert tap.taken_from_replay == 1


def test_holes_of_a_replay_answer_are_asked_for_again(engine: StandIn, open_tap: Open) -> None:
    """Engines before 0.33 leave out what their socket cannot hold."""
    tap = open_tap()
    left_out = iter([True])
    engine.faults.replay_drop = lambda seq: seq == 1 and next(left_out, False)
    for payload in (b"a", b"b", b"c"):
        engine.publish(payload)

    assert seqs(tap) == [0, 1, 2]


def test_a_buffer_that_is_too_short_at_the_start_is_told(
    engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "SUBSCRIPTION_SECONDS_MAX", 0.05)
    engine.faults.forget = lambda seq: seq < 2
    for payload in (b"a", b"b", b"c"):
        engine.publish(payload)
    tap = open_tap()

    tap.catch_up()

    assert tap.first == 2


def test_a_hole_that_replay_cannot_fill_is_an_error(engine: StandIn, open_tap: Open) -> None:
    tap = open_tap()
    engine.publish(b"a")
    tap.catch_up()
    engine.faults.forget = lambda seq: seq == 1
    engine.publish(b"b")
    engine.publish(b"c")

    with pytest.raises(Unavailable, match="no batch after 0 but 2"):
        tap.catch_up()


@pytest.mark.parametrize("later", [(), (b"x",), (b"x", b"y"), (b"x", b"y", b"z")])
def test_a_restart_is_an_error(engine: StandIn, open_tap: Open, later: tuple[bytes, ...]) -> None:
    """Also one that looks like going on: before ``a b``, after ``x y z``, whose third has the number that is due."""
    tap = open_tap()
    for payload in (b"a", b"b"):
        engine.publish(payload)
    tap.catch_up()
    engine.restart()
    for payload in later:
        engine.publish(payload)

    with pytest.raises(Unavailable, match="restarted"):
        tap.catch_up()


def test_an_answer_that_never_comes_is_an_error(
    engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "ANSWER_SECONDS", (0.05, 0.05))
    engine.faults.replay_silent = True

    with pytest.raises(Unavailable, match="replay_endpoint"):
        open_tap().catch_up()


def test_a_request_that_is_lost_is_sent_again(engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that was sent into a connection that was just breaking."""
    lost = iter([True])

    class Lossy(Faults):
        @property  # type: ignore[misc]  # what an attribute is to the rest
        def replay_silent(self) -> bool:
            return next(lost, False)

        @replay_silent.setter
        def replay_silent(self, _value: bool) -> None:
            pass

    monkeypatch.setattr(tap_module, "ANSWER_SECONDS", (0.05, 10.0))
    tap = open_tap()
    engine.publish(b"a")
    engine.faults = Lossy()

    assert seqs(tap) == [0]


def test_an_answer_without_its_end_is_continued(
    engine: StandIn, open_tap: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "ANSWER_SECONDS", (0.2, 30.0))
    tap = open_tap()
    for payload in (b"a", b"b", b"c"):
        engine.publish(payload)
    cut = iter([2])
    engine.faults.replay_drop = lambda _seq: _forget_cut(engine, cut)
    engine.faults.replay_batches_max = 2

    assert seqs(tap) == [0, 1, 2]


def _forget_cut(engine: StandIn, cut: Iterator[int]) -> bool:
    """From the second answer on nothing is cut."""
    if engine.requests > 1:
        engine.faults.replay_batches_max = None
    del cut
    return False


def test_without_replay_silence_ends_a_turn(engine: StandIn, open_tap: Open) -> None:
    tap = open_tap(replay=False, quiet_seconds=QUIET_SECONDS)
    engine.publish(b"a")
    engine.publish(b"b")

    assert seqs(tap) == [0, 1]
    assert seqs(tap) == []


def test_without_replay_a_hole_is_an_error(engine: StandIn, open_tap: Open) -> None:
    tap = open_tap(replay=False, quiet_seconds=QUIET_SECONDS)
    engine.publish(b"a")
    tap.catch_up()
    engine.skip()
    engine.publish(b"c")

    with pytest.raises(Unavailable, match="jump from 0 to 2"):
        tap.catch_up()


def test_old_replay_frames_are_read() -> None:
    """Up to vLLM 0.25 replies have no topic."""
    with StandIn(framing="old") as engine, Tap(engine.data, engine.replay) as tap:
        assert engine.wait_subscribers(1)
        engine.publish(b"a", b"topic")

        (batch,) = tap.catch_up()

        assert (batch.seq, batch.payload, batch.topic) == (0, b"a", b"topic")
