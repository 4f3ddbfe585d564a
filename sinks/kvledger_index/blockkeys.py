"""Block keys: 8-byte names of *prefixes that end here*, computed from tokens by bridge and router alike (DESIGN §3).

    key_0 = XXH3_64(canonical(namespace), seed = KEY_VERSION)
    key_i = XXH3_64(u32le(tokens of stride i) || canonical(extras that start in stride i), seed = key_{i-1})

``canonical(namespace)`` is model, LoRA name, salt, each as u32le length and UTF-8 bytes, a missing one as length
0xFFFFFFFF. ``canonical(extras)`` is, per extra in order of (offset, identifier), u32le offset within the stride,
u32le length and UTF-8 bytes. A stride without extras adds nothing. ``docs/block-keys.md`` has golden vectors.

Keys are unkeyed and 64 bits wide: a collision costs one wrong route, never wrong data.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

import xxhash

from kvledger_index.errors import InvalidInput

KEY_VERSION = 1
SEGMENT_STRIDES = 16
"""Strides per segment: a row of the index holds the keys of one segment (DESIGN §7)."""

_ABSENT = b"\xff\xff\xff\xff"
_U32 = Struct("<I")
_TOKEN_MAX = 2**32 - 1
_hash = xxhash.xxh3_64_intdigest

Extra = tuple[int, str]
"""(absolute token position where a multimodal item starts, its identifier)."""


def _text(word: str | None) -> bytes:
    if word is None:
        return _ABSENT
    raw = word.encode("utf-8", "surrogatepass")
    return _U32.pack(len(raw)) + raw


def root_key(model: str, lora: str | None = None, salt: str | None = None) -> int:
    """The key of the empty prefix of one namespace."""
    return _hash(_text(model) + _text(lora) + _text(salt), KEY_VERSION)


def token_bytes(tokens: Sequence[int] | Iterable[int]) -> bytes:
    """Tokens as u32le; raises InvalidInput naming the first token outside 0..2^32-1."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        msg = f"token ids must be integers in 0..{_TOKEN_MAX}: {error}"
        raise InvalidInput(msg) from error
    if packed.itemsize != 4:  # pragma: no cover - no supported platform
        msg = f"array('I') has {packed.itemsize} bytes per item, expected 4"
        raise InvalidInput(msg)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def extend(parent: int, tokens: bytes, stride: int, *, start: int = 0, extras: Sequence[Extra] = ()) -> list[int]:
    """Keys of the full strides of ``tokens`` (u32le), whose first token stands at position ``start``.

    ``parent`` is the key of the prefix that ends at ``start``. Extras outside the span are ignored: one that starts
    earlier is already in ``parent``. O(tokens); a tail shorter than a stride has no key.
    """
    step = stride * 4
    count = len(tokens) // step
    keys: list[int] = []
    key = parent
    if not extras:
        view = memoryview(tokens)
        for at in range(0, count * step, step):
            key = _hash(view[at : at + step], key)
            keys.append(key)
        return keys
    by_stride: dict[int, list[tuple[int, bytes]]] = {}
    for position, identifier in extras:
        offset = position - start
        if 0 <= offset < count * stride:
            by_stride.setdefault(offset // stride, []).append((offset % stride, _text(identifier)))
    for i in range(count):
        data = tokens[i * step : (i + 1) * step]
        # by offset, then identifier: its length, which comes first in the bytes, must not decide
        for offset, raw in sorted(by_stride.get(i, ()), key=lambda extra: (extra[0], extra[1][4:])):
            data += _U32.pack(offset) + raw
        key = _hash(data, key)
        keys.append(key)
    return keys


def prompt_keys(
    model: str,
    tokens: Sequence[int],
    stride: int,
    *,
    lora: str | None = None,
    salt: str | None = None,
    media: Sequence[Extra] = (),
) -> list[int]:
    """Keys of every full stride of a prompt, first to last."""
    return extend(root_key(model, lora, salt), token_bytes(tokens), stride, extras=media)
