"""Order and continuity with a replay endpoint. In timelines | is a disconnect, X a loss, ? an unanswered request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rankworld import AskReplay, Desk, DropReplay, Engine, Note, OpenData, payload

from kvledger_bridge.commands import Limits
from kvledger_bridge.continuity import Phase
from kvledger_bridge.engine import Session
from kvledger_wire.records import LIVE, REPLAYED, Events, Heartbeat, Opened, Resumed, Suspended


def origins(desk: Desk) -> list[tuple[int, int]]:
    return [(c.seq, c.origin) for record in desk.reader.of(Events) for c in record.changes]


def test_first_contact_reads_the_whole_buffer() -> None:
    """Engine 0 1 2   bridge: subscribe, replay(0) -> Opened, 0 1 2."""
    desk, engine = Desk(), Engine()
    for word in ("+a", "+b", "-a"):
        engine.step(word)
    desk.follow(engine)

    assert desk.reader.kinds() == ["Fence", "Opened", "Events", "Events", "Events"]
    assert origins(desk) == [(0, REPLAYED), (1, REPLAYED), (2, REPLAYED)]
    assert (desk.reader.status, desk.reader.blocks, desk.session.last) == ("exact", {"b"}, 2)


def test_an_engine_that_has_published_nothing_opens_empty() -> None:
    desk = Desk().follow(Engine())

    opened = desk.reader.of(Opened)[0]
    assert (opened.seq, opened.digest, opened.partial) == (-1, b"", False)
    assert desk.reader.status == "exact"


def test_a_buffer_that_begins_later_opens_a_partial_life_at_its_oldest_batch() -> None:
    """Engine (0 1) 2 3   Opened(partial) AT 2, with its digest and without its changes."""
    desk, engine = Desk(), Engine(buffer_steps=2)
    for word in ("+a", "+b", "+c", "+d"):
        engine.step(word)
    desk.follow(engine)

    opened = desk.reader.of(Opened)[0]
    assert (opened.seq, opened.partial) == (2, True)
    assert engine.truth[opened.digest] == {"a", "b", "c"}
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"d"})


def test_live_batches_wait_until_one_is_byte_equal_to_a_replayed_one() -> None:
    """Live 3 arrives unproven -> replay(2) -> 2 3 -> 3 == 3: the seam is closed, 4 is applied live."""
    desk, engine = Desk(), Engine()
    for word in ("+a", "+b", "+c"):
        engine.step(word)
    desk.follow(engine)
    desk.session.live(*engine.step("+d"))
    desk.turn()
    assert desk.asked() == [2]
    assert desk.reader.blocks == {"a", "b", "c"}
    desk.serve(engine)
    desk.turn()
    desk.session.live(*engine.step("+e"))
    desk.turn()

    assert desk.asked() == []
    assert origins(desk)[3:] == [(3, REPLAYED), (4, LIVE)]
    assert desk.reader.blocks == {"a", "b", "c", "d", "e"}


def test_a_live_batch_that_differs_from_the_replayed_one_parts_the_sockets() -> None:
    """SUB shows life 1, ROUTER life 0 (or the other way round): nothing of SUB counts, both are opened anew."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine)
    desk.session.live(1, payload("+z", tag=99))
    desk.turn()
    engine.step("+b")
    desk.serve(engine)
    desk.turn()

    assert (desk.did(OpenData), desk.did(Note)) == (1, 1)
    assert desk.session.phase is Phase.SUSPECT
    assert desk.reader.blocks == {"a", "b"}
    assert desk.reader.status == "suspended"
    desk.session.connected()
    desk.turn(0.2)
    desk.serve(engine)
    desk.turn()
    assert desk.reader.status == "exact"


def test_a_session_that_trusts_both_sockets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary of the seam."""
    monkeypatch.setattr(Session, "_sew", lambda _session: True)

    with pytest.raises(AssertionError):
        test_a_live_batch_that_differs_from_the_replayed_one_parts_the_sockets()


def test_a_restart_that_looks_contiguous_is_noticed() -> None:
    """Live ...1 | 2   where 2 is of a new engine: the disconnect is drained before anything is applied.

    Without the rule, batch 2 of the new life would be applied on top of batches 0 and 1 of the old one.
    """
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    engine.restart()
    for word in ("+x", "+y"):
        engine.step(word)
    desk.session.live(*engine.step("+z"))
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    assert desk.reader.status == "suspended"
    assert desk.asked() == [1]
    desk.serve(engine)
    desk.turn()
    assert (desk.did(OpenData), desk.asked()) == (1, [0])
    desk.session.connected()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.kinds()[4:] == ["Suspended", "Opened", "Events", "Events", "Events"]
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"x", "y", "z"})


def test_a_disconnect_of_a_living_engine_is_suspended_and_resumed() -> None:
    """Live 0 1 | 2   replay(1) begins with the same 1 -> Resumed, then 2 from the same answer."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.disconnected()
    desk.turn()
    assert desk.reader.status == "suspended"
    desk.session.connected()
    desk.turn()
    engine.step("+c")
    desk.serve(engine)
    desk.turn()

    assert desk.reader.kinds()[4:] == ["Suspended", "Resumed", "Events"]
    assert desk.reader.of(Resumed)[0].how == "replay"
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a", "b", "c"})


def test_nothing_is_proven_before_the_live_socket_is_back() -> None:
    """Live 0 1 | replay answers, SUB is away: a restart now would show only with the next probe, so it is not asked.

    The engine restarts before SUB is back; nothing was called exact after the disconnect.
    """
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.disconnected()
    asked = [command for command in desk.wait(5.0) if isinstance(command, AskReplay)]
    assert asked == []
    assert desk.reader.status == "suspended"
    engine.restart()
    engine.step("+x")
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    desk.turn()
    desk.session.connected()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.of(Resumed) == []
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"x"})
    assert desk.reader.of(Opened)[-1].why.endswith("the engine restarted, or no longer remembers it")


def test_a_life_that_opens_before_the_live_socket_is_there_is_suspended_until_then() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    engine.step("+b")
    desk.turn()
    desk.serve(engine)
    desk.turn()
    assert (desk.reader.status, desk.reader.blocks) == ("suspended", {"a", "b"})
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.kinds() == ["Fence", "Opened", "Suspended", "Events", "Events", "Resumed"]
    assert desk.reader.status == "exact"


def test_a_disconnect_throws_an_answer_under_way_away() -> None:
    """replay(1) was answered by the old process; the disconnect comes before its frames are looked at."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.turn(1.5)
    assert desk.serve(engine) == 1
    desk.session.disconnected()
    desk.turn()

    assert desk.did(DropReplay) == 1
    assert desk.asked() == []
    desk.session.connected()
    desk.turn()
    assert desk.asked() == [1]
    assert desk.reader.kinds()[-1] == "Suspended"


def test_frames_without_a_request_are_stale_and_dropped() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine)
    desk.answer([(0, payload("+z")), (1, payload("+y"))])
    desk.turn()

    assert desk.reader.blocks == {"a"}
    assert desk.session.counts.malformed == 3


def test_a_disconnect_undoes_the_seam() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.disconnected()
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    desk.turn()
    desk.session.live(*engine.step("+c"))
    desk.turn()

    assert desk.asked() == [1]
    assert desk.reader.blocks == {"a", "b"}


def test_a_second_publisher_on_one_connection_counts_as_a_disconnect() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.connected()
    desk.turn()

    assert desk.reader.kinds()[-1] == "Suspended"


def test_a_hole_is_filled_by_one_replay_while_live_batches_wait() -> None:
    """Live 0 1 X 3 4 5   replay(1) -> 1 2 3 4 5; 3 4 5 are not applied twice."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    lost = engine.step("+c")
    asked: list[int] = []
    for word in ("+d", "-a", "+e"):
        desk.session.live(*engine.step(word))
        desk.turn()
        asked += desk.asked()
    waiting = set(desk.reader.blocks)
    desk.answer(engine.replay(1))
    desk.turn()

    assert lost[0] == 2
    assert asked == [1]
    assert waiting == {"a", "b"}
    assert [seq for seq, _ in origins(desk)] == [0, 1, 2, 3, 4, 5]
    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"b", "c", "d", "e"})


def test_a_replayed_store_after_its_live_removal_stays_dead() -> None:
    """5 stores A (lost), 6 removes A (live): the order is by sequence, so A is absent at the end."""
    desk, engine = Desk(), Engine()
    engine.step("+z")
    desk.follow(engine).sew(engine, "+y")
    engine.step("+A")
    desk.session.live(*engine.step("-A"))
    desk.turn()
    desk.turn(1.5)
    desk.answer(engine.replay(1))
    desk.turn()

    assert desk.reader.blocks == {"z", "y"}


def test_every_sequence_of_an_answer_is_checked() -> None:
    """Answer 1 2 X 4 END: END proves nothing; 3 is asked for from 2 on."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    for word in ("+c", "+d", "+e"):
        engine.step(word)
    desk.turn(1.5)
    desk.answer([m for m in engine.replay(1) if m[0] != 3])
    desk.turn()
    assert desk.reader.blocks == {"a", "b", "c"}
    assert desk.asked() == [2]
    desk.serve(engine)
    desk.turn()

    assert desk.reader.blocks == {"a", "b", "c", "d", "e"}
    assert desk.reader.status == "exact"


def test_an_answer_without_an_end_is_taken_as_far_as_it_goes() -> None:
    """Answer 1 2 and silence: 2 counts, and after the deadline a new socket asks from 2 on."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    for word in ("+c", "+d"):
        engine.step(word)
    desk.turn(1.5)
    desk.answer(engine.replay(1)[:2], end=False)
    desk.turn()
    assert desk.reader.blocks == {"a", "b", "c"}
    desk.wait(2.5)

    assert (desk.did(DropReplay), desk.asked()) == (1, [2])
    assert desk.session.phase is Phase.FOLLOWING


def test_a_quiet_rank_is_probed_and_a_lost_last_batch_shows() -> None:
    """Live 0 1 X and then nothing: replay(1) -> 1 2."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    engine.step("+c")
    desk.turn(0.9)
    early = desk.asked()
    desk.turn(0.2)
    assert (early, desk.asked()) == ([], [1])
    desk.serve(engine)
    desk.turn()

    assert desk.reader.blocks == {"a", "b", "c"}


def test_an_answered_probe_without_news_is_a_heartbeat() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine)
    for _ in range(3):
        desk.turn(1.1)
        desk.serve(engine)
        desk.turn()

    beats = desk.reader.of(Heartbeat)
    assert [b.n for b in beats] == [2, 3, 4]
    assert {(b.seq, engine.truth[b.digest]) for b in beats} == {(0, frozenset({"a"}))}


def test_a_busy_rank_is_not_probed_and_a_batch_without_changes_is_a_heartbeat() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    for _ in range(5):
        desk.session.live(*engine.step())
        desk.turn(0.6)
        assert desk.asked() == []

    assert desk.reader.kinds()[-5:] == ["Heartbeat"] * 5
    assert desk.reader.state.seq == 6


def test_live_batches_go_on_while_a_probe_is_under_way() -> None:
    """Probe replay(1) sent; live 2 is applied at once; the answer 1 2 proves and brings nothing twice."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.turn(1.1)
    assert desk.asked() == [1]
    desk.session.live(*engine.step("+c"))
    desk.turn()
    live = set(desk.reader.blocks)
    desk.answer(engine.replay(1))
    desk.turn()

    assert live == {"a", "b", "c"}
    assert [seq for seq, _ in origins(desk)] == [0, 1, 2]


def test_an_unanswered_probe_suspends_and_only_proof_ends_it() -> None:
    """Probe ? -> Suspended; live batches do not end it; replay(1) again -> Resumed."""
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.turn(1.1)
    while not desk.did(DropReplay):
        desk.turn(0.25)
    assert (desk.did(DropReplay), desk.reader.status) == (1, "suspended")
    desk.session.live(*engine.step("+c"))
    desk.turn()
    assert desk.reader.status == "suspended"
    desk.turn(0.2)
    assert desk.asked() == [1]
    desk.serve(engine)
    desk.turn()

    assert (desk.reader.status, desk.reader.blocks) == ("exact", {"a", "b", "c"})


def test_requests_that_nobody_answers_back_off() -> None:
    desk, engine = Desk(), Engine()
    desk.follow(engine)
    times = []
    for _ in range(400):
        desk.turn(0.05)
        times += [desk.now for _ in desk.asked()]
    gaps = [b - a - Limits().replay_seconds_max for a, b in pairwise(times)]

    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6] + [2.0] * (len(gaps) - 5), abs=0.11)
    assert len(gaps) > 5
    assert len(desk.reader.of(Suspended)) == 1


def test_a_bridge_that_stood_still_does_not_blame_the_engine() -> None:
    """The loop stalls 10 s after a request was sent: the answer is not late, nobody looked."""
    desk, engine = Desk(), Engine()
    desk.follow(engine)
    desk.turn(1.1)
    assert desk.asked() == [0]
    desk.turn(10.0)
    assert desk.reader.of(Suspended) == []
    desk.answer([])
    desk.turn()

    assert desk.reader.kinds()[-1] == "Heartbeat"


def test_a_lower_sequence_on_the_live_socket_is_an_overlap() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    twice = engine.step("+c")
    desk.session.live(*twice)
    desk.session.live(*twice)
    desk.turn()

    assert desk.session.counts.overlaps == 2  # one of them closed the seam
    assert desk.reader.blocks == {"a", "b", "c"}
    assert desk.reader.kinds()[-1] == "Events"


def test_a_repeated_sequence_with_other_bytes_parts_the_sockets() -> None:
    desk, engine = Desk(), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.live(1, payload("+z", tag=5))
    desk.turn()

    assert desk.session.counts.seam_mismatches == 1
    assert desk.reader.status == "suspended"


def test_a_batch_that_fell_out_of_the_buffer_proves_nothing() -> None:
    """Covered up to 1; the buffer now begins at 3: a new life, partial, AT 3."""
    desk, engine = Desk(), Engine(buffer_steps=2)
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    desk.session.disconnected()
    desk.session.connected()
    for word in ("+c", "+d", "+e"):
        engine.step(word)
    desk.turn()
    desk.serve(engine)
    desk.turn()
    desk.session.connected()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.kinds()[4:] == ["Suspended", "Opened", "Events"]
    assert desk.reader.of(Opened)[1].partial
    assert (desk.reader.status, desk.reader.blocks) == ("at_least", {"e"})


def test_only_as_many_batches_as_allowed_are_applied_in_a_step() -> None:
    desk, engine = Desk(), Engine()
    for i in range(10):
        engine.step(f"+{i}")
    desk.session.connected()
    desk.turn()
    desk.serve(engine)
    sizes = []
    while desk.session.ready:
        desk.turn(batches_max=3)
        sizes.append(len(desk.reader.blocks))

    assert sizes[:4] == [3, 6, 9, 10]


def test_a_whole_buffer_is_read_only_where_allowed() -> None:
    desk, engine = Desk(), Engine()
    desk.turn(may_load=False)
    desk.session.connected()
    assert desk.asked() == []
    desk.turn()
    desk.serve(engine)
    desk.turn()

    assert desk.reader.status == "exact"


def test_reading_stops_at_the_bounds() -> None:
    desk, engine = Desk(limits=Limits(live_batches_max=3, replay_bytes_max=100)), Engine()
    engine.step("+a")
    desk.follow(engine).sew(engine, "+b")
    engine.step("+lost")

    def wants() -> tuple[bool, bool]:
        return desk.session.wants_live, desk.session.wants_replay

    seen = [wants()]
    for _ in range(3):
        desk.session.live(*engine.step("+c"))
    seen.append(wants())
    desk.turn()
    desk.answer(engine.replay(1))
    seen.append(wants())
    desk.turn()

    assert [*seen, wants()] == [(True, True), (False, True), (False, False), (True, True)]
    assert desk.reader.blocks == {"a", "b", "lost", "c"}


def test_malformed_messages_are_counted_and_nothing_else() -> None:
    desk = Desk().follow(Engine())
    before = len(desk.reader.log)
    desk.session.malformed()
    desk.turn()

    assert desk.session.counts.malformed == 1
    assert len(desk.reader.log) == before
