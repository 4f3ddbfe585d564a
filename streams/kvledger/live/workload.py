"""Requests that make a small engine share, evict and repeat; a pure generator that learns what was answered.

Kinds, drawn from one seed: a prompt behind one of a few shared prefixes, the next turn of an earlier conversation (its
prompt, the answer to it, and something new), an exact repeat, a prompt of whole blocks, and something never seen. Some
carry a salt. Once in a while the prefix cache is reset while nothing runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

ANSWER_TOKENS: Final = (1, 40)
"""Least and most tokens that a request may generate."""

PREFIXES: Final = 4
SALTS: Final = ("tenant-a", "tenant-b")
SALTED_SHARE: Final = 0.2
RESET_EVERY: Final = 15
"""Requests between two resets, about."""

CONVERSATIONS_MAX: Final = 5
"""How many earlier requests may be continued or repeated; older ones are forgotten, their blocks mostly evicted."""

NEW_BLOCKS_MAX: Final = 5
"""What follows a shared prefix or an earlier answer, in blocks: short beside what is found, as in real traffic."""

TOKEN_FIRST: Final = 3
"""Below are the marks for begin, end and padding."""


class Job(NamedTuple):
    """One request to send. ``after_reset``: the prefix cache is to be reset, idle, just before it."""

    tokens: tuple[int, ...]
    salt: str | None
    max_tokens: int
    lora: str | None = None
    after_reset: bool = False


class _Turn(NamedTuple):
    tokens: tuple[int, ...]
    salt: str | None
    answer: tuple[int, ...]


@dataclass
class Workload:
    """``jobs()`` yields requests; tell ``answered`` what each one generated before the next is taken.

    ``count`` requests are such that their answer can be predicted from events; those right after a reset come on top.
    ``prompt_tokens_max`` bounds each prompt with its answer.
    """

    seed: int
    count: int
    vocabulary: int
    block_tokens: int
    prompt_tokens_max: int
    resets: bool = True
    _turns: list[_Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        least = 4 * self.block_tokens + ANSWER_TOKENS[1]
        if self.prompt_tokens_max < least:
            msg = f"{self.prompt_tokens_max} tokens are too few for prompts of a few blocks; {least} are the least"
            raise ValueError(msg)
        self._random = random.Random(self.seed)  # noqa: S311 - a workload is to be the same again
        self._room = self.prompt_tokens_max - ANSWER_TOKENS[1]
        least = min(2 * self.block_tokens, self._room // 3)
        self._shared = [self._fresh(self._random.randint(least, self._room // 3)) for _ in range(PREFIXES)]
        self._last: Job | None = None

    def jobs(self) -> Iterator[Job]:
        """Every request, in order."""
        made = 0
        until_reset = self._pause()
        while made < self.count:
            reset = self.resets and until_reset == 0
            until_reset = self._pause() if reset else until_reset - 1
            job = self._job()._replace(after_reset=reset)
            made += not reset
            self._last = job
            yield job

    def answered(self, answer: Sequence[int]) -> None:
        """What the last request generated; it may be continued from now on."""
        if self._last is None:
            msg = "answered() came before the first job"
            raise RuntimeError(msg)
        self._turns.append(_Turn(self._last.tokens, self._last.salt, tuple(answer)))
        del self._turns[:-CONVERSATIONS_MAX]

    def _pause(self) -> int:
        return self._random.randint(RESET_EVERY // 2, RESET_EVERY * 3 // 2)

    def _job(self) -> Job:
        draw = self._random
        kind = draw.choices(("shared", "turn", "repeat", "whole", "fresh"), (36, 30, 14, 12, 8))[0]
        salt = draw.choice(SALTS) if draw.random() < SALTED_SHARE else None
        if kind in ("turn", "repeat") and self._turns:
            turn = draw.choice(self._turns)
            tokens, salt = turn.tokens, turn.salt
            if kind == "turn":
                tokens = tokens + turn.answer + self._new()
        elif kind == "fresh":
            tokens = self._fresh(draw.randint(1, self._room))
        else:
            prefix = draw.choice(self._shared)
            tokens = prefix + self._new()
            if kind == "whole":
                tokens = tokens[: max(1, len(tokens) // self.block_tokens) * self.block_tokens]
        return Job(tokens[: self._room], salt, draw.randint(*ANSWER_TOKENS))

    def _new(self) -> tuple[int, ...]:
        return self._fresh(self._random.randint(1, NEW_BLOCKS_MAX * self.block_tokens))

    def _fresh(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(TOKEN_FIRST, self.vocabulary) for _ in range(count))
