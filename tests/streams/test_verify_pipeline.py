"""What ``kvledger verify`` takes for an answer that is settled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvledger.verify.pipeline import Followed
from kvledger_index.model import ModelEntry
from kvledger_router import Holder, Match
from kvledger_router.standing import MOVED, Status


class Answers:
    """An index whose answers are written down; the last one stays."""

    def __init__(self, *answers: tuple[Status, int | None, str]) -> None:
        self.left = list(answers)
        self.asked = 0

    async def match(self, tokens: Any, **_: Any) -> Match:
        self.asked += 1
        status, as_of, reason = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return Match("m", len(tokens), [Holder("r", 0, 0, 0, status, as_of, 0.0, reason=reason)])


def followed(index: Answers) -> Followed:
    pipeline: Any = SimpleNamespace(index=lambda _model: index, check=lambda: None)
    bridge: Any = SimpleNamespace(running=True)
    engine = Followed(pipeline, "r", ModelEntry(model="m"), bridge)
    engine.heard(7)
    return engine


async def test_an_answer_that_moved_while_it_was_read_is_asked_for_again() -> None:
    """A heartbeat between two looks moves a rank's stamp, and nothing else."""
    index = Answers(("exact", 7, ""), ("uncertain", 7, MOVED), ("exact", 7, ""))
    answer = await followed(index).predict([1])

    assert (answer.status, index.asked) == ("exact", 3)


async def test_any_other_doubt_is_an_answer() -> None:
    index = Answers(("exact", 6, ""), ("stale", 7, "old"), ("uncertain", 7, "full_reports"))
    answer = await followed(index).predict([1])

    assert answer.status == "uncertain"
