"""What a ledger counts: the copies of one lane, and plain totals of one life. Pure."""

from __future__ import annotations

from kvledger_bridge.blocks import Block


class Counts:
    """Plain counters of one life, for telemetry; nothing is decided by them."""

    __slots__ = (
        "attached",
        "clears",
        "events_refused",
        "full_reports",
        "removals_unknown",
        "removed",
        "retracted",
        "stored",
        "stored_unplaced",
    )

    def __init__(self) -> None:
        self.stored = 0
        self.stored_unplaced = 0
        self.removed = 0
        self.removals_unknown = 0
        self.attached = 0
        self.retracted = 0
        self.clears = 0
        self.events_refused = 0
        self.full_reports = 0


class Lane:
    """Copies in one (group, medium): of blocks, and of hashes without one, some of them ``opaque`` or ``veiled``.

    ``reported``: sequence, last hash and first stride of tokens of the newest event from token 0 that brought nothing
    new; GPU lanes only, as connectors announce again whatever they like.
    """

    __slots__ = ("code", "copies", "gpu", "group", "opaque", "reported", "unplaced", "veiled")

    def __init__(self, group: int | None, code: int) -> None:
        self.group = group
        self.code = code
        self.gpu = code == 0
        self.copies: dict[Block, int] = {}
        self.unplaced: dict[int, int] = {}
        self.opaque: set[int] = set()
        self.veiled: set[int] = set()
        self.reported: tuple[int, int, tuple[int, ...]] = (-1, 0, ())
