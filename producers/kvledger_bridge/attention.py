"""When an empty socket is a sign that nothing was sent: not right after this process was held up. Pure.

What arrives is taken from the network by ZMQ's own thread. A process that was stopped, or starved, wakes up with empty
sockets although much may have arrived meanwhile: that thread has to run first. Until it surely has, emptiness speaks
for the time of the look before the last, which it had a whole turn to follow. So a loop whose every turn is slow still
gets on, two turns late.
"""

from __future__ import annotations

HELD_UP_SECONDS = 0.25
"""Between two looks of a loop that never waits for longer than 0.02 s: whoever takes longer was held up."""

SETTLE_SECONDS = 0.05
"""After that, until emptiness counts at once again."""


class Attention:
    """One loop's; moments are monotonic seconds."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._counts_from = float("-inf")
        self._before: tuple[float | None, float | None] = None, None
        """When the look before the last began, and the last one."""

    def looked(self, before: float, after: float) -> float | None:
        """Between two moments: up to when a socket that was empty then had nothing. None: nobody knows."""
        if self._looked is None or after - self._looked > HELD_UP_SECONDS:
            self._counts_from = after + SETTLE_SECONDS
        self._looked = after
        earlier, last = self._before
        self._before = last, before
        return before if before >= self._counts_from else earlier
