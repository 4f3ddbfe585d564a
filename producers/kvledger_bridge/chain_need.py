"""Whether a rank's masked hashes need the engine's chain, and in steps of how many tokens (ENGINE.md §3.4, §3.5, §4).

A masked hash is named for nothing where a full-attention group of the rank ends a block at the same token: that group's
events are dense. Only other ranks pay for digests.
"""

from __future__ import annotations

from math import gcd

from kvledger_bridge.decode import BlockStored
from kvledger_index.model import FULL_KINDS, GroupSpec, ModelEntry


class Need:
    """What is known of a rank's groups as far as it matters for chains; the entry wins over the wire."""

    def __init__(self, entry: ModelEntry) -> None:
        self.chains = False
        self.block = 0
        """The engine's hash block in tokens; 0: no group is known yet."""
        self._entry = entry
        self._kinds: dict[int | None, str | None] = {each.group: each.kind for each in entry.groups}
        self._sizes: dict[int | None, int] = {each.group: each.block_size for each in entry.groups if each.block_size}
        self._heard: dict[int | None, int] = {}  # the last size of each group's events
        self._forced = entry.partial_hash_hits
        self._settle()

    def hear(self, event: BlockStored) -> bool:
        """Learn from a GPU store; whether that changed ``chains`` or ``block``. O(1), and nearly free if not new."""
        group, size = event.group_idx, event.block_size
        if self._heard.get(group) == size or not size:
            return False
        self._heard[group] = size
        have = self._sizes.get(group)
        if have is None or size > have:
            self._sizes[group] = size
        if have is not None and size != have:
            self._forced = True  # one group, two sizes: pieces of blocks
        if self._kinds.get(group) is None:
            self._kinds[group] = event.kv_cache_spec_kind
        return self._settle()

    def learn(self, spec: GroupSpec) -> None:
        """Learn what the log says of a group, before anything is heard of it."""
        if spec.block_size is None:
            return
        self._heard[spec.group] = spec.block_size
        self._sizes[spec.group] = max(spec.block_size, self._sizes.get(spec.group, 0))
        if self._kinds.get(spec.group) is None:
            self._kinds[spec.group] = spec.kind
        self._settle()

    def force(self) -> bool:
        """A masked hash was met that nothing names; whether that is news."""
        self._forced = True
        return self._settle()

    def _settle(self) -> bool:
        before = self.chains, self.block
        sizes = [*self._sizes.values(), *self._heard.values()]
        self.block = self._entry.hash_block_size or gcd(*sizes)
        full = [size for group, size in self._sizes.items() if self._is_full(group)]
        bare = [
            group
            for group, size in self._sizes.items()
            if self._kinds.get(group) is not None
            and not self._is_full(group)
            and not any(size % each == 0 for each in full)
        ]
        pieces = any(self._kinds.get(group) == "mamba" and size > self.block for group, size in self._sizes.items())
        self.chains = self._forced or bool(bare) or pieces
        return (self.chains, self.block) != before

    def _is_full(self, group: int | None) -> bool:
        kind = self._kinds.get(group)
        return kind in FULL_KINDS or (kind is None and group is None)
