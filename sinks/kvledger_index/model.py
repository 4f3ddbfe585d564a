"""Facts about a model's KV cache that the wire, the index and the hit rule share.

Everything here is a value: built once, compared by value, serialised by msgspec.
"""

from __future__ import annotations

from math import gcd
from typing import Literal

import msgspec

from kvledger_index.enginehash import Scheme

STRIDE_TOKENS_DEFAULT = 16
"""Tokens per block key where a model entry names no group sizes (DESIGN §1)."""

GROUP_MAX = 254
"""Highest ``group_idx`` a lane can name; 255 in a lane byte means that the event had no group."""

GROUP_NONE_LANE = 255

EXPIRE_SECONDS_DEFAULT = 600.0
"""How long after its last store a tier that never announces removals is counted. Such tiers are large and shared, and
evict least recently used blocks after hours; ten minutes keep what conversations come back to, and bound the guess."""

Medium = Literal["gpu", "cpu", "storage", "other"]

MEDIA: tuple[Medium, ...] = ("gpu", "cpu", "storage", "other")
"""Media in the order of their codes on the topic and in Redis (0..3)."""

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
SLIDING_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
KNOWN_KINDS = FULL_KINDS | SLIDING_KINDS | {"mamba", "chunked_local_attention"}
"""Kinds with a hit rule (ENGINE.md §5). Any other kind fails closed."""


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """One KV-cache group of an engine.

    ``group`` is ``group_idx`` on the wire, None for events without one (a namespace of its own, never 0).
    ``kind`` is vLLM's ``kv_cache_spec_kind``; None where neither wire nor entry says. Sizes are in tokens.
    """

    group: int | None
    kind: str | None = None
    block_size: int | None = None
    window: int | None = None
    chunk: int | None = None
    eagle: bool = False


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator says of one model, beside what the wire says (DESIGN §8).

    ``groups`` is needed for engines 0.20 and 0.21, whose events carry no kind; later engines announce theirs and the
    entry wins where both speak. A group without a number (``group: null``) describes engines before 0.20;
    left out, those count as one full-attention group.
    """

    model: str
    aliases: tuple[str, ...] = ()
    groups: tuple[GroupSpec, ...] = ()
    hash_block_size: int | None = None
    alignment: int | None = None
    partial_hash_hits: bool = False
    full_reports: bool = False
    copies: Literal["counted", "last"] = "counted"
    loss: Literal["invalidate", "keep"] = "invalidate"
    harmless_tags: tuple[str, ...] = ()
    multimodal: bool | None = None
    """False: bare strings in ``extra_keys`` of engines <= 0.18 are salts. None: untellable there, so unplaced."""
    hash_scheme: Scheme | None = None
    """How the engines hash, where the operator knows; else it is found out on dense events (ENGINE.md §4)."""
    expire_seconds: float | None = None
    """Tiers that never announce removals are not counted this long after their last store; None:
    EXPIRE_SECONDS_DEFAULT."""

    @property
    def stride(self) -> int:
        """Tokens per block key: the greatest common divisor of the sizes named here, else 16."""
        sizes = [g.block_size for g in self.groups if g.block_size]
        if self.hash_block_size:
            sizes.append(self.hash_block_size)
        return gcd(*sizes) if sizes else STRIDE_TOKENS_DEFAULT


def medium_of(word: str | None) -> Medium:
    """Map a medium word from the wire; case-insensitive, a missing one is gpu, an unknown one is never gpu."""
    if word is None:
        return "gpu"
    low = word.lower()
    if low in ("gpu", "cpu"):
        return low  # type: ignore[return-value]  # the two literals just compared
    if low in ("storage", "fs", "obj"):
        return "storage"
    return "other"


def lane_code(group: int | None) -> int:
    """The byte that names a group in rows; raises ValueError above GROUP_MAX."""
    if group is None:
        return GROUP_NONE_LANE
    if not 0 <= group <= GROUP_MAX:
        msg = f"group_idx {group} is outside 0..{GROUP_MAX}"
        raise ValueError(msg)
    return group
