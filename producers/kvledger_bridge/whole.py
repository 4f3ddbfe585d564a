"""Up to when all that an engine sent is in a rank's log: what makes its answers exact (DESIGN §7). Pure.

    the live socket held nothing more ─┐
    everything read is applied         ├─> whole: known up to that look at the socket
    no replay is missing               ┘

While something is waited for - a replay, a hole, a batch in the middle of being applied, a socket that is not read -
the moment stays, and with it what routers may call fresh.
"""

from __future__ import annotations


class Whole:
    """One rank's; moments are monotonic seconds."""

    def __init__(self) -> None:
        self.known: float | None = None
        """Up to when everything is applied; None: it never was."""
        self._drained: float | None = None
        self._owed = False

    def drained(self, moment: float) -> None:
        """The live socket held nothing more that was sent before this moment."""
        self._drained = moment

    def look(self, *, whole: bool, wrote: bool) -> bool:
        """After a step: whether nothing more is waited for, and whether it wrote. True: readers have to be told so.

        What was written meanwhile told them that the picture is as old as before.
        """
        if not whole or self._drained is None:
            self._owed = self._owed or wrote
            return False
        self.known = self._drained if self.known is None else max(self.known, self._drained)
        owed, self._owed = self._owed and not wrote, False
        return owed
