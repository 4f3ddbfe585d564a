"""A large batch is applied a piece per step: whatever happens to the rank meanwhile, readers see all of it or nothing.

batch 0 | a large one: piece · piece · piece · … · the unit is written
^ here something happens, at every place once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import rankworld
from rankworld import KEEP, AskProcess, Desk, Engine

from kvledger_bridge.continuity import Phase
from kvledger_bridge.lifelog import LifeLog
from kvledger_wire.records import Checkpoint, Claim, Events, Gap, Heartbeat, Opened, Resumed, Suspended

WORDS = ("+b", "+c", "-a", "+d", "-b", "+a", "+e")
PIECES = len(WORDS)


class Following:
    """A rank that is followed live, in front of a large batch."""

    def __init__(self, *, replay: bool = True, **options: Any) -> None:
        self.engine = Engine()
        self.desk = Desk(replay=replay, process=not replay, **options)
        if replay:
            self.engine.step("+a")
            self.desk.follow(self.engine).sew(self.engine, "+z")
        else:
            self.desk.turn()
            self.desk.session.connected()
            self.desk.turn()
            self.desk.session.identified("p0")
            self.desk.session.live(*self.engine.step("+a"))
            self.desk.turn()
        self.session = self.desk.session

    def pieces(self, count: int) -> None:
        """So many steps; fewer if the batch is whole before."""
        for _ in range(count):
            self.desk.turn(batches_max=1)
            self.desk.serve(self.engine)
            self.check()

    def check(self) -> None:
        """No reader is told anything that was not so after the batch it says it covers."""
        reader = self.desk.reader
        if reader.status == "exact":
            assert reader.blocks == self.engine.truth[reader.state.digest]
        elif reader.status in {"at_least", "suspended"} and reader.state.digest:
            assert reader.blocks <= self.engine.truth[reader.state.digest]

    def recover(self) -> None:
        """Everything is well again, time passes, and what the large batch brought is removed."""
        for _ in range(8):
            if not self.session.attached:
                self.session.connected()
            for seconds in (1.1, 0.0):
                self.desk.turn(seconds)
                self.desk.serve(self.engine)
                self.check()
        gone = sorted(f"-{block}" for block in self.engine.resident)
        self.desk.sew(self.engine, *gone, "+y")
        self.check()
        reader = self.desk.reader
        assert self.session.phase is Phase.FOLLOWING
        assert reader.state.seq == self.engine.next - 1
        assert (reader.status, reader.blocks) == ("exact", set(self.engine.resident))


def disconnect(at: Following) -> None:
    """The live socket is gone, and comes back."""
    at.session.disconnected()


def restart(at: Following) -> None:
    """It is another engine that comes back."""
    at.session.disconnected()
    at.engine.restart()
    at.engine.step("+x")


def supersede(at: Following) -> None:
    """Another bridge claims the rank, and falls silent."""
    at.desk.replicas.append(Claim(0, -1, "other", ""))
    at.session.superseded(len(at.desk.replicas) - 1)
    at.desk.turn()
    assert not at.session.ready
    at.session.lapsed("silent")


def fail(at: Following) -> None:
    """Kafka lost a record."""
    at.session.failed(at.desk.reader.of(Events)[-1], "lost")


def release(at: Following) -> None:
    """The producer was rebuilt."""
    at.session.release("rebuilt")


def checkpoint(at: Following) -> None:
    """One is due."""
    at.session.checkpoint()
    assert at.session.checkpointing


def stop(at: Following) -> None:
    """The bridge stops where it is, another one takes over."""
    at.desk = Desk(after=at.desk)
    at.session = at.desk.session
    at.desk.turn()


def reconnect(at: Following) -> None:
    """A second publisher."""
    at.session.connected()


def more(at: Following) -> None:
    """The engine goes on, faster than its batches are applied."""
    for word in ("+m", "-m", "+n"):
        at.session.live(*at.engine.step(word))


HAPPENINGS: tuple[Callable[[Following], None], ...] = (
    disconnect,
    restart,
    supersede,
    fail,
    release,
    checkpoint,
    stop,
    reconnect,
    more,
)


def played(happens: Callable[[Following], None], after: int, *words: str) -> Following:
    """A large batch, of which ``after`` pieces are done when it happens; then all is well again."""
    rank = Following()
    rank.session.live(*rank.engine.step(*words or WORDS))
    rank.pieces(after)
    happens(rank)
    rank.check()
    rank.pieces(PIECES)
    rank.recover()
    return rank


@pytest.mark.parametrize("after", range(PIECES + 2))
@pytest.mark.parametrize("happens", HAPPENINGS)
def test_readers_see_all_of_a_large_batch_or_nothing(happens: Callable[[Following], None], after: int) -> None:
    rank = played(happens, after)

    for _, record in rank.desk.reader.log:
        assert not isinstance(record, Gap)


class Sabotage(NamedTuple):
    """A rule that is taken away, and what then goes wrong."""

    where: type
    what: str
    instead: Any
    happens: Callable[[Following], None]


SABOTAGES = {
    "a batch in part is no reason to wait": Sabotage(LifeLog, "covering", property(lambda _: False), more),
    "a checkpoint waits for nothing": Sabotage(LifeLog, "covering", property(lambda _: False), checkpoint),
    "what is half done outlives its life": Sabotage(LifeLog, "leave", lambda _: None, release),
}


def goes_wrong(happens: Callable[[Following], None], after: int) -> bool:
    try:
        played(happens, after)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", SABOTAGES)
def test_without_a_rule_something_half_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary per rule."""
    where, what, instead, happens = SABOTAGES[name]
    monkeypatch.setattr(where, what, instead)

    assert any(goes_wrong(happens, after) for after in range(1, PIECES))


def test_a_large_batch_takes_a_step_per_piece_and_writes_nothing_before_the_last() -> None:
    rank = Following()
    written = len(rank.desk.reader.log)
    rank.session.live(*rank.engine.step(*WORDS))
    seen = []
    for _ in range(PIECES):
        rank.desk.turn(batches_max=1)
        seen.append((rank.session.covering, rank.session.ready, len(rank.desk.reader.log) - written))

    assert seen[:-1] == [(True, True, 0)] * (PIECES - 1)
    assert seen[-1] == (False, False, len(WORDS))


def test_pieces_change_nothing_of_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    for words in (1, 3, len(WORDS)):
        monkeypatch.setattr(rankworld, "WORDS_AT_ONCE", words)
        rank = Following()
        for some in (WORDS, ("+q",), ("!", *WORDS)):
            rank.session.live(*rank.engine.step(*some))
        rank.desk.turn()
        logs.append(rank.desk.reader.log)

    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) > 2 * len(WORDS)


def test_a_rank_whose_turn_it_is_not_waits_with_its_large_batch() -> None:
    rank = Following()
    rank.session.live(*rank.engine.step(*WORDS))
    rank.desk.turn(batches_max=1)
    for _ in range(3 * PIECES):
        rank.session.step(rank.desk.now, batches_max=0)

    seen = [rank.session.covering]
    rank.pieces(PIECES)
    seen.append(rank.session.covering)

    assert seen == [True, False]
    assert rank.desk.reader.blocks == set(rank.engine.resident)


def test_a_disconnect_in_a_large_batch_is_written_at_once_and_before_it() -> None:
    """Suspended · the batch · Resumed: what was received before the disconnect is of the life that is known."""
    rank = Following()
    rank.session.live(*rank.engine.step(*WORDS))
    rank.pieces(2)
    since = len(rank.desk.reader.log)
    rank.session.disconnected()
    rank.desk.turn(batches_max=1)
    assert rank.desk.reader.kinds(since) == ["Suspended"]
    rank.recover()

    kinds = rank.desk.reader.kinds(since)
    assert kinds[: len(WORDS) + 2] == ["Suspended", *["Events"] * len(WORDS), "Resumed"]
    assert rank.desk.reader.of(Opened)[1:] == []


def test_nothing_is_asked_of_the_engine_while_a_large_batch_is_applied() -> None:
    """What is known would not be what is known once it is whole."""
    rank = Following()
    rank.session.live(*rank.engine.step(*WORDS))
    rank.desk.turn(batches_max=1)
    for _ in range(PIECES - 2):
        rank.desk.turn(5.0, batches_max=1)
        assert rank.desk.asked() == []

    rank.desk.turn()
    assert rank.desk.reader.of(Suspended) == []


def test_a_process_that_is_read_within_a_large_batch_proves_its_life() -> None:
    rank = Following(replay=False)
    rank.session.live(*rank.engine.step(*WORDS))
    rank.pieces(2)
    rank.session.disconnected()
    rank.session.connected()
    rank.pieces(PIECES)
    rank.desk.turn()
    rank.session.identified("p0")
    rank.desk.turn()

    assert len(rank.desk.reader.of(Resumed)) == 1
    assert (rank.desk.reader.status, rank.desk.reader.blocks) == ("exact", set(rank.engine.resident))


def test_another_process_ends_a_large_batch_with_its_life() -> None:
    """Asked while the rank was idle, answered within the batch."""
    rank = Following(replay=False)
    rank.desk.turn(6.0)
    assert rank.desk.did(AskProcess) == 1
    rank.session.live(*rank.engine.step(*WORDS))
    rank.pieces(2)
    seen = [rank.session.covering]
    rank.session.identified("p1")
    seen.append(rank.session.covering)

    assert seen == [True, False]
    assert rank.session.phase is Phase.OPENING


def test_a_ledger_that_fails_in_the_middle_opens_a_new_life() -> None:
    rank = Following()
    rank.session.live(*rank.engine.step("+b", "+c", "x", "+d"))
    rank.desk.turn()

    assert [type(each) for _, each in rank.desk.reader.log[-2:]] == [Gap, Opened]
    assert rank.desk.reader.status == "at_least"


@pytest.mark.parametrize("entry", [rankworld.ENTRY, KEEP])
def test_a_ledger_that_fails_after_a_disconnect_opens_a_life_that_is_suspended(entry: Any) -> None:
    """A new life is no proof that the engine is still there."""
    rank = Following(entry=entry)
    rank.session.live(*rank.engine.step("+b", "+c", "x", "+d"))
    rank.pieces(2)
    rank.session.disconnected()
    rank.desk.turn()

    assert [type(each) for _, each in rank.desk.reader.log[-4:]] == [Suspended, Gap, Opened, Suspended]
    assert (rank.desk.reader.status, rank.session.phase) == ("suspended", Phase.SUSPECT)


def test_a_checkpoint_that_is_due_begins_when_the_large_batch_is_whole() -> None:
    rank = Following()
    rank.session.live(*rank.engine.step(*WORDS))
    rank.pieces(2)
    rank.session.checkpoint()
    since = len(rank.desk.reader.log)
    rank.desk.turn()

    kinds = [each for each in rank.desk.reader.kinds(since) if each != Heartbeat.__name__]
    assert kinds[: len(WORDS)] == ["Events"] * len(WORDS)
    assert set(kinds[len(WORDS) :]) == {Checkpoint.__name__}


def test_a_rank_that_is_claimed_over_in_a_checkpoint_has_nothing_left_to_do() -> None:
    """Else its bridge would never rest."""
    rank = Following()
    rank.session.checkpoint()
    rank.desk.turn(batches_max=1)
    seen = [rank.session.ready]
    rank.session.superseded(99)
    rank.desk.turn()
    seen.append(rank.session.ready)

    assert seen == [True, False]
