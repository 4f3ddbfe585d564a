"""What can be wrong with a record or a topic.

WireError
├── Poison        bytes that are no record of this contract: dead-letter and unload the rank that the key names
└── WrongTopic    a topic is missing or shaped wrongly: an operator creates or changes it
"""

from __future__ import annotations


class WireError(Exception):
    """Any failure of the topic contract; never raised itself."""


class Poison(WireError):
    """A record that cannot be read; the text says what, never the bytes."""


class WrongTopic(WireError):
    """A topic that does not fit; the text says what to change."""
