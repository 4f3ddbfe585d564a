"""A router under load: questions at a steady rate, and how late the asking loop itself was meanwhile.

What a promise in time is held against is the promise, and beside it what this process could not have kept: its own
loop's lag, measured by ticks that come late for no other reason.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import pytest

from kvledger_router import Index

TICK_SECONDS = 0.001
SCAN_SECONDS = 10.0
"""Questions are listed as they end, which is not quite the order in which they were asked."""


class LoopLag:
    """By how much all ticks of the running loop came late since the start, in sum. A context manager.

    Each tick is late by a little on an idle machine too: fine ones see short delays, coarse ones add up less.
    """

    def __init__(self, tick_seconds: float = TICK_SECONDS) -> None:
        self.seconds = 0.0
        self._tick_seconds = tick_seconds

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(self._tick_seconds)
            self.seconds += max(0.0, time.monotonic() - at - self._tick_seconds)


class Question(NamedTuple):
    """One call of a router: when, how long, and how far the loop was late meanwhile; what came of it.

    ``status`` is that of the best rank; empty where there is none.
    """

    at: float
    seconds: float
    opinion: bool
    status: str
    lag_seconds: float


class Load:
    """Asks at a steady rate, whether or not earlier questions are answered."""

    def __init__(self, index: Index, prompt: Sequence[int]) -> None:
        self._index = index
        self._prompt = prompt
        self.questions: list[Question] = []
        """In the order of their ends."""

    async def run(self, until: Callable[[], bool], seconds: float, *, per_second: float, what: str) -> None:
        """Ask until so; the condition is looked at before each question."""
        start = time.monotonic()
        async with LoopLag() as lag, asyncio.TaskGroup() as group:
            for number in itertools.count():
                if until():
                    break
                if time.monotonic() > start + seconds + lag.seconds:
                    pytest.fail(f"not within {seconds} s: {what}")
                await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
                group.create_task(self._ask(lag))

    def answered(self, count: int, since: float = 0.0) -> bool:
        """Whether so many questions that were asked since then have an opinion.

        Not so many in a row: where the machine has no time for us, some deadlines pass on any Redis.
        """
        found = 0
        for one in reversed(self.questions):
            found += one.opinion and one.at > since
            if found >= count or one.at < since - SCAN_SECONDS:
                return found >= count
        return False

    def since(self, at: float) -> list[Question]:
        """Those that were asked later."""
        return [one for one in self.questions if one.at > at]

    def over(self, seconds: float) -> list[Question]:
        """Those that took longer, the loop's own lag left out."""
        return [one for one in self.questions if one.seconds > seconds + one.lag_seconds]

    async def _ask(self, lag: LoopLag) -> None:
        at, late = time.monotonic(), lag.seconds
        match = await self._index.match(self._prompt)
        took = time.monotonic() - at
        await asyncio.sleep(TICK_SECONDS)  # a tick that is late because of us is counted before we look
        status = match.holders[0].status if match.holders else ""
        self.questions.append(Question(at, took, match.opinion, status, lag.seconds - late))
