"""Several ranks of a bridge with large batches: one goes on per turn, each in turn, and no step is long."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from rankworld import WORDS_AT_ONCE, Desk, Engine

from kvledger_bridge.bridge import Bridge
from kvledger_bridge.commands import Limits
from kvledger_bridge.pace import Rotation
from kvledger_bridge.settings import Settings
from kvledger_bridge.telemetry import Telemetry

LARGE = [f"+b{i}" for i in range(12)]
assert WORDS_AT_ONCE == 1, "as many pieces as words"


class Seats:
    """A bridge's table without its sockets and its Kafka: ranks that are followed, and the steps of a turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.bridge = Bridge(Settings(kafka="-"), (), telemetry=Telemetry(io.StringIO()))
        self.engines = [Engine() for _ in range(ranks)]
        self.desks = [Desk().follow(engine).sew(engine, "+a") for engine in self.engines]
        self.pieces = [0] * ranks
        self.bridge._seats = [cast("Any", desk) for desk in self.desks]
        monkeypatch.setattr(self.bridge, "_produce", self._produce)
        for i, desk in enumerate(self.desks):
            monkeypatch.setattr(desk.session._log, "go_on", self._counted(i, desk.session._log.go_on))

    def _counted(self, rank: int, go_on: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            self.pieces[rank] += 1
            go_on()

        return counted

    def _produce(self, seat: Any, command: Any, _now: float, _shell: Any) -> bool:
        seat._execute(command)
        return True

    def large(self, rank: int) -> None:
        self.desks[rank].session.live(*self.engines[rank].step(*LARGE))

    def turn(self) -> list[int]:
        """Which ranks had a piece done."""
        before = list(self.pieces)
        self.bridge.telemetry.counters.turns += 1
        self.bridge._choose_large()
        for seat in self.bridge._seats:
            self.bridge._step(seat, 0.0, cast("Any", None))
        return [rank for rank, pieces in enumerate(self.pieces) if pieces > before[rank]]


def test_ranks_with_large_batches_have_a_piece_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large ones of the same rank in a row put nobody back."""
    seats = Seats(monkeypatch, 3)
    for rank in (0, 0, 1, 2):
        seats.large(rank)
    assert seats.turn() == [0, 1, 2], "a first piece shows that a batch is large"
    told = []
    while any(desk.session.covering for desk in seats.desks):
        told.append(seats.turn())
        assert len(told) < 100, "they all come to an end"

    rounds = len(LARGE) - 1
    assert told == [*[[0], [1], [2]] * (rounds - 1), [0], [0, 1], [2], *[[0]] * rounds]
    assert [desk.session.last for desk in seats.desks] == [2, 1, 1]


def waits(choose: Callable[[int, Sequence[int]], int | None], turns: int) -> int:
    """How often rank 0, which always waits, is chosen where the others come and go so as to keep it out."""
    chosen = 0
    for turn in range(1, turns):
        others = next((n for n in range(1, 9) if turn % (n + 1)), 1)
        chosen += choose(turn, range(others + 1)) == 0
    return chosen


def test_nobody_waits_for_more_than_a_turn_of_each_other() -> None:
    """By the number of the turn alone a rank can wait for ever: the canary."""
    rotation = Rotation()

    assert waits(lambda turn, waiting: waiting[turn % len(waiting)], 500) == 0
    assert waits(lambda _, waiting: rotation.next(waiting), 500) >= 500 // 9
    assert rotation.next(()) is None


def test_a_step_ends_behind_the_batch_that_makes_it_long() -> None:
    """64 batches just below a piece would be half a second; the rest is applied without waiting for anything."""
    desk, engine = Desk(limits=Limits(step_bytes_max=100)), Engine()
    desk.follow(engine).sew(engine, "+a")
    for i in range(6):
        desk.session.live(*engine.step(f"+{i:020}"))
    seen = []
    for _ in range(3):
        desk.turn(batches_max=64)
        seen.append((desk.session.last, desk.session.ready))

    assert seen == [(2, True), (4, True), (6, False)]


def test_a_step_over_an_answer_ends_there_too() -> None:
    desk, engine = Desk(limits=Limits(step_bytes_max=100)), Engine()
    for i in range(6):
        engine.step(f"+{i:020}")
    desk.turn()
    desk.session.connected()
    desk.serve(engine)
    seen = []
    for _ in range(3):
        desk.turn(batches_max=64)
        seen.append(desk.session.last)

    assert seen == [1, 3, 5]


def test_a_rank_without_replay_that_has_batches_left_does_not_wait() -> None:
    desk, engine = Desk(replay=False), Engine()
    desk.turn()
    desk.session.connected()
    for i in range(3):
        desk.session.live(*engine.step(f"+{i}"))
    seen = []
    for _ in range(3):
        desk.turn(batches_max=1)
        seen.append((desk.session.last, desk.session.ready))

    assert seen == [(0, True), (1, True), (2, False)]
