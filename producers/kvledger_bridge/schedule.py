"""When a rank's next checkpoint is due: by what a reader would have to read, and before retention takes the last one.

A reader starts at the lowest pointer of a partition, so what counts is how far the partition has grown since a rank's
own pointer, whoever wrote that. Bytes of others are not known; their records are, as every acknowledgement tells an
offset. All ranks of a partition write checkpoints into it, so what one may grow to depends on how many they are: else
checkpoints alone could make the next ones due. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Rates(msgspec.Struct, frozen=True):
    """The rules of one installation."""

    bytes_min: int
    """The partition's growth below which no checkpoint is due."""
    size_factor: float
    """Nor below so many times the checkpoints of all its ranks, if they are as large as this one's: checkpoints are at
    most one part in so many of what is written."""
    seconds_max: float
    """But one is due after so long, idle ranks' too."""
    retry_seconds: float = 5.0
    """A checkpoint that was asked for and is not pointed at by then was given up."""


class Schedule:
    """One rank's checkpoints. Times are monotonic."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._offset = -1
        self._newest = -1
        self._pointed_at = 0.0
        self._asked_at = -1.0e9
        self._size = 0
        self._writing = 0

    @property
    def size(self) -> int:
        """Bytes of the newest checkpoint; 0: none is known."""
        return self._size

    def pointed(self, offset: int, now: float, *, age: float = 0.0, size: int | None = None) -> None:
        """A pointer to ``offset`` stands; what is there was written ``age`` seconds ago. ``size``: of the checkpoint
        that another bridge wrote there.
        """
        self._offset, self._pointed_at = offset, now - age
        self._size = self._writing if size is None else size
        self._asked_at = -1.0e9

    def wrote(self, size: int, *, first: bool) -> None:
        """A checkpoint's part of ``size`` bytes was handed to Kafka."""
        self._writing = size + (0 if first else self._writing)

    def grew(self, offset: int) -> None:
        """The partition has reached ``offset``."""
        self._newest = max(self._newest, offset)

    def due(self, now: float, *, record_bytes: float, ranks: Callable[[], int]) -> bool:
        """Whether to write one now. ``record_bytes`` is what a record takes on average; ``ranks`` tells how many share
        the partition, and is asked only where that matters.
        """
        if self._offset < 0 or now - self._asked_at < self._rates.retry_seconds:
            return False
        grown = (self._newest - self._offset) * record_bytes
        if now - self._pointed_at >= self._rates.seconds_max:
            return True
        return grown >= self._rates.bytes_min and grown >= self._rates.size_factor * self._size * max(1, ranks())

    def asked(self, now: float) -> None:
        """One is being written."""
        self._asked_at = now
