"""A small honest prefix cache, as vLLM's: a pool of blocks that several groups share, and what it would reuse.

It does what engines do that makes following them hard: equal blocks are copies, the least recently used goes first,
whichever group it is of, windows and states announce fewer hashes than tokens, a prompt hits only as far as every group
serves it together, and what one group has lost is computed again for all. It shares no code with bridge or router.

    request ─► hit ─► take blocks of the hit ─► allocate the rest (BlockRemoved per victim) ─► BlockStored per group
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, NamedTuple

HASH_BLOCK = 16
"""Tokens per hash block, and of the smallest block of every group here."""

GPU, CPU = "GPU", "CPU"
FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"

Lane = tuple[int, str]
"""(group, medium)."""

Event = dict[str, Any]
Has = Callable[[int, int], bool]
"""Whether (group, hash) is resident on the GPU."""


class Group(NamedTuple):
    """One KV-cache group; sizes in tokens."""

    number: int
    kind: str
    block: int = HASH_BLOCK
    window: int = 0

    @property
    def tail(self) -> int:
        """Blocks that a hit needs right before its end."""
        return 1 if self.kind == STATE else -(-(self.window - 1) // self.block)


class Shape(NamedTuple):
    """How an engine of one model caches: its groups, and the blocks of its pool and of its CPU tier (0: none)."""

    model: str
    groups: tuple[Group, ...]
    blocks: int
    cpu_blocks: int = 0

    @property
    def alignment(self) -> int:
        """Every hit is a multiple of this many tokens."""
        return lcm(*(group.block for group in self.groups))


def hit(shape: Shape, tokens: int, names: Sequence[int], has: Has) -> int:
    """The longest aligned prefix, short of the last token, that every group serves: by trying all, longest first."""
    step = shape.alignment
    for length in range((tokens - 1) // step * step, 0, -step):
        if all(_serves(group, length, names, has) for group in shape.groups):
            return length
    return 0


def _serves(group: Group, length: int, names: Sequence[int], has: Has) -> bool:
    count = length // group.block
    first = 0 if group.kind == FULL else max(0, count - group.tail)
    return all(has(group.number, name_of(group, index, names)) for index in range(first, count))


def name_of(group: Group, index: int, names: Sequence[int]) -> int:
    """The hash of a group's block: that of its last hash block."""
    return names[(index + 1) * group.block // HASH_BLOCK - 1]


class Chronicle:
    """What was resident after each batch of one life: every change of presence, by sequence."""

    def __init__(self) -> None:
        self._changes: dict[Lane, dict[int, list[int]]] = defaultdict(dict)
        """When a hash came and went, in turn."""
        self._copies: dict[Lane, Counter[int]] = defaultdict(Counter)

    def stored(self, lane: Lane, name: int, seq: int) -> None:
        """One more copy."""
        self._copies[lane][name] += 1
        if self._copies[lane][name] == 1:
            self._changes[lane].setdefault(name, []).append(seq)

    def removed(self, lane: Lane, name: int, seq: int) -> None:
        """One copy less."""
        self._copies[lane][name] -= 1
        if self._copies[lane][name] == 0:
            del self._copies[lane][name]
            self._changes[lane][name].append(seq)

    def cleared(self, seq: int) -> None:
        """Nothing is left."""
        for lane, copies in self._copies.items():
            for name in copies:
                self._changes[lane][name].append(seq)
            copies.clear()

    def was_resident(self, lane: Lane, name: int, seq: int) -> bool:
        """Right after batch ``seq``."""
        return bisect_right(self._changes[lane].get(name, ()), seq) % 2 == 1

    def held(self) -> dict[Lane, set[int]]:
        """What is resident now."""
        return {lane: set(copies) for lane, copies in self._copies.items() if copies}


class Cache:
    """One life of an engine's cache. ``begin`` a batch, let things happen, take its events with ``end``."""

    def __init__(self, shape: Shape, chronicle: Chronicle) -> None:
        self.shape = shape
        self.chronicle = chronicle
        self._seq = -1
        self._events: list[Event] = []
        self._free: OrderedDict[int, tuple[int, int] | None] = OrderedDict(
            (block, None) for block in range(shape.blocks)
        )
        """Blocks that no request uses, the first to go first, with the (group, hash) that each still caches."""
        self._cached: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._named: dict[int, tuple[int, int]] = {}
        self._tier: OrderedDict[int, None] = OrderedDict()

    def begin(self, seq: int) -> None:
        """What follows is told with batch ``seq``."""
        self._seq, self._events = seq, []

    def end(self) -> list[Event]:
        """The events of the batch."""
        return self._events

    def clear(self) -> None:
        """Forget everything; told as one event."""
        self._cached.clear()
        self._named.clear()
        self._tier.clear()
        self._free = OrderedDict.fromkeys(range(self.shape.blocks))
        self.chronicle.cleared(self._seq)
        self._events.append({"type": "AllBlocksCleared"})

    def serve(self, tokens: Sequence[int], names: Sequence[int]) -> int:
        """One request in one step; ``names`` are the hashes of its hash blocks. Returns the tokens it reused."""
        reused = hit(self.shape, len(tokens), names, lambda group, name: bool(self._cached.get((group, name))))
        whole = len(tokens) // self.shape.alignment * self.shape.alignment
        used: list[int] = []
        for group in self.shape.groups:
            used += self._touch(group, reused // group.block, names)
        if whole == reused:
            self._release(used)
            return reused
        fresh = {group.number: self._allocate(group, reused, whole) for group in self.shape.groups}
        for group in self.shape.groups:
            kept = fresh[group.number]
            for index, block in kept.items():
                self._store(group.number, name_of(group, index, names), block)
            self._tell(group, list(kept), reused, tokens[reused:whole], names)
            used += kept.values()
        self._offload(names[reused // HASH_BLOCK : whole // HASH_BLOCK])
        self._release(used)
        return reused

    def _touch(self, group: Group, count: int, names: Sequence[int]) -> list[int]:
        """The blocks of the hit that the request needs, taken out of the queue."""
        first = 0 if group.kind == FULL else max(0, count - group.tail)
        taken = [self._cached[group.number, name_of(group, index, names)][0] for index in range(first, count)]
        for block in taken:
            self._free.pop(block, None)
        return taken

    def _allocate(self, group: Group, start: int, end: int) -> dict[int, int]:
        """Blocks by index for what is kept of [start, end): windows keep their tail, states the last one."""
        indexes = range(start // group.block, end // group.block)
        kept = indexes if group.kind == FULL else indexes[-group.tail :]
        return {index: self._victim() for index in kept}

    def _victim(self) -> int:
        block, _ = self._free.popitem(last=False)
        cached = self._named.pop(block, None)
        if cached is not None:
            group, name = cached
            self._cached[cached].remove(block)
            self.chronicle.removed((group, GPU), name, self._seq)
            self._events.append({"type": "BlockRemoved", "block_hashes": [name], "medium": GPU, "group_idx": group})
        return block

    def _store(self, group: int, name: int, block: int) -> None:
        self._cached[group, name].append(block)
        self._named[block] = group, name
        self.chronicle.stored((group, GPU), name, self._seq)

    def _tell(self, group: Group, kept: list[int], start: int, tokens: Sequence[int], names: Sequence[int]) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [name_of(group, index, names) for index in kept],
            "parent_block_hash": names[start // HASH_BLOCK - 1] if start else None,
            "token_ids": list(tokens),
            "block_size": group.block,
            "lora_id": None,
            "medium": GPU,
            "lora_name": None,
            "extra_keys": [None] * len(kept) or None,
            "group_idx": group.number,
            "kv_cache_spec_kind": group.kind,
        }
        if group.window:
            event["kv_cache_spec_sliding_window"] = group.window
        self._events.append(event)

    def _offload(self, names: Sequence[int]) -> None:
        """Copies of full attention blocks in the CPU tier, told as engines do: without tokens and size."""
        if not self.shape.cpu_blocks:
            return
        fresh = [name for name in names if name not in self._tier]
        for name in fresh:
            self._tier[name] = None
            self.chronicle.stored((0, CPU), name, self._seq)
        gone = []
        while len(self._tier) > self.shape.cpu_blocks:
            name, _ = self._tier.popitem(last=False)
            self.chronicle.removed((0, CPU), name, self._seq)
            gone.append(name)
        placeholder: Event = {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "lora_name": None,
        }
        if fresh:
            self._events.append(
                {"type": "BlockStored", "block_hashes": fresh, "medium": CPU, "group_idx": 0} | placeholder
            )
        if gone:
            self._events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": CPU, "group_idx": 0})

    def _release(self, used: list[int]) -> None:
        """The end of a prompt goes first: what stands before it may serve others."""
        for block in reversed(used):
            self._free[block] = None
            self._free.move_to_end(block)
