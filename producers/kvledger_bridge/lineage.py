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

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kvledger_bridge.blocks import NAMELESS, SEGMENT_MASK, Block, Span
from kvledger_bridge.chained import Chained, Chains
from kvledger_bridge.decode import BlockStored, Event, low64
from kvledger_bridge.hearing import names_of, packed, same
from kvledger_bridge.identity import identify, listing
from kvledger_bridge.pace import PIECE_BLOCKS, Work, at_once, slices
from kvledger_index.blockkeys import Extra, extend, root_key
from kvledger_index.errors import InvalidInput
from kvledger_index.model import ModelEntry, medium_of


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
    """The names of one rank in one life. Not thread-safe; every method is O(1) per block.

    Work pauses after every ``piece_blocks`` blocks or so.
    """

    def __init__(
        self, entry: ModelEntry, *, parents_max: int, orphans_max: int, piece_blocks: int = PIECE_BLOCKS
    ) -> None:
        self.stride = entry.stride
        self.chains = Chains(entry, entry.stride, piece_blocks=piece_blocks)
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
        self._piece = piece_blocks
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

    def place(self, events: Sequence[Event]) -> Work[list[Span | None]]:
        """Name whatever the dense events of a batch name, in whatever order their parents come.

        Returns one entry per event: its span, or None where it can only be found by hash. A span without ``blocks``
        has an unknown parent: ``hold`` it once its hashes are stored. ``moves`` tells what this changed.
        """
        self.moves = []
        self._last = None
        for some in slices(events, self._piece):  # groups first: whether digests are kept must be known before any span
            for event in some:
                if type(event) is BlockStored and (event.medium == "GPU" or medium_of(event.medium) == "gpu"):
                    self.chains.hear(event)
            if len(events) > self._piece:
                yield
        waiting: dict[int, list[Span]] = {}
        spans: list[Span | None] = []
        masked: list[Span] = []
        done, piece = 0, self._piece
        for event in events:
            if done >= piece:
                done = 0
                yield
            done += 1
            if type(event) is not BlockStored or not event.token_ids:
                spans.append(None)
                continue
            done += len(event.block_hashes)
            span = yield from self._span(event)
            spans.append(span)
            if span is None or span.start >= 0:
                continue
            if span.masked:
                masked.append(span)
            elif span.named:
                yield from self._plant(span, waiting)
        yield from self._place_masked(masked, waiting)
        return spans

    def _place_masked(self, masked: Sequence[Span], waiting: dict[int, list[Span]]) -> Work[None]:
        """Last: most of their hashes are named by then."""
        known = self._strong
        done = 0
        for span in masked:
            if span.start >= 0:
                continue
            done += 1 + len(span.hashes)
            if done >= self._piece:
                done = 0
                yield
            if span.hashes and all(name in known for name in span.hashes):
                span.start = 0
            else:
                yield from self._plant(span, waiting)

    def _plant(self, span: Span, waiting: dict[int, list[Span]]) -> Work[None]:
        """Name what follows from a span, if its parent is known; else let it wait for the rest of the batch."""
        if span.parent is None:
            yield from self._grow(span, None, waiting)
            return
        parent = self.find(span.parent, gpu=span.gpu)
        if parent is None:
            kin = waiting.setdefault(span.parent, [])
            if not kin or kin[-1] is not span:
                kin.append(span)
            return
        if not parent.refs and parent in self._idle:
            self._idle.move_to_end(parent)
        yield from self._grow(span, parent, waiting)

    def _span(self, event: BlockStored) -> Work[Span | None]:
        """The event as a span; None where it is masked, cut across strides, or of an identity that cannot be told."""
        size = event.block_size
        hashes = event.block_hashes
        if not size or size % self.stride or event.lookahead_token_ids:
            return None  # hashes with lookahead also cover tokens that come after the block
        dense = len(hashes) * size == len(event.token_ids)
        gpu = medium_of(event.medium) == "gpu"
        if not dense and not (gpu and self.chains.need.chains):
            return None
        if self._last is not None and self._last[1].gpu == gpu and (yield from same(self._last[0], event, self._piece)):
            return self._last[1]  # groups of equal block size repeat each other's event
        if not dense:
            return (yield from self._masked(event))
        identity = yield from identify(
            event, pairs_known=self._pairs_known, multimodal=self._entry.multimodal, piece_blocks=self._piece
        )
        self._pairs_known = self._pairs_known or identity.pairs
        parent = event.parent_block_hash
        span = Span(
            (yield from names_of(hashes, self._piece)),
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
            span.tokens = yield from packed(event.token_ids, self._piece)
        except InvalidInput:
            span.named = 0
        if span.named < len(hashes):
            self.unreadable += 1
        if gpu and span.named:
            span.chained = yield from self.chains.read(event, span.hashes, dense=True)
        self._last = (event, span)
        return span

    def _masked(self, event: BlockStored) -> Work[Span | None]:
        """A masked GPU event as a span; None where its chain cannot be computed."""
        heard = yield from listing(
            event, pairs_known=self._pairs_known, multimodal=self._entry.multimodal, piece_blocks=self._piece
        )
        parent = event.parent_block_hash
        names = yield from names_of(event.block_hashes, self._piece)
        root = root_key(self._entry.model, event.lora_name, heard.salt) if parent is None else 0
        span = Span(names, None if parent is None else low64(parent), root, event.block_size // self.stride, gpu=True)
        span.chained = yield from self.chains.read(event, names, dense=False, heard=heard)
        if span.chained is None:
            return None
        span.masked = True
        span.named = len(names)
        span.size = len(event.token_ids) // self.stride
        try:
            span.tokens = yield from packed(event.token_ids, self._piece)
        except InvalidInput:
            return None
        self._last = (event, span)
        return span

    def _grow(self, span: Span, parent: Block | None, waiting: dict[int, list[Span]]) -> Work[None]:
        """Name what ``span`` names, then what everything that waited for one of these names, without recursion.

        ``parent`` None: it starts at token 0.
        """
        work = [(span, parent)]
        done = 0
        while work:
            span, parent = work.pop()
            raw = span.tokens
            if not span.masked:
                yield from self._assign(span, parent)
            if span.chained is not None:
                yield from self._link(span, span.chained, parent, raw)
            span.tokens = b""
            done += 1 + span.size
            if done >= self._piece and work:
                done = 0
                yield
            if not (waiting or self._orphans):
                continue
            for i, (name, block) in enumerate(chain(zip(span.hashes, span.blocks, strict=False), span.links), 1):
                if not i % self._piece:
                    yield
                if block is not None:
                    work += yield from self._kin(name, block, waiting, gpu=span.gpu)

    def _kin(
        self, name: int, block: Block, waiting: dict[int, list[Span]], *, gpu: bool
    ) -> Work[list[tuple[Span, Block | None]]]:
        """What waited for ``name`` and can now be placed, taken out of where it waited."""
        found: list[tuple[Span, Block | None]] = []
        for place in (waiting, self._orphans):
            kin = place.get(name)
            if kin is None:
                continue
            ready = [each for each in kin if gpu or not each.gpu]
            for each in ready:
                yield from self._forget_orphan(each)
                found.append((each, block))
            rest = [each for each in kin if each not in ready]
            if rest:
                place[name] = rest
            else:
                place.pop(name, None)
        return found

    def _assign(self, span: Span, parent: Block | None) -> Work[None]:
        """Compute the keys of a dense span that starts behind ``parent``, and name its blocks."""
        key, start, row = (span.root, 0, 0) if parent is None else (parent.key, parent.end, parent.row)
        per = span.per
        keys = yield from self._keys_of(key, span.tokens, span.named * per, span.extras)
        if not span.gpu and (yield from self._contradicts(span, keys)):
            span.named = 0
            return
        blocks: list[Block | None] = []
        known, by_key, created = self._strong, self._keys, self._created
        doubtful = bool(self._weak or self._ambiguous or self.loose or not span.gpu)
        at = per - 1
        for names in slices(span.hashes[: span.named], self._piece):
            if blocks:
                yield
            for name in names:
                block = known.get(name)
                own = keys[at]
                if block is None or block.key != own:
                    first = at - ((start + at) & SEGMENT_MASK)
                    made = Block(
                        name, own, keys[first] if first >= 0 else row, keys[at - 1] if at else key, start + at + 1
                    )
                    if doubtful or block is not None or own in by_key:
                        block = self._name(name, made, gpu=span.gpu)
                        doubtful = True
                    else:  # what _name comes to for a hash and a key that nobody has seen
                        block = known[name] = by_key[own] = made
                        created.append(made)
                blocks.append(block)
                at += per
        span.keys, span.start, span.row, span.before, span.blocks = keys, start, row, key, blocks

    def _keys_of(self, key: int, tokens: bytes, strides: int, extras: Sequence[Extra]) -> Work[list[int]]:
        """Keys of the first ``strides`` of ``tokens`` behind ``key``; ``extras`` in order of their positions."""
        stride, step = self.stride, self._piece
        keys: list[int] = []
        for first in range(0, strides, step):
            if first:
                yield
            end = min(first + step, strides)
            near = extras
            if strides > step:
                near = extras[bisect_left(extras, (first * stride, "")) : bisect_left(extras, (end * stride, ""))]
            raw = tokens[first * stride * 4 : end * stride * 4]
            keys += extend(keys[-1] if keys else key, raw, stride, start=first * stride, extras=near)
        return keys

    def _link(self, span: Span, chained: Chained, parent: Block | None, raw: bytes) -> Work[None]:
        """Recompute the engine's chain over a span and name its hash blocks, whether they were announced or not."""
        key, start, row = (span.root, 0, 0) if parent is None else (parent.key, parent.end, parent.row)
        digest = None if parent is None else parent.digest
        walk = yield from self.chains.follow(chained, raw, digest, start * self.stride)
        if span.masked:
            span.start = start
            media = sorted(each for each in walk.media if each[0] >= 0)
            if media:
                self.chains.media = True
            strides = len(raw) // 4 // self.stride if walk.digests else 0
            keys = yield from self._keys_of(key, raw, strides, media)
        else:
            keys = span.keys
        step = chained.block // self.stride
        proven = walk.proven
        plain = chained.is_plain(parent=None if parent is None else parent.plain)
        pause = self._piece
        for i, each in enumerate(walk.digests[: len(keys) // step]):
            if i >= pause:
                pause += self._piece
                yield
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

    def _contradicts(self, span: Span, keys: list[int]) -> Work[bool]:
        """Whether a lower tier's tokens would give a known hash another key: then the known one stands."""
        per = span.per
        for i, name in enumerate(span.hashes[: span.named]):
            if i and not i % self._piece:
                yield
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

    def hold(self, span: Span) -> Work[None]:
        """Keep an orphan whose hashes were just stored without a key."""
        if span.held or span.start >= 0 or span.parent is None or not span.named:
            return
        for i, name in enumerate(span.hashes, 1):
            if not i % self._piece:
                yield
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
                at_once(self._drop_orphan(span))

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

    def trim(self) -> Work[None]:
        """End of a batch: keep non-resident names, orphans and doubtful hashes within their limits, oldest go first."""
        self._last = None
        yield from self._settle_created()
        over = len(self._idle) - self._parents_max
        for i in range(1, over + 1):
            block, _ = self._idle.popitem(last=False)
            del self._keys[block.key]
            for name in (block.hash, *self._others.pop(block, ())):
                for names in (self._strong, self._weak):
                    if names.get(name) is block:
                        del names[name]
            if not i % self._piece:
                yield
        while self._orphan_size > self._orphans_max:
            self.orphans_dropped += 1
            yield from self._drop_orphan(next(iter(self._orphan_order)))
        over = len(self._ambiguous) - self._parents_max
        for i in range(1, over + 1):
            del self._ambiguous[next(iter(self._ambiguous))]
            if not i % self._piece:
                yield

    def _settle_created(self) -> Work[None]:
        """What the batch named and nobody holds may still be a parent."""
        created, self._created = self._created, []
        for some in slices(created, self._piece):
            for block in some:
                if not block.refs and block.hash != NAMELESS:
                    self._idle[block] = None
            if len(created) > self._piece:
                yield

    # -- orphans --------------------------------------------------------------------------------------------------

    def _drop_orphan(self, span: Span) -> Work[None]:
        yield from self._forget_orphan(span)
        if span.parent is None:
            return
        kin = self._orphans.get(span.parent, [])
        if span in kin:
            kin.remove(span)
            if not kin:
                del self._orphans[span.parent]

    def _forget_orphan(self, span: Span) -> Work[None]:
        """Undo ``hold``, but for the list of its parent's orphans."""
        if not span.held:
            return
        span.held = False
        del self._orphan_order[span]
        self._orphan_size -= span.size
        if not span.live:
            return
        span.live = 0
        for i, name in enumerate(span.hashes, 1):
            if self._orphan_of.get(name) is span:
                del self._orphan_of[name]
            if not i % self._piece:
                yield
