"""Pace the batches of a recording over a stand-in engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvledger_engine.recording import Published, Step
from kvledger_engine.standin import StandIn


def _nobody(_batch: Published) -> None:
    """Nobody wants to know."""


def play(
    engine: StandIn,
    steps: Iterable[Step],
    *,
    batches_per_second: float | None,
    clock: Callable[[], float],
    wait: Callable[[float], bool],
    published: Callable[[Published], None] = _nobody,
) -> int:
    """Publish every batch in order and return how many; None plays as fast as the socket takes them.

    ``published`` is told of each batch once it is sent.

    ``wait(seconds)`` returns True to stop early. The pace is kept against the start, so that a late batch does not
    delay those after it.
    """
    start, count = clock(), 0
    for step in steps:
        if not isinstance(step, Published):
            continue
        ahead = 0.0 if batches_per_second is None else start + count / batches_per_second - clock()
        if wait(max(0.0, ahead)):
            break
        engine.publish(step.payload, step.topic, step.seq)
        published(step)
        count += 1
    return count
