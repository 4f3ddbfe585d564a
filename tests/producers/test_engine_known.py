"""Up to when a rank's picture is whole: a session that waits for anything does not let its log look fresh."""

from __future__ import annotations

import pytest
from rankworld import Desk, Engine

from kvledger_bridge.attention import HELD_UP_SECONDS, SETTLE_SECONDS, Attention
from kvledger_bridge.commands import Limits
from kvledger_bridge.whole import Whole
from kvledger_wire.records import Heartbeat


def test_nothing_is_known_before_the_replay_is_read_to_its_end() -> None:
    """Answer 0 1 | 2 END: only the last step has it all, and says so."""
    desk, engine = Desk(), Engine()
    for word in ("+a", "+b", "+c"):
        engine.step(word)
    desk.turn()
    desk.session.connected()
    desk.session.drained(1.0)
    desk.turn()
    desk.answer(engine.replay(0)[:2], end=False)
    desk.session.drained(2.0)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (1, None)

    desk.answer(engine.replay(2))
    desk.session.drained(3.0)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (2, 3.0)


def test_readers_are_told_when_a_replay_ends_that_brought_nothing_more() -> None:
    """Answer 0 1 | END: the records of 0 and 1 said that more may come."""
    desk, engine = Desk(), Engine()
    for word in ("+a", "+b"):
        engine.step(word)
    desk.turn()
    desk.session.connected()
    desk.turn()
    desk.answer(engine.replay(0), end=False)
    desk.turn()
    assert desk.reader.kinds()[-1] == "Events"

    desk.session.replay_ended()
    desk.session.drained(3.0)
    desk.turn()
    assert (desk.reader.kinds()[-1], desk.session.known) == ("Heartbeat", 3.0)
    assert not desk.reader.of(Heartbeat)[-1].alive


def test_a_hole_holds_the_moment_until_it_is_filled() -> None:
    """Live 0 1 _ 3: from 1 on nothing is known, although 3 was read."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.session.live(*engine.step("+b"))
    desk.session.drained(5.0)
    desk.turn()
    assert desk.session.known == 5.0

    engine.step("+c")
    desk.session.live(*engine.step("+d"))
    desk.session.drained(6.0)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (1, 5.0)
    desk.session.drained(7.0)
    desk.serve(engine)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (3, 7.0)


def test_batches_that_wait_for_their_turn_hold_it_too() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    for word in ("+b", "+c", "+d"):
        desk.session.live(*engine.step(word))
    desk.session.drained(5.0)
    desk.turn(batches_max=2)
    assert (desk.session.last, desk.session.known) == (2, None)
    desk.turn(batches_max=2)
    assert (desk.session.last, desk.session.known) == (3, 5.0)


def test_a_probe_in_flight_waits_for_nothing_that_is_missed() -> None:
    """A quiet rank is known to be whole up to the last look at its socket, also while it is asked."""
    desk, engine = Desk(limits=Limits(idle_probe_seconds=1.0)), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.turn(1.5)
    assert desk.asked()
    desk.session.drained(5.0)
    desk.turn()
    assert desk.session.known == 5.0


def test_a_suspicion_holds_it_until_all_is_read_again() -> None:
    """| replay shows the last batch: resumed, and whole only with its END."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.session.drained(5.0)
    desk.turn()
    desk.session.disconnected()
    desk.session.drained(6.0)
    desk.turn()
    assert desk.session.known == 5.0
    desk.session.connected()
    desk.turn(1.0)
    desk.answer(engine.replay(0), end=False)
    desk.session.drained(7.0)
    desk.turn()
    assert (desk.reader.kinds()[-1], desk.session.known) == ("Resumed", 5.0)
    desk.session.replay_ended()
    desk.session.drained(8.0)
    desk.turn()
    assert (desk.reader.kinds()[-1], desk.session.known) == ("Heartbeat", 8.0)


def test_without_replay_only_a_batch_that_follows_says_that_none_was_lost() -> None:
    """0 1 | same process: what was sent meanwhile is lost, until 2 comes and follows."""
    desk, engine = Desk(replay=False, process=True), Engine()
    desk.turn()
    desk.session.connected()
    desk.turn()
    desk.session.live(*engine.step("+a"))
    desk.session.identified("p1")
    desk.session.live(*engine.step("+b"))
    desk.session.drained(2.0)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (1, 2.0)

    desk.session.disconnected()
    desk.turn()
    desk.session.connected()
    desk.turn(1.0)
    desk.session.identified("p1")
    desk.session.drained(3.0)
    desk.turn()
    assert (desk.reader.kinds()[-1], desk.session.known) == ("Resumed", 2.0)
    desk.session.live(*engine.step("+c"))
    desk.session.drained(4.0)
    desk.turn()
    assert (desk.session.last, desk.session.known) == (2, 4.0)


def test_of_the_records_of_a_step_only_the_last_says_what_is_known_now() -> None:
    """Live 1 2 3 in one step: the link to Kafka may break behind any of them, for longer than an answer may be old."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.session.drained(5.0)
    desk.turn()
    for word in ("+b", "+c", "+d"):
        desk.session.live(*engine.step(word))
    desk.session.drained(50.0)
    desk.dates.clear()
    desk.turn()

    assert desk.dates == [("Events", 5.0), ("Events", 5.0), ("Events", 50.0)]


def test_what_was_known_before_a_record_was_lost_is_not_known_of_what_the_log_gives_back() -> None:
    """The picture that is resumed is the log's, which may have stood still long before; replay then brings the rest."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.session.live(*engine.step("+b"))
    desk.session.drained(5.0)
    desk.turn()
    desk.dates.clear()
    desk.session.release("the producer was rebuilt")
    for _ in range(3):
        desk.turn(0.5)
        if not desk.session.attached:
            desk.session.connected()
        desk.serve(engine)
    desk.session.drained(7.0)
    desk.turn()

    assert ("Resumed", None) in desk.dates
    assert desk.dates[-1] == ("Heartbeat", 7.0)


def test_a_moment_of_a_socket_that_is_replaced_counts_for_nothing() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    desk.session.drained(5.0)
    desk.turn()
    desk.session._reopen()
    desk.session.drained(9.0)
    assert desk.session._whole._drained == 5.0


@pytest.mark.parametrize("held_up", [0.0, HELD_UP_SECONDS + 0.01])
def test_after_being_held_up_an_empty_socket_speaks_for_the_time_before(held_up: float) -> None:
    attention = Attention()
    begun = [attention.looked(1.0, 1.0, 0.0), attention.looked(1.1, 1.12, 0.0)]
    assert begun == [None, 1.1], "nothing is known at the start"
    assert attention.looked(1.13, 1.15, 0.0) == 1.13
    woken = 1.17 + held_up
    assert attention.looked(1.16, woken, 0.0) == (1.1 if held_up else 1.16)
    assert attention.looked(woken, woken + 0.01, 0.0) == (1.13 if held_up else woken)
    later = woken + SETTLE_SECONDS
    assert attention.looked(later, later + 0.01, 0.0) == later


def test_whoever_worked_all_the_time_was_not_held_up() -> None:
    """Turns of a second each, as many ranks are busy: their sockets are looked at once a turn, and that counts.

    That the same time without work counts two turns late is the canary.
    """
    attention, idle = Attention(), Attention()
    moments, idles = [], []
    for turn in range(1, 6):
        moments.append(attention.looked(turn, turn + 0.01, turn * 0.98))
        idles.append(idle.looked(turn, turn + 0.01, 0.0))

    assert moments == [None, 2, 3, 4, 5]
    assert idles == [None, None, 1, 2, 3]


def test_a_loop_whose_turns_are_slow_gets_on() -> None:
    """Each takes half a second: many ranks, or a machine that has little time for us."""
    attention = Attention()
    looks = [attention.looked(each / 2, each / 2 + 0.01, 0.0) for each in range(6)]
    assert looks == [None, None, 0.0, 0.5, 1.0, 1.5]


def test_the_moment_never_goes_back() -> None:
    whole = Whole()
    for moment, known in ((3.0, 3.0), (2.0, 3.0), (4.0, 4.0)):
        whole.drained(moment)
        assert whole.look(whole=True, wrote=False) is False
        assert whole.known == known
