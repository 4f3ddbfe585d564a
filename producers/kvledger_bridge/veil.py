"""Which hashes are proven to be no part of a plain prompt, one without adapter, salt and media (ADR 4). Pure.

    shown      its event lists an adapter, or salt or media for this hash or for one before it
    behind     its event's parent is veiled, or stands on a chain that was computed with extra keys
    computed   the engine's chain over its event's tokens without extra keys, from token 0 or behind a parent on such a
               chain, does not have it

All three are about the hash, not about a lane: a chain binds tokens and extra keys, so what is proven once holds
wherever the hash is resident. Only GPU events prove anything, as other tiers leave extra keys out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvledger_bridge.blocks import Block
from kvledger_bridge.decode import BlockStored, low64
from kvledger_bridge.identity import extras_from
from kvledger_bridge.pace import PIECE_BLOCKS, Work, at_once, slices
from kvledger_bridge.scheme import Finder
from kvledger_index.enginehash import chain

LATE_TOKENS_MAX = 65_536
"""Tokens kept of events that came before the scheme was found, about 2.5 MB; the chains over them take about 10 ms in
hash blocks of 16, once."""


class Veil:
    """The veiled hashes of one life, the newest ``names_max`` of them, resident or not: children may follow."""

    def __init__(self, names_max: int) -> None:
        self._names: dict[int, None] = {}
        self._names_max = names_max
        self._late: deque[tuple[BlockStored, list[int]]] = deque()
        self._late_tokens = 0

    def __contains__(self, name: int) -> bool:
        return name in self._names

    def discard(self, name: int) -> None:
        """Forget a hash of which nothing is proven any more."""
        self._names.pop(name, None)

    def add(self, name: int) -> None:
        """Keep a hash that is proven veiled."""
        self._names[name] = None
        if len(self._names) > self._names_max:
            del self._names[next(iter(self._names))]

    def prove(
        self,
        event: BlockStored,
        names: Sequence[int],
        places: Sequence[int],
        opaque_from: int,
        *,
        parent: Block | None,
        finder: Finder,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> Work[list[int]]:
        """Which of ``places`` in ``names``, the hashes of a GPU event that have no key, are proven veiled.

        ``parent``: the block of the event's parent, where that has one. From ``opaque_from`` on nothing is computed:
        what no router can compute may be part of a prompt of which a router is told no more than tokens. O(places),
        and about 2 µs per hash block where the chain has to be computed.
        """
        behind = event.parent_block_hash
        if parent is not None and behind is not None and low64(parent.digest or b"") != low64(behind):
            parent = None  # its block has another name, and digest and ``plain`` are of that one
        first = self._first(event, parent)
        end = min(first, opaque_from)
        proven: list[int] = []
        left: list[int] = []
        for some in slices(places, piece_blocks):
            proven += [place for place in some if place >= first or names[place] in self._names]
            left += [place for place in some if place < end and names[place] not in self._names]
            if len(places) > piece_blocks:
                yield
        if not left or not event.token_ids or event.lookahead_token_ids:
            return proven
        plain = yield from _plain_names(event, parent, finder, piece_blocks)
        if plain is not None:
            for some in slices(left, piece_blocks):
                proven += [place for place in some if names[place] not in plain]
                if len(left) > piece_blocks:
                    yield
        elif finder.wants and not finder.seeded:
            self._keep(event, [names[place] for place in left])
        return proven

    def catch_up(self, finder: Finder) -> list[int]:
        """Hashes whose events came before the scheme was found and that are proven now. Free where there are none."""
        proven: dict[int, None] = {}
        while self._late and finder.seeded:
            event, names = self._late.popleft()
            self._late_tokens -= len(event.token_ids)
            behind = event.parent_block_hash
            if behind is None:
                plain = at_once(_plain_names(event, None, finder, PIECE_BLOCKS))
                proven.update((name, None) for name in names if plain is not None and name not in plain)
            elif low64(behind) in proven or low64(behind) in self._names:
                proven.update(dict.fromkeys(names))
        return list(proven)

    def _keep(self, event: BlockStored, names: list[int]) -> None:
        """An event that nothing can be computed of yet; the oldest give way."""
        self._late.append((event, names))
        self._late_tokens += len(event.token_ids)
        while self._late_tokens > LATE_TOKENS_MAX:
            self._late_tokens -= len(self._late.popleft()[0].token_ids)

    def _first(self, event: BlockStored, parent: Block | None) -> int:
        """From which of its hashes on an event shows that they are veiled, or inherits it."""
        if event.parent_block_hash is not None and (
            low64(event.parent_block_hash) in self._names or (parent is not None and parent.plain is False)
        ):
            return 0
        return extras_from(event)


def _plain_names(
    event: BlockStored, parent: Block | None, finder: Finder, piece_blocks: int
) -> Work[frozenset[int] | None]:
    """The hashes of a plain prompt with the event's tokens, up to its last; None where they cannot be known.

    The scheme must have reproduced hashes from token 0: an operator's word, or a guess, proves nothing. 64 equal bits
    prove the hash block, too.
    """
    scheme, block = finder.scheme, finder.block
    if scheme is None or not finder.seeded or not block:
        return None
    if event.parent_block_hash is not None and (parent is None or not parent.plain):
        return None
    digest = None if parent is None else parent.digest
    names: set[int] = set()
    for some in slices(event.token_ids, piece_blocks * block):
        if names:
            yield
        digests = chain(scheme, digest, some, block)
        names.update(map(low64, digests))
        digest = digests[-1] if digests else digest
    return frozenset(names)
