"""What stands in the log, and the small world that it is about."""

from __future__ import annotations

from typing import Literal

import msgspec

RANKS, GROUPS, LANES, HASHES = (0, 1), (0, 1), (0, 1, 2), (0, 1, 2, 3)
MEDIA = ("gpu", "cpu")
MEDIUM = {0: "gpu", 1: "gpu", 2: "cpu"}
GROUP = {0: 0, 1: 1, 2: 0}
GPU_LANES = (0, 1)

Life = tuple[int, int]
NO_LIFE: Life = (-1, 0)

Kind = Literal[
    "Claim", "Pointer", "Fence", "Opened", "Events", "Heartbeat", "Checkpoint", "Suspended", "Resumed", "Gap", "Closed"
]


class Change(msgspec.Struct, frozen=True, gc=False):
    """One store or removal, as the bridge counted it; a clear has lane -1."""

    op: Literal["store", "remove", "clear"]
    lane: int
    hash: int
    effective: bool = True


class Put(msgspec.Struct, frozen=True, gc=False):
    """What a checkpoint says is held."""

    lane: int
    hash: int
    copies: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """Any record; ``ghost`` is the engine's own life, which only the checks look at.

    ``offset`` and ``fence`` belong to pointers (None: log start, not known).
    """

    kind: Kind
    rank: int
    owner: int
    life: Life = NO_LIFE
    n: int = -1
    end: bool = True
    seq: int = -1
    digest: int | None = None
    process: int | None = None
    partial: bool = False
    suspended: bool = False
    changes: tuple[Change, ...] = ()
    part: int = 0
    last: bool = False
    puts: tuple[Put, ...] = ()
    offset: int | None = None
    fence: int | None = None
    readable: bool = True
    ghost: int | None = None
