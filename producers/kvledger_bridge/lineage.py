"""From engine hashes to block keys: names, the LRU of what may still be a parent, and orphans (DESIGN §3).

A hash is *named* by a dense event (hashes x block size = tokens) whose start is known: null parent (token 0), or a
parent that is named itself. A masked event finds names; where no dense event can have given them, the engine's chain is
recomputed over its tokens and names every hash block of them (``chained``, ADR 4). An event without tokens only finds
names. Names by GPU events are *strong*. Other tiers leave salts, adapters and media out of their events, so theirs are
*weak*: they serve lower tiers, never a GPU lane, and give way to a strong one.

An event whose tokens have an unknown parent is an orphan: kept while one of its hashes is resident without a key,
within ``orphans_max``, and named as soon as its parent is. Nothing is ever named from a guessed start.

Residency is the ledger's; it tells the lineage by ``Block.refs`` and by ``hold``, ``loosen``, ``tighten``, ``release``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kvledger_bridge.chained import Chained, Chains
from kvledger_bridge.decode import BlockStored, Event, low64
from kvledger_bridge.identity import identify, listing
from kvledger_index.blockkeys import SEGMENT_STRIDES, Extra, extend, root_key, token_bytes
from kvledger_index.errors import InvalidInput
from kvledger_index.model import ModelEntry, medium_of

SEGMENT_MASK = SEGMENT_STRIDES - 1
"""Takes the place within its segment out of a stride's number."""

NAMELESS = -1
"""``Block.hash`` once no hash means the block any more."""


class Block:
    """One block key with what a removal, which brings a hash only, has to say of it.

    ``row`` is the first key of its segment, ``parent`` the stride key before it, ``end`` the strides from token 0 to
    its end. ``refs`` counts the lanes in which it is resident. ``hash`` is the first of its names, or NAMELESS.
    ``digest`` is the engine's whole hash, where the rank's chains are recomputed and it is known; ``plain`` then says
    whether it was computed without extra keys from token 0 on (None: neither is proven).
    """

    __slots__ = ("digest", "end", "hash", "key", "parent", "plain", "refs", "row")

    def __init__(self, name: int, key: int, row: int, parent: int, end: int) -> None:
        self.hash = name
        self.key = key
        self.row = row
        self.parent = parent
        self.end = end
        self.refs = 0
        self.digest: bytes | None = None
        self.plain: bool | None = None


class Span:
    """An event that tells its own identity: ``hashes`` name ``per`` strides of ``tokens`` each; of a ``masked`` one,
    some of the blocks of ``tokens``, so that only its ``chained`` form can place them.

    ``parent`` is a hash, None where ``root`` is the key of the namespace. ``named`` of the hashes can be placed.
    Once its start is known: ``keys`` of all their strides, from stride ``start`` on, the key ``before`` them, the
    ``row`` that was open there, and ``blocks`` (None: a hash that was seen under two keys; none at all for a masked
    event, whose hashes are found one by one). ``links`` are what its chain named.
    """

    __slots__ = (
        "before",
        "blocks",
        "chained",
        "extras",
        "gpu",
        "hashes",
        "held",
        "keys",
        "links",
        "live",
        "masked",
        "named",
        "parent",
        "per",
        "root",
        "row",
        "size",
        "start",
        "tokens",
    )

    def __init__(self, hashes: tuple[int, ...], parent: int | None, root: int, per: int, *, gpu: bool) -> None:
        self.hashes = hashes
        self.parent = parent
        self.root = root
        self.per = per
        self.gpu = gpu
        self.tokens = b""
        self.extras: tuple[Extra, ...] = ()
        self.named = 0
        self.keys: list[int] = []
        self.start = -1
        self.before = 0
        self.row = 0
        self.blocks: list[Block | None] = []
        self.size = len(hashes) * per
        self.live = 0
        self.held = False
        self.masked = False
        self.chained: Chained | None = None
        self.links: list[tuple[int, Block]] = []


class Move(NamedTuple):
    """A hash got a name (``was`` None), lost it (``now`` None: seen under two keys), or changed a weak name for a
    strong one (both set: this concerns lower tiers only).
    """

    hash: int
    was: Block | None
    now: Block | None


class Names(NamedTuple):
    """The tables of a lineage, for whoever writes or reads them as a whole (``snapshot``, ``recall``): names that GPU
    events gave, names that other tiers gave, further names of a block, hashes that are placed no more, and blocks that
    are not resident, the longest unused first.
    """

    strong: dict[int, Block]
    weak: dict[int, Block]
    others: dict[Block, list[int]]
    ambiguous: dict[int, None]
    idle: OrderedDict[Block, None]


class Lineage:
    """The names of one rank in one life. Not thread-safe; every method is O(1) per block."""

    def __init__(self, entry: ModelEntry, *, parents_max: int, orphans_max: int) -> None:
        self.stride = entry.stride
        self.chains = Chains(entry, entry.stride)
        self.loose: dict[int, int] = {}
        """Hashes that are resident without a name -> in how many lanes."""
        self.moves: list[Move] = []
        """What the last ``place`` changed for hashes that were resident, or that lost their name."""
        self.twins = 0
        self.unreadable = 0
        self.orphans_dropped = 0
        self._entry = entry
        self._parents_max = parents_max
        self._orphans_max = orphans_max
        self._strong: dict[int, Block] = {}
        self._weak: dict[int, Block] = {}
        self._keys: dict[int, Block] = {}
        self._others: dict[Block, list[int]] = {}  # further names, rare
        self._ambiguous: dict[int, None] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._created: list[Block] = []
        self._pairs_known = False
        self._orphans: dict[int, list[Span]] = {}
        self._orphan_of: dict[int, Span] = {}
        self._orphan_order: OrderedDict[Span, None] = OrderedDict()
        self._orphan_size = 0
        self._last: tuple[BlockStored, Span] | None = None

    # -- names ----------------------------------------------------------------------------------------------------

    def find(self, name: int, *, gpu: bool) -> Block | None:
        """The block of a hash, as a lane of that kind may know it."""
        block = self._strong.get(name)
        if block is None and not gpu:
            block = self._weak.get(name)
        return block

    def is_ambiguous(self, name: int) -> bool:
        """Whether a hash was seen under two keys."""
        return name in self._ambiguous

    @property
    def names(self) -> Names:
        """The tables themselves; what changes them changes the lineage."""
        return Names(self._strong, self._weak, self._others, self._ambiguous, self._idle)

    def learn(self, name: int, made: Block, *, gpu: bool) -> Block:
        """Take a name as the log tells it, which is right whatever was believed; returns its block.

        Only for a lineage that is recalled: nothing is announced by ``moves``.
        """
        self._ambiguous.pop(name, None)
        strong, weak = self._strong.get(name), self._weak.get(name)
        if strong is not None and strong.key == made.key:
            return strong
        if weak is not None and weak.key == made.key:
            if gpu:
                self._strong[name] = self._weak.pop(name)
            return weak
        self.unlearn(name)
        block = self._keys.get(made.key)
        if block is None:
            block = self._keys[made.key] = made
            made.hash = name
            if not made.refs:
                self._idle[made] = None
        else:
            self._others.setdefault(block, []).append(name)
        (self._strong if gpu else self._weak)[name] = block
        return block

    def unlearn(self, name: int) -> None:
        """Whatever ``name`` was believed to mean, it does not; only for a lineage that is recalled."""
        for names in (self._strong, self._weak):
            was = names.pop(name, None)
            if was is not None:
                self._unname(name, was)

    def place(self, events: Sequence[Event]) -> list[Span | None]:
        """Name whatever the dense events of a batch name, in whatever order their parents come.

        Returns one entry per event: its span, or None where it can only be found by hash. A span without ``blocks``
        has an unknown parent: ``hold`` it once its hashes are stored. ``moves`` tells what this changed.
        """
        self.moves = []
        self._last = None
        for event in events:  # groups first: whether digests are kept must be known before the first span is placed
            if type(event) is BlockStored and (event.medium == "GPU" or medium_of(event.medium) == "gpu"):
                self.chains.hear(event)
        waiting: dict[int, list[Span]] = {}
        spans: list[Span | None] = []
        masked: list[Span] = []
        for event in events:
            span = self._span(event) if isinstance(event, BlockStored) and event.token_ids else None
            spans.append(span)
            if span is None or span.start >= 0:
                continue
            if span.masked:
                masked.append(span)
            elif span.named:
                self._plant(span, waiting)
        known = self._strong
        for span in masked:  # last: most of their hashes are named by then
            if span.start >= 0:
                continue
            if span.hashes and all(name in known for name in span.hashes):
                span.start = 0
            else:
                self._plant(span, waiting)
        return spans

    def _plant(self, span: Span, waiting: dict[int, list[Span]]) -> None:
        """Name what follows from a span, if its parent is known; else let it wait for the rest of the batch."""
        if span.parent is None:
            self._grow(span, None, waiting)
            return
        parent = self.find(span.parent, gpu=span.gpu)
        if parent is None:
            kin = waiting.setdefault(span.parent, [])
            if not kin or kin[-1] is not span:
                kin.append(span)
            return
        if not parent.refs and parent in self._idle:
            self._idle.move_to_end(parent)
        self._grow(span, parent, waiting)

    def _span(self, event: BlockStored) -> Span | None:
        """The event as a span; None where it is masked, cut across strides, or of an identity that cannot be told."""
        size = event.block_size
        hashes = event.block_hashes
        if not size or size % self.stride or event.lookahead_token_ids:
            return None  # hashes with lookahead also cover tokens that come after the block
        dense = len(hashes) * size == len(event.token_ids)
        gpu = medium_of(event.medium) == "gpu"
        if not dense and not (gpu and self.chains.need.chains):
            return None
        if self._last is not None and self._last[1].gpu == gpu and _same(self._last[0], event):
            return self._last[1]  # groups of equal block size repeat each other's event
        if not dense:
            return self._masked(event)
        identity = identify(event, pairs_known=self._pairs_known, multimodal=self._entry.multimodal)
        self._pairs_known = self._pairs_known or identity.pairs
        parent = event.parent_block_hash
        span = Span(
            tuple([low64(each) for each in hashes]),
            None if parent is None else low64(parent),
            root_key(self._entry.model, event.lora_name, identity.salt) if parent is None else 0,
            size // self.stride,
            gpu=gpu,
        )
        span.named = identity.blocks
        span.extras = identity.extras
        if identity.extras:
            self.chains.media = True
        try:
            span.tokens = token_bytes(event.token_ids)
        except InvalidInput:
            span.named = 0
        if span.named < len(hashes):
            self.unreadable += 1
        if gpu and span.named:
            span.chained = self.chains.read(event, span.hashes, dense=True)
        self._last = (event, span)
        return span

    def _masked(self, event: BlockStored) -> Span | None:
        """A masked GPU event as a span; None where its chain cannot be computed."""
        heard = listing(event, pairs_known=self._pairs_known, multimodal=self._entry.multimodal)
        parent = event.parent_block_hash
        names = tuple([low64(each) for each in event.block_hashes])
        root = root_key(self._entry.model, event.lora_name, heard.salt) if parent is None else 0
        span = Span(names, None if parent is None else low64(parent), root, event.block_size // self.stride, gpu=True)
        span.chained = self.chains.read(event, names, dense=False, heard=heard)
        if span.chained is None:
            return None
        span.masked = True
        span.named = len(names)
        span.size = len(event.token_ids) // self.stride
        try:
            span.tokens = token_bytes(event.token_ids)
        except InvalidInput:
            return None
        self._last = (event, span)
        return span

    def _grow(self, span: Span, parent: Block | None, waiting: dict[int, list[Span]]) -> None:
        """Name what ``span`` names, then what everything that waited for one of these names, without recursion.

        ``parent`` None: it starts at token 0.
        """
        work = [(span, parent)]
        while work:
            span, parent = work.pop()
            raw = span.tokens
            if not span.masked:
                self._assign(span, parent)
            if span.chained is not None:
                self._link(span, span.chained, parent, raw)
            span.tokens = b""
            if not (waiting or self._orphans):
                continue
            for name, block in chain(zip(span.hashes, span.blocks, strict=False), span.links):
                if block is None:
                    continue
                for place in (waiting, self._orphans):
                    kin = place.get(name)
                    if kin is None:
                        continue
                    ready = [each for each in kin if span.gpu or not each.gpu]
                    for each in ready:
                        self._forget_orphan(each)
                        work.append((each, block))
                    rest = [each for each in kin if each not in ready]
                    if rest:
                        place[name] = rest
                    else:
                        place.pop(name, None)

    def _assign(self, span: Span, parent: Block | None) -> None:
        """Compute the keys of a dense span that starts behind ``parent``, and name its blocks."""
        key, start, row = (span.root, 0, 0) if parent is None else (parent.key, parent.end, parent.row)
        per = span.per
        count = span.named * per
        tokens = span.tokens if span.named == len(span.hashes) else span.tokens[: count * self.stride * 4]
        keys = extend(key, tokens, self.stride, extras=span.extras)
        if not span.gpu and self._contradicts(span, keys):
            span.named = 0
            return
        blocks: list[Block | None] = []
        known, by_key, created = self._strong, self._keys, self._created
        doubtful = bool(self._weak or self._ambiguous or self.loose or not span.gpu)
        at = per - 1
        for name in span.hashes[: span.named]:
            block = known.get(name)
            own = keys[at]
            if block is None or block.key != own:
                first = at - ((start + at) & SEGMENT_MASK)
                made = Block(name, own, keys[first] if first >= 0 else row, keys[at - 1] if at else key, start + at + 1)
                if doubtful or block is not None or own in by_key:
                    block = self._name(name, made, gpu=span.gpu)
                    doubtful = True
                else:  # what _name comes to for a hash and a key that nobody has seen
                    block = known[name] = by_key[own] = made
                    created.append(made)
            blocks.append(block)
            at += per
        span.keys, span.start, span.row, span.before, span.blocks = keys, start, row, key, blocks

    def _link(self, span: Span, chained: Chained, parent: Block | None, raw: bytes) -> None:
        """Recompute the engine's chain over a span and name its hash blocks, whether they were announced or not."""
        key, start, row = (span.root, 0, 0) if parent is None else (parent.key, parent.end, parent.row)
        digest = None if parent is None else parent.digest
        walk = self.chains.follow(chained, raw, digest, start * self.stride)
        if span.masked:
            span.start = start
            media = [each for each in walk.media if each[0] >= 0]
            if media:
                self.chains.media = True
            keys = extend(key, raw, self.stride, extras=media) if walk.digests else []
        else:
            keys = span.keys
        step = chained.block // self.stride
        proven = walk.proven
        plain = chained.is_plain(parent=None if parent is None else parent.plain)
        for i, each in enumerate(walk.digests[: len(keys) // step]):
            at = (i + 1) * step - 1
            name = low64(each)
            block = self._strong.get(name)
            if block is None or block.key != keys[at]:
                if i >= proven and self._has_strong(self._keys.get(keys[at])):
                    break  # nothing announced proves it, and the key has a hash that was
                first = at - ((start + at) & SEGMENT_MASK)
                made = Block(
                    name, keys[at], keys[first] if first >= 0 else row, keys[at - 1] if at else key, start + at + 1
                )
                block = self._name(name, made, gpu=True)
            if block is not None:
                if i < proven or block.digest is None:
                    block.digest, block.plain = each, plain
                span.links.append((name, block))

    def _contradicts(self, span: Span, keys: list[int]) -> bool:
        """Whether a lower tier's tokens would give a known hash another key: then the known one stands."""
        per = span.per
        for i, name in enumerate(span.hashes[: span.named]):
            block = self.find(name, gpu=False)
            if block is not None and block.key != keys[(i + 1) * per - 1]:
                self.unreadable += 1
                return True
        return False

    def _name(self, name: int, made: Block, *, gpu: bool) -> Block | None:
        """Give ``name`` the block that ``made`` describes; None where it has two."""
        if name in self._ambiguous:
            return None
        was = self._strong.get(name)
        if was is not None:
            if was.key == made.key:
                return was
            del self._strong[name]
            self._unname(name, was)
            self._ambiguous[name] = None
            self.moves.append(Move(name, was, None))
            return None
        was = self._weak.get(name)
        if not gpu and was is not None:
            return was
        block = self._keys.get(made.key)
        if block is None:
            block = self._keys[made.key] = made
            self._created.append(made)
        elif was is not block:
            if gpu and self._has_strong(block):
                self.twins += 1
            self._others.setdefault(block, []).append(name)
        if was is not None:
            del self._weak[name]
            if was is not block:
                self._unname(name, was)
        (self._strong if gpu else self._weak)[name] = block
        if name in self.loose or (was is not None and was is not block):
            self.moves.append(Move(name, None if was is block else was, block))
        return block

    def _has_strong(self, block: Block | None) -> bool:
        if block is None:
            return False
        names = (block.hash, *self._others.get(block, ()))
        return any(self._strong.get(each) is block for each in names)

    def _unname(self, name: int, block: Block) -> None:
        """``name`` no longer means ``block``; a block without names is forgotten."""
        others = self._others.get(block, [])
        if name == block.hash and others:
            block.hash = others.pop(0)
        elif name in others:
            others.remove(name)
        else:
            block.hash = NAMELESS
            self._keys.pop(block.key, None)
            self._idle.pop(block, None)
        if not others:
            self._others.pop(block, None)

    # -- what the ledger tells ------------------------------------------------------------------------------------

    def hold(self, span: Span) -> None:
        """Keep an orphan whose hashes were just stored without a key."""
        if span.held or span.start >= 0 or span.parent is None or not span.named:
            return
        for name in span.hashes:
            if name in self.loose and name not in self._orphan_of:
                self._orphan_of[name] = span
                span.live += 1
        if not span.live:
            return
        span.held = True
        self._orphans.setdefault(span.parent, []).append(span)
        self._orphan_order[span] = None
        self._orphan_size += span.size

    def loosen(self, name: int) -> None:
        """``name`` became resident without a key in one more lane."""
        self.loose[name] = self.loose.get(name, 0) + 1

    def tighten(self, name: int) -> None:
        """``name`` is no longer resident without a key in one lane."""
        lanes = self.loose[name] - 1
        if lanes:
            self.loose[name] = lanes
            return
        del self.loose[name]
        span = self._orphan_of.pop(name, None)
        if span is not None:
            span.live -= 1
            if not span.live:
                self._drop_orphan(span)

    def retain(self, block: Block) -> None:
        """``block`` became resident in one more lane."""
        if not block.refs:
            self._idle.pop(block, None)
        block.refs += 1

    def release(self, block: Block) -> None:
        """``block`` is no longer resident in one lane."""
        block.refs -= 1
        if not block.refs and block.hash != NAMELESS:
            self._idle[block] = None

    def trim(self) -> None:
        """End of a batch: keep non-resident names, orphans and doubtful hashes within their limits, oldest go first."""
        for block in self._created:
            if not block.refs and block.hash != NAMELESS:
                self._idle[block] = None
        self._created = []
        self._last = None
        while len(self._idle) > self._parents_max:
            block, _ = self._idle.popitem(last=False)
            del self._keys[block.key]
            for name in (block.hash, *self._others.pop(block, ())):
                for names in (self._strong, self._weak):
                    if names.get(name) is block:
                        del names[name]
        while self._orphan_size > self._orphans_max:
            self.orphans_dropped += 1
            self._drop_orphan(next(iter(self._orphan_order)))
        while len(self._ambiguous) > self._parents_max:
            del self._ambiguous[next(iter(self._ambiguous))]

    # -- orphans --------------------------------------------------------------------------------------------------

    def _drop_orphan(self, span: Span) -> None:
        self._forget_orphan(span)
        if span.parent is None:
            return
        kin = self._orphans.get(span.parent, [])
        if span in kin:
            kin.remove(span)
            if not kin:
                del self._orphans[span.parent]

    def _forget_orphan(self, span: Span) -> None:
        """Undo ``hold``, but for the list of its parent's orphans."""
        if not span.held:
            return
        span.held = False
        del self._orphan_order[span]
        self._orphan_size -= span.size
        for name in span.hashes:
            if self._orphan_of.get(name) is span:
                del self._orphan_of[name]


def _same(one: BlockStored, other: BlockStored) -> bool:
    """Whether two events say the same of which hashes name which tokens."""
    return (
        one.block_hashes == other.block_hashes
        and one.parent_block_hash == other.parent_block_hash
        and one.block_size == other.block_size
        and one.token_ids == other.token_ids
        and one.lora_name == other.lora_name
        and one.lora_id == other.lora_id
        and one.extra_keys == other.extra_keys
    )
