"""What makes the blocks of an event different from others with the same tokens: adapter, salt, media (DESIGN §3).

``extra_keys`` has one entry per hash. Its items are untagged: the LoRA name, multimodal ``(identifier, offset)`` pairs
(bare identifiers in 0.17 and 0.18), the cache salt (block 0 only), a prompt-embeds digest (bytes). What cannot be told
apart ends the part of the event that can be placed: a wrong key would be a false claim, a missing one is counted.
"""

from __future__ import annotations

from typing import NamedTuple

from kvledger_bridge.decode import BlockStored, ExtraKey
from kvledger_bridge.pace import PIECE_BLOCKS, Work, slices
from kvledger_index.blockkeys import Extra


class Identity(NamedTuple):
    """``salt`` of the namespace (only where the span starts at token 0), ``extras`` positioned from the span's first
    token (negative: started before it), and how many of the event's first blocks these describe fully.
    """

    salt: str | None
    extras: tuple[Extra, ...]
    blocks: int
    pairs: bool
    """Whether a pair was seen: this engine's bare strings are then never multimodal identifiers."""


def identify(
    event: BlockStored, *, pairs_known: bool, multimodal: bool | None, piece_blocks: int = PIECE_BLOCKS
) -> Work[Identity]:
    """Read the event's adapter, salt and media.

    ``pairs_known``: the engine is known to send multimodal items as pairs. ``multimodal`` False: it has none at all.
    O(blocks + items).
    """
    if event.lora_id is not None and event.lora_name is None:
        return Identity(None, (), 0, pairs=False)  # an adapter without a name: releases before 0.14
    entries = event.extra_keys
    count = len(event.block_hashes)
    if entries is None or entries.count(None) == len(entries):
        return Identity(None, (), count, pairs=False)
    if len(entries) != count:
        return Identity(None, (), 0, pairs=False)
    pairs = yield from _has_pair(entries, piece_blocks)
    pairs_known = pairs_known or event.group_idx is not None or pairs  # group numbers came after pairs
    salt = None
    extras: set[Extra] = set()  # an item is listed by every block that it covers
    blocks = 0
    for entry in entries:
        if blocks and not blocks % piece_blocks:
            yield
        words, found = _sort_out(entry or (), event.lora_name)
        if words is None:
            break
        if words:
            at_start = event.parent_block_hash is None and blocks == 0
            if not (at_start and len(words) == 1 and (pairs_known or multimodal is False)):
                break
            salt = words[0]
        extras.update((blocks * event.block_size + offset, identifier) for identifier, offset in found)
        blocks += 1
    return Identity(salt, tuple(sorted(extras)), blocks, pairs=pairs)


class Listing(NamedTuple):
    """What each announced hash lists, read without knowing where it stands: the salt (of a first hash that is block 0),
    (identifier, offset) per hash (None: no media at all), and how many of the hashes could be read.
    """

    salt: str | None
    media: tuple[tuple[tuple[str, int], ...], ...] | None
    readable: int


def listing(
    event: BlockStored, *, pairs_known: bool, multimodal: bool | None, piece_blocks: int = PIECE_BLOCKS
) -> Work[Listing]:
    """Read the extra keys of an event for the engine's chain; what cannot be told ends it. O(blocks + items)."""
    entries, count = event.extra_keys, len(event.block_hashes)
    if event.lora_id is not None and event.lora_name is None:
        return Listing(None, None, 0)
    if entries is None or entries.count(None) == len(entries):
        return Listing(None, None, count)
    if len(entries) != count:
        return Listing(None, None, 0)
    pairs_known = pairs_known or event.group_idx is not None or (yield from _has_pair(entries, piece_blocks))
    salt = None
    media: list[tuple[tuple[str, int], ...]] = []
    for entry in entries:
        if media and not len(media) % piece_blocks:
            yield
        words, found = _sort_out(entry or (), event.lora_name)
        if words is None:
            break
        if words:
            first = event.parent_block_hash is None and not media
            if not (first and len(words) == 1 and (pairs_known or multimodal is False)):
                break
            salt = words[0]
        media.append(tuple(found))
    return Listing(salt, tuple(media) if any(media) else None, len(media))


def opaque_from(event: BlockStored) -> int:
    """From which of its hashes on no router could compute the event's, whatever it knows of scheme and prompt.

    Hashes over tokens to come (lookahead), prompt embeddings, extra keys of a kind that this version does not know,
    adapters that only have a number. ``len(block_hashes)`` where there is none. ADR 4 says what is not opaque.
    """
    if event.lookahead_token_ids or (event.lora_id is not None and event.lora_name is None):
        return 0
    for i, entry in enumerate(event.extra_keys or ()):
        if entry and _sort_out(entry, event.lora_name)[0] is None:
            return i
    return len(event.block_hashes)


def extras_from(event: BlockStored) -> int:
    """From which of its hashes on a GPU event lists an adapter, salt or media, told apart or not.

    What follows a block of one prompt is bound to it, so later hashes need not list anything. Items of other kinds do
    not count: prompt embeddings are no part of what a prompt is asked about by. ``len(block_hashes)`` where there is
    none.
    """
    if event.lora_name or event.lora_id:
        return 0
    entries, count = event.extra_keys, len(event.block_hashes)
    if entries is None or len(entries) != count:
        return count
    for i, entry in enumerate(entries):
        for item in entry or ():
            match item:
                case str() | (str(), int()):
                    return i
                case _:
                    pass
    return count


def _sort_out(entry: tuple[ExtraKey, ...], lora: str | None) -> tuple[list[str] | None, list[tuple[str, int]]]:
    """The bare strings of one entry without the adapter's name, and its pairs; None: something else is in there."""
    words: list[str] = []
    pairs: list[tuple[str, int]] = []
    for item in entry:
        match item:
            case str():
                words.append(item)
            case (str() as identifier, int() as offset):
                pairs.append((identifier, offset))
            case _:
                return None, []
    if lora is not None and words and words[0] == lora:
        del words[0]
    return words, pairs


def _has_pair(entries: tuple[tuple[ExtraKey, ...] | None, ...], piece_blocks: int) -> Work[bool]:
    for some in slices(entries, piece_blocks):
        if any(isinstance(item, tuple) for entry in some if entry for item in entry):
            return True
        if len(entries) > piece_blocks:
            yield
    return False
