"""The engine's own hash chain over the tokens of one event, and where on it the announced hashes stand (DESIGN §3).

    tokens, parent's digest ──> H[0] H[1] H[2] …   one per hash block (``kvledger_index.enginehash``)
    announced hashes        ──>           ^    ^   a masked event says which hashes, not at which blocks

A hash that is met in order is proven, and with it everything before it: the chain binds tokens and extra keys. Extra
keys come one entry per announced hash, so a media item is known where an announced block lists it; how far it reaches
beyond is tried, block by block, against the next announced hash. Pure; nothing here keeps anything.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from kvledger_bridge.pace import PIECE_BLOCKS, Work, slices
from kvledger_index.enginehash import Item, Namespace, Scheme, chain, low64

TRIES_BLOCKS_MAX = 4096
"""Hash blocks computed for one event beyond its own: about 10 ms. Four gaps of 40 blocks, each tried at every end."""

Listed = tuple[tuple[str, int], ...]
"""What one announced block lists: (identifier, where it starts relative to that block)."""


class Told(NamedTuple):
    """What an event says: low 64 bits of its hashes, hash blocks ``per`` block, media per hash (None: none at all),
    and whether hash i is block i (``dense``).
    """

    names: tuple[int, ...]
    per: int
    media: tuple[Listed, ...] | None
    namespace: Namespace
    dense: bool


class Walk(NamedTuple):
    """Digests of the hash blocks from the span's start, as far as they are known; the hash block that each announced
    hash ends (-1: not met); media that were met as (token relative to the span's start, identifier).
    """

    digests: list[bytes]
    places: list[int]
    media: tuple[tuple[int, str], ...] = ()

    @property
    def proven(self) -> int:
        """How many of the digests an announced hash proves; the others follow if nothing unseen is in their tokens."""
        return max(self.places, default=-1) + 1


class _Reach(NamedTuple):
    """A media item that ends before hash block ``end``; tokens are relative to the span's start."""

    start: int
    identifier: str
    end: int


NOTHING = Walk([], [])


def tokens_of(raw: bytes) -> Sequence[int]:
    """The other way round of ``blockkeys.token_bytes``."""
    tokens = array("I", raw)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def computable(scheme: Scheme, namespace: Namespace, *, media: bool) -> bool:
    """Whether the scheme says how to hash these extra keys."""
    if namespace.lora is None and namespace.salt is None and not media:
        return True
    return scheme.extras is not None and not (
        scheme.extras == "tagged" and namespace.lora is not None and namespace.path is None
    )


def walk(
    scheme: Scheme,
    parent: bytes,
    tokens: Sequence[int],
    told: Told,
    *,
    block: int,
    start: int,
    tries_max: int = TRIES_BLOCKS_MAX,
    reached: bool = False,
    piece_blocks: int = PIECE_BLOCKS,
) -> Work[Walk]:
    """Follow the chain through a span that starts at token ``start`` behind ``parent``; ``block`` is the hash block.

    Beyond the last hash that was met, digests are given only if every hash was, and no media item may reach there;
    ``reached``: one may reach in from before ``start``, which only a hash that is met can rule out.
    O(tokens), plus what is tried for media, at most ``tries_max`` hash blocks. Never raises.
    """
    if not computable(scheme, told.namespace, media=told.media is not None):
        return NOTHING
    if not told.names and reached:
        return NOTHING
    if told.media is None:
        digests: list[bytes] = []
        step = piece_blocks * block
        for at in range(0, len(tokens), step):
            if at:
                yield
            behind = digests[-1] if digests else parent
            some = tokens[at : at + step]
            digests += chain(scheme, behind, some, block, start=start + at, namespace=told.namespace)
        return _cut(digests, (yield from _match(told, digests, piece_blocks)))
    search = _Search(scheme, parent, tokens, told, block=block, start=start, tries_max=tries_max)
    return (yield from search.run(piece_blocks))


def _match(told: Told, digests: list[bytes], piece_blocks: int) -> Work[list[int]]:
    """Which hash block each announced hash ends, in order; -1 from the first on that a dense event contradicts."""
    per = told.per
    places: list[int] = []
    if told.dense:
        for i, name in enumerate(told.names):
            if i and not i % piece_blocks:
                yield
            at = (i + 1) * per - 1
            if at >= len(digests) or low64(digests[at]) != name:
                break
            places.append(at)
        return places + [-1] * (len(told.names) - len(places))
    where: dict[int, int] = {}
    for some in slices(range(per - 1, len(digests), per), piece_blocks):
        if where:
            yield
        where.update({low64(digests[at]): at for at in some})
    last = -1
    for name in told.names:
        at = where.get(name, -1)
        if at > last:
            last = at
        else:
            at = -1
        places.append(at)
    return places


def _cut(digests: list[bytes], places: list[int]) -> Walk:
    return Walk(digests[: max(places) + 1] if -1 in places else digests, places)


class _Search:
    """A walk with media: from one announced hash to the next, trying how far items reach."""

    def __init__(
        self,
        scheme: Scheme,
        parent: bytes,
        tokens: Sequence[int],
        told: Told,
        *,
        block: int,
        start: int,
        tries_max: int,
    ) -> None:
        self._scheme = scheme
        self._tokens = tokens
        self._told = told
        self._block = block
        self._start = start
        self._count = len(tokens) // block
        self._left = self._count + tries_max
        self._digest = parent
        self._digests: list[bytes] = []
        self._open: _Reach | None = None  # touches the last hash block met; may reach further
        self._media: dict[tuple[int, str], None] = {}

    def run(self, piece_blocks: int) -> Work[Walk]:
        places: list[int] = []
        listed = self._told.media or ()
        paid = self._left
        for name, items in zip(self._told.names, listed, strict=False):
            if paid - self._left >= piece_blocks:
                paid = self._left
                yield
            at = self._next(len(places), name, items)
            if at < 0:
                break
            places.append(at)
        places += [-1] * (len(self._told.names) - len(places))
        if -1 not in places and self._open is None:
            self._digests += self._chain((), self._count) or []
        return Walk(self._digests, places, tuple(self._media))

    def _next(self, number: int, name: int, items: Listed) -> int:
        """The hash block that ends with ``name``, and everything up to there taken over; -1 where it is not met."""
        per, have = self._told.per, len(self._digests)
        if self._told.dense:
            ends: Sequence[int] = ((number + 1) * per - 1,)
        else:
            ends = range(have + per - 1, self._count, per)
        if not items and not self._told.dense:
            return self._next_free(name, ends)
        for at in ends:
            for reaches in self._reaches(items, at):
                digests = self._chain(reaches, at + 1)
                if digests is None:
                    return -1
                if digests and low64(digests[-1]) == name:
                    self._take(digests, reaches, at)
                    return at
        return -1

    def _next_free(self, name: int, ends: Sequence[int]) -> int:
        """A masked block that lists nothing: it is the same wherever it stands, but for where an open item ended."""
        have = len(self._digests)
        stops = range(have, self._count) if self._open else (have,)
        for stop in stops:
            reaches = (self._open._replace(end=stop),) if self._open else ()
            digests = self._chain(reaches, self._count)
            if digests is None:
                return -1
            for at in ends:
                if at - self._told.per + 1 >= stop and low64(digests[at - have]) == name:
                    self._take(digests[: at - have + 1], reaches, at)
                    return at
        return -1

    def _take(self, digests: list[bytes], reaches: tuple[_Reach, ...], at: int) -> None:
        self._digests += digests
        self._digest = digests[-1]
        last = reaches[-1] if reaches else None
        self._open = last if last is not None and last.end == at + 1 else None
        for reach in reaches:
            if reach.start >= 0:
                self._media[reach.start, reach.identifier] = None

    def _reaches(self, items: Listed, at: int) -> Iterator[tuple[_Reach, ...]]:
        """How far the items in play may reach if hash block ``at`` ends the block that lists ``items``.

        Items follow each other: only the last one of a block can reach beyond it.
        """
        have, block = len(self._digests), self._block
        first = at - self._told.per + 1
        present = sorted((first * block + offset, identifier) for identifier, offset in items)
        known = self._open
        early = [each for each in present if each[0] < have * block]
        lasting = known is not None and (known.start, known.identifier) in early
        if len(early) > lasting and not (have == 0 and self._start > 0):
            return  # an item that started in a block which did not list it
        choices: list[list[_Reach]] = []
        if known is not None and not lasting:
            border = min([first, *[-(-each[0] // block) for each in present[:1]]])
            choices.append([known._replace(end=end) for end in range(have, border + 1)])
        for i, (start, identifier) in enumerate(present):
            border = min(at + 1, -(-present[i + 1][0] // block)) if i + 1 < len(present) else at + 1
            low = max(start // block, first) + 1
            choices.append([_Reach(start, identifier, end) for end in range(border, low - 1, -1)])
        yield from product(*choices)

    def _chain(self, reaches: tuple[_Reach, ...], end: int) -> list[bytes] | None:
        """Digests of the hash blocks from the last one met up to ``end``; None: nothing more may be tried."""
        have, block = len(self._digests), self._block
        self._left -= end - have
        if self._left < 0:
            return None
        items = [
            Item(reach.identifier, self._start + reach.start, reach.end * block - reach.start)
            for reach in reaches
            if reach.end * block > reach.start
        ]
        return chain(
            self._scheme,
            self._digest,
            self._tokens[have * block : end * block],
            block,
            start=self._start + have * block,
            namespace=self._told.namespace,
            items=items,
        )
