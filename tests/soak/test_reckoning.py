"""Each check of the soak can fail: broken promises, late answers, differences at the end, losses without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from answers import GRACE_SECONDS, SLACK_SECONDS, Answer, Checker, Held
from cache import HASH_BLOCK
from fleet import PLAIN, Engine, draw_prompts
from verdict import Claim, Quiet, verdict

from kvledger_index.model import ModelEntry
from kvledger_wire.records import SCHEMA, Gap, Opened

PROMPTS = draw_prompts(1)
NUMBER = 0
WHOLE = (len(PROMPTS[NUMBER].tokens) - 1) // HASH_BLOCK * HASH_BLOCK
DEADLINE = 0.020
RESTARTED = 100.0
"""When the engine of these tests began its second life."""


@pytest.fixture
def engine() -> Engine:
    """First life: nothing as of batch 0, the whole prompt as of 1. Second life: nothing as of 0."""
    made = Engine("calm/0", PLAIN, PROMPTS, 1, replay=False, arrays=False, found=True)
    made._begin()
    made._publish([])
    made.life.cache.begin(1)
    made.life.cache.serve(PROMPTS[NUMBER].tokens, PROMPTS[NUMBER].names(made.life.scheme))
    made._publish(made.life.cache.end())
    made.life.started, made.life.ended = 0.0, RESTARTED
    made._begin()
    made._publish([])
    made.life.started = RESTARTED
    return made


def answer(*, at: float, seconds: float = 0.002, lag: float = 0.0, **held: Any) -> Answer:
    said: dict[str, Any] = {
        "replica": "calm",
        "rank": 0,
        "hit_tokens": 0,
        "status": "exact",
        "as_of": 0,
        "reason": "",
    } | held
    return Answer(at, seconds, DEADLINE, lag, "plain", NUMBER, True, "", (Held(**said),))


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        ({"at": 50, "as_of": 1, "hit_tokens": WHOLE}, False),
        ({"at": 50, "as_of": 0, "hit_tokens": 0}, False),
        ({"at": 50, "as_of": -1, "hit_tokens": 0}, False),
        ({"at": 50, "as_of": 1, "hit_tokens": WHOLE - HASH_BLOCK}, True),
        ({"at": 50, "as_of": 1, "hit_tokens": WHOLE - HASH_BLOCK, "status": "at_least"}, False),
        ({"at": 50, "as_of": 0, "hit_tokens": HASH_BLOCK, "status": "at_least"}, True),
        ({"at": 50, "as_of": 0, "hit_tokens": HASH_BLOCK, "status": "uncertain"}, False),
        ({"at": 50, "as_of": 2, "hit_tokens": 0}, True),
        ({"at": RESTARTED + GRACE_SECONDS - 1, "as_of": 1, "hit_tokens": WHOLE}, False),
        ({"at": RESTARTED + GRACE_SECONDS + 1, "as_of": 1, "hit_tokens": WHOLE}, True),
        ({"at": RESTARTED + GRACE_SECONDS + 1, "as_of": 0, "hit_tokens": 0}, False),
        ({"at": 50, "seconds": DEADLINE + SLACK_SECONDS + 0.001}, True),
        ({"at": 50, "seconds": DEADLINE + SLACK_SECONDS + 0.001, "lag": 0.002}, False),
    ],
)
def test_an_answer_that_breaks_its_promise_is_noticed(engine: Engine, asked: dict[str, Any], broken: bool) -> None:
    checker = Checker(Path("none"), {engine.name: engine}, PROMPTS)
    checker.take(answer(**asked))

    assert bool(checker.broken) is broken


def test_what_the_asker_writes_is_read_as_it_grows(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "asker.log"
    line = b'[50.0, 0.002, 0.02, 0.0, "plain", 0, true, "", [["calm", 0, %d, "exact", 1, ""]]]\n' % (WHOLE + HASH_BLOCK)
    checker = Checker(path, {engine.name: engine}, PROMPTS)
    path.write_bytes(line[:20])
    checker.poll()
    before = checker.questions
    path.write_bytes(line + b"a word\n")
    checker.poll()
    checker.poll()

    assert (before, checker.questions) == (0, 1)
    assert ["of prompt 0 as of 1" in checker.broken[0], "a word" in checker.broken[1]] == [True, True]
    assert len(checker.broken) == 2


def opened(seq: int, *, partial: bool) -> Opened:
    return Opened(SCHEMA, 1, (1, 1), 0, ModelEntry(model="m"), 16, seq, b"", partial=partial, why="test")


def gap(first: int, last: int) -> Gap:
    return Gap(SCHEMA, 1, (1, 1), 5, first, last, "test", "invalidate")


ALL: frozenset[Claim] = frozenset((0, "gpu", key) for key in range(4))
HASHES: frozenset[Claim] = frozenset((0, "gpu", 100 + key) for key in range(4))
LOOSE: frozenset[Claim] = frozenset({(0, "gpu", 103)})
SOME: frozenset[Claim] = frozenset((0, "gpu", key) for key in range(3))


def quiet(**changes: Any) -> Quiet:
    well = Quiet(
        "r/0",
        ALL,
        ALL,
        ALL,
        loose=frozenset(),
        hashes=HASHES,
        partial=False,
        lost=(),
        records=(opened(-1, partial=False),),
    )
    return well._replace(**changes)


def test_a_rank_that_is_well_is_not_reported() -> None:
    assert verdict(quiet()) == []
    assert verdict(quiet(logged=SOME, dumped=SOME, partial=True, lost=(7,), records=(gap(5, 9),))) == []
    assert verdict(quiet(logged=SOME, dumped=SOME, partial=True, lost=(7,), records=(opened(8, partial=True),))) == []
    assert verdict(quiet(logged=SOME, dumped=SOME | LOOSE, loose=LOOSE, partial=True, records=(gap(5, 9),))) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dumped": SOME}, "in the log and not in the index"),
        ({"logged": SOME}, "in the index and not in the log"),
        ({"truth": SOME}, "its engine does not hold"),
        ({"truth": SOME, "partial": True, "records": (gap(1, 2),)}, "its engine does not hold"),
        ({"dumped": ALL | LOOSE}, "in the index and not in the log"),
        ({"dumped": ALL | LOOSE, "loose": LOOSE, "hashes": frozenset()}, "its engine does not hold"),
        ({"logged": SOME, "dumped": SOME}, "missing, and it is not partial"),
        ({"lost": (7,), "records": (gap(7, 7),)}, "were lost, and it is not partial"),
        ({"lost": (7,), "partial": True, "records": (gap(1, 6),)}, "batch 7 was lost without a word"),
        ({"partial": True}, "nothing in the log says why"),
    ],
)
def test_a_rank_that_is_not_is(changes: dict[str, Any], said: str) -> None:
    found = verdict(quiet(**changes))

    assert [what for what in found if said in what]
