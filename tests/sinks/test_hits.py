"""The hit rule against slow, independent forms of the same specification, and its named corner cases.

Two references: without EAGLE, the sentence that closes ENGINE §5 (the largest aligned length that every group can
serve), tried length by length; with EAGLE, the section transcribed line by line over plain predicates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, gcd, lcm
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvledger_index.model import GroupSpec
from kvledger_router.hits import Ending, block_ends, compile_rule, explain, hit

STRIDE = 4


class Case(NamedTuple):
    """One question: groups, residency by the set of prefix ends (in tokens) that each group holds, and N."""

    groups: tuple[GroupSpec, ...]
    held: dict[int | None, frozenset[int]]
    tokens: int
    partial: bool = False


def bits_of(ends: frozenset[int]) -> int:
    return sum(1 << (end // STRIDE - 1) for end in ends)


def ours(case: Case) -> int | None:
    rule = compile_rule(case.groups, stride=STRIDE, hash_block_size=h_of(case), partial_hash_hits=case.partial)
    return hit(rule, case.tokens, {group: bits_of(ends) for group, ends in case.held.items()})


def h_of(case: Case) -> int:
    return gcd(*(g.block_size or 0 for g in case.groups)) if not case.partial else STRIDE


def alignment_of(case: Case) -> int:
    return h_of(case) if case.partial and len(case.groups) > 1 else lcm(*(g.block_size or 0 for g in case.groups))


# --- reference 1: the largest length that every group serves -------------------------------------------------------


def serves(case: Case, g: GroupSpec, others: list[GroupSpec], length: int) -> bool:
    """Whether ``g`` and all groups of equal spec can serve exactly ``length`` tokens (no EAGLE)."""
    b, a = g.block_size or 0, alignment_of(case)
    joint = [o.group for o in others if (o.kind, o.block_size, o.window, o.chunk) == (g.kind, b, g.window, g.chunk)]

    def held(end: int) -> bool:
        return all(end in case.held.get(group, frozenset()) for group in joint)

    if length == 0:
        return True
    if g.kind == "full_attention":
        whole = length // b
        pieces = [x for x in range(length, (whole + 1) * b + a, a) if x < case.tokens] if a < b else []
        return all(held((i + 1) * b) for i in range(whole)) and (length % b == 0 or any(held(x) for x in pieces))
    if g.kind == "sliding_window":
        first = max(length // b - max(ceil(((g.window or 0) - 1) / b), 1), 0)
        return length % b == 0 and all(held((i + 1) * b) for i in range(first, length // b))
    if g.kind == "mamba":
        return held(length) and (a < b or length % b == 0)
    chunk = g.chunk or 0
    return length % b == 0 and all(held((i + 1) * b) for i in range(length // chunk * chunk // b, length // b))


def largest_served(case: Case) -> int:
    a = alignment_of(case)
    groups = list(case.groups)
    for length in range((case.tokens - 1) // a * a, 0, -a):
        if all(serves(case, g, groups, length) for g in groups):
            return length
    return 0


# --- reference 2: the section, line by line ------------------------------------------------------------------------


class Slow(NamedTuple):
    """One set of the transcription: B over block numbers, P over token counts."""

    kind: str
    b: int
    window: int
    chunk: int
    eagle: bool
    has_block: Callable[[int], bool]
    has_point: Callable[[int], bool]


def slow_full(s: Slow, m: int, a: int, hashed: int, *, drop: bool) -> int:
    n = 0
    while (n + 1) * s.b <= m and s.has_block(n):
        n += 1
    length = n * s.b
    if a < s.b and s.b % a == 0:
        found = [length + j * a for j in range(1, s.b // a)]
        found = [x for x in found if x <= m and x <= hashed and s.has_point(x)]
        length = max(found, default=length)
    if drop and length > 0:
        length -= min(a, s.b)
    return length - length % a


def slow_sliding(s: Slow, m: int, a: int, *, drop: bool) -> int:
    b = s.b
    need = ceil((s.window - 1) / b) + (1 if drop else 0)
    admissible = [e for e in range(1, m // b + 1) if b == a or ((e - 1 if drop else e) * b) % a == 0]
    edges = [
        e
        for e in admissible
        if s.has_block(e - 1) and e - need >= 0 and all(s.has_block(i) for i in range(e - need, e))
    ]
    if edges:
        edge = max(edges)
    else:
        edge = max((e for e in admissible if e < need and all(s.has_block(i) for i in range(e))), default=0)
        while b != a and edge * b % a:
            edge -= 1
    if drop and edge > 0:
        edge -= 1
        while b != a and edge * b % a:
            edge -= 1
    return edge * b


def slow_mamba(s: Slow, m: int, a: int) -> int:
    if a < s.b and s.b % a == 0:
        return max((x for x in range(a, m + 1, a) if s.has_point(x)), default=0)
    ends = [(i + 1) * s.b for i in range(m // s.b) if s.has_block(i) and (i + 1) * s.b % a == 0]
    return max(ends, default=0)


def slow_chunked(s: Slow, m: int) -> int:
    n = m // s.chunk * s.chunk // s.b
    while (n + 1) * s.b <= m and s.has_block(n):
        n += 1
    return n * s.b


def slow_rule(s: Slow, m: int, a: int, hashed: int, *, drop: bool) -> int:
    match s.kind:
        case "full_attention":
            return slow_full(s, m, a, hashed, drop=drop)
        case "sliding_window":
            return slow_sliding(s, m, a, drop=drop)
        case "mamba":
            return slow_mamba(s, m, a)
        case _:
            return slow_chunked(s, m)


def slow_set(case: Case, members: list[GroupSpec]) -> Slow:
    first = members[0]
    b = first.block_size or 0
    held = [case.held.get(g.group, frozenset()) for g in members]
    return Slow(
        first.kind or "",
        b,
        first.window or 0,
        first.chunk or 0,
        eagle=any(g.eagle for g in members),
        has_block=lambda i: all((i + 1) * b in ends for ends in held),
        has_point=lambda x: all(x in ends for ends in held),
    )


def transcribed(case: Case) -> int:
    a, h = alignment_of(case), h_of(case)
    cap, hashed = case.tokens - 1, case.tokens // h * h
    by_spec: dict[tuple[object, ...], list[GroupSpec]] = {}
    for g in sorted(case.groups, key=lambda g: -1 if g.group is None else g.group):
        by_spec.setdefault((g.kind, g.block_size, g.window, g.chunk), []).append(g)
    sets = [slow_set(case, members) for members in by_spec.values()]
    sets.sort(key=lambda s: s.kind != "full_attention")
    if len(case.groups) == 1:
        return slow_rule(sets[0], cap, a, hashed, drop=sets[0].eagle)
    best, verified, full_lengths = cap, set[int](), dict[int, int]()
    while True:
        length = best
        for i, s in enumerate(sets):
            if i in full_lengths:
                length = min(length, full_lengths[i])
                continue
            drop = s.eagle and i not in verified
            m = length
            if drop and s.kind != "mamba":
                margin = h if case.partial and s.kind == "full_attention" and s.b > h else s.b
                m = min(length + margin, hashed)
            new = slow_rule(s, m, a, hashed, drop=drop)
            if drop:
                verified.add(i)
            elif new < length:
                verified = set()
            length = new
            if s.kind == "full_attention":
                full_lengths[i] = new
        if length >= best:
            break
        best = length
        if len(sets) == 2 and sets[0].kind == "full_attention":
            break
    return best


# --- cases ---------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to four groups without EAGLE, mostly resident, so that long hits are common."""
    partial = draw(st.booleans())
    chunked = not partial and draw(st.integers(0, 4)) == 0
    one_size = draw(st.sampled_from([STRIDE, 2 * STRIDE])) if chunked else 0
    groups = []
    for number in range(draw(st.integers(1, 4))):
        kinds = ["full_attention", "sliding_window", "mamba"] + (["chunked_local_attention"] if chunked else [])
        kind = draw(st.sampled_from(kinds))
        size = one_size or draw(st.sampled_from([STRIDE, 2 * STRIDE, 3 * STRIDE, 4 * STRIDE]))
        if partial and kind == "sliding_window":
            size = STRIDE  # an engine enables pieces only where windows use hash blocks
        groups.append(
            GroupSpec(
                group=number,
                kind=kind,
                block_size=size,
                window=draw(st.integers(1, 40)) if kind == "sliding_window" else None,
                chunk=size * draw(st.integers(1, 4)) if kind == "chunked_local_attention" else None,
            )
        )
    tokens = draw(st.integers(1, 32 * STRIDE))
    ends = [(i + 1) * STRIDE for i in range(tokens // STRIDE)]
    held: dict[int | None, frozenset[int]] = {}
    for g in groups:
        lost = draw(st.sets(st.sampled_from(ends), max_size=4)) if ends else set()
        kept = frozenset(draw(st.sampled_from([frozenset(ends) - lost, frozenset(lost), frozenset(ends)])))
        held[g.group] = kept
    return Case(tuple(groups), held, tokens, partial)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_the_hit_is_the_largest_length_that_every_group_serves(case: Case) -> None:
    """One full set at most where pieces count: two would depend on their order, which that sentence leaves out."""
    assume(not case.partial or len({g.block_size for g in case.groups if g.kind == "full_attention"}) < 2)

    assert ours(case) == largest_served(case)


def random_case(rng: random.Random) -> Case:
    """Layouts where EAGLE, alignment and windows meet; holes are few, so that the fixed point takes several rounds."""
    partial = rng.random() < 0.4
    groups = []
    for number in range(rng.randint(1, 4)):
        kind = rng.choice(["full_attention", "mamba", "sliding_window", "sliding_window"])
        size = STRIDE if partial and kind == "sliding_window" else STRIDE * rng.randint(1, 4)
        wide = rng.randint(1, 40) if kind == "sliding_window" else None
        eagle = kind != "mamba" and rng.random() < 0.6
        groups.append(GroupSpec(group=number, kind=kind, block_size=size, window=wide, eagle=eagle))
    tokens = rng.randint(1, 32 * STRIDE)
    held: dict[int | None, frozenset[int]] = {}
    for g in groups:
        kept = rng.choice([0.5, 0.9, 0.97, 1.0])
        held[g.group] = frozenset(end for end in range(STRIDE, tokens + 1, STRIDE) if rng.random() < kept)
    return Case(tuple(groups), held, tokens, partial)


def test_the_rule_equals_the_specification_line_by_line() -> None:
    """Seeded cases, many: what tells a wrong EAGLE margin or alignment from a right one is one case in a thousand."""
    rng = random.Random(7)
    wrong = [case for case in (random_case(rng) for _ in range(12_000)) if ours(case) != transcribed(case)]

    assert wrong == []


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_rule_equals_the_specification_with_chunks_too(case: Case) -> None:
    assert ours(case) == transcribed(case)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_more_residency_never_shortens_a_hit(case: Case, data: st.DataObject) -> None:
    """What the bounds for unplaced hashes rest on: absent and present enclose the truth (no EAGLE)."""
    ends = [(i + 1) * STRIDE for i in range(case.tokens // STRIDE)]
    more = {
        group: have | (data.draw(st.sets(st.sampled_from(ends))) if ends else set())
        for group, have in case.held.items()
    }
    before, after = ours(case), ours(case._replace(held=more))

    assert before is not None
    assert after is not None
    assert after >= before


def test_more_residency_never_shortens_a_hit_with_eagle_either() -> None:
    rng = random.Random(11)
    shorter = []
    for _ in range(6_000):
        case = random_case(rng)
        group = rng.choice(case.groups).group
        everything = frozenset(range(STRIDE, case.tokens + 1, STRIDE))
        more = everything if rng.random() < 0.5 else case.held[group] | set(list(everything)[:2])
        before, after = ours(case), ours(case._replace(held={**case.held, group: more}))
        if before is None or after is None or after < before:
            shorter.append(case)

    assert shorter == []


def full(group: int | None = 0, size: int = 4, *, eagle: bool = False) -> GroupSpec:
    return GroupSpec(group=group, kind="full_attention", block_size=size, eagle=eagle)


def window(group: int, w: int, size: int = 4, *, eagle: bool = False) -> GroupSpec:
    return GroupSpec(group=group, kind="sliding_window", block_size=size, window=w, eagle=eagle)


def ends(*blocks: int, size: int = 4) -> frozenset[int]:
    return frozenset((i + 1) * size for i in blocks)


@pytest.mark.parametrize(
    ("w", "tail"),
    [(96, 6), (97, 6), (98, 7), (1, 1), (2, 1)],
)
def test_a_window_needs_the_tail_of_w_minus_one_tokens(w: int, tail: int) -> None:
    """A window of 96 or 97 needs 6 blocks of 16, one of 98 needs 7; blocks before the tail are irrelevant."""
    rule = compile_rule((window(0, w, 16),), stride=16)
    need = ((1 << tail) - 1) << (20 - tail)

    assert hit(rule, 321, {0: need}) == 320
    assert hit(rule, 321, {0: need & (need - 1)}) == 0


def test_a_full_group_and_a_window_share_the_longest_prefix_that_both_serve() -> None:
    """Full 0..9 with a window of 2 blocks at 8, 9 gives 10 blocks; without 9 the window serves nothing longer."""
    groups = (full(), window(1, 9))
    both = Case(groups, {0: ends(*range(10)), 1: ends(8, 9)}, 41)

    assert ours(both) == 40
    assert ours(both._replace(held={0: ends(*range(10)), 1: ends(3, 4, 8)})) == 20
    assert ours(both._replace(held={0: ends(*range(10)), 1: ends(8)})) == 0


def test_a_prefix_shorter_than_the_window_serves() -> None:
    assert ours(Case((window(0, 40),), {0: ends(0, 1, 2)}, 33)) == 12


def test_the_last_token_is_always_computed() -> None:
    """A block-aligned prompt that is wholly resident hits one block less."""
    assert ours(Case((full(),), {0: ends(0, 1)}, 8)) == 4
    assert ours(Case((full(),), {0: ends(0, 1)}, 9)) == 8


@pytest.mark.parametrize("tokens", [0, 1])
def test_prompts_too_short_to_reuse_anything_hit_nothing(tokens: int) -> None:
    assert ours(Case((full(),), {0: ends(0, 1)}, tokens)) == 0


def test_hits_are_aligned_to_the_least_common_multiple() -> None:
    """Blocks of 8 and 4: a window that ends at 12 tokens serves 8."""
    groups = (full(0, 8), window(1, 5, 4))

    assert ours(Case(groups, {0: ends(0, 1, size=8), 1: ends(0, 1, 2)}, 40)) == 8


def test_groups_of_equal_spec_hit_jointly() -> None:
    """Both windows end somewhere, but nowhere together."""
    groups = (full(0), window(1, 5), window(2, 5))
    held: dict[int | None, frozenset[int]] = {0: ends(*range(6)), 1: ends(1, 3), 2: ends(1, 4)}

    assert ours(Case(groups, held, 40)) == 8


def test_an_eagle_group_reuses_a_block_less_than_it_holds() -> None:
    assert ours(Case((full(eagle=True),), {0: ends(0, 1, 2)}, 40)) == 8


def test_one_mamba_state_is_enough() -> None:
    groups = (full(0), GroupSpec(group=1, kind="mamba", block_size=4))

    assert ours(Case(groups, {0: ends(*range(8)), 1: ends(5)}, 40)) == 24


def test_chunked_attention_needs_only_its_own_chunk() -> None:
    chunked = GroupSpec(group=1, kind="chunked_local_attention", block_size=4, chunk=16)
    groups = (full(0), chunked)

    assert ours(Case(groups, {0: ends(*range(8)), 1: ends(4, 5)}, 32)) == 24
    assert ours(Case((chunked,), {}, 40)) == 32


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (GroupSpec(group=1, kind="telepathic_attention", block_size=4), "telepathic_attention"),
        (GroupSpec(group=1, kind=None, block_size=4), "kind unknown"),
        (GroupSpec(group=1, kind="sliding_window", block_size=4), "window"),
        (GroupSpec(group=1, kind="chunked_local_attention", block_size=4), "chunk size"),
        (GroupSpec(group=1, kind="full_attention"), "block size"),
        (GroupSpec(group=1, kind="full_attention", block_size=6), "stride"),
    ],
)
def test_what_cannot_be_judged_fails_closed_and_says_what_to_set(spec: GroupSpec, word: str) -> None:
    rule = compile_rule((full(0), spec), stride=STRIDE)
    everything: dict[int | None, int] = {0: (1 << 10) - 1, 1: (1 << 10) - 1}

    assert hit(rule, 40, everything) is None
    assert any(word in fault and "group 1" in fault for fault in rule.faults)


def test_an_unjudgeable_group_leaves_a_certain_nothing_certain() -> None:
    """Every group must serve a hit: where full attention has no block, no other group can change the 0."""
    rule = compile_rule((full(0), GroupSpec(group=1, kind="telepathic_attention", block_size=4)), stride=STRIDE)

    assert hit(rule, 40, {1: 0b111}) == 0


def test_a_group_whose_keys_cannot_be_seen_proves_nothing() -> None:
    """Blocks of 6 tokens have no keys at a stride of 4: their absence is ignorance."""
    rule = compile_rule((full(0, 6),), stride=STRIDE)

    assert hit(rule, 40, {}) is None


def test_cross_attention_takes_no_part() -> None:
    rule = compile_rule((full(0), GroupSpec(group=1, kind="cross_attention")), stride=STRIDE)

    assert hit(rule, 9, {0: 0b11}) == 8


def test_an_engine_that_stored_nothing_reuses_nothing() -> None:
    assert hit(compile_rule((), stride=STRIDE), 40, {}) == 0


@given(st.integers(0, 2**70), st.integers(1, 70), st.integers(1, 5))
def test_block_ends_are_every_ratio_th_stride(bits: int, count: int, ratio: int) -> None:
    bits &= (1 << count) - 1
    expected = sum((bits >> ((j + 1) * ratio - 1) & 1) << j for j in range(count // ratio))

    assert block_ends(bits, count, ratio) == expected


# --- explain -------------------------------------------------------------------------------------------------------


def endings(case: Case) -> dict[int | None, Ending]:
    rule = compile_rule(case.groups, stride=STRIDE)
    return {e.group: e for e in explain(rule, case.tokens, {g: bits_of(have) for g, have in case.held.items()})}


def test_explain_names_the_block_that_ended_a_window() -> None:
    """Full serves 40, the window of 2 blocks lacks block 9: it is the limit, at tokens 36..39."""
    found = endings(Case((full(), window(1, 9)), {0: ends(*range(10)), 1: ends(3, 4, 8)}, 41))

    assert (found[0].serves, found[0].limits) == (40, False)
    assert (found[1].serves, found[1].limits, found[1].missing) == (20, True, (36, 40))
    assert "36..39" in found[1].why


def test_explain_names_the_first_hole_of_full_attention() -> None:
    found = endings(Case((full(),), {0: ends(0, 1, 3, 4)}, 41))

    assert (found[0].serves, found[0].limits, found[0].missing) == (8, True, (8, 12))


def test_explain_blames_the_member_of_a_joint_set_that_lacks_the_block() -> None:
    groups = (full(0), window(1, 5), window(2, 5))
    found = endings(Case(groups, {0: ends(*range(10)), 1: ends(*range(10)), 2: ends(1)}, 41))

    assert found[1].missing is None
    assert found[1].limits
    assert found[2].missing == (36, 40)


def test_explain_blames_nobody_where_only_the_cap_ends_the_hit() -> None:
    found = endings(Case((full(),), {0: ends(*range(10))}, 41))

    assert not found[0].limits


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_limit_that_explain_names_is_one(case: Case) -> None:
    """Every missing span is really missing, and a hit short of the cap has somebody to blame."""
    rule = compile_rule(case.groups, stride=STRIDE, hash_block_size=h_of(case), partial_hash_hits=case.partial)
    resident = {g: bits_of(have) for g, have in case.held.items()}
    found = explain(rule, case.tokens, resident)
    length = hit(rule, case.tokens, resident)

    assert length is not None
    for ending in found:
        if ending.missing is not None:
            assert ending.missing[1] not in case.held[ending.group]
    if length + rule.alignment < case.tokens:
        assert any(ending.limits for ending in found)


def test_explain_covers_every_group_of_every_layout() -> None:
    """With EAGLE too, whose dropped block nobody lacks: then nobody may be blamed, but everyone is listed."""
    rng = random.Random(13)
    for _ in range(2_000):
        case = random_case(rng)
        rule = compile_rule(case.groups, stride=STRIDE, hash_block_size=h_of(case), partial_hash_hits=case.partial)
        found = explain(rule, case.tokens, {g: bits_of(have) for g, have in case.held.items()})

        assert {ending.group for ending in found} == {g.group for g in case.groups}
        assert all(end not in case.held[e.group] for e in found if e.missing for end in e.missing[1:])
