"""A unit that is larger than a step: the fold makes it piece by piece, and the index ends as if it were one."""

from __future__ import annotations

import random

import msgspec
import pytest
from foldlog import KEYS, TOPIC, Log, nonces, opened_rank, put_run, state_at, steps_of
from hypothesis import given
from hypothesis import strategies as st
from ranklog import RankLog, prompt, runs

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import UNDERWAY_MS, Bind, Drop, Step
from kvledger_streams import fold as folding
from kvledger_streams.fold import PIECE_OPS_MAX, UNIT_OPS_MAX, fold, resume
from kvledger_streams.ops import ops_of
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ops a step, two a piece."""
    monkeypatch.setattr(folding, "OPS_PER_STEP_MAX", 4)
    monkeypatch.setattr(folding, "PIECE_OPS_MAX", 2)


def large_batch(rank: RankLog) -> None:
    """A batch of nine ops in three records."""
    rank.batch(*((group, "gpu", "store", KEYS, 0, 40) for group in range(3)))


@pytest.mark.usefixtures("small")
def test_a_unit_larger_than_a_step_comes_in_pieces() -> None:
    rank, log = opened_rank()
    rank.beat()
    large_batch(rank)
    rank.beat()
    tally = Tally()
    before, *pieces, after = steps_of(log, tally=tally)
    units = [step.units[0] for step in pieces]

    assert [len(unit.ops) for unit in units] == [2, 2, 2, 2, 1]
    assert [step.piece and step.piece[1:] for step in pieces] == [(n, n == 4) for n in range(5)]
    assert len({step.piece.token for step in pieces if step.piece}) == 1
    assert len({step.nonce for step in pieces}) == 5
    assert {(unit.before.n, unit.after.n) for unit in units} == {(1, 4)}
    assert [bool(unit.state) for unit in units] == [False] * 4 + [True]
    assert [unit.card is not None for unit in units] == [False] * 4 + [True], "groups were heard"
    assert [(unit.now.underway, unit.now.unproven_ms, unit.now.seq) for unit in units] == [
        *[(True, UNDERWAY_MS, -1)] * 4,
        (False, 0, 0),
    ]
    assert (before.piece, after.piece, after.units[0].after.n) == (None, None, 5)
    assert (tally.units, tally.ops) == (3, 10)


@pytest.mark.usefixtures("small")
def test_progress_moves_behind_the_last_piece_only() -> None:
    rank, log = opened_rank()
    large_batch(rank)
    first, *pieces, last, end = steps_of(log)

    assert (first.restart, first.read) == (1, 3)
    assert {(step.restart_before, step.restart, step.read, step.at_end) for step in pieces} == {(1, 1, 1, False)}
    assert (last.restart_before, last.restart, last.read) == (1, 4, 4)
    assert (end.units, end.restart_before, end.at_end) == ((), 4, True)


@pytest.mark.usefixtures("small")
def test_ops_are_made_when_their_piece_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece ahead, to know the last one; else a large unit would be one long stretch of work."""
    made = 0

    def counted(effect: object) -> object:
        nonlocal made
        for op in ops_of(effect):  # type: ignore[arg-type]  # passed on
            made += 1
            yield op

    monkeypatch.setattr(folding, "ops_of", counted)
    rank, log = opened_rank()
    large_batch(rank)
    records = [(offset, offset, *row, None) for offset, row in enumerate(log)]
    steps = fold(state_at(), records, end=len(log), nonce=nonces(), tally=Tally())
    told = [made for _ in steps]

    assert told == [1, 5, 7, 9, 10, 10, 10]


@pytest.mark.usefixtures("small")
def test_a_change_that_cannot_be_made_unloads_the_rank_also_behind_some_pieces() -> None:
    rank, log = opened_rank()
    (good, *_) = runs(KEYS, 0, 16)
    bad = msgspec.structs.replace(good, row=b"short")
    rank.events(wire.Change(wire.STORED, 0, 1, 0.0, (*[good] * 6, bad)))
    put_run(rank, good)
    tally = Tally()
    steps = steps_of(log, tally=tally)
    pieces = [step for step in steps if step.piece]

    assert [len(step.units[0].ops) for step in pieces] == [2, 2, 2, 1]
    last = pieces[-1].units[0]
    assert (last.ops, last.card and last.card.loaded) == ((Drop(),), False)
    assert [note.kind for note in tally.notes] == ["opened", "unloaded"]
    assert steps[-1].units == (), "what follows is not applied to it"


@pytest.mark.usefixtures("small")
def test_a_unit_larger_than_the_index_should_bear_is_a_hole_before_its_first_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folding, "UNIT_OPS_MAX", 8)
    rank, log = opened_rank()
    large_batch(rank)
    tally = Tally()
    steps = steps_of(log, tally=tally)

    assert [(step.piece, step.units[0].ops) for step in steps if step.units] == [(None, (Bind(),)), (None, (Drop(),))]
    assert tally.notes[-1].why == "unit of 9 ops > 8"


@pytest.mark.usefixtures("small")
def test_a_tail_that_another_record_ends_goes_into_a_step_of_its_own() -> None:
    """No bridge ends a unit so, and a reader takes it all the same."""
    rank, log = opened_rank()
    other = RankLog(log, "pod-b")
    for _ in range(3):
        rank.events(wire.Change(wire.STORED, 0, 1, 0.0, runs(KEYS, 0, 40)), end=False)
    other.open()
    rank.beat()
    steps = steps_of(log)

    assert [len(step.units) for step in steps if step.piece] == [1] * 5
    assert [unit.rank for step in steps if not step.piece for unit in step.units] == ["pod-a/0", "pod-b/0"]


def test_a_batch_that_removes_200_000_blocks_one_by_one_is_taken() -> None:
    """The most that one event of a full cache may say; ordinary limits."""
    rank, log = opened_rank()
    names = b"".join((j + 1).to_bytes(8, "big") for j in range(200_000))
    rank.events(wire.Change(wire.REMOVED, 0, 1, 0.0, unplaced=names))
    records = [(offset, offset, *row, None) for offset, row in enumerate(log)]
    sizes = [
        len(step.units[0].ops)
        for step in fold(state_at(), records, end=len(log), nonce=nonces(), tally=Tally())
        if step.units
    ]

    assert sum(sizes) == 200_001 < UNIT_OPS_MAX
    assert max(sizes) == PIECE_OPS_MAX


async def _held(index: MemoryIndex) -> set[tuple[str, int | None, str, int]]:
    return {(claim.rank, claim.group, claim.medium, claim.key) async for claim in index.dump()}


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
async def test_workers_that_die_between_pieces_change_nothing(seed: int, ops: int, piece: int) -> None:
    """Each goes on from what is stored; some wake up later and send what they had left."""
    rnd = random.Random(seed)
    log: Log = []
    prompts = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9)]
    writers = [RankLog(log, f"pod-{number}") for number in range(2)]
    for writer in writers:
        writer.open()
    for _ in range(25):
        rnd.choice(writers).act(rnd, prompts)
    index, nonce = MemoryIndex(), nonces()
    await index.seek(0, TOPIC, 0, len(log), drop=True)
    late: list[Step] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "OPS_PER_STEP_MAX", ops)
        patch.setattr(folding, "PIECE_OPS_MAX", piece)
        for left in range(8, -1, -1):
            stored = await index.load(0)
            assert stored.progress is not None
            restart = stored.progress.restart
            await index.seek(0, TOPIC, restart, len(log), drop=False)
            state = resume(0, partitions=1, topic_id=TOPIC, restart=restart, broker_ms=0, stored=stored.ranks)
            records = [(offset, offset, *log[offset], None) for offset in range(restart, len(log))]
            steps = list(fold(state, records, end=len(log), nonce=nonce, tally=Tally()))
            count = rnd.randint(0, len(steps)) if left else len(steps)
            for step in steps[:count]:
                if left and late and rnd.random() < 0.2:
                    await index.apply(late.pop(0))  # refused, or the log's own next step
                if (await index.apply(step)).verdict == "refused":
                    assert left
                    break
            late = steps[count:] or late

    assert await _held(index) == {(writer.id, *claim) for writer in writers for claim in writer.held}


def test_a_new_life_in_pieces_begins_with_its_slots() -> None:
    """A checkpoint's part: nothing is added to the slots of before."""
    rank, log = opened_rank()
    names = b"".join((j + 1).to_bytes(8, "big") for j in range(2_000))
    rank.beat()
    rank.part(0, last=True, lanes=(wire.Held(0, wire.Change(wire.STORED, 0, 1, 0.0, unplaced=names)),))
    first, *_ = steps_of(log[2:], start=2)

    assert first.piece is not None
    assert first.units[0].ops[0] == Bind()
