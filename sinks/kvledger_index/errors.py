"""What can go wrong at the index, by what the caller does next.

IndexFailure
├── InvalidInput      the caller's own data is wrong: fix it, do not retry
├── Unavailable       Redis did not answer: retry with a deadline, or answer "no opinion"
├── Refused           Redis is set up in a way that would lose or corrupt the index: an operator changes it
└── Corrupt           a stored value cannot be read: that row counts as absent, and is counted
"""

from __future__ import annotations


class IndexFailure(Exception):
    """Any failure of the index; never raised itself."""


class InvalidInput(IndexFailure):
    """The caller's data is wrong; the text names both the value and the bound."""


class Unavailable(IndexFailure):
    """Redis did not answer in time or the connection broke; retryable."""


class Refused(IndexFailure):
    """Redis cannot hold an index as configured; the text says which setting to change and to what."""


class Corrupt(IndexFailure):
    """A stored value cannot be read."""
