"""What a worker has folded so far, and what of it an operator may want to know. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

NOTES_MAX = 200
"""Notes kept between two looks at them: a log full of junk must not fill the memory or the operator's screen."""

NoteKind = Literal[
    "opened", "loaded", "unloaded", "unusable", "unreadable_value", "unreadable_key", "misplaced", "forgotten"
]


class Note(NamedTuple):
    """Something about one rank that an operator may want to know; never a token, hash or key."""

    kind: NoteKind
    rank: str
    offset: int
    why: str


class Tally(msgspec.Struct):
    """What a worker has folded so far; ``notes`` is emptied by whoever logs them."""

    records: int = 0
    units: int = 0
    ops: int = 0
    opened: int = 0
    loaded: int = 0
    unloaded: int = 0
    unusable: int = 0
    unreadable_values: int = 0
    unreadable_keys: int = 0
    misplaced: int = 0
    forgotten: int = 0
    notes: list[Note] = []

    def note(self, kind: NoteKind, rank: str, offset: int, why: str) -> None:
        """Keep a note; above NOTES_MAX only the counters tell."""
        if len(self.notes) < NOTES_MAX:
            self.notes.append(Note(kind, rank, offset, why))
