"""Answers that a router got, beside what the engines held: which of them broke their promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from fleet import Engine, Life, Prompt

GRACE_SECONDS = 5.0
"""After an engine's restart, in which answers may still be of its former life."""

SLACK_SECONDS = 0.005
"""A question may take its deadline, this, and what its own loop was late by."""

BROKEN_SHOWN_MAX = 20


class Held(NamedTuple):
    """What an answer said of one rank."""

    replica: str
    rank: int | None
    hit_tokens: int
    status: str
    as_of: int | None
    reason: str


class Answer(NamedTuple):
    """One question of the asker; times in seconds of the monotonic clock."""

    at: float
    seconds: float
    deadline: float
    lag: float
    model: str
    prompt: int
    opinion: bool
    reason: str
    held: tuple[Held, ...]

    @classmethod
    def read(cls, line: str) -> Self:
        """From a line of the asker."""
        return msgspec.json.decode(line, type=cls)


class Checker:
    """Reads what the asker writes, line by line, and counts; ``broken`` are promises that were not kept."""

    def __init__(
        self,
        source: Path,
        engines: Mapping[str, Engine],
        prompts: Sequence[Prompt],
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``say`` is told of each promise that was not kept, at once."""
        self._say = say
        self._source = source
        self._engines = engines
        self._prompts = prompts
        self._at = 0
        self.statuses: Counter[str] = Counter()
        self.questions = self.no_opinion = 0
        self.slowest = float("-inf")
        """The longest that a question took beyond its deadline and what its own loop was late by."""
        self.broken: list[str] = []
        self.settled: dict[str, tuple[float, Held]] = {}
        """Per rank the newest answer, and when it was asked for."""

    def poll(self) -> None:
        """Judge what was written since the last time."""
        with self._source.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                if line.startswith(b"["):
                    self.take(Answer.read(line.decode()))
                else:
                    self._break(f"the asker said {line.decode(errors='replace').rstrip()!r}")

    def take(self, answer: Answer) -> None:
        """Judge one answer."""
        self.questions += 1
        self.no_opinion += not answer.opinion
        net = answer.seconds - answer.lag
        self.slowest = max(self.slowest, net - answer.deadline)
        if net > answer.deadline + SLACK_SECONDS:
            self._break(
                f"a question of {answer.deadline * 1e3:.0f} ms took {answer.seconds * 1e3:.1f}, its loop was late by "
                f"{answer.lag * 1e3:.1f}; asked at {answer.at:.1f}"
            )
        if not answer.held:
            self.statuses["unheard of"] += 1
        for held in answer.held:
            self.statuses[held.status] += 1
            name = f"{held.replica}/{held.rank}"
            if answer.opinion and answer.at >= self.settled.get(name, (0.0, held))[0]:
                self.settled[name] = answer.at, held
            if held.status in {"exact", "at_least"}:
                for fault in self._faults(answer, held, self._engines[name]):
                    self._break(fault)

    def _faults(self, answer: Answer, held: Held, engine: Engine) -> Iterator[str]:
        """Nothing where a life that may be meant bears the answer out."""
        lives = [life for life in engine.lives if may_be_meant(life, answer.at, answer.at + answer.seconds)]
        seq = -1 if held.as_of is None else held.as_of
        true = [engine.hit(self._prompts[answer.prompt], seq, life) for life in lives if seq <= life.head]
        if any(held.hit_tokens == hit if held.status == "exact" else held.hit_tokens <= hit for hit in true):
            return
        since = [f"{answer.at - life.started:.1f} s" for life in lives]
        yield (
            f"{engine.name} {held.status} {held.hit_tokens} of prompt {answer.prompt} as of {seq}, asked at "
            f"{answer.at:.1f}, and it was {true} in the lives that may be meant, begun before that by {since}"
        )

    def _break(self, what: str) -> None:
        if len(self.broken) < BROKEN_SHOWN_MAX:
            self.broken.append(what)
            self._say(what)


def may_be_meant(life: Life, asked: float, answered: float) -> bool:
    """Whether an answer may speak of this life: begun by then, and not over for longer than the grace."""
    return life.started <= answered and (life.ended is None or asked < life.ended + GRACE_SECONDS)
