"""Engines without a replay endpoint: lives begin live, and only the process proves them."""

from __future__ import annotations

import pytest
from rankworld import AskProcess, Desk, Engine, OpenData, payload

from kvledger_bridge.continuity import First, Known, Nothing, Phase, Process, judge
from kvledger_bridge.lifelog import digest_of
from kvledger_wire.records import Gap, Heartbeat, Opened, Resumed


def start(engine: Engine, *, process: bool = False, identity: str | None = "p1") -> Desk:
    """Claimed and connected, and where asked for, identified."""
    desk = Desk(replay=False, process=process)
    desk.turn()
    desk.session.connected()
    desk.turn()
    if process:
        assert desk.did(AskProcess) == 1
        desk.session.identified(identity)
        desk.turn()
    return desk


def test_opened_waits_for_the_first_live_batch() -> None:
    desk, engine = start(Engine()), Engine()
    before = desk.reader.kinds()
    desk.session.live(*engine.step("+a"))
    desk.turn()

    assert before == ["Fence"]
    assert desk.reader.kinds() == ["Fence", "Opened", "Events"]
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a"})


def test_a_first_batch_above_zero_opens_a_partial_life_at_it() -> None:
    desk, engine = start(Engine()), Engine()
    engine.step("+a")
    second = engine.step("+b")
    desk.session.live(*second)
    desk.session.live(*engine.step("+c"))
    desk.turn()

    opened = desk.reader.of(Opened)[0]
    assert (opened.seq, opened.digest, opened.partial) == (1, digest_of(second[1]), True)
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"c"})


def test_batches_that_came_before_the_fence_are_not_lost() -> None:
    """Without replay nobody brings them back, so they wait."""
    engine = Engine()
    desk = Desk(replay=False)
    desk.hold = lambda _record: True
    desk.turn()
    desk.session.connected()
    desk.session.live(*engine.step("+a"))
    desk.turn(1.0)
    desk.hold = lambda _record: False
    desk.session.acknowledged(desk.session._awaited, 0)  # type: ignore[arg-type]  # the claim
    desk.turn()

    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a"})


def test_a_gap_cannot_be_filled_and_is_written_at_once() -> None:
    desk, engine = start(Engine()), Engine()
    desk.session.live(*engine.step("+a"))
    engine.step("+b")
    desk.session.live(*engine.step("+c"))
    desk.session.live(*engine.step("+d"))
    desk.turn()

    gap = desk.reader.of(Gap)[0]
    assert (gap.first, gap.last) == (1, 1)
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"d"})


def test_without_an_identity_every_disconnect_ends_the_life() -> None:
    """Live 0 | 1   nothing proves the same engine: Suspended, a new socket, and Opened with the next batch."""
    desk, engine = start(Engine()), Engine()
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.session.disconnected()
    desk.turn()
    assert desk.did(OpenData) == 1
    assert (desk.reader.status, desk.session.phase) == ("suspended", Phase.OPENING)
    desk.session.connected()
    desk.session.live(*engine.step("+b"))
    desk.turn()

    assert desk.reader.kinds()[2:] == ["Events", "Suspended", "Opened"]
    assert desk.reader.of(Opened)[1].partial
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", set())


def test_the_same_process_proves_the_same_life() -> None:
    """Live 0 | 1   the identity, read after the connection came back, is the old one: Resumed, and 1 follows."""
    engine = Engine()
    desk = start(engine, process=True)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.session.disconnected()
    desk.turn()
    early = desk.did(AskProcess)
    desk.session.connected()
    desk.session.live(*engine.step("+b"))
    desk.turn()
    assert (early, desk.did(AskProcess)) == (0, 1)
    assert desk.reader.blocks == {"a"}
    desk.session.identified("p1")
    desk.turn()

    assert desk.reader.of(Opened)[0].process == "p1"
    assert desk.reader.of(Resumed)[0].how == "process"
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a", "b"})


def test_another_process_is_another_life() -> None:
    engine = Engine()
    desk = start(engine, process=True)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    engine.restart()
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    desk.session.identified("p2")
    desk.turn()
    assert desk.did(OpenData) == 1
    desk.session.connected()
    desk.turn()
    desk.session.identified("p2")
    desk.session.live(*engine.step("+x"))
    desk.turn()

    assert desk.reader.of(Opened)[1].process == "p2"
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"x"})


def test_an_identity_read_on_an_earlier_connection_proves_nothing() -> None:
    """AskProcess | disconnect | connected | the late answer of before: it is not taken."""
    engine = Engine()
    desk = start(engine, process=True)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    assert desk.did(AskProcess) == 1
    desk.session.disconnected()
    desk.session.identified("p1")
    desk.turn()

    assert desk.reader.status == "suspended"


def test_an_identity_that_cannot_be_read_is_asked_again_and_meanwhile_suspended() -> None:
    engine = Engine()
    desk = start(engine, process=True)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    desk.session.identified(None)
    desk.turn()
    assert (desk.did(AskProcess), desk.reader.status) == (0, "suspended")
    desk.turn(0.2)
    assert desk.did(AskProcess) == 1
    desk.session.identified("p1")
    desk.turn()

    assert desk.reader.status == "exact"


@pytest.mark.parametrize("later", ["p1", None])
def test_a_life_may_open_without_an_identity_but_cannot_be_proven_later(later: str | None) -> None:
    engine = Engine()
    desk = start(engine, process=True, identity=None)
    desk.session.live(*engine.step("+a"))
    desk.turn(0.2)
    desk.session.identified(None)
    desk.turn()
    assert desk.reader.status == "exact"
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    desk.session.identified(later)
    desk.turn()

    assert desk.session.phase is Phase.OPENING
    assert desk.reader.status == "suspended"


def test_a_server_that_listens_after_its_engine_published_is_asked_until_it_tells() -> None:
    """Connected: None | None | p1 | batch 0   the life has the identity, so a later disconnect does not end it."""
    engine = Engine()
    desk = start(engine, process=True, identity=None)
    for told in (None, "p1"):
        desk.turn(2.5)
        assert desk.did(AskProcess) == 1
        desk.session.identified(told)
    desk.session.live(*engine.step("+a"))
    desk.turn()

    assert desk.reader.of(Opened)[0].process == "p1"


def test_an_idle_rank_is_not_called_complete() -> None:
    """Nobody can be asked, so there is no heartbeat: the rank goes stale by age."""
    engine = Engine()
    desk = start(engine)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.wait(10)

    assert desk.reader.of(Heartbeat) == []
    assert desk.asked() == []


def idle(identity: str = "p1") -> tuple[Desk, Engine]:
    """A rank without replay that has followed one batch, in a process that is known."""
    engine = Engine()
    desk = start(engine, process=True, identity=identity)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    return desk, engine


def test_an_idle_rank_whose_process_is_still_the_same_is_alive_and_no_more() -> None:
    """Not gone; but nothing says that no batch was lost, so the log is not called complete."""
    desk, _ = idle()
    asked = [command for command in desk.wait(5.25) if isinstance(command, AskProcess)]
    desk.session.identified("p1")
    desk.turn()
    beats = desk.reader.of(Heartbeat)

    assert len(asked) == 1
    assert [(beat.alive, beat.seq) for beat in beats] == [(True, 0)]
    assert desk.did(AskProcess) == 0


def test_a_busy_rank_is_not_asked() -> None:
    desk, engine = idle()
    asked = 0
    for _ in range(5):
        desk.turn(3.0)
        desk.session.live(*engine.step("+b"))
        asked += desk.did(AskProcess)
        desk.turn()
        asked += desk.did(AskProcess)

    assert asked == 0


def test_an_idle_rank_in_another_process_is_another_life() -> None:
    """The monitor did not tell: a proxy, or a disconnect that was lost."""
    desk, _ = idle()
    desk.wait(5.25)
    desk.session.identified("p2")
    desk.turn()

    assert desk.reader.kinds()[-1] == "Suspended"
    assert desk.session.phase is Phase.OPENING


def test_an_answer_from_before_a_disconnect_says_nothing() -> None:
    desk, _ = idle()
    desk.wait(5.25)
    desk.session.disconnected()
    desk.session.connected()
    desk.session.identified("p1")
    desk.turn()

    assert desk.reader.of(Heartbeat) == []


def test_a_process_that_cannot_be_read_says_nothing_and_is_asked_again() -> None:
    desk, _ = idle()
    desk.wait(5.25)
    desk.session.identified(None)
    asked = [command for command in desk.wait(5.25) if isinstance(command, AskProcess)]

    assert desk.reader.of(Heartbeat) == []
    assert (len(asked), desk.session.phase) == (1, Phase.FOLLOWING)


def test_a_repeated_sequence_with_other_bytes_ends_the_life() -> None:
    engine = Engine()
    desk = start(engine)
    desk.session.live(*engine.step("+a"))
    desk.turn()
    desk.session.live(0, payload("+z", tag=9))
    desk.turn()

    assert desk.session.phase is Phase.OPENING
    assert desk.reader.status == "suspended"


KNOWN = Known(4, b"d", "p")


@pytest.mark.parametrize(
    ("known", "answer", "verdict"),
    [
        (KNOWN, First(4, b"d"), True),
        (KNOWN, First(4, b"e"), False),
        (KNOWN, First(5, b"d"), False),
        (KNOWN, Nothing(), False),
        (KNOWN, Process("p"), True),
        (KNOWN, Process("q"), False),
        (KNOWN, Process(None), None),
        (Known(-1, b"", None), First(0, b"x"), True),
        (Known(-1, b"", None), Nothing(), True),
        (Known(-1, b"", None), Process("p"), False),
    ],
)
def test_proofs_judge_their_own_kind_of_answer(known: Known, answer: First | Nothing | Process, verdict: bool) -> None:
    assert judge(known, answer) is verdict
