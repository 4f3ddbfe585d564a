"""What can be wrong with a stand-in engine.

EngineFailure
├── BadRecording    a line of a recording cannot be read: fix the file; the text names file and line
└── NoAddress       an address cannot be used: choose another; the text names it
"""

from __future__ import annotations


class EngineFailure(Exception):
    """Any failure of the stand-in; never raised itself."""


class BadRecording(EngineFailure):
    """A recording that cannot be read; the text says which line and what is wrong, never its tokens."""


class NoAddress(EngineFailure):
    """An address that cannot be bound or connected to."""
