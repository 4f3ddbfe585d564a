"""Who may write for a rank: claim, pointer, fence, and what ends it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from rankworld import CloseAll, Desk, Engine, Note, OpenData

from kvledger_bridge.continuity import OWNING, TABLE, Move, Phase, after
from kvledger_bridge.errors import Bug
from kvledger_wire.records import Claim, Fence, Heartbeat, Opened, Pointer


def test_a_take_over_is_claim_pointer_fence_pointer_opened_each_waiting_for_the_one_before() -> None:
    desk, engine = Desk(), Engine()
    held: list[Any] = []
    desk.hold = lambda record: not held.append(record)  # type: ignore[func-returns-value]  # keeps it, and says hold
    seen: list[tuple[Phase, list[str], list[str]]] = []
    for _ in range(4):
        desk.turn()
        if not seen:
            desk.session.connected()
        seen.append((desk.session.phase, [type(r).__name__ for r in desk.replicas], desk.reader.kinds()))
        desk.session.acknowledged(held[-1], 7 if isinstance(held[-1], Claim) else 40)
    desk.turn()
    assert desk.asked() == [0]
    desk.serve(engine)
    desk.turn()

    assert seen == [
        (Phase.CLAIMING, ["Claim"], []),
        (Phase.POINTING, ["Claim", "Pointer"], []),
        (Phase.FENCING, ["Claim", "Pointer"], ["Fence"]),
        (Phase.FENCING, ["Claim", "Pointer", "Pointer"], ["Fence"]),
    ]
    assert desk.replicas[1] == Pointer(0, owner=7, fence=-1, offset=-1)
    assert desk.replicas[2] == Pointer(0, owner=7, fence=40, offset=-1)
    fence, opened = (record for _, record in desk.reader.log)
    assert (fence.owner, fence.bridge, fence.why) == (7, "b", "first contact")
    assert (opened.owner, opened.life, opened.n, opened.seq, opened.partial) == (7, (7, 1), 0, -1, False)


def test_the_opened_is_pointed_at_once_it_is_acknowledged() -> None:
    desk, engine = Desk(), Engine()
    desk.hold = lambda record: isinstance(record, Opened)
    desk.follow(engine)
    before = list(desk.replicas)
    desk.session.acknowledged(desk.reader.of(Opened)[0], 12)
    desk.turn()

    assert len(before) == 3
    assert desk.replicas[3] == Pointer(0, owner=0, fence=0, offset=12)


def test_nothing_waits_for_the_acknowledgement_of_an_opened() -> None:
    """A life is known before it is acknowledged: (owner, count)."""
    desk, engine = Desk(), Engine()
    desk.hold = lambda record: isinstance(record, Opened)
    engine.step("+a")
    desk.follow(engine)

    assert desk.reader.kinds() == ["Fence", "Opened", "Events"]


def test_a_higher_claim_ends_the_session() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    records = len(desk.reader.log)
    desk.session.superseded(9, "node-b/1")
    desk.session.live(*engine.step("+c"))
    notes = [command.text for command in desk.turn(5.0) if isinstance(command, Note)]

    assert desk.session.phase is Phase.CLOSED
    assert (desk.did(CloseAll), desk.did(Note)) == (1, 1)
    assert len(desk.reader.log) == records
    assert notes == [
        "owner 9, bridge node-b/1, is above 0; this bridge listens, and claims again once that one is silent",
    ]
    desk.session.release("the producer was rebuilt")
    assert desk.session.phase is Phase.CLOSED


def test_a_lower_claim_changes_nothing() -> None:
    desk, engine = Desk(), Engine()
    desk.replicas += [None] * 5  # the own claim lands at 5
    desk.follow(engine)
    desk.session.superseded(4)
    desk.turn()

    assert desk.session.phase is Phase.FOLLOWING


@pytest.mark.parametrize(("foreign", "phase"), [(3, Phase.POINTING), (9, Phase.CLOSED)])
def test_of_two_claims_under_way_the_higher_wins(foreign: int, phase: Phase) -> None:
    desk = Desk()
    desk.hold = lambda _record: True
    desk.turn()
    desk.session.superseded(foreign)
    between = desk.session.phase
    desk.session.acknowledged(desk.replicas[0], 6)

    assert between is Phase.CLAIMING
    assert desk.session.phase is phase


def test_a_failed_delivery_claims_anew_and_opens_a_new_life() -> None:
    """Claim 0 | opened (0,1) | events -X- | claim 4 | fence | opened (4,1) with everything again."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    lost = desk.reader.log[-1][1]
    desk.reader.log[-2] = (0, None)
    desk.session.failed(lost, "_MSG_TIMED_OUT")
    desk.turn()
    assert desk.did(OpenData) == 1
    desk.session.connected()
    desk.turn(0.2)
    desk.serve(engine)
    desk.turn()

    assert desk.session.owner == 4
    assert desk.reader.state.life == (4, 1)
    assert desk.reader.blocks == {"a", "b"}
    assert desk.reader.of(Fence)[1].why == "delivery failed: _MSG_TIMED_OUT"
    assert desk.reader.status == "exact"


def test_failures_of_earlier_owners_are_ignored() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine)
    old = desk.reader.of(Opened)[0]
    desk.session.release("the producer was rebuilt")
    desk.turn(0.2)
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    desk.turn()
    desk.session.failed(old, "late")
    desk.session.acknowledged(old, 77)
    desk.turn()

    assert desk.session.phase is Phase.FOLLOWING
    assert [p.offset for p in desk.replicas if isinstance(p, Pointer)] == [-1, -1, 1, 1, 1]


def test_claims_that_fail_again_and_again_back_off() -> None:
    desk = Desk()
    desk.hold = lambda _record: True
    times: list[float] = []
    while len(times) < 6:
        before = len(desk.replicas)
        desk.turn(0.05)
        if len(desk.replicas) > before:
            times.append(desk.now)
            desk.session.failed(desk.replicas[-1], "unknown topic")

    assert [b - a for a, b in pairwise(times)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6], abs=0.06)


def test_a_claim_below_an_earlier_one_ends_the_session() -> None:
    """The replicas topic was re-created: readers would take nothing from an owner number below an old fence."""
    desk, engine = Desk(), Engine()
    desk.replicas += [None] * 5
    desk.follow(engine)
    desk.replicas.clear()
    desk.session.release("a topic was re-created")
    desk.turn(0.2)

    assert desk.session.phase is Phase.CLOSED
    assert Note("claims_went_back", "owner 0 after 5") in desk.commands


def test_records_that_were_not_handed_out_are_forgotten_with_their_owner() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine)
    desk.session.disconnected()  # a Suspended is due
    desk.session.release("the producer was rebuilt")
    desk.turn()

    assert desk.reader.kinds() == ["Fence", "Opened"]


def test_no_batch_is_applied_before_the_fence_is_acknowledged() -> None:
    desk, engine = Desk(), Engine()
    desk.hold = lambda record: isinstance(record, Fence)
    desk.session.connected()
    desk.session.live(*engine.step("+a"))
    desk.turn(3.0)

    assert desk.reader.kinds() == ["Fence"]
    assert desk.asked() == []


def test_every_phase_is_reached_and_left_by_the_table() -> None:
    assert {to for _, to in TABLE.items()} == set(Phase)
    assert {phase for phase, _ in TABLE} == set(Phase)
    assert {move for _, move in TABLE} == set(Move)
    assert set(Phase) > OWNING


@pytest.mark.parametrize(
    ("phase", "move"), [(Phase.CLOSED, Move.RELEASED), (Phase.CLAIMING, Move.OPENED), (Phase.OPENING, Move.DOUBTED)]
)
def test_an_illegal_move_names_state_and_event(phase: Phase, move: Move) -> None:
    with pytest.raises(Bug, match=f"{phase.value} cannot be {move.value}"):
        after(phase, move)


def test_an_awaited_record_of_another_kind_is_a_bug() -> None:
    desk = Desk()
    wrong: Any = Heartbeat(0, 0, (0, 1), 1, 0, b"")
    desk.session._awaited = wrong

    with pytest.raises(Bug, match="Heartbeat was awaited"):
        desk.session.acknowledged(wrong, 1)
