"""From segments to bits, how far lower tiers continue, and hints: against slow forms of the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from router_fleet import FULL, MODEL

from kvledger_index.model import GroupSpec
from kvledger_index.units import Card
from kvledger_index.views import Catalogue, RankView, Segment
from kvledger_router.hints import HINTS_MAX, Hints
from kvledger_router.residency import extension, gather
from kvledger_router.roster import STRIDES_MAX, Roster, seat_all

Holders = tuple[tuple[int, int, int], ...]


def card(*, stride: int = 16, groups: tuple[GroupSpec, ...] = (FULL,)) -> Card:
    return Card(
        MODEL, 0, stride, loaded=True, suspended=False, partial=False, uncertain=(), closed=False, groups=groups
    )


def roster(**ranks: tuple[int, int, int, int]) -> Roster:
    return seat_all(Catalogue(b"v", {f"{name}/0": RankView(card(), slots) for name, slots in ranks.items()}))


holders = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 255]), st.integers(1, 2**16 - 1)),
    unique_by=lambda holder: holder[:2],
    max_size=6,
).map(tuple)


@given(st.lists(st.sampled_from(range(3)), max_size=12), st.lists(holders, min_size=3, max_size=3))
def test_gathered_bits_are_those_of_the_segments(order: list[int], kinds: list[Holders]) -> None:
    """Runs of equal segments, which are taken in one step, included; slots 7..9 are dead."""
    segments = [Segment(kinds[kind]) for kind in order]
    seats = roster(a=(1, 2, 3, 0), b=(4, 5, 6, 0))
    expected: dict[tuple[int, int, int], set[int]] = {}
    for number, segment in enumerate(segments):
        for slot, lane, mask in segment.holders:
            if slot <= 6:
                at = (slot - 1) // 3, (slot - 1) % 3, lane
                expected.setdefault(at, set()).update(number * 16 + p for p in range(16) if mask >> p & 1)
    found = {
        (seat, medium, lane): {i for i in range(len(segments) * 16) if bits >> i & 1}
        for seat, held in gather(segments, seats).items()
        for (medium, lane), bits in ({(0, lane): bits for lane, bits in held.gpu.items()} | held.tiers).items()
    }

    assert found == expected


@given(st.sets(st.integers(0, 19)), st.integers(0, 20), st.sampled_from([16, 32]), st.integers(0, 15))
def test_an_extension_is_the_blocks_right_behind_the_hit(blocks: set[int], hit: int, size: int, rest: int) -> None:
    seats = seat_all(
        Catalogue(b"v", {"a/0": RankView(card(groups=(GroupSpec(0, "full_attention", size),)), (1, 2, 3, 4))})
    )
    tokens = 20 * size + rest
    lower = {0: sum(1 << ((block + 1) * size // 16 - 1) for block in blocks)}
    expected = 0
    while (hit + expected) in blocks and (hit + expected + 1) * size < tokens:
        expected += 1

    assert extension(seats.seats[0], {}, lower, tokens, hit * size) == expected * size


def test_an_empty_catalogue_is_still_looked_up() -> None:
    """Its first rank is noticed by the reading's version."""
    assert seat_all(Catalogue(b"", {})).strides


def test_strides_are_bounded_and_the_frequent_come_first() -> None:
    views = {f"r{i}/0": RankView(card(stride=16 if i < 5 else i), (0, 0, 0, 0)) for i in range(20)}
    strides = seat_all(Catalogue(b"v", views)).strides

    assert len(strides) == STRIDES_MAX
    assert strides[0] == 16


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_a_hint_counts_as_far_as_the_paths_agree(left: list[int], right: list[int]) -> None:
    """Keys name whole prefixes, so equal keys at one place mean equal paths up to it."""

    def chain(path: list[int]) -> tuple[int, ...]:
        keys, key = [], 7
        for step in path:
            key = hash((key, step))
            keys.append(key)
        return tuple(keys)

    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    hints = Hints()
    hints.expect({16: chain(left)}, "pod", None, now=0.0, seconds=1.0)

    assert hints.shared({16: chain(right)}, 0.5) == ({("pod", None): common * 16} if common else {})
    assert hints.shared({32: chain(right)}, 0.5) == {}


def test_hints_are_bounded_and_a_burst_of_one_prompt_is_one_hint() -> None:
    hints = Hints()
    for _ in range(50):
        hints.expect({16: (1, 2, 3)}, "pod", None, now=0.0, seconds=1.0)
    burst = len(hints)
    for key in range(HINTS_MAX + 10):
        hints.expect({16: (1, 2, 1000 + key)}, "pod", None, now=0.0, seconds=1.0)

    assert burst == 1
    assert len(hints) == HINTS_MAX


def test_expired_hints_are_forgotten() -> None:
    hints = Hints()
    hints.expect({16: (1,)}, "pod", 0, now=0.0, seconds=1.0)
    hints.shared({16: (1,)}, 1.0)

    assert len(hints) == 0
