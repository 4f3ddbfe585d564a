"""What cannot be had or cannot be read: holes, poison, policies, and reasons to doubt."""

from __future__ import annotations

from typing import Any

import pytest
from rankworld import KEEP, Batch, Counting, DeadLetter, Desk, Engine, Note, payload

from kvledger_bridge.commands import Limits
from kvledger_bridge.continuity import Phase
from kvledger_bridge.lifelog import digest_of
from kvledger_bridge.pace import at_once
from kvledger_wire.records import Events, Gap, Heartbeat, Opened


def hopeless(desk: Desk, engine: Engine, start: int, missing: int) -> None:
    """Answer every request without ``missing`` until the session stops asking for it."""
    for _ in range(Limits().hole_tries_max):
        while not desk.asked():
            desk.turn(0.05)
        assert desk.asked() == [start]
        desk.answer([m for m in engine.replay(start) if m[0] != missing])
        desk.turn()


def test_a_hole_that_replay_cannot_fill_is_a_gap_and_a_partial_life_beyond_it() -> None:
    """Live 0 1 X 3   replay(1) three times without 2 -> Gap 2..2, Opened(partial) AT 3, then 4 as usual."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    engine.step("+c")
    third = engine.step("+d")
    desk.session.live(*third)
    desk.turn()
    hopeless(desk, engine, 1, 2)
    desk.session.live(*engine.step("+e"))
    desk.turn()

    gap, opened = desk.reader.of(Gap)[0], desk.reader.of(Opened)[1]
    assert (gap.first, gap.last, gap.policy) == (2, 2, "invalidate")
    assert (opened.seq, opened.digest, opened.partial) == (3, digest_of(third[1]), True)
    assert (opened.life, gap.life) == ((0, 2), (0, 1))
    assert desk.reader.kinds().index("Gap") + 1 == desk.reader.kinds().index("Opened", 3)
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"e"})
    assert desk.session.counts.lost == 1


def test_a_hole_inside_every_answer_is_a_gap_too() -> None:
    """Nothing live; 2 was never encoded: replay(1) -> 1 3 4, three times. Opened(partial) AT 3, then 4."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    for word in ("+c", "+d", "+e"):
        engine.step(word)
    desk.turn(1.1)
    hopeless(desk, engine, 1, 2)
    assert desk.asked() == [3]
    desk.serve(engine)
    desk.turn()

    assert (desk.reader.of(Gap)[0].first, desk.reader.of(Gap)[0].last) == (2, 2)
    assert (desk.reader.state.seq, desk.reader.blocks) == (4, {"e"})


def test_first_contact_with_a_hole_in_the_buffer_ends_beyond_it_and_does_not_loop() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    engine.buffer.append((2, payload("+c", tag=2)))
    engine.next = 3
    desk.turn()
    desk.session.connected()
    for _ in range(20):
        desk.serve(engine)
        desk.turn(0.1)

    assert desk.reader.kinds()[:5] == ["Fence", "Opened", "Events", "Gap", "Opened"]
    assert set(desk.reader.kinds()[5:]) == {"Heartbeat"}
    assert desk.reader.status == "at_least"


def test_slow_progress_is_progress() -> None:
    """A ROUTER that drops all but two batches per answer: no Gap, every batch in the end."""
    desk, engine = Desk(), Engine()
    for i in range(12):
        engine.step(f"+{i}")
    desk.turn()
    desk.session.connected()
    for _ in range(12):
        starts = desk.asked()
        if starts:
            desk.answer(engine.replay(starts[0])[:2], end=False)
        desk.turn()
        if not desk.asked():
            desk.wait(2.5)

    assert desk.reader.of(Gap) == []
    assert len(desk.reader.blocks) == 12


def test_under_keep_a_hole_makes_the_rank_uncertain_and_the_life_goes_on() -> None:
    desk, engine = Desk(entry=KEEP), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    engine.step("+c")
    desk.session.live(*engine.step("+d"))
    desk.turn()
    hopeless(desk, engine, 1, 2)

    assert len(desk.reader.of(Opened)) == 1
    assert desk.reader.of(Gap)[0].policy == "keep"
    assert (desk.reader.status, desk.reader.blocks, desk.reader.state.seq) == ("uncertain", {"a", "b", "d"}, 3)


def test_a_clear_ends_what_was_partial_or_uncertain_by_loss() -> None:
    for entry in (None, KEEP):
        desk, engine = Desk(entry=entry) if entry else Desk(), Engine()
        engine.step("+a")
        desk.follow(engine).sew(engine, "+b")
        desk.session.live(*engine.step(raw=b"?"))
        desk.turn()
        assert desk.reader.status in {"at_least", "uncertain"}
        desk.session.live(*engine.step("!", "+z"))
        desk.turn()

        assert (desk.reader.status, desk.reader.blocks) == ("exact", {"z"})
        assert desk.session._log.state.partial is False


def test_an_undecodable_batch_is_a_dead_letter_a_gap_and_a_partial_life_at_it() -> None:
    """Live 1 ? 3   same engine, no new socket: Opened AT 2, whose digest is a proof; 3 is applied at once."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    bad = engine.step(raw=b"?? secret bytes")
    desk.session.live(*bad)
    desk.session.live(*engine.step("+c"))
    desk.turn()

    letters = [c for c in desk.commands if isinstance(c, DeadLetter)]
    assert [(d.seq, d.reason, d.digest) for d in letters] == [(2, "not an engine batch", digest_of(bad[1]))]
    assert desk.reader.kinds()[-3:] == ["Gap", "Opened", "Events"]
    assert (desk.reader.of(Opened)[1].seq, desk.reader.of(Opened)[1].digest) == (2, digest_of(bad[1]))
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"c"})
    desk.turn(1.1)
    assert desk.asked() == [3]


def test_an_undecodable_batch_under_keep_is_covered_by_a_heartbeat() -> None:
    desk, engine = Desk(entry=KEEP), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.live(*engine.step(raw=b"?"))
    desk.turn()

    assert desk.reader.kinds()[-2:] == ["Gap", "Heartbeat"]
    assert (desk.reader.status, desk.reader.blocks, desk.reader.state.seq) == ("uncertain", {"a", "b"}, 2)


@pytest.mark.parametrize(("entry", "blocks"), [(None, set()), (KEEP, {"a", "b", "c"})])
def test_a_batch_with_an_unreadable_event_follows_the_policy(entry: Any, blocks: set[str]) -> None:
    desk, engine = Desk(entry=entry) if entry else Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.live(*engine.step("+c", "?"))
    desk.turn()

    gap = desk.reader.of(Gap)[0]
    assert (gap.first, gap.last, gap.cause) == (2, 2, "event 1: unreadable")
    assert desk.reader.blocks == blocks
    assert desk.reader.state.seq == 2
    assert desk.did(DeadLetter) == 1
    assert desk.session.counts.failed_events == 1


def test_bad_batches_during_first_contact_end_in_the_life_after_the_last_of_them() -> None:
    desk, engine = Desk(), Engine()
    for word in ("+a", "?", "+b", "?", "+c"):
        engine.step(word)
    desk.follow(engine)

    assert [o.seq for o in desk.reader.of(Opened)] == [-1, 1, 3]
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"c"})


@pytest.mark.parametrize("entry", [None, KEEP])
def test_a_defect_of_the_ledger_costs_one_life_and_tells_no_value(entry: Any) -> None:
    desk, engine = Desk(entry=entry) if entry else Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.live(*engine.step("+c", "x"))
    desk.turn()

    notes = [c for c in desk.commands if isinstance(c, Note)]
    assert notes == [Note("ledger_failed", "ValueError")]
    assert desk.reader.of(Gap)[0].cause == "the ledger failed: ValueError"
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", set())
    assert desk.session.phase is Phase.FOLLOWING


def test_a_rank_that_contradicts_the_configured_one_is_counted_and_flagged_once_per_life() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    for word in ("+c", "+d"):
        desk.session.live(*engine.step(raw=payload(word, rank=3)))
    desk.session.live(*engine.step(raw=payload("+e", rank=None)))
    desk.turn()

    reasons = [reason for record in desk.reader.of(Events) for reason in record.uncertain]
    assert len(reasons) == 1
    assert "rank 3" in reasons[0]
    assert "says 0" in reasons[0]
    assert desk.session.counts.contradictions == 2
    assert desk.reader.status == "uncertain"


def test_reasons_without_a_piece_stand_on_the_heartbeat() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.live(*engine.step("u:BlockInactive"))
    desk.turn()

    assert desk.reader.of(Heartbeat)[-1].uncertain == ("u:BlockInactive",)
    assert desk.session.counts.unknown_events == 1
    assert [c.reason for c in desk.commands if isinstance(c, DeadLetter)] == ["unknown event tag u:BlockInactive"]
    assert desk.reader.status == "uncertain"


def test_reasons_are_given_again_in_a_new_life() -> None:
    desk, engine = Desk(rank=1), Engine()
    engine.step("+a")
    desk.follow(engine)
    engine.restart()
    engine.step("+b")
    desk.session.disconnected()
    for _ in range(3):
        if not desk.session.attached:
            desk.session.connected()
        desk.turn(0.1)
        desk.serve(engine)
    desk.turn()

    assert len(desk.reader.of(Opened)) == 2
    assert desk.reader.status == "uncertain"


def test_a_replay_that_never_finishes_suspends_instead_of_claiming() -> None:
    """Each answer repeats the last covered batch and falls silent: alive, but completeness is not known."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine)
    desk.turn(1.1)
    while desk.reader.status == "exact" and desk.now < 60:
        if desk.asked():
            desk.answer(engine.replay(0)[:1], end=False)
        desk.turn(0.25)

    assert desk.reader.status == "suspended"
    assert desk.reader.kinds().count("Heartbeat") == 0


def test_live_batches_that_replay_never_has_part_the_sockets_instead_of_a_gap() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine)
    desk.session.live(7, payload("+z", tag=7))
    desk.turn()
    for _ in range(Limits().hole_tries_max):
        desk.serve(engine)
        desk.turn()
        desk.turn(0.5)

    assert desk.session.counts.seam_mismatches == 1
    assert desk.reader.of(Gap) == []
    assert desk.reader.blocks == {"a"}


def test_the_made_up_ledger_counts_copies() -> None:
    """The fake shares its rule with the real one: 0 to 1 and 1 to 0 are effective."""
    ledger = Counting(KEEP)

    changes = [at_once(ledger.work(i, Batch((w,), 0), 0)) for i, w in enumerate(["+a", "+a", "-a", "-a", "-a"])]
    bits = [change.unplaced_effective for pieces in changes for piece in pieces for change in piece.changes]

    assert bits == [b"\1", b"\0", b"\0", b"\1"]
