"""How much of a prompt an engine would reuse: vLLM's hit rule over residency bits (DESIGN §8, ENGINE §5). Pure.

Notation, as in the specification:

    N, M    tokens of the prompt; M = N - 1, because the last token is always computed
    b       tokens per block of a group set        h   tokens per hash block, which divides every b
    A       alignment: every hit is a multiple     W   window, C chunk, in tokens
    B(i)    block i is resident in every group of the set
    P(x)    the prefix of x tokens has an entry in every group of the set (pieces of a block, where h < b)

Residency of a group comes as a Python int over *strides*, the tokens per block key: bit i is the prefix that ends after
stride i. Runs of bits are then a handful of machine-word operations, however long the prompt.

A group that cannot be judged (unknown kind, a size that nobody named) makes the answer None: fail closed. It stays an
exact 0 where another group holds nothing at all, because every group must serve the hit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from kvledger_index.model import FULL_KINDS, KNOWN_KINDS, SLIDING_KINDS, GroupSpec

UNCACHED_KINDS = frozenset({"cross_attention", "encoder_only_attention"})
"""Kinds without prefix caching: they take no part in a hit (ENGINE §5, not participating)."""

MAMBA = "mamba"
CHUNKED = "chunked_local_attention"

Resident = Mapping[int | None, int]
"""Residency bits per group; a group that is missing holds nothing."""


class GroupSet(NamedTuple):
    """Groups of equal spec: they hit jointly, so a block counts where all of them have it. Sizes in tokens."""

    groups: tuple[int | None, ...]
    kind: str
    block: int
    window: int
    chunk: int
    eagle: bool

    @property
    def full(self) -> bool:
        """Whether this is of the full-attention family, whose residency counts from block 0."""
        return self.kind in FULL_KINDS


class HitRule(NamedTuple):
    """The rule of one rank, compiled from its groups by :func:`compile_rule`.

    ``faults`` says what keeps it from being applied; ``sets`` are then incomplete. ``proving`` are groups that,
    holding nothing, make the hit 0 whatever else is unknown. ``single`` is the coordinator of an engine with one group.
    """

    sets: tuple[GroupSet, ...]
    faults: tuple[str, ...]
    proving: tuple[int | None, ...]
    single: bool
    stride: int
    hash_block: int
    alignment: int
    partial: bool

    def splits(self, block: int) -> bool:
        """Whether hits may end inside a block of this size (A < b and A | b)."""
        return self.alignment < block and block % self.alignment == 0


class Seen(NamedTuple):
    """What a set has of the prompt: bit i of ``blocks`` is B(i), bit i of ``points`` is P((i + 1) * stride)."""

    blocks: int
    points: int


class Ending(NamedTuple):
    """Why one group carries the hit no further.

    ``serves`` is the length that the group's set would serve alone. ``limits`` says that the hit would be longer, or
    could not grow, because of this set; ``missing`` is then the first span of tokens [from, to) of this very group
    that is not resident and that the next longer hit would need (None: the others of a joint set lack it).
    """

    group: int | None
    kind: str
    serves: int
    limits: bool
    missing: tuple[int, int] | None
    why: str


@lru_cache(maxsize=1024)
def compile_rule(
    groups: tuple[GroupSpec, ...],
    *,
    stride: int,
    hash_block_size: int | None = None,
    alignment: int | None = None,
    partial_hash_hits: bool = False,
) -> HitRule:
    """Sort groups into sets and settle h and A; never raises, ``faults`` says what cannot be judged.

    Without ``hash_block_size`` h is the greatest common divisor of the blocks; without ``alignment`` A is the block of
    a single group, h with partial hash hits, else the blocks' least common multiple.
    """
    groups = tuple(g for g in groups if g.kind not in UNCACHED_KINDS)
    blocks = [g.block_size for g in groups if g.block_size]
    h = hash_block_size or (gcd(*blocks) if blocks else stride)
    default = h if partial_hash_hits and len(groups) > 1 else lcm(*blocks) if blocks else stride
    a = alignment or default
    faults = [fault for g in groups for fault in _faults(g, stride, h, a)]
    if h % stride:
        faults.append(f"hash blocks of {h} tokens are no multiple of the stride of {stride} tokens")
    if a % h:
        faults.append(f"an alignment of {a} tokens is no multiple of the hash block of {h} tokens")
    return HitRule(
        sets=_sets(groups),
        faults=tuple(faults),
        proving=tuple(g.group for g in groups if _proves_nothing(g, stride)),
        single=len(groups) == 1,
        stride=stride,
        hash_block=h,
        alignment=a,
        partial=partial_hash_hits,
    )


def _faults(g: GroupSpec, stride: int, h: int, a: int) -> Iterable[str]:
    """What keeps this group from being judged; each text names the value and what to set."""
    name = f"group {'without a number' if g.group is None else g.group}"
    if g.kind not in KNOWN_KINDS:
        yield f"{name} is of kind {g.kind or 'unknown'}, which has no hit rule: name its kind in the model entry"
        return
    if not g.block_size:
        yield f"{name} has no known block size: name it in the model entry"
        return
    if g.block_size % stride:
        yield f"{name} has blocks of {g.block_size} tokens, no multiple of the stride of {stride}: name it in the entry"
    if g.block_size % h:
        yield f"{name} has blocks of {g.block_size} tokens, no multiple of the hash block of {h}"
    if g.kind in SLIDING_KINDS and not g.window:
        yield f"{name} has no known window: name it in the model entry"
    if g.kind == CHUNKED:
        if not g.chunk:
            yield f"{name} has no known chunk size: name it in the model entry"
        if g.eagle or g.block_size != a:
            yield f"{name} is chunked, which no engine combines with EAGLE or an alignment other than its block"


def _proves_nothing(g: GroupSpec, stride: int) -> bool:
    """Whether this group without a resident block makes the hit 0: every kind but chunked, if its keys can be seen."""
    return g.kind in KNOWN_KINDS and g.kind != CHUNKED and not (g.block_size and g.block_size % stride)


def _sets(groups: tuple[GroupSpec, ...]) -> tuple[GroupSet, ...]:
    """Merge groups of equal spec; full family first, else by first group index. A set is EAGLE if any member is."""
    merged: dict[tuple[str, int, int, int], list[GroupSpec]] = {}
    for g in sorted(groups, key=lambda g: -1 if g.group is None else g.group):
        merged.setdefault((g.kind or "", g.block_size or 0, g.window or 0, g.chunk or 0), []).append(g)
    sets = [GroupSet(tuple(g.group for g in m), *spec, eagle=any(g.eagle for g in m)) for spec, m in merged.items()]
    return tuple(sorted(sets, key=lambda s: not s.full))


def hit(rule: HitRule, tokens: int, resident: Resident) -> int | None:
    """Tokens of a prompt of ``tokens`` that the engine would reuse; None where the rule cannot be applied.

    An engine that has stored nothing, so that no group is known, reuses nothing.
    """
    if not rule.sets or any(not resident.get(group) for group in rule.proving):
        return 0
    if rule.faults:
        return None
    return _joint(rule, tokens, [_seen(rule, s, tokens, resident) for s in rule.sets])


def _joint(rule: HitRule, tokens: int, seen: list[Seen]) -> int:
    """The largest length that every set can serve together: one rule alone, or the fixed point of all."""
    cap = tokens - 1
    if cap <= 0:
        return 0
    if rule.single:
        return _alone(rule, rule.sets[0], seen[0], cap, drop=rule.sets[0].eagle)
    return _fixed_point(rule, seen, cap, tokens - tokens % rule.hash_block)


def _fixed_point(rule: HitRule, seen: list[Seen], cap: int, hashed: int) -> int:
    """Several groups (HybridKVCacheCoordinator): shorten until every set agrees. ``hashed`` is |H| * h.

    An EAGLE set drops a block once per length; to make up for it, it may look one margin further. Each round but the
    last shortens the hit by at least one alignment, so it ends; two or three rounds are usual.
    """
    best = cap
    verified: set[GroupSet] = set()
    full_lengths: dict[GroupSet, int] = {}
    while True:
        length = best
        for s, have in zip(rule.sets, seen, strict=True):
            if s in full_lengths:  # full attention is downward closed: what it serves it serves shorter
                length = min(length, full_lengths[s])
                continue
            drop = s.eagle and s not in verified
            bound = min(length + _margin(rule, s), hashed) if drop and s.kind != MAMBA else length
            new = _alone(rule, s, have, bound, drop=drop)
            if drop:
                verified.add(s)
            elif new < length:
                verified.clear()
            length = new
            if s.full:
                full_lengths[s] = new
        if length >= best:
            return best
        best = length
        if len(rule.sets) == 2 and rule.sets[0].full:
            return best  # one pass is enough


def _margin(rule: HitRule, s: GroupSet) -> int:
    """How far past the length an EAGLE set may look, to find the block that it drops."""
    return rule.hash_block if rule.partial and s.full and s.block > rule.hash_block else s.block


def _alone(rule: HitRule, s: GroupSet, have: Seen, m: int, *, drop: bool) -> int:
    """The longest hit of one set within ``m`` tokens; ``drop``: EAGLE needs one block more than it reuses."""
    if s.full:
        return _full(rule, s, have, m, drop=drop)
    if s.kind in SLIDING_KINDS:
        return _sliding(rule, s, have, m, drop=drop)
    if s.kind == MAMBA:
        return _mamba(rule, s, have, m)
    return _chunked(s, have, m)


def _full(rule: HitRule, s: GroupSet, have: Seen, m: int, *, drop: bool) -> int:
    """Full family: every block from 0, then, where hits may end inside a block, the furthest piece of the next one."""
    b, a = s.block, rule.alignment
    length = _ones(have.blocks & _low(m // b)) * b
    if rule.splits(b):
        furthest = min(length + b - a, m - m % a)
        pieces = (x for x in range(furthest, length, -a) if _has(have.points, x // rule.stride - 1))
        length = next(pieces, length)
    if drop and length > 0:
        length -= min(a, b)
    return length - length % a


def _sliding(rule: HitRule, s: GroupSet, have: Seen, m: int, *, drop: bool) -> int:
    """Sliding window: the furthest edge behind a whole tail of ceil((W - 1) / b) blocks; left of it nothing is needed.

    Where no tail is whole, a prefix shorter than the tail serves. W - 1, because the token to come sees itself.
    """
    need = tail_blocks(s, drop=drop)
    step = rule.alignment // gcd(rule.alignment, s.block)  # edges stand every this many blocks
    count = m // s.block
    blocks = have.blocks & _low(count)
    edges = _runs(blocks, max(need, 1)) & _grid(count, step, first=1 if drop else step)
    if edges:
        edge = edges.bit_length()
    else:
        edge = min(_ones(blocks), max(need - 1, 0))
        edge -= (edge - drop) % step if edge else 0
        edge = _down(max(edge, 0), step)  # with a drop this may lose one alignment more: the engine does, too
    if drop and edge > 0:
        edge = _down(edge - 1, step)
    return edge * s.block


def _mamba(rule: HitRule, s: GroupSet, have: Seen, m: int) -> int:
    """Mamba (align mode): one state is enough, at the furthest aligned end. It never drops."""
    b, a = s.block, rule.alignment
    if rule.splits(b):
        every = a // rule.stride
        count = m // a * every
        return (have.points & _grid(count, every, first=every)).bit_length() * rule.stride
    step = a // gcd(a, b)
    count = m // b
    return (have.blocks & _grid(count, step, first=step)).bit_length() * b


def _chunked(s: GroupSet, have: Seen, m: int) -> int:
    """Chunked local attention: every block from the start of the chunk; what is before it is not needed."""
    start = m // s.chunk * s.chunk // s.block
    return (start + _ones((have.blocks & _low(m // s.block)) >> start)) * s.block


def tail_blocks(s: GroupSet, *, drop: bool) -> int:
    """Blocks that a window needs behind its edge."""
    return -(-(s.window - 1) // s.block) + (1 if drop else 0)


def _seen(rule: HitRule, s: GroupSet, tokens: int, resident: Resident) -> Seen:
    """Join the groups of a set, and keep the block ends of their strides."""
    strides = tokens // rule.stride
    points = _low(strides)
    for group in s.groups:
        points &= resident.get(group, 0)
    return Seen(block_ends(points, strides, s.block // rule.stride), points)


def explain(rule: HitRule, tokens: int, resident: Resident) -> tuple[Ending, ...]:
    """Per group in set order, what it would serve alone and which block ended the hit; () where :func:`hit` is None.

    For people: costs two evaluations per set, where :func:`hit` costs one in all.
    """
    if rule.faults or not rule.sets:
        return ()
    cap, strides = max(tokens - 1, 0), tokens // rule.stride
    seen = [_seen(rule, s, tokens, resident) for s in rule.sets]
    length = _joint(rule, tokens, seen)
    reach: list[int] = []  # how far the hit would go if this one set had everything
    for i, s in enumerate(rule.sets):
        whole = Seen(block_ends(_low(strides), strides, s.block // rule.stride), _low(strides))
        reach.append(_joint(rule, tokens, [*seen[:i], whole, *seen[i + 1 :]]))
    # where no single set makes the difference, all that cannot serve the next length share the blame
    shared = 0 if max(reach) > length or length + rule.alignment > cap else length + rule.alignment
    endings: list[Ending] = []
    for s, have, far in zip(rule.sets, seen, reach, strict=True):
        alone = _alone(rule, s, have, cap, drop=s.eagle)
        missing = {g: _first_missing(rule, s, resident.get(g, 0), max(far, shared)) for g in s.groups}
        limits = far > length or (shared > 0 and any(missing.values()))
        wanted = max(far, shared) if limits else 0
        endings += [_ending(s, g, alone, missing[g] if limits else None, wanted) for g in s.groups]
    return tuple(endings)


def _ending(s: GroupSet, group: int | None, alone: int, missing: tuple[int, int] | None, wanted: int) -> Ending:
    """What one group says to a hit of ``wanted`` tokens (0: it is not what ended the hit)."""
    if not wanted:
        why = f"no limit: serves {alone} tokens alone"
    elif missing is None:
        why = f"has all that a hit of {wanted} needs, but hits jointly with its set, or less EAGLE's block"
    else:
        why = f"a hit of {wanted} needs tokens {missing[0]}..{missing[1] - 1}, which are not resident"
    return Ending(group, s.kind, alone, limits=wanted > 0, missing=missing, why=why)


def _first_missing(rule: HitRule, s: GroupSet, bits: int, wanted: int) -> tuple[int, int] | None:
    """The first span of tokens that a hit of ``wanted`` needs of this group and that is not resident."""
    if not wanted:
        return None
    b = s.block
    edge = -(-wanted // b) + (1 if s.eagle and s.kind != MAMBA else 0)
    if s.kind in SLIDING_KINDS:
        first = max(edge - tail_blocks(s, drop=s.eagle), 0)
    elif s.kind == MAMBA:
        first = edge - 1
    else:
        first = 0 if s.full else wanted // s.chunk * s.chunk // b
    for block in range(first, edge):
        end = min((block + 1) * b, wanted) if rule.splits(b) and not s.eagle else (block + 1) * b
        # a piece of a block is served by any longer piece of the same block, too
        pieces = range(end, (block + 1) * b + 1, rule.stride) if s.full else range(end, end + 1)
        if not any(_has(bits, x // rule.stride - 1) for x in pieces):
            return block * b, end
    return None


def block_ends(strides: int, count: int, ratio: int) -> int:
    """Of ``count`` stride bits, those at the ends of blocks of ``ratio`` strides, as bits over blocks. O(count)."""
    if ratio == 1:
        return strides
    blocks = count // ratio
    if not blocks or not strides:
        return 0
    # the text has its highest stride first; the last block ends ``blocks * ratio`` from its right end
    return int(f"{strides:0{count}b}"[count - blocks * ratio :: ratio], 2)


def _has(bits: int, at: int) -> bool:
    return bool(bits >> at & 1)


def _low(count: int) -> int:
    """``count`` ones."""
    return (1 << count) - 1


def _ones(bits: int) -> int:
    """How many ones stand in a row from bit 0."""
    return (~bits & (bits + 1)).bit_length() - 1


def _runs(bits: int, length: int) -> int:
    """The bits at which ``length`` ones in a row end. O(log length) operations."""
    have = 1
    while have < length and bits:
        step = min(have, length - have)
        bits &= bits << step
        have += step
    return bits


def _down(edge: int, step: int) -> int:
    return edge - edge % step


@lru_cache(maxsize=1024)
def _grid(count: int, step: int, first: int) -> int:
    """Ones for the edges first, first + step, … of ``count``; edge e is bit e - 1."""
    if step == 1:
        return _low(count)
    repeats = (count - first) // step + 1
    if repeats <= 0:
        return 0
    return _low(repeats * step) // _low(step) << (first - 1)
