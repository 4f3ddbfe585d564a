"""A rank's chains: which events are worth computing, under which scheme, behind which digest (ADR 4). Pure.

``need`` decides whether digests are kept at all, ``finder`` under which scheme; the lineage asks ``follow`` for the
digests of a span whose start it knows, and names them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger_bridge.chain import NOTHING, Told, Walk, tokens_of, walk
from kvledger_bridge.chain_need import Need
from kvledger_bridge.decode import BlockStored, HashValue
from kvledger_bridge.identity import Listing, listing
from kvledger_bridge.pace import PIECE_BLOCKS, Work
from kvledger_bridge.scheme import DIGEST_BYTES, Finder
from kvledger_index.enginehash import Namespace, Scheme
from kvledger_index.model import GroupSpec, ModelEntry


class Chained:
    """An event as the engine's chain sees it: what it tells, and the byte hashes of releases that send them."""

    __slots__ = ("bare_possible", "block", "parent", "root", "told", "wire")

    def __init__(self, event: BlockStored, told: Told, block: int) -> None:
        self.told = told
        self.block = block
        self.root = event.parent_block_hash is None
        self.parent = event.parent_block_hash if isinstance(event.parent_block_hash, bytes) else None
        self.wire = _bytes_only(event.block_hashes)
        self.bare_possible = event.group_idx is None  # group numbers came after media with offsets

    @property
    def digests(self) -> tuple[bytes, ...] | None:
        """One per hash block, where the wire has them all and nothing need be computed."""
        return self.wire if self.told.dense and self.told.per == 1 else None

    def is_plain(self, *, parent: bool | None) -> bool | None:
        """Whether the digests of this event are computed without extra keys from token 0 on, its parent's being so
        (True) or not (False); None: neither is proven.
        """
        told = self.told
        if told.namespace.lora is not None or told.namespace.salt is not None or (not self.root and parent is False):
            return False
        return True if told.media is None and self.digests is None and (self.root or parent) else None


def _bytes_only(hashes: tuple[HashValue, ...]) -> tuple[bytes, ...] | None:
    if not hashes or not isinstance(hashes[0], bytes):  # as a rule they are all of one kind
        return None
    raw = tuple([each for each in hashes if isinstance(each, bytes)])
    return raw if len(raw) == len(hashes) else None


class Chains:
    """What is known of one rank's hashing. ``walks`` counts spans computed, ``misses`` those of which a hash was not
    met although the scheme is known.
    """

    def __init__(self, entry: ModelEntry, stride: int, *, piece_blocks: int = PIECE_BLOCKS) -> None:
        self.need = Need(entry)
        self.finder = Finder(entry.hash_scheme)
        self.walks = 0
        self.misses = 0
        self.media = False
        """Whether any key of this life knows of a media item: one may then reach into a span that does not show it."""
        self.whole = False
        """Whether the wire has whole hashes: a child then brings its parent's digest itself."""
        self._stride = stride
        self._piece = piece_blocks
        self._paths = dict(entry.hash_scheme.paths) if entry.hash_scheme is not None else {}

    def learn(self, groups: Sequence[GroupSpec], scheme: Scheme | None, *, digests: bool) -> None:
        """Begin with what the log says. ``digests``: it has some, so chains were needed.

        Media may have been met, as the log does not say. Of a scheme that was not found out yet the search begins anew.
        """
        for spec in groups:
            self.need.learn(spec)
        if digests:
            self.need.force()
        if scheme is not None:
            self.finder.learn(scheme)
            self.need.block = self.finder.block
        self.media = True

    def hear(self, event: BlockStored) -> None:
        """Learn the group's size and kind from a GPU store before any event of its batch is placed."""
        if self.need.hear(event):
            self._changed()

    def force(self) -> None:
        """A masked hash was met that no dense event names: keep digests from the next batch on."""
        if not self.need.chains and self.need.force():
            self._changed()

    def _changed(self) -> None:
        if self.finder.confirmed:
            self.need.block = self.finder.block  # proven by hashes, whatever groups are heard of later
        else:
            self.finder.restart()

    @property
    def recorded(self) -> bool:
        """Whether the log has to keep digests: chains are computed, and the wire has only the low 64 bits of hashes."""
        return self.need.chains and not self.whole

    def take_scheme(self) -> Scheme | None:
        """The scheme, with the hash block size under which it holds, if others have not been told all of it."""
        return self.finder.take_news()

    def read(
        self, event: BlockStored, names: tuple[int, ...], *, dense: bool, heard: Listing | None = None
    ) -> Work[Chained | None]:
        """The event, if its chain is of use: to keep digests, to place its hashes, or to learn the scheme."""
        need, finder = self.need, self.finder
        extras = event.extra_keys
        if not need.chains and (
            not finder.wants
            or (
                finder.confirmed
                and finder.rooted
                and event.lora_name is None
                and (extras is None or extras.count(None) == len(extras))
            )
        ):
            return None
        block = need.block
        if not block or block % self._stride or event.block_size % block:
            return None
        if heard is None:
            pairs = event.group_idx is not None
            heard = yield from listing(event, pairs_known=pairs, multimodal=None, piece_blocks=self._piece)
        names = names[: heard.readable]
        namespace = Namespace(event.lora_name, heard.salt, self._paths.get(event.lora_name or ""))
        return Chained(event, Told(names, event.block_size // block, heard.media, namespace, dense), block)

    def follow(self, chained: Chained, raw: bytes, digest: bytes | None, start: int) -> Work[Walk]:
        """Digests along a span of ``raw`` tokens (u32le) from token ``start`` on, behind ``digest`` where known."""
        told, finder = chained.told, self.finder
        self.whole = self.whole or chained.wire is not None
        if finder.wants:
            yield from finder.look(
                told,
                raw,
                digest or chained.parent,
                block=chained.block,
                start=start,
                root=chained.root,
                bare_possible=chained.bare_possible,
                digest_bytes=len(chained.wire[0]) if chained.wire else None,
                piece_blocks=self._piece,
            )
        scheme = finder.scheme
        if not self.need.chains or scheme is None or chained.block != self.need.block:
            return NOTHING
        size = DIGEST_BYTES[scheme.algorithm]
        if chained.digests:
            return Walk([each[-size:] for each in chained.digests[: len(told.names)]], list(range(len(told.names))))
        if chained.root:
            behind = scheme.none_hash if finder.rooted else None
        else:
            behind = digest or (chained.parent[-size:] if chained.parent else None)
        if behind is None:
            return NOTHING
        self.walks += 1
        tokens = tokens_of(raw)
        reached = self.media and not chained.root
        found = yield from walk(
            scheme, behind, tokens, told, block=chained.block, start=start, reached=reached, piece_blocks=self._piece
        )
        if chained.root and found.proven and finder.confirmed and chained.block == finder.block:
            finder.seeded = True
        if -1 in found.places or len(found.places) < len(told.names):
            self.misses += 1
        return found
