"""What hashes stand for: a block of one prefix, and the span of tokens that one event announces. Pure values."""

from __future__ import annotations

import msgspec

from kvledger_bridge.chained import Chained
from kvledger_index.blockkeys import SEGMENT_STRIDES, Extra

SEGMENT_MASK = SEGMENT_STRIDES - 1
"""Takes the place within its segment out of a stride's number."""

NAMELESS = -1
"""``Block.hash`` once no hash means the block any more."""


class Block(msgspec.Struct, gc=False, eq=False):
    """One block key with what a removal, which brings a hash only, has to say of it.

    ``row`` is the first key of its segment, ``parent`` the stride key before it, ``end`` the strides from token 0 to
    its end. ``refs`` counts the lanes in which it is resident. ``hash`` is the first of its names, or NAMELESS.
    ``digest`` is the engine's whole hash, where the rank's chains are recomputed and it is known; ``plain`` then says
    whether it was computed without extra keys from token 0 on (None: neither is proven).

    Compared by identity. There are hundreds of thousands of them and they hold numbers only, so the garbage collector
    need not look at them: it did for 0.15 s at a time, in which every rank waited.
    """

    hash: int
    key: int
    row: int
    parent: int
    end: int
    refs: int = 0
    digest: bytes | None = None
    plain: bool | None = None


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
