"""The upper bound of a hit: never below the truth, whatever a lane's unknown hashes are; and close where it counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hits import STRIDE, Case, alignment_of, bits_of, cases, full, h_of, random_case, window

from kvledger_index.model import GroupSpec
from kvledger_router.bounds import longest
from kvledger_router.hits import HitRule, compile_rule, hit


def rule_of(case: Case) -> HitRule:
    return compile_rule(case.groups, stride=STRIDE, hash_block_size=h_of(case), partial_hash_hits=case.partial)


def bits(case: Case) -> dict[int | None, int]:
    return {group: bits_of(ends) for group, ends in case.held.items()}


def split(case: Case, rng: random.Random) -> tuple[dict[int | None, int], dict[int | None, int]]:
    """What is known of a case's residency, and per group how many entries, at least, are not."""
    known: dict[int | None, int] = {}
    spare: dict[int | None, int] = {}
    for group, ends in case.held.items():
        if rng.random() < 0.3:
            lost: set[int] = set()
        else:
            lost = set(rng.sample(sorted(ends), min(len(ends), rng.choice([1, 2, 3, 8, 30]))))
        known[group] = bits_of(ends - lost)
        # other hashes of the lane, of other prompts, may be unknown, too
        spare[group] = len(lost) + rng.choice([0, 0, 1, 3])
    return known, spare


def test_the_truth_is_never_above_the_bound() -> None:
    """Seeded, many: EAGLE, alignment, pieces and windows together."""
    rng = random.Random(5)
    tight = 0
    for _ in range(4_000):
        case = random_case(rng)
        known, spare = split(case, rng)
        rule = rule_of(case)
        truth, low, high = hit(rule, case.tokens, bits(case)), hit(rule, case.tokens, known), None
        high = longest(rule, case.tokens, known, spare)

        assert truth is not None
        assert low is not None
        assert high is not None
        assert low <= truth <= high, (case, known, spare)
        tight += high == low
    assert tight > 1_000


@settings(max_examples=400, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_truth_is_never_above_the_bound_with_chunks_either(case: Case, rng: random.Random) -> None:
    known, spare = split(case, rng)
    rule = rule_of(case)
    truth, high = hit(rule, case.tokens, bits(case)), longest(rule, case.tokens, known, spare)

    assert truth is not None
    assert high is not None
    assert truth <= high


@settings(max_examples=200, deadline=None)
@given(cases())
def test_without_anything_unknown_the_bound_is_the_hit(case: Case) -> None:
    rule = rule_of(case)
    none: dict[int | None, int] = dict.fromkeys(case.held, 0)

    assert longest(rule, case.tokens, bits(case), {}) == hit(rule, case.tokens, bits(case))
    assert longest(rule, case.tokens, bits(case), none) == hit(rule, case.tokens, bits(case))


FULL_AND_WINDOW = (full(), window(1, 2 * STRIDE + 1))
"""A tail of two blocks."""


@pytest.mark.parametrize(
    ("groups", "known", "spare", "bound"),
    [
        ((full(),), {0: 0b0011}, {0: 1}, 3),
        ((full(),), {0: 0b1011}, {0: 1}, 4),
        ((full(),), {0: 0}, {0: 2}, 2),
        ((full(), full(1)), {0: 0b1111, 1: 0b0001}, {1: 1}, 2),
        (FULL_AND_WINDOW, {0: 0b11111111, 1: 0}, {1: 1}, 1),
        (FULL_AND_WINDOW, {0: 0b11111111, 1: 0}, {1: 2}, 8),
        (FULL_AND_WINDOW, {0: 0b11111111, 1: 0b00010000}, {1: 1}, 6),
        (FULL_AND_WINDOW, {0: 0b00011111, 1: 0}, {1: 2}, 5),
        ((full(), GroupSpec(1, "mamba", STRIDE)), {0: 0b111, 1: 0}, {1: 1}, 3),
        ((GroupSpec(0, "chunked_local_attention", STRIDE, chunk=4 * STRIDE),), {0: 0}, {0: 2}, 10),
    ],
)
def test_a_lane_can_lack_no_more_blocks_than_it_has_unknown_hashes(
    groups: tuple[GroupSpec, ...], known: dict[int | None, int], spare: dict[int | None, int], bound: int
) -> None:
    """In blocks, of a prompt of ten and a token."""
    rule = compile_rule(groups, stride=STRIDE)

    assert longest(rule, 10 * STRIDE + 1, known, spare) == bound * STRIDE


def test_a_bound_that_takes_too_long_stays_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = compile_rule(FULL_AND_WINDOW, stride=STRIDE)
    known: dict[int | None, int] = {0: (1 << 100) - 1, 1: 0}
    one: dict[int | None, int] = {1: 1}
    assert longest(rule, 100 * STRIDE + 1, known, one) == STRIDE

    monkeypatch.setattr("kvledger_router.bounds.STEPS_MAX", 10)

    assert longest(rule, 100 * STRIDE + 1, known, one) == 90 * STRIDE


def test_where_no_rule_applies_there_is_no_bound() -> None:
    rule = compile_rule((full(), GroupSpec(1, "mamba")), stride=STRIDE)

    assert longest(rule, 100, {0: 1, 1: 1}, {0: 1}) is None


def test_alignment_is_kept() -> None:
    """Blocks of 2 and 3 strides: hits are multiples of 6."""
    groups = (full(0, 2 * STRIDE), full(1, 3 * STRIDE))
    case = Case(groups, {0: frozenset(), 1: frozenset()}, 40 * STRIDE)
    known: dict[int | None, int] = {
        0: sum(1 << i for i in range(1, 40, 2)),
        1: sum(1 << i for i in range(2, 40, 3) if i != 14),
    }

    assert alignment_of(case) == 6 * STRIDE
    assert longest(rule_of(case), 40 * STRIDE, known, {0: 1}) == 12 * STRIDE
