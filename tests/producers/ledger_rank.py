"""A rank as the tests of the ledger drive it: short words for its events, a ledger with its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from struct import unpack
from typing import Any

from kvledger_bridge.decode import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.records import LIVE, Change, Run

STRIDE = 16
GPU, CPU, STORAGE, OTHER = range(4)


def text(blocks: int, salt: int = 0, size: int = STRIDE) -> tuple[int, ...]:
    """Tokens of so many blocks, different for each ``salt``."""
    return tuple(range(1000 * salt, 1000 * salt + blocks * size))


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    size: int = STRIDE,
    **more: Any,
) -> BlockStored:
    fields: dict[str, Any] = {"medium": "GPU", "group_idx": 0, **more}
    return BlockStored(tuple(hashes), parent, tuple(tokens), size, **fields)


def removed(*hashes: int | bytes, group: int | None = 0, medium: str | None = "GPU") -> BlockRemoved:
    return BlockRemoved(hashes, medium, group)


def cleared() -> AllBlocksCleared:
    return AllBlocksCleared()


class Rank:
    """A ledger with its sequence."""

    def __init__(
        self, *, groups: tuple[GroupSpec, ...] = (), parents_max: int = 1000, orphans_max: int = 1000, **entry: Any
    ) -> None:
        self.entry = ModelEntry(model="m", groups=groups, **entry)
        self.ledger = Ledger(self.entry, parents_max=parents_max, orphans_max=orphans_max)
        self.seq = -1

    def take(self, *events: Event, origin: int = LIVE, unknown: tuple[str, ...] = ()) -> list[Piece]:
        self.seq += 1
        return self.ledger.apply(self.seq, Batch(1.5, 0, events, unknown), origin)

    def changes(self, *events: Event) -> list[Change]:
        return [change for piece in self.take(*events) for change in piece.changes]

    def keys(self, tokens: Sequence[int], **more: Any) -> list[int]:
        return prompt_keys("m", tokens, self.entry.stride, **more)

    def unplaced(self, group: int | None = 0, medium: str = "gpu") -> set[int]:
        return set(self.ledger.resident(group, medium)) - set(self.ledger.placed(group, medium))


def keys_of(run: Run) -> list[int]:
    return list(unpack(f">{len(run.keys) // 8}Q", run.keys))


def hashes_of(raw: bytes) -> list[int]:
    return list(unpack(f">{len(raw) // 8}Q", raw))
