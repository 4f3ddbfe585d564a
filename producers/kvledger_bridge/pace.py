"""Long work in bounded pieces, so that other ranks have their turns between them. Pure.

Work is a generator: it yields where a piece is done, and returns its result. Whoever starts it may leave it at any
yield and go on later, or never; until it has returned, what it changes is neither as before nor as after it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
Work = Generator[None, None, T]

PIECE_BLOCKS = 2048
"""Blocks (or hashes, or events) after which work pauses: about 10 ms, as much as a part of a checkpoint."""


def at_once(work: Work[T]) -> T:
    """The result, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """``items`` in order, at most ``size`` at a time."""
    return (items[at : at + size] for at in range(0, len(items), size))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The same of what cannot be cut; it must not change meanwhile."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some


class Rotation:
    """Who is next of those who wait: each waits for one turn of every other at most."""

    def __init__(self) -> None:
        self._last = -1

    def next(self, waiting: Sequence[int]) -> int | None:
        """One of them, which are in ascending order; None where there is none. O(waiting)."""
        if not waiting:
            return None
        self._last = next((each for each in waiting if each > self._last), waiting[0])
        return self._last
