"""A validated prompt: its block keys per stride and, for ranks that need them, the engine's own hashes (ADR 5). Pure.

way         how one engine may name this prompt: its scheme, as far as the prompt's content makes it matter, the hash
            block size h, and at which lengths its groups' entries can end. Several where the form of extra keys is
            not known: one per form that there is
obstacle    why this prompt's hashes cannot be computed under a scheme
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvledger_index.blockkeys import extend, root_key, token_bytes
from kvledger_index.enginehash import EXTRA_FORMS, Item, Namespace, Scheme, chain, low64
from kvledger_index.errors import InvalidInput

PROMPT_TOKENS_MAX = 2**20
"""Tokens of a prompt that are looked up: 4096 rows at a stride of 16. What is beyond can only lengthen a hit."""

CHAIN_BLOCKS_MAX = 8_192
"""Hash blocks of a prompt that are computed for one way: about 2 µs each (cbor 5), and nothing else runs on the loop
meanwhile; more would be a router's whole deadline."""


class Media(msgspec.Struct, frozen=True):
    """A multimodal item of the prompt: its identifier (vLLM's multimodal hash), the absolute position of its first
    placeholder token and how many tokens it covers.

    Without ``length``, hashes that an engine published without their tokens cannot be asked for: ranks that hold such
    hashes are then answered by bounds.
    """

    identifier: str
    offset: int
    length: int | None = None


class Way(NamedTuple):
    """How one engine names a prompt; ``every``: only each prefix of a multiple of so many tokens can have an entry."""

    scheme: Scheme
    hash_block: int
    every: int


class Prompt:
    """What is asked about. ``tokens`` is its length, ``looked_up`` how much of it counts here."""

    def __init__(
        self, model: str, token_ids: Sequence[int], lora: str | None, salt: str | None, media: Iterable[Media]
    ) -> None:
        """Raises InvalidInput for a token outside u32, and for media that stand nowhere."""
        if isinstance(token_ids, bytes | bytearray):
            raise InvalidInput("token ids must be integers, got bytes, whose layout nobody knows")
        packed = token_bytes(token_ids)
        self.tokens = len(packed) // 4
        self.looked_up = min(self.tokens, PROMPT_TOKENS_MAX)
        self.by_stride: dict[int, tuple[int, ...]] = {}
        self._media = sorted(map(_checked, media), key=lambda item: item.offset)
        # the engine tests both for truth: an empty name or salt is none
        self._lora, self._salt = lora or None, salt or None
        self._root = root_key(model, self._lora, self._salt)
        self._bytes = packed[: self.looked_up * 4]
        self._by_way: dict[Way, tuple[int, ...]] = {}

    def keys(self, stride: int) -> tuple[int, ...]:
        """Block keys of every full stride; computed once."""
        if stride not in self.by_stride:
            extras = [(item.offset, item.identifier) for item in self._media]
            self.by_stride[stride] = tuple(extend(self._root, self._bytes, stride, extras=extras))
        return self.by_stride[stride]

    def obstacle(self, scheme: Scheme | None, hash_block: int) -> str:
        """Why an engine's hashes of this prompt cannot be computed; empty where they can."""
        if scheme is None:
            return "it is not known how the engine hashes: name hash_scheme in the model entry"
        if self.looked_up // hash_block > CHAIN_BLOCKS_MAX:
            return f"the prompt has more than {CHAIN_BLOCKS_MAX} hash blocks of {hash_block} tokens"
        return "" if self.plain else self._obstacle_of_extras(scheme)

    def _obstacle_of_extras(self, scheme: Scheme) -> str:
        if any(item.length is None for item in self._media):
            return "the length of a multimodal item is not known: give Media.length"
        if self._lora is not None and scheme.extras in {"tagged", None} and self._lora not in dict(scheme.paths):
            return "the path of the LoRA adapter is not known: name hash_scheme.paths in the model entry"
        return ""

    def ways(self, scheme: Scheme, hash_block: int, every: int) -> tuple[Way, ...]:
        """Equal for engines that name this prompt alike: what a plain prompt does not touch does not matter.

        Without a known form of extra keys, one per form of :data:`EXTRA_FORMS`, which is every release's so far.
        """
        if self.plain:
            return (Way(msgspec.structs.replace(scheme, extras=None, paths=(), block=None), hash_block, every),)
        if scheme.extras is not None:
            return (Way(msgspec.structs.replace(scheme, block=None), hash_block, every),)
        forms = (
            EXTRA_FORMS if self._media else [form for form in EXTRA_FORMS if form != "offsets"]
        )  # they are bare then
        return tuple(Way(msgspec.structs.replace(scheme, extras=form, block=None), hash_block, every) for form in forms)

    def hashes(self, way: Way) -> tuple[int, ...]:
        """The engine's hashes (low 64 bits) of the prefixes of ``every``, 2 x ``every``, … tokens; computed once.

        Only where there is no :meth:`obstacle`. O(tokens), about 2 µs per hash block.
        """
        if way not in self._by_way:
            tokens = array("I")
            tokens.frombytes(self._bytes)
            if sys.byteorder == "big":
                tokens.byteswap()
            path = dict(way.scheme.paths).get(self._lora) if self._lora is not None else None
            digests = chain(
                way.scheme,
                None,
                tokens,
                way.hash_block,
                namespace=Namespace(self._lora, self._salt, path),
                items=[Item(item.identifier, item.offset, item.length or 0) for item in self._media],
            )
            step = way.every // way.hash_block
            self._by_way[way] = tuple(map(low64, digests[step - 1 :: step]))
        return self._by_way[way]

    @property
    def plain(self) -> bool:
        """Whether it has neither adapter nor salt nor media: no veiled hash is then part of it."""
        return self._lora is None and self._salt is None and not self._media


def _checked(item: Media) -> Media:
    if item.offset < 0:
        raise InvalidInput(f"media offset {item.offset} < 0: it is the absolute position of a placeholder token")
    if item.length is not None and item.length <= 0:
        raise InvalidInput(f"media length {item.length} <= 0: it is how many tokens the item covers")
    return item
