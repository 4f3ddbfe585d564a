"""What can go wrong in the bridge, by what the caller does next.

BridgeError
├── Undecodable     an engine batch that cannot be read: its sequence is a hole (Gap, dead letter); never retried
├── InvalidConfig   what the operator wrote is wrong: the text names the place and what to write instead
├── Unavailable     Kafka did not answer: start it or correct its address, then try again
├── Refused         Kafka is there, but its topics would lose or disorder the log: an operator changes them
└── Bug             our own code broke its rules: shown with its traceback
"""

from __future__ import annotations


class BridgeError(Exception):
    """Any failure of the bridge; never raised itself."""


class Undecodable(BridgeError):
    """The bytes of a batch are no engine batch. The engine is at fault; the text says what, never the bytes."""


class InvalidConfig(BridgeError):
    """Something that the operator wrote is wrong; the text says where, and what to write instead."""


class Unavailable(BridgeError):
    """Kafka did not answer in time; retryable."""


class Refused(BridgeError):
    """Kafka's topics do not fit; the text says what to change, and with which command."""


class Bug(BridgeError):
    """A rule of ours was broken; the text names state and event."""
