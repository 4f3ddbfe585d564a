"""Which hashes are proven to be no part of a plain prompt, one without adapter, salt and media (ADR 4). Pure.

    shown      its event lists an adapter, or salt or media for this hash or for one before it
    behind     its event's parent is veiled, or stands on a chain that was computed with extra keys
    computed   the engine's chain over its event's tokens without extra keys, from token 0 or behind a parent on such a
               chain, does not have it

All three are about the hash, not about a lane: a chain binds tokens and extra keys, so what is proven once holds
wherever the hash is resident. Only GPU events prove anything, as other tiers leave extra keys out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger_bridge.decode import BlockStored, low64
from kvledger_bridge.identity import extras_from
from kvledger_bridge.lineage import Block
from kvledger_bridge.scheme import Finder
from kvledger_index.enginehash import chain


class Veil:
    """The veiled hashes of one life, the newest ``names_max`` of them, resident or not: children may follow."""

    def __init__(self, names_max: int) -> None:
        self._names: dict[int, None] = {}
        self._names_max = names_max

    def __contains__(self, name: int) -> bool:
        return name in self._names

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
    ) -> list[int]:
        """Which of ``places`` in ``names``, the hashes of a GPU event that have no key, are proven veiled.

        ``parent``: the block of the event's parent, where that has one. From ``opaque_from`` on nothing is computed:
        what no router can compute may be part of a prompt of which a router is told no more than tokens. O(places),
        and about 2 µs per hash block where the chain has to be computed.
        """
        behind = event.parent_block_hash
        if parent is not None and behind is not None and low64(parent.digest or b"") != low64(behind):
            parent = None  # its block has another name, and digest and ``plain`` are of that one
        first = self._first(event, parent)
        proven = [place for place in places if place >= first or names[place] in self._names]
        left = [place for place in places if place < min(first, opaque_from) and names[place] not in self._names]
        if left and event.token_ids and not event.lookahead_token_ids:
            plain = _plain_names(event, parent, finder)
            if plain is not None:
                proven += [place for place in left if names[place] not in plain]
        return proven

    def _first(self, event: BlockStored, parent: Block | None) -> int:
        """From which of its hashes on an event shows that they are veiled, or inherits it."""
        if event.parent_block_hash is not None and (
            low64(event.parent_block_hash) in self._names or (parent is not None and parent.plain is False)
        ):
            return 0
        return extras_from(event)


def _plain_names(event: BlockStored, parent: Block | None, finder: Finder) -> frozenset[int] | None:
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
    return frozenset(low64(each) for each in chain(scheme, digest, event.token_ids, block))
