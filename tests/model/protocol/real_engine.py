"""What the model's engine says as vLLM would say it: payload bytes, block keys, and back."""

from __future__ import annotations

import msgspec
import xxhash
from protocol_engine import Batch, Engine, Event
from protocol_parts import AsOf
from protocol_records import GROUP, HASHES, MEDIUM

from kvledger_bridge.lifelog import digest_of
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.model import GroupSpec, ModelEntry

MODEL, BLOCK = "m", 4
KINDS = ("full_attention", "sliding_window")
ENTRY = ModelEntry(model=MODEL, groups=(GroupSpec(0, KINDS[0], BLOCK), GroupSpec(1, KINDS[1], BLOCK, window=9)))
TOKENS = {block: [block] * BLOCK for block in HASHES}
PROMPTS = {block: [*tokens, 99] for block, tokens in TOKENS.items()}
"""A prompt per block, one token longer, as the last token is never reused."""

BLOCKS = {prompt_keys(MODEL, tokens, BLOCK)[0]: block for block, tokens in TOKENS.items()}
"""Block key -> block."""


class Payloads:
    """Raw bytes of batches, and which batch some bytes were."""

    def __init__(self) -> None:
        self._raw: dict[tuple[int, int], bytes] = {}
        self._known: dict[bytes, AsOf] = {}

    def of(self, rank: int, batch: Batch) -> bytes:
        """The bytes on the wire; the time stamp tells equal batches of different lives apart."""
        raw = self._raw.get((rank, batch.digest))
        if raw is None:
            raw = b"?%d of %d" % (batch.digest, rank)
            if batch.readable:
                events = [_wire(event, batch.ghost) for event in batch.events]
                raw = msgspec.msgpack.encode([float(batch.digest), events, rank])
            self._raw[rank, batch.digest] = raw
            self._known[digest_of(raw)] = AsOf(batch.ghost, batch.seq)
        return raw

    def as_of(self, digest: bytes) -> AsOf:
        """Which batch it was; ``ghost`` None for none."""
        return self._known[digest] if digest else AsOf(None, -1)


def _wire(event: Event, life: int) -> dict[str, object]:
    if event.op == "clear":
        return {"type": "AllBlocksCleared"}
    name = xxhash.xxh3_64_intdigest(repr((life, event.hash)).encode())
    group, medium = GROUP[event.lane], MEDIUM[event.lane].upper()
    if event.op == "remove":
        return {"type": "BlockRemoved", "block_hashes": [name], "medium": medium, "group_idx": group}
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": TOKENS[event.hash],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": KINDS[group],
    }


def hit_tokens(engine: Engine, block: int, as_of: AsOf) -> int:
    """What the engine would reuse of a block's prompt: both groups have to hold it."""
    held = all(block in engine.truth(lane, as_of.ghost, as_of.seq) for lane in (0, 1))
    return BLOCK if held and as_of.ghost is not None else 0
