"""What this router has just sent where: bridges the moment until a new prompt's events land (DESIGN §8).

Local to one router, never written to Redis, bounded and short-lived. Pure: ``now`` is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HINTS_MAX = 512
"""Hints kept; beyond it the oldest go. At 2 s each: 256 new prompts a second, and about 1 us each per question."""

HINT_SECONDS_DEFAULT = 2.0

_Who = tuple[str, int | None, int]
"""(replica, rank or None for all, stride)."""


class _Hint(NamedTuple):
    until: float
    keys: tuple[int, ...]


class Hints:
    """Prompts expected at replicas; equal prompts at one replica are one hint."""

    def __init__(self, *, hints_max: int = HINTS_MAX) -> None:
        self._hints_max = hints_max
        self._hints: dict[tuple[_Who, int], _Hint] = {}

    def __len__(self) -> int:
        return len(self._hints)

    def expect(
        self, keys: Mapping[int, tuple[int, ...]], replica: str, rank: int | None, now: float, seconds: float
    ) -> None:
        """Remember that ``replica`` (``rank`` None: any rank of it) will soon hold the prompt of ``keys``."""
        for stride, chain in keys.items():
            if chain:
                at = (replica, rank, stride), chain[-1]
                self._hints.pop(at, None)  # a renewed hint is the newest
                self._hints[at] = _Hint(now + seconds, chain)
        while len(self._hints) > self._hints_max:
            del self._hints[next(iter(self._hints))]

    def shared(self, keys: Mapping[int, tuple[int, ...]], now: float) -> dict[tuple[str, int | None], int]:
        """Tokens that a prompt shares with the longest live hint, per (replica, rank or None).

        Forgets what has expired. O(hints x log keys).
        """
        if not self._hints:
            return {}
        found: dict[tuple[str, int | None], int] = {}
        for at in [at for at, hint in self._hints.items() if hint.until <= now]:
            del self._hints[at]
        for ((replica, rank, stride), _), hint in self._hints.items():
            tokens = _common(hint.keys, keys.get(stride, ())) * stride
            if tokens > found.get((replica, rank), 0):
                found[replica, rank] = tokens
        return found


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many keys agree from the start: a key names its whole prefix, so a binary search finds it."""
    if not left or not right or left[0] != right[0]:
        return 0
    low, high = 1, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
