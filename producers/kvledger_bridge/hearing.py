"""What one event says, in the forms that the lineage works with. Read in pieces: one event may be very long. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger_bridge.decode import BlockStored, HashValue, low64
from kvledger_bridge.pace import Work, slices
from kvledger_index.blockkeys import token_bytes

TOKENS_PER_BLOCK = 64
"""Tokens that are packed or compared in the time that a block takes."""


def names_of(hashes: Sequence[HashValue], piece_blocks: int) -> Work[tuple[int, ...]]:
    """The low 64 bits of each."""
    if len(hashes) <= piece_blocks:
        return tuple([low64(each) for each in hashes])
    names: list[int] = []
    for some in slices(hashes, piece_blocks):
        names += [low64(each) for each in some]
        yield
    return tuple(names)


def packed(tokens: Sequence[int], piece_blocks: int) -> Work[bytes]:
    """Tokens as u32le; raises InvalidInput."""
    step = piece_blocks * TOKENS_PER_BLOCK
    if len(tokens) <= step:
        return token_bytes(tokens)
    raw = bytearray()
    for some in slices(tokens, step):
        raw += token_bytes(some)
        yield
    return bytes(raw)


def same(one: BlockStored, other: BlockStored, piece_blocks: int) -> Work[bool]:
    """Whether two events say the same of which hashes name which tokens."""
    if (
        one.parent_block_hash != other.parent_block_hash
        or one.block_size != other.block_size
        or len(one.token_ids) != len(other.token_ids)
        or one.lora_name != other.lora_name
        or one.lora_id != other.lora_id
        or one.block_hashes != other.block_hashes
        or one.extra_keys != other.extra_keys
    ):
        return False
    step = piece_blocks * TOKENS_PER_BLOCK
    for mine, its in zip(slices(one.token_ids, step), slices(other.token_ids, step), strict=True):
        if mine != its:
            return False
        if len(one.token_ids) > step:
            yield
    return True
