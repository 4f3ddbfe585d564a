"""What an engine holds, by its own events: a plain counter, which shares no code with the bridge's ledger.

Two ways of counting that agree prove more than one: this one knows neither tokens nor keys, and reads both encodings of
events by position or name. It is for recordings and tests; a batch that it cannot read is an error. Where clients ask
for full reports it is over the truth, as blocks are announced again that are there already.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from kvledger_engine.errors import BadRecording

GPU = "gpu"
OUTLIVES_A_CLEAR = "storage"
"""A clear empties every medium but this one."""

NO_GROUP = "-"

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_LAYOUTS = {
    "BlockStored": (*_STORED, "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class Held(msgspec.Struct, frozen=True):
    """What is resident after batch ``seq``: lane to hash to number of copies.

    A lane is the group, ``-`` where events name none, with ``@medium`` behind it where that is not the GPU. Hashes are
    integers as the engine wrote them, in decimal, or bytes in hexadecimal.
    """

    seq: int
    resident: dict[str, dict[str, int]]
    rank: int | None = None
    """The data-parallel rank that the batch names."""


class Truth:
    """One rank from its empty start on."""

    def __init__(self) -> None:
        self.seq = -1
        self._rank: int | None = None
        self._lanes: dict[tuple[str, str], Counter[str]] = {}

    def apply(self, seq: int, payload: bytes) -> None:
        """The events of one batch, in order. Raises BadRecording. O(hashes)."""
        try:
            batch = msgspec.msgpack.decode(payload)
            for event in batch[1]:
                self._event(event)
            self._rank = batch[2] if len(batch) > 2 else None
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise BadRecording(f"batch {seq} cannot be counted: {type(error).__name__}") from error
        self.seq = seq

    def held(self) -> Held:
        """A copy of what is resident; lanes that hold nothing are left out."""
        lanes = sorted((medium != GPU, medium, group) for (group, medium), copies in self._lanes.items() if copies)
        names = {(group, medium): group if medium == GPU else f"{group}@{medium}" for _, medium, group in lanes}
        return Held(self.seq, {name: dict(self._lanes[lane]) for lane, name in names.items()}, self._rank)

    def _event(self, event: Any) -> None:
        if isinstance(event, dict):
            tag, fields = event["type"], event
        else:
            tag, fields = event[0], dict(zip(_LAYOUTS.get(event[0], ()), event[1:], strict=False))
        if tag == "AllBlocksCleared":
            self._lanes = {lane: copies for lane, copies in self._lanes.items() if lane[1] == OUTLIVES_A_CLEAR}
        elif tag in _LAYOUTS:
            self._count(fields, stored=tag == "BlockStored")

    def _count(self, fields: dict[str, Any], *, stored: bool) -> None:
        group = fields.get("group_idx")
        lane = NO_GROUP if group is None else str(group), (fields.get("medium") or GPU).lower()
        copies = self._lanes.setdefault(lane, Counter())
        for block in fields["block_hashes"]:
            name = str(block) if isinstance(block, int) else block.hex()
            if stored:
                copies[name] += 1
            elif copies[name] > 1:
                copies[name] -= 1
            else:
                del copies[name]  # of a Counter: also where there was none
