"""A bridge that takes a rank over goes on in its life: restored from the log, proven by the engine, then resumed."""

from __future__ import annotations

from typing import Any

import pytest
from rankworld import KEEP, Desk, Engine, OpenData, recount

from kvledger_bridge.commands import Forget, Restore
from kvledger_bridge.continuity import Phase
from kvledger_bridge.errors import Bug
from kvledger_wire.accept import accept
from kvledger_wire.records import (
    SCHEMA,
    Checkpoint,
    Claim,
    Events,
    Fence,
    Gap,
    Opened,
    Pointer,
    Resumed,
    Suspended,
)


def taken_over(engine: Engine, *words: str, **options: Any) -> tuple[Desk, Desk]:
    """A bridge that followed the engine, and the next one, which has restored the rank and proven nothing yet."""
    first = Desk(**options).follow(engine)
    for word in words:
        first.session.live(*engine.step(word))
        first.turn()
        first.serve(engine)
        first.turn()
    second = Desk(after=first, **options)
    second.turn()
    return first, second


def phase(desk: Desk) -> Phase:
    return desk.session.phase


def test_a_restored_rank_goes_on_in_the_same_life_once_the_engine_has_proven_it() -> None:
    """Opened 0 1 2 X | claim, fence, restore | replay(2) begins with the same 2 -> Resumed, then 3."""
    engine = Engine()
    first, second = taken_over(engine, "+a", "+b", "-a")
    assert (second.session.phase, second.reader.status) == (Phase.SUSPECT, "suspended")
    since = second.reader.offset
    engine.step("+c")
    second.session.connected()
    second.turn()
    assert second.asked() == [2]
    second.serve(engine)
    second.turn()

    assert second.reader.kinds(since) == ["Resumed", "Events"]
    assert (second.reader.status, second.reader.blocks) == ("exact", {"b", "c"})
    assert second.session.life == first.session.life
    assert second.session.owner > first.session.owner
    assert [record.n for record in second.reader.of(Resumed)] == [4]


def test_a_buffer_that_begins_late_loses_nothing_of_a_restored_rank() -> None:
    """The engine remembers two batches; without the log the life would begin at them, and be partial."""
    engine = Engine(buffer_steps=2)
    _, second = taken_over(engine, "+a", "+b", "+c", "+d", "+e")
    second.session.connected()
    second.turn()
    second.serve(engine)
    second.turn()

    assert (second.reader.status, second.reader.blocks) == ("exact", {"a", "b", "c", "d", "e"})
    assert len(second.reader.of(Opened)) == 1


def test_another_engine_life_is_a_new_life() -> None:
    engine = Engine()
    _, second = taken_over(engine, "+a", "+b")
    engine.restart()
    engine.step("+x")
    second.session.connected()
    second.turn()
    second.serve(engine)
    second.turn()
    assert second.did(OpenData) == 1
    second.session.connected()
    second.serve(engine)
    second.turn()

    assert (second.reader.status, second.reader.blocks) == ("exact", {"x"})
    assert second.session.life == (second.session.owner, 1)


def test_copies_are_counted_on_from_the_log() -> None:
    """Two copies of a block; the second is removed after the take-over."""
    engine = Engine()
    _, second = taken_over(engine, "+a", "+a", "-a", "+a")
    second.session.connected()
    engine.step("-a")
    second.turn()
    second.serve(engine)
    second.turn()
    assert second.reader.blocks == {"a"}
    engine.step("-a")
    second.turn(1.5)
    second.serve(engine)
    second.turn()

    assert second.reader.blocks == set()


@pytest.mark.parametrize("loss", ["invalidate", "keep"])
def test_what_is_partial_or_uncertain_stays_so(loss: str) -> None:
    engine = Engine(buffer_steps=2)
    options: dict[str, Any] = {"entry": KEEP} if loss == "keep" else {}
    for word in ("+a", "+b", "+c"):
        engine.step(word)
    first = Desk(**options).follow(engine)
    first.session.live(*engine.step(raw=b"?"))
    first.turn()
    first.serve(engine)
    first.turn()
    status = first.reader.status
    second = Desk(after=first, **options)
    second.turn()
    second.session.connected()
    second.turn()
    second.serve(engine)
    second.turn()

    assert status in {"at_least", "uncertain"}
    assert second.reader.of(Resumed)
    assert second.reader.status == status


def test_an_unfinished_batch_is_asked_for_again() -> None:
    """The first bridge died between the records of batch 1: what landed of it counts for nothing."""
    engine = Engine()
    first = Desk().follow(engine)
    engine.step("+a")
    first.turn(1.5)
    first.serve(engine)
    first.turn()
    engine.step("+b", "+c", "+d")
    first.turn(1.5)
    first.serve(engine)
    first.turn()
    unit = [record for record in first.reader.of(Events) if record.seq == 1]
    log = first.reader.log
    del log[next(i for i, (_, record) in enumerate(log) if record is unit[-1]) :]
    fresh = Desk()
    for group, record in log:
        fresh.reader.read(group, record)
    fresh.replicas += first.replicas
    second = Desk(after=fresh)
    second.turn()
    second.session.connected()
    second.turn()
    assert second.asked() == [0]
    second.serve(engine)
    second.turn()

    assert (second.reader.status, second.reader.blocks) == ("exact", {"a", "b", "c", "d"})


def test_the_pointer_of_the_highest_owner_below_is_inherited_before_the_fence_and_names_it_then() -> None:
    engine = Engine()
    first, second = taken_over(engine, "+a")
    own = [p for p in second.replicas if isinstance(p, Pointer) and p.owner == second.session.owner]
    opened = next(p for p in first.replicas if isinstance(p, Pointer) and p.offset >= 0)

    fence = next(i for i, (_, r) in enumerate(second.reader.log) if r is second.reader.of(Fence)[1])

    assert [(p.fence, p.offset) for p in own] == [(opened.fence, opened.offset), (fence, opened.offset)]
    assert second.reader.log[opened.offset][1] == first.reader.of(Opened)[0]
    whys = [each.why for each in second.reader.of(Fence)]
    assert whys == ["first contact", f"takes over from owner {first.session.owner}"]


def test_restoring_ends_below_the_own_fence() -> None:
    engine = Engine()
    first = Desk().follow(engine)
    second = Desk(after=first)
    asked: list[tuple[int, int, int]] = []
    second.restores = lambda *where: asked.append(where)
    second.turn()
    fence = next(i for i, (_, r) in enumerate(second.reader.log) if r is second.reader.of(Fence)[1])

    assert second.session.phase is Phase.RESTORING
    assert asked == [(second.session.owner, 1, fence)]


def test_where_no_owner_ever_pointed_nothing_is_read() -> None:
    desk = Desk()
    asked: list[Any] = []
    desk.restores = lambda *where: asked.append(where)
    desk.turn()

    assert asked == []
    assert desk.session.phase is Phase.OPENING


def test_what_cannot_be_restored_is_a_new_life_that_says_why() -> None:
    engine = Engine()
    engine.step("+a")
    first = Desk().follow(engine)
    second = Desk(after=first)
    second.restores = lambda owner, _start, _end: second.session.unrestorable(owner, "no log")
    second.turn()
    second.session.connected()
    second.serve(engine)
    second.turn()

    assert second.reader.of(Opened)[-1].why == "first contact; not restored: no log"
    assert (second.reader.status, second.reader.blocks) == ("exact", {"a"})


def test_an_answer_for_an_earlier_owner_is_ignored() -> None:
    engine = Engine()
    first = Desk().follow(engine)
    second = Desk(after=first)
    late: list[tuple[int, int, int]] = []
    second.restores = lambda *where: late.append(where)
    second.turn()
    second.session.release("the producer was rebuilt")
    second.restores = None
    second.restore(*late[0])
    assert phase(second) is Phase.CLAIMING
    second.turn(0.2)

    assert phase(second) is Phase.SUSPECT
    assert second.session.counts.restored == 1


def test_a_rank_that_was_claimed_over_while_restoring_writes_nothing_more() -> None:
    engine = Engine()
    first = Desk().follow(engine)
    second = Desk(after=first)
    late: list[tuple[int, int, int]] = []
    second.restores = lambda *where: late.append(where)
    second.turn()
    second.session.superseded(99)
    owner, *_ = late[0]
    second.session.unrestorable(owner, "late")
    before = second.reader.offset
    second.wait(3.0)

    assert (second.session.phase, second.reader.offset) == (Phase.CLOSED, before)


def test_a_higher_owner_that_fenced_before_ends_the_session() -> None:
    """Claims 1, 2; Fence 2, Fence 1: the lower owner reads of the higher one and writes nothing, least of all as it."""
    engine = Engine()
    first = Desk().follow(engine)
    second = Desk(after=first)
    late: list[tuple[int, int, int]] = []
    second.restores = lambda *where: late.append(where)
    second.turn()
    owner, start, end = late[0]
    state, ledger = recount(second.reader.log, start, end)
    accept(state, "*", Fence(SCHEMA, owner + 1, "b", "0", "start"), end - 1)
    before = second.reader.offset
    second.session.restored(owner, state, ledger)
    second.session.checkpoint()
    second.wait(3.0)

    assert (second.session.phase, second.session.foreign, second.reader.offset) == (Phase.CLOSED, owner + 1, before)


def test_the_same_process_resumes_a_restored_rank_without_replay() -> None:
    """Opened by p0 0 1 | bridge 2, whose own connection reads p0: Resumed, 2 live. A hole would be a Gap."""
    engine = Engine()
    options: dict[str, Any] = {"replay": False, "process": True}
    first = Desk(**options)
    first.turn()
    first.session.connected()
    first.turn()
    first.session.identified("p0")
    for word in ("+a", "+b"):
        first.session.live(*engine.step(word))
        first.turn()
    second = Desk(after=first, **options)
    second.turn()
    second.session.connected()
    second.turn()
    second.session.identified("p0")
    second.session.live(*engine.step("+c"))
    second.turn()

    assert [resumed.how for resumed in second.reader.of(Resumed)] == ["process"]
    assert (second.reader.status, second.reader.blocks) == ("exact", {"a", "b", "c"})
    engine.step("+d")
    second.session.live(*engine.step("+e"))
    second.turn()
    assert second.reader.of(Gap)


def test_without_replay_and_process_a_restored_rank_is_a_new_life() -> None:
    engine = Engine()
    first = Desk(replay=False)
    first.turn()
    first.session.connected()
    first.session.live(*engine.step("+a"))
    first.turn()
    second = Desk(after=first, replay=False)
    second.turn()
    second.session.connected()
    second.session.live(*engine.step("+b"))
    second.turn()

    assert second.reader.of(Resumed) == []
    assert (second.reader.of(Opened)[-1].partial, second.reader.status) == (True, "at_least")


# -- checkpoints and pointers -----------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_between_batches_and_pointed_at_once_it_is_complete() -> None:
    """Parts are consecutive; a batch that waits is applied after the last of them."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a", "+b")
    since = desk.reader.offset
    desk.session.checkpoint()
    desk.session.live(*engine.step("+c"))
    desk.turn()
    pointer = desk.replicas[-1]

    assert desk.reader.kinds(since) == ["Checkpoint", "Checkpoint", "Checkpoint", "Events"]
    assert [(c.part, c.last) for c in desk.reader.of(Checkpoint)] == [(0, False), (1, False), (2, True)]
    assert pointer == Pointer(0, desk.session.owner, 0, since)
    assert Forget(desk.session.owner) in desk.commands
    assert desk.reader.status == "exact"


def test_a_pointer_waits_for_the_last_part() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a")
    held: list[Any] = []
    desk.hold = lambda record: isinstance(record, Checkpoint) and not held.append(record)  # type: ignore[func-returns-value]
    before = len(desk.replicas)
    desk.session.checkpoint()
    desk.turn()
    assert len(held) == 2
    desk.session.acknowledged(held[0], 40)
    desk.turn()
    assert len(desk.replicas) == before
    desk.session.acknowledged(held[1], 41)
    desk.turn()

    assert desk.replicas[-1].offset == 40


def test_anything_else_that_has_to_be_said_ends_a_checkpoint() -> None:
    """Part 0 | disconnect -> Suspended: no further part, no pointer; asked for again, it is whole."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a", "+b")
    since, before = desk.reader.offset, len(desk.replicas)
    desk.session.checkpoint()
    desk.turn(batches_max=1)
    desk.session.disconnected()
    desk.turn()
    assert desk.reader.kinds(since) == ["Checkpoint", "Suspended"]
    assert len(desk.replicas) == before
    desk.session.checkpoint()
    desk.turn()

    assert desk.reader.kinds(since + 2) == ["Checkpoint"] * 3
    assert all(checkpoint.suspended for checkpoint in desk.reader.of(Checkpoint)[1:])
    assert desk.replicas[-1].offset == since + 2


def test_a_rank_is_restored_from_its_checkpoint_and_what_follows() -> None:
    desk, engine = Desk(), Engine(buffer_steps=2)
    desk.follow(engine).sew(engine, "+a", "+b")
    desk.session.checkpoint()
    desk.turn()
    for word in ("+c", "-a", "+c"):
        desk.session.live(*engine.step(word))
        desk.turn()
    at = desk.reader.log.index(("*", desk.reader.of(Checkpoint)[0]))
    desk.reader.log[:at] = [("*", None)] * at  # retention
    second = Desk(after=desk)
    second.turn()
    second.session.connected()
    second.turn()
    second.serve(engine)
    second.turn()

    assert (second.reader.status, second.reader.blocks) == ("exact", {"b", "c"})
    assert second.session.life == desk.session.life


def test_a_suspended_rank_is_checkpointed_and_stays_suspended() -> None:
    engine = Engine()
    _, second = taken_over(engine, "+a")
    second.session.checkpoint()
    second.turn()
    third = Desk(after=second)
    third.turn()
    third.session.connected()
    third.turn()
    third.serve(engine)
    third.turn()

    assert [c.suspended for c in third.reader.of(Checkpoint)] == [True, True]
    assert (third.reader.status, third.reader.blocks) == ("exact", {"a"})
    assert third.reader.of(Suspended) == []


def test_a_rank_without_a_life_has_no_checkpoint() -> None:
    desk = Desk()
    desk.turn()
    desk.session.checkpoint()
    desk.turn()

    assert desk.reader.of(Checkpoint) == []
    assert not desk.session.checkpointing


def test_a_rank_that_readers_have_given_up_has_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of more records than a unit may have unloads the rank for everybody, its bridge included."""
    monkeypatch.setattr("kvledger_wire.accept.UNIT_RECORDS_MAX", 2)
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a", "+b", "+c", "+d")
    desk.session.checkpoint()
    desk.turn()

    assert desk.reader.status == "unknown"
    assert desk.reader.of(Checkpoint) == []


def test_a_checkpoint_that_was_asked_for_is_not_waited_for_once_the_rank_is_lost() -> None:
    """One rank at a time writes one: a rank that never will must not keep the others from theirs."""
    desk, engine = Desk(), Engine()
    desk.follow(engine).sew(engine, "+a", "+b")
    session = desk.session
    session.checkpoint()
    desk.turn(batches_max=1)
    seen = [session.checkpointing]
    session.superseded(99)
    seen.append(session.checkpointing)
    session.checkpoint()
    seen.append(session.checkpointing)

    assert seen == [True, False, False]


def test_a_bridge_claims_again_where_the_higher_owner_fell_silent() -> None:
    engine = Engine()
    desk = Desk().follow(engine).sew(engine, "+a")
    desk.replicas.append(Claim(0, -1, "other", ""))
    desk.session.superseded(len(desk.replicas) - 1)
    desk.turn()
    assert phase(desk) is Phase.CLOSED
    desk.session.lapsed("owner 3 is silent")
    desk.turn()
    assert desk.did(OpenData) == 1
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.of(Fence)[-1].why == "owner 3 is silent"
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a"})
    desk.session.lapsed("not closed")
    assert phase(desk) is Phase.FOLLOWING


def test_a_command_for_the_log_is_taken_back_with_its_owner() -> None:
    engine = Engine()
    first = Desk().follow(engine)
    second = Desk(after=first)
    second.hold = lambda record: isinstance(record, Fence)
    second.turn()
    second.session.acknowledged(second.reader.of(Fence)[-1], second.reader.offset - 1)
    second.session.release("the producer was rebuilt")

    assert not any(isinstance(each, Restore) for each in second.session.step(0.0, batches_max=1))


def test_a_pointer_before_the_claim_is_no_move() -> None:
    desk = Desk()
    desk.session.pointed(None)
    assert desk.session.phase is Phase.CLAIMING
    with pytest.raises(Bug):
        desk.session._unrestored()
