"""The engine's own block hashes, recomputed from tokens where its scheme is known (ENGINE.md §4).

    H_i = F((H_{i-1} or NONE_HASH, tokens of hash block i, extra keys of block i or None))

``F`` is a digest over a serialisation: CPython's pickle at the highest protocol (``sha256``, ``xxhash``) or canonical
CBOR (``sha256_cbor``, ``xxhash_cbor``). NONE_HASH is F of the seed as a text. What stands in the extra keys changed
with releases; :data:`EXTRA_FORMS` names the three forms. Bridge and router both use this: the bridge to place hashes
whose events name no tokens of their own, the router to ask for hashes that have no block key.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import xxhash

from kvledger_index.errors import InvalidInput

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
ExtraForm = Literal["tagged", "offsets", "bare"]

ALGORITHMS: tuple[Algorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEED_DEFAULT = "vllm-none-hash"
"""NONE_HASH's seed from 0.29 on where PYTHONHASHSEED is not set (sha256 family only)."""

EXTRA_FORMS: dict[ExtraForm, str] = {
    "tagged": "0.31 on: ('lora', name, path), ('mm', identifier, offset in block), ('cache_salt', salt)",
    "offsets": "0.19 to 0.30: name, (identifier, offset in block), salt",
    "bare": "up to 0.18: name, identifier, salt",
}


class Scheme(msgspec.Struct, frozen=True, array_like=True):
    """How an engine hashes. ``seed`` is PYTHONHASHSEED as the engine saw it, or vLLM's default.

    ``extras`` None: not known, so only prompts without LoRA, salt and media can be chained. ``paths`` are (LoRA name,
    path) of adapters; from 0.31 on the path is hashed and not on the wire. ``block`` is the hash block size in tokens
    under which the scheme was proven, where it was found out. ``none`` is NONE_HASH itself (hex) of an engine whose
    seed was random, where somebody knows it.
    """

    algorithm: Algorithm = "sha256"
    seed: str = SEED_DEFAULT
    extras: ExtraForm | None = None
    paths: tuple[tuple[str, str], ...] = ()
    block: int | None = None
    none: str = ""

    @property
    def none_hash(self) -> bytes:
        """The parent of every first block. Raises InvalidInput where ``none`` is no hex."""
        if not self.none:
            return _none_hash(self.algorithm, self.seed)
        try:
            return bytes.fromhex(self.none)
        except ValueError as error:
            msg = f"NONE_HASH must be hex digits, got {len(self.none)} characters that are not"
            raise InvalidInput(msg) from error


class Item(NamedTuple):
    """A multimodal item of a prompt: ``length`` in tokens (it is part of which blocks the item touches)."""

    identifier: str
    offset: int
    length: int


class Namespace(NamedTuple):
    """What stands in the extra keys of whole prompts; ``path`` is the LoRA adapter's path (0.31 on)."""

    lora: str | None = None
    salt: str | None = None
    path: str | None = None


NO_NAMESPACE = Namespace()


def chain(
    scheme: Scheme,
    parent: bytes | None,
    tokens: Sequence[int],
    block: int,
    *,
    start: int = 0,
    namespace: Namespace = NO_NAMESPACE,
    items: Sequence[Item] = (),
) -> list[bytes]:
    """Digests of the full hash blocks of ``tokens``, whose first token stands at position ``start``.

    ``parent`` None is the start of a prompt. ``block`` is the engine's hash block size. O(tokens), about 2 µs a block.
    Raises InvalidInput where extras are asked for and their form is not known.
    """
    digest = parent if parent is not None else scheme.none_hash
    step = _STEPS[scheme.algorithm]
    plain = namespace.lora is None and namespace.salt is None and not items
    form = scheme.extras
    if form is None:
        if not plain:
            msg = "the form of this engine's extra keys is not known: LoRA, salt and media cannot be hashed"
            raise InvalidInput(msg)
        form = "tagged"
    digests: list[bytes] = []
    for at in range(0, len(tokens) - block + 1, block):
        extras = None if plain else extra_keys(form, start + at, block, namespace, items)
        digest = step(digest, tuple(tokens[at : at + block]), extras)
        digests.append(digest)
    return digests


def extra_keys(
    form: ExtraForm, start: int, block: int, namespace: Namespace, items: Sequence[Item]
) -> tuple[object, ...] | None:
    """Extra keys of the block at ``start`` in the order of the engine: LoRA, items by position, salt in block 0."""
    keys: list[object] = []
    if namespace.lora is not None:
        keys.append(("lora", namespace.lora, namespace.path or "") if form == "tagged" else namespace.lora)
    for item in items:
        if item.offset < start + block and start < item.offset + item.length:
            offset = item.offset - start
            keys.append(
                ("mm", item.identifier, offset)
                if form == "tagged"
                else (item.identifier, offset)
                if form == "offsets"
                else item.identifier
            )
    if start == 0 and namespace.salt is not None:
        keys.append(("cache_salt", namespace.salt) if form == "tagged" else namespace.salt)
    return tuple(keys) or None


def low64(digest: bytes) -> int:
    """The form in which hashes of one rank meet: the low 64 bits."""
    return int.from_bytes(digest[-8:], "big")


def _sha256_pickle(parent: bytes, tokens: tuple[int, ...], extras: tuple[object, ...] | None) -> bytes:
    return hashlib.sha256(pickle.dumps((parent, tokens, extras), protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _xxhash_pickle(parent: bytes, tokens: tuple[int, ...], extras: tuple[object, ...] | None) -> bytes:
    return xxhash.xxh3_128_digest(pickle.dumps((parent, tokens, extras), protocol=pickle.HIGHEST_PROTOCOL))


def _sha256_cbor(parent: bytes, tokens: tuple[int, ...], extras: tuple[object, ...] | None) -> bytes:
    return hashlib.sha256(_cbor_block(parent, tokens, extras)).digest()


def _xxhash_cbor(parent: bytes, tokens: tuple[int, ...], extras: tuple[object, ...] | None) -> bytes:
    return xxhash.xxh3_128_digest(_cbor_block(parent, tokens, extras))


_STEPS = {"sha256": _sha256_pickle, "sha256_cbor": _sha256_cbor, "xxhash": _xxhash_pickle, "xxhash_cbor": _xxhash_cbor}


@lru_cache(maxsize=256)
def _none_hash(algorithm: Algorithm, seed: str) -> bytes:
    data = cbor(seed) if algorithm.endswith("_cbor") else pickle.dumps(seed, protocol=pickle.HIGHEST_PROTOCOL)
    return hashlib.sha256(data).digest() if algorithm.startswith("sha256") else xxhash.xxh3_128_digest(data)


def _cbor_block(parent: bytes, tokens: tuple[int, ...], extras: tuple[object, ...] | None) -> bytes:
    head = b"\x83" + _head(2, len(parent)) + parent + _head(4, len(tokens))
    return head + b"".join(map(_uint, tokens)) + cbor(extras)


@lru_cache(maxsize=1 << 18)
def _uint(value: int) -> bytes:
    return _head(0, value)


def cbor(value: object) -> bytes:
    """Canonical CBOR of what extra keys are made of: None, text, bytes, integers, tuples of those."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case str():
            raw = value.encode()
            return _head(3, len(raw)) + raw
        case bytes():
            return _head(2, len(value)) + value
        case tuple() | list():
            return _head(4, len(value)) + b"".join(map(cbor, _objects(value)))
    msg = f"no extra key has the type {type(value).__name__}"
    raise InvalidInput(msg)


def _objects(value: Iterable[object]) -> Iterable[object]:
    return value


def _head(major: int, value: int) -> bytes:
    """The shortest CBOR head, as canonical CBOR asks."""
    if value < 24:
        return bytes((major << 5 | value,))
    for size, info in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 1 << 8 * size:
            return bytes((major << 5 | info,)) + value.to_bytes(size, "big")
    msg = f"{value} does not fit 64 bits"
    raise InvalidInput(msg)
