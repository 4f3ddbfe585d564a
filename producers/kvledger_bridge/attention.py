"""When an empty socket is a sign that nothing was sent: not right after this process was held up. Pure.

What arrives is taken from the network by ZMQ's own thread. A process that was stopped, or starved, wakes up with empty
sockets although much may have arrived meanwhile: that thread has to run first.
"""

from __future__ import annotations

HELD_UP_SECONDS = 0.25
"""Between two looks of a loop that never waits for longer than 0.02 s: whoever takes longer was held up."""

SETTLE_SECONDS = 0.05
"""After that, until emptiness counts again."""


class Attention:
    """One loop's; moments are monotonic seconds."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._counts_from = float("-inf")

    def looked(self, before: float, after: float) -> float | None:
        """Looked at between two moments: up to when one that was empty had nothing; None: who knows."""
        if self._looked is None or after - self._looked > HELD_UP_SECONDS:
            self._counts_from = after + SETTLE_SECONDS
        self._looked = after
        return before if before >= self._counts_from else None
