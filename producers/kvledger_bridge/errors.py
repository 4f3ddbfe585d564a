"""What can go wrong in the bridge, by what the caller does next.

BridgeError
└── Undecodable   an engine batch that cannot be read: its sequence is a hole (Gap, dead letter); never retried
"""

from __future__ import annotations


class BridgeError(Exception):
    """Any failure of the bridge; never raised itself."""


class Undecodable(BridgeError):
    """The bytes of a batch are no engine batch. The engine is at fault; the text says what, never the bytes."""
