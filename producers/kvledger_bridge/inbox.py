"""Messages of one socket that were read and not applied, with their bytes. Pure."""

from __future__ import annotations

from collections import deque

Message = tuple[int, bytes]
"""(sequence, payload); an empty payload is the END of a replay answer, as on the wire."""


class Inbox:
    """First in, first out. The bounds are told by ``full``; nothing is refused."""

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._messages_max = messages_max
        self._bytes_max = bytes_max

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        """Whether the caller should leave further messages where they are."""
        return len(self._messages) >= self._messages_max or self._bytes >= self._bytes_max

    @property
    def first(self) -> int:
        """Sequence of the oldest message; raises IndexError where there is none."""
        return self._messages[0][0]

    @property
    def newest(self) -> int:
        """Sequence of the one that came last."""
        return self._messages[-1][0]

    def head(self) -> Message:
        """The oldest message."""
        return self._messages[0]

    def put(self, seq: int, payload: bytes) -> None:
        """One more."""
        self._messages.append((seq, payload))
        self._bytes += len(payload)

    def pop(self) -> Message:
        """Take the oldest one out."""
        message = self._messages.popleft()
        self._bytes -= len(message[1])
        return message

    def clear(self) -> None:
        """Forget all of them."""
        self._messages.clear()
        self._bytes = 0
