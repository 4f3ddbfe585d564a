"""What can go wrong in a stream worker, by what happens next.

StreamsFailure
├── BadSettings     flags or environment are wrong: an operator changes them
├── Unavailable     Kafka did not answer: at start the worker ends, later it tries again and says so
└── UnreadableState what an earlier worker stored for a partition cannot be read: the partition is rebuilt

Redis speaks through ``kvledger_index.errors``, a topic that does not fit through ``kvledger_wire.errors.WrongTopic``.
"""

from __future__ import annotations


class StreamsFailure(Exception):
    """Any failure of a stream worker; never raised itself."""


class BadSettings(StreamsFailure):
    """A setting is missing or outside its bounds; the text names it, its value and the bound."""


class Unavailable(StreamsFailure):
    """Kafka did not answer in time; the text names the address. Retryable."""


class UnreadableState(StreamsFailure):
    """A stored rank state does not decode or contradicts its stamp."""
