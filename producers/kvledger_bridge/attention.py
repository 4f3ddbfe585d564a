"""When an empty socket is a sign that nothing was sent: not right after this process was held up. Pure.

What arrives is taken from the network by ZMQ's own thread. A process that was stopped, or starved, wakes up with empty
sockets although much may have arrived meanwhile: that thread has to run first. Until it surely has, emptiness speaks
for the time of the look before the last, which it had a whole turn to follow. So a loop whose every turn is slow still
gets on, two turns late.
"""

from __future__ import annotations

HELD_UP_SECONDS = 0.25
"""Between two looks, beside what the thread itself worked: its loop never waits for longer than 0.02 s. While it works,
ZMQ's own thread runs, too: a turn may be long because many ranks are busy.
"""

SETTLE_SECONDS = 0.05
"""After that, until emptiness counts at once again."""


class Attention:
    """One loop's; moments are monotonic seconds."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._worked = 0.0
        self._counts_from = float("-inf")
        self._before: tuple[float | None, float | None] = None, None
        """When the look before the last began, and the last one."""

    def looked(self, before: float, after: float, worked: float) -> float | None:
        """Between two moments: up to when a socket that was empty then had nothing. None: nobody knows. ``worked``: CPU
        seconds of this thread so far.
        """
        if self._looked is None or (after - self._looked) - (worked - self._worked) > HELD_UP_SECONDS:
            self._counts_from = after + SETTLE_SECONDS
        self._looked, self._worked = after, worked
        earlier, last = self._before
        self._before = last, before
        return before if before >= self._counts_from else earlier
