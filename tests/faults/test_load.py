"""The measuring of promises in time: what the asking loop itself was late is seen, and nothing else is forgiven."""

from __future__ import annotations

import asyncio
import time

from load import Load, LoopLag, Question
from router_fleet import MODEL, PROMPT, Fleet

from kvledger_index.memory import MemoryIndex
from kvledger_router import Index

STILL_SECONDS = 0.2


async def test_a_loop_that_stands_still_is_late_by_as_much() -> None:
    async with LoopLag() as lag:
        await asyncio.sleep(0.01)
        before = lag.seconds
        time.sleep(STILL_SECONDS)  # noqa: ASYNC251 - what is to be seen
        await asyncio.sleep(0.01)

    assert lag.seconds - before > STILL_SECONDS * 0.9


async def test_questions_are_asked_at_their_rate_and_timed() -> None:
    memory = MemoryIndex()
    fleet = Fleet(memory)
    await fleet.start()
    await fleet.open("pod-a/0")
    load = Load(Index(memory, model=MODEL, deadline_seconds=30.0), PROMPT)
    start = time.monotonic()
    await load.run(lambda: load.answered(20), 30, per_second=200, what="answers")

    assert len(load.since(start)) >= 20
    assert load.questions[-1].at - load.questions[0].at > 0.09, "an open loop keeps its pace"


def test_a_question_that_took_too_long_is_over_unless_the_loop_was_late() -> None:
    """The canary: a slow answer on a loop in time is no lag."""
    load = Load(Index(MemoryIndex(), model=MODEL), PROMPT)
    slow, starved = Question(0.0, 0.5, True, "", 0.01), Question(0.0, 0.5, True, "", 0.49)
    load.questions += [slow, starved]

    assert load.over(0.02) == [slow]
