"""What an index that ignores groups would have answered; the comparison that ``verify --group-blind`` shows.

One set of blocks per replica, as peers keep it: a store in any group adds the block, a removal in any group takes it
away, the answer is the longest prefix of blocks from the start. Fed by the same ledger, so that keys, namespaces and
placement are equal and only the rule differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger_bridge.decode import decode_batch
from kvledger_bridge.errors import Undecodable
from kvledger_bridge.ledger import Ledger
from kvledger_engine.recording import Media
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.model import ModelEntry
from kvledger_wire.records import CLEARED, LIVE, STORED, Change


class BlindIndex:
    """One replica as a group-blind index sees it."""

    def __init__(self, entry: ModelEntry) -> None:
        self._entry = entry
        self._ledger = Ledger(entry)
        self._held: set[int] = set()
        sizes = [group.block_size for group in entry.groups if group.block_size]
        self._block = max(sizes, default=entry.stride)

    def apply(self, seq: int, payload: bytes) -> None:
        """One batch of the engine, as raw bytes; what cannot be decoded is lost to it."""
        try:
            batch = decode_batch(payload)
        except Undecodable:
            return
        for piece in self._ledger.apply(seq, batch, LIVE):
            for change in piece.changes:
                self._change(change)

    def _change(self, change: Change) -> None:
        if change.medium != 0:
            return
        if change.op == CLEARED:
            self._held.clear()
        for run in change.runs:
            keys = [int.from_bytes(run.keys[at : at + 8], "big") for at in range(0, len(run.keys), 8)]
            named = {key for j, key in enumerate(keys) if run.blocks >> j & 1}
            if change.op == STORED:
                self._held |= named
            else:
                self._held -= named

    def predict(self, tokens: Sequence[int], *, lora: str | None, salt: str | None, media: Sequence[Media] = ()) -> int:
        """Tokens of the longest prefix of known blocks, capped like the engine's own answer at all but one token."""
        extras = [(offset, identifier) for offset, _, identifier in media]
        keys = prompt_keys(self._entry.model, tokens, self._entry.stride, lora=lora, salt=salt, media=extras)
        step = self._block // self._entry.stride
        hit = 0
        for last in range(step - 1, len(keys), step):
            end = (last + 1) * self._entry.stride
            if keys[last] not in self._held or end > len(tokens) - 1:
                break
            hit = end
        return hit
