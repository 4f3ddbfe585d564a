"""What the library counts and says. It owns no log handler and no metrics server: the router does.

Counters are plain ints on :attr:`Index.counters`; log records carry ``event`` and its fields in ``extra``. Never per
question, and never anything of a prompt.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from kvledger_router.breaker import State

Event = Literal["breaker_changed"]

_log = logging.getLogger("kvledger_router")


class Counters(msgspec.Struct):
    """Since the index was made. ``asked`` = ``answered`` + ``timeouts`` + ``failures`` + ``refused`` + ``abandoned``.

    ``timeouts`` and ``failures`` are questions without an opinion because of the deadline, or of Redis; many
    ``refused`` mean an open breaker; ``rereads`` are answers taken again because the catalogue had changed: more than
    a few per second mean ranks that flap. ``unsettled`` are those for which it changed every time: the ranks that it
    changed for are uncertain in them. ``hash_rereads`` are readings taken again because a rank came to need engine
    hashes (ADR 5). ``corrupt`` counts stored values that could not be read.
    """

    asked: int = 0
    answered: int = 0
    timeouts: int = 0
    failures: int = 0
    refused: int = 0
    abandoned: int = 0
    catalogues: int = 0
    rereads: int = 0
    unsettled: int = 0
    corrupt: int = 0
    hash_rereads: int = 0


def breaker_changed(before: State, after: State, why: str) -> None:
    """Redis stopped answering, or answers again: look at Redis, not at the router."""
    event: Event = "breaker_changed"
    level = logging.INFO if after == "closed" else logging.WARNING
    extra = {"event": event, "before": before, "after": after, "why": why}
    _log.log(level, "%s: %s -> %s %s", event, before, after, why, extra=extra)
