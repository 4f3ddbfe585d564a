"""An engine's hashing as the tests of chains need it: prompts with extra keys, and the events that announce them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvledger_bridge.chain import Listed
from kvledger_bridge.decode import BlockStored
from kvledger_index.enginehash import NO_NAMESPACE, Item, Namespace, Scheme, chain, low64

TOKENS_PER_HASH = 16


class Prompt(NamedTuple):
    """A prompt with what its hashes depend on."""

    tokens: tuple[int, ...]
    namespace: Namespace = NO_NAMESPACE
    items: tuple[Item, ...] = ()


class HashingEngine:
    """Hashes as ``scheme`` says, in hash blocks of 16 tokens; ``raw``: byte hashes on the wire."""

    def __init__(self, scheme: Scheme, *, raw: bool = False) -> None:
        self.scheme = scheme
        self.raw = raw

    def digests(self, prompt: Prompt) -> list[bytes]:
        tokens, namespace, items = prompt
        return chain(self.scheme, None, tokens, TOKENS_PER_HASH, namespace=namespace, items=items)

    def name(self, digest: bytes) -> int | bytes:
        return digest if self.raw else low64(digest)

    def stored(
        self, prompt: Prompt, first: int, last: int, kept: Sequence[int] | None = None, *, per: int = 1, **more: Any
    ) -> BlockStored:
        """Blocks ``first`` to ``last`` (exclusive, of ``per`` hash blocks each), of which ``kept`` are announced."""
        digests = self.digests(prompt)
        size = per * TOKENS_PER_HASH
        kept = range(first, last) if kept is None else kept
        lists = [listed(prompt, i * size, size) for i in kept]
        entries = [self.entry(prompt, each, i) for each, i in zip(lists, kept, strict=True)]
        fields: dict[str, Any] = {
            "medium": "GPU",
            "group_idx": 0,
            "lora_id": None if prompt.namespace.lora is None else 1,
            "lora_name": prompt.namespace.lora,
            "extra_keys": tuple(entries) or None,
            **more,
        }
        return BlockStored(
            tuple(self.name(digests[(i + 1) * per - 1]) for i in kept),
            self.name(digests[first * per - 1]) if first else None,
            prompt.tokens[first * size : last * size],
            size,
            **fields,
        )

    def entry(self, prompt: Prompt, items: Listed, block: int) -> tuple[Any, ...] | None:
        """Untagged, as on the wire: adapter, media, salt of block 0."""
        bare = self.scheme.extras == "bare"
        keys: list[Any] = [] if prompt.namespace.lora is None else [prompt.namespace.lora]
        keys += [identifier if bare else (identifier, offset) for identifier, offset in items]
        if block == 0 and prompt.namespace.salt is not None:
            keys.append(prompt.namespace.salt)
        return tuple(keys) or None


def listed(prompt: Prompt, start: int, size: int) -> Listed:
    """The media that touch a block, with offsets relative to it."""
    return tuple(
        (item.identifier, item.offset - start)
        for item in prompt.items
        if item.offset < start + size and start < item.offset + item.length
    )


def text(blocks: int, salt: int = 0) -> tuple[int, ...]:
    """Tokens of so many hash blocks, different for each ``salt``."""
    return tuple(range(100_000 * salt, 100_000 * salt + blocks * TOKENS_PER_HASH))
