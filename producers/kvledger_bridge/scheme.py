"""How an engine hashes, found out on its own events (ENGINE.md §4).

Tried are the known algorithms, seeds and forms of extra keys, on events whose start is known: from token 0, or behind a
parent whose digest is known (byte hashes carry it). 64 equal bits are proof. A random seed is never found: what may be
spent on the search is bounded. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvledger_bridge.chain import Told, computable, tokens_of, walk
from kvledger_bridge.pace import PIECE_BLOCKS, Work
from kvledger_index.enginehash import ALGORITHMS, EXTRA_FORMS, SEED_DEFAULT, Algorithm, ExtraForm, Scheme

SEARCH_BLOCKS_MAX = 262_144
"""Hash blocks computed in search of one life's scheme, about 0.6 s: five masked prompts of 100 000 tokens under every
candidate."""

SEARCH_EVENTS_MAX = 64
"""Events tried, dense ones at a block or two each: a random-seeded engine costs about 5 ms in all."""

BLIND_SHARE = 2
"""One part in so many of both may go to events of adapters whose path is not known: under tagged keys these fit no
candidate, so on their own they say little, and a rank that begins with them must still be found out by what follows.
"""

SEEDS = (SEED_DEFAULT, "0")
"""The default from 0.29 on, and what operators set as PYTHONHASHSEED."""

DIGEST_BYTES: dict[Algorithm, int] = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


class Finder:
    """Searches one rank's scheme during one life.

    ``scheme`` is what chains are computed under, None as long as nothing is known. It is ``rooted`` if its seed is
    known, too; only such a scheme is told to others.
    """

    def __init__(self, given: Scheme | None) -> None:
        self.scheme = given
        self.rooted = given is not None
        self.seeded = False
        """Whether the scheme reproduced a hash from token 0: its seed is then proven, not only named."""
        self.confirmed = False
        self.block = 0
        """The hash block size under which it was confirmed."""
        self.given = given
        self._refuted = False
        self._told = given
        self._blocks = SEARCH_BLOCKS_MAX
        self._events = SEARCH_EVENTS_MAX

    @property
    def wants(self) -> bool:
        """Whether further events are of use: cheap, asked for every span."""
        return self._events > 0 and self._blocks > 0 and not (self.confirmed and self.rooted and self._formed)

    @property
    def _mostly_spent(self) -> bool:
        return self._events <= SEARCH_EVENTS_MAX // BLIND_SHARE or self._blocks <= SEARCH_BLOCKS_MAX // BLIND_SHARE

    @property
    def _formed(self) -> bool:
        return self.scheme is not None and self.scheme.extras is not None

    @property
    def refuted(self) -> bool:
        """The entry names a scheme that is not the engine's: another one was found, or none fits."""
        spent = self._events <= 0 or self._blocks <= 0
        return self._refuted or (self.given is not None and spent and not self.confirmed)

    def learn(self, told: Scheme) -> None:
        """Take what the log says of this engine: it was confirmed, and rooted, or it would not be there."""
        self.scheme = msgspec.structs.replace(told, block=self.given.block if self.given is not None else None)
        self.rooted = self.confirmed = True
        self.seeded = self.given is None  # else it may have been told because the operator named the seed
        self.block = told.block or 0
        self._told = told

    def restart(self) -> None:
        """What was tried in vain was tried in steps of the wrong size."""
        self._blocks, self._events = SEARCH_BLOCKS_MAX, SEARCH_EVENTS_MAX

    def take_news(self) -> Scheme | None:
        """The scheme and the hash block size, if others have not been told all of it."""
        if self.scheme is None or not (self.confirmed and self.rooted):
            return None
        news = msgspec.structs.replace(self.scheme, block=self.block)
        if news == self._told:
            return None
        self._told = news
        return news

    def look(
        self,
        told: Told,
        raw: bytes,
        parent: bytes | None,
        *,
        block: int,
        start: int,
        root: bool,
        bare_possible: bool,
        digest_bytes: int | None,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> Work[None]:
        """Try an event of ``raw`` tokens (u32le). ``parent`` None: it starts at token 0 (``root``), or it is not known,
        and then nothing can be tried.

        ``bare_possible``: the engine may be one that lists media without offsets. ``digest_bytes``: size of the hashes
        on the wire, None for integers.
        """
        plain = told.namespace.lora is None and told.namespace.salt is None and told.media is None
        if not told.names or (parent is None and not root) or (plain and self.confirmed and (self.rooted or not root)):
            return
        blind = told.namespace.lora is not None and told.namespace.path is None
        if blind and self._mostly_spent:
            return
        walked = False
        if told.dense:  # the first hash that extra keys are part of is enough
            first = _first_extra(told)
            told = told._replace(names=told.names[: first + 1], media=told.media and told.media[: first + 1])
            raw = raw[: (first + 1) * told.per * block * 4]
        tokens = tokens_of(raw)
        for base in self._bases(digest_bytes, root=root):
            behind = base.none_hash if root or parent is None else parent[-DIGEST_BYTES[base.algorithm] :]
            fits: list[ExtraForm | None] = []
            for form in self._forms(base, bare_possible=bare_possible, plain=plain):
                scheme = msgspec.structs.replace(base, extras=form)
                if not computable(scheme, told.namespace, media=told.media is not None):
                    continue
                if not walked:  # an event that no candidate can be tried on costs nothing
                    self._events -= 1
                    walked = True
                self._blocks -= len(tokens) // block
                walked_to = yield from walk(
                    scheme,
                    behind,
                    tokens,
                    told,
                    block=block,
                    start=start,
                    tries_max=256,
                    piece_blocks=piece_blocks,
                )
                if max(walked_to.places[_first_extra(told) :], default=-1) >= 0:
                    fits.append(form)
                if self._blocks <= 0:
                    return
            if fits:
                self.block = block
                self._found(base, fits, root=root)
                return

    def _found(self, base: Scheme, fits: list[ExtraForm | None], *, root: bool) -> None:
        form = fits[0] if len(fits) == 1 else base.extras
        if self.given is not None and root and (base.algorithm, base.seed) != (self.given.algorithm, self.given.seed):
            self._refuted = True
        self.rooted = root or self.rooted
        self.seeded = root or self.seeded
        self.confirmed = True
        self.scheme = msgspec.structs.replace(base, extras=form if form is not None else base.extras)
        self._blocks, self._events = SEARCH_BLOCKS_MAX, SEARCH_EVENTS_MAX

    def _bases(self, digest_bytes: int | None, *, root: bool) -> Iterator[Scheme]:
        """Algorithm and seed: what is known, else the likely ones first."""
        if self.scheme is not None:
            yield self.scheme
            if self.confirmed and self.rooted:
                return
        paths = self.given.paths if self.given is not None else ()
        seeds = dict.fromkeys([*([self.given.seed] if self.given is not None else []), *SEEDS])
        for algorithm in ALGORITHMS:
            if self.confirmed and self.scheme is not None and algorithm != self.scheme.algorithm:
                continue
            if digest_bytes is not None and digest_bytes % DIGEST_BYTES[algorithm]:
                continue
            for seed in seeds if root else (SEED_DEFAULT,):  # behind a parent the seed does not matter
                yield Scheme(algorithm, seed, None, paths)

    def _forms(self, base: Scheme, *, bare_possible: bool, plain: bool) -> Iterator[ExtraForm | None]:
        if plain or base.extras is not None:
            yield base.extras
            return
        yield from (form for form in EXTRA_FORMS if bare_possible or form != "bare")


def _first_extra(told: Told) -> int:
    """The first hash that extra keys are part of."""
    if told.namespace.lora is not None or told.namespace.salt is not None or told.media is None:
        return 0
    return next((i for i, items in enumerate(told.media) if items), 0)
