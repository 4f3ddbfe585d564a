"""What every implementation of the index promises about blocks: who holds which, on whatever branch they stand."""

from __future__ import annotations

import pytest
from index_pairs import Fold, Pair, claims, look, put, take

from kvledger_index.units import Bind

A, B, C = "replica-a/0", "replica-b/0", "replica-c/1"
PATH = tuple(range(0x1000, 0x1010))
EDGES = (0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)


# --- puts


async def test_adding_twice_is_adding_once(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH), put(PATH, 3, 9), put(PATH))
    await fold.do(A, put(PATH, 5, 6))
    await fold.do(A, take(PATH, 5, 6))

    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH if key != PATH[5]}


async def test_removing_what_is_not_there_changes_nothing(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), take(PATH), put(PATH, 0, 4), take(PATH, 4), take(PATH, lane=3), take(PATH, medium="cpu"))
    await fold.do(A, take((1, 2, 3)))

    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in PATH[:4]}


async def test_a_removal_is_the_removing_holder_s_only(pair: Pair, fold: Fold) -> None:
    await fold.open(A, B, C)
    for rank in (A, B, C):
        await fold.do(rank, put(PATH))
    await fold.do(A, take(PATH))
    await fold.do(A, take(PATH))

    assert await claims(pair.reader) == {((rank, "gpu", 0), key) for rank in (B, C) for key in PATH}


async def test_every_lane_and_medium_stands_for_itself(pair: Pair, fold: Fold) -> None:
    lanes = range(256)
    await fold.do(A, Bind(), *(put(PATH, 0, 1 + lane % 16, lane=lane, medium="storage") for lane in lanes))
    await fold.do(A, put(PATH, 0, 2), put(PATH, 0, 2, medium="other"), take(PATH, 0, 1, lane=77, medium="storage"))
    want = {((A, "storage", lane), key) for lane in lanes for key in PATH[: 1 + lane % 16]}
    want |= {((A, medium, 0), key) for medium in ("gpu", "other") for key in PATH[:2]}
    want -= {((A, "storage", 77), PATH[0])}

    assert await claims(pair.reader) == want
    holders, _ = await look(pair.reader, PATH)
    assert holders == [{where for where, key in want if key == each} for each in PATH]
    groups = {claim.group async for claim in pair.reader.dump()}
    assert groups == {None, *range(255)}, "lane 255 is the group without a number"


async def test_keys_without_a_bit_only_describe_the_path(pair: Pair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH, 0, 8, mask=0b10001000), put(PATH, 8, 16, mask=0))

    assert await claims(pair.reader) == {((A, "gpu", 0), PATH[3]), ((A, "gpu", 0), PATH[7])}
    await fold.do(A, take(PATH, 0, 8, mask=0b01110111))
    assert len(await claims(pair.reader)) == 2


@pytest.mark.parametrize("key", EDGES)
async def test_keys_keep_all_their_bits(pair: Pair, fold: Fold, key: int) -> None:
    path = [key, *(each for each in EDGES if each != key)]
    await fold.do(A, Bind(), put(path))
    await fold.do(B, Bind(), put([key, 5]))

    assert await claims(pair.reader) == {((A, "gpu", 0), k) for k in path} | {((B, "gpu", 0), k) for k in (key, 5)}
    holders, _ = await look(pair.reader, [*path, 4])
    assert holders == [{(A, "gpu", 0), (B, "gpu", 0)}, *[{(A, "gpu", 0)}] * 8, set()]
    await fold.do(A, *(take(path, at, at + 1) for at in range(1, 9)))
    assert await claims(pair.reader) == {((A, "gpu", 0), key), ((B, "gpu", 0), key), ((B, "gpu", 0), 5)}


# --- branches within a segment


@pytest.mark.parametrize("cut", [1, 2, 8, 15])
@pytest.mark.parametrize("trunk_first", [True, False])
async def test_prompts_that_part_within_a_segment_keep_their_own_holders(
    pair: Pair, fold: Fold, cut: int, trunk_first: bool
) -> None:
    branch = [*PATH[:cut], *range(0x2000 + cut, 0x2010)]
    twig = [*branch[:-1], 0x3000]
    await fold.open(A, B, C)
    steps = [(A, PATH), (B, branch), (C, twig)]
    for rank, path in steps if trunk_first else reversed(steps):
        await fold.do(rank, put(path))

    for path in (PATH, branch, twig):
        holders, _ = await look(pair.reader, path)
        want = [{(rank, "gpu", 0) for rank, held in steps if held[at] == key} for at, key in enumerate(path)]
        assert holders == want
    await fold.do(A, take(PATH))
    await fold.do(B, put(twig, 14, 16))
    holders, _ = await look(pair.reader, PATH)
    assert holders == [{(B, "gpu", 0), (C, "gpu", 0)} if at < cut else set() for at in range(16)]
    holders, _ = await look(pair.reader, twig)
    assert holders[15] == {(B, "gpu", 0), (C, "gpu", 0)}


async def test_a_branch_goes_on_where_the_path_ends_with_another_key(pair: Pair, fold: Fold) -> None:
    """A key belongs on the path only behind its own parent.

    path     1 2 3 4 5
    branch   1 2 9 9 9 | 10   as long as the path, but not on it: 10 must not become the path's next key
    """
    path, branch = [1, 2, 3, 4, 5], [1, 2, 11, 12, 13, 10]
    await fold.open(A, B)
    await fold.do(A, put(path))
    await fold.do(B, put(branch, 5, 6))

    holders, _ = await look(pair.reader, branch)
    assert holders == [{(A, "gpu", 0)}, {(A, "gpu", 0)}, set(), set(), set(), {(B, "gpu", 0)}]
    holders, _ = await look(pair.reader, [*path, 6])
    assert holders == [*[{(A, "gpu", 0)}] * 5, set()]


async def test_the_end_of_a_segment_may_be_known_before_its_start(pair: Pair, fold: Fold) -> None:
    await fold.open(A, B)
    await fold.do(A, put(PATH, 12, 16))
    await fold.do(B, put(PATH, 5, 6))
    holders, _ = await look(pair.reader, PATH)
    assert holders == [{(A, "gpu", 0)} if at >= 12 else {(B, "gpu", 0)} if at == 5 else set() for at in range(16)]

    await fold.do(A, put(PATH, 0, 12))
    await fold.do(B, put(PATH))
    holders, _ = await look(pair.reader, PATH)
    assert holders == [{(A, "gpu", 0), (B, "gpu", 0)}] * 16
    await fold.do(A, take(PATH))
    await fold.do(B, take(PATH, 1))
    assert await claims(pair.reader) == {((B, "gpu", 0), PATH[0])}


async def test_a_row_whose_path_is_gone_keeps_its_branches(pair: Pair, fold: Fold) -> None:
    branch = [*PATH[:3], 9, 10]
    await fold.open(A, B)
    await fold.do(A, put(PATH))
    await fold.do(B, put(branch, 3, 5))
    await fold.do(A, take(PATH))

    assert await claims(pair.reader) == {((B, "gpu", 0), 9), ((B, "gpu", 0), 10)}
    holders, _ = await look(pair.reader, branch)
    assert holders == [set(), set(), set(), {(B, "gpu", 0)}, {(B, "gpu", 0)}]
    await fold.do(A, put(branch))
    holders, _ = await look(pair.reader, branch)
    assert holders == [*[{(A, "gpu", 0)}] * 3, {(A, "gpu", 0), (B, "gpu", 0)}, {(A, "gpu", 0), (B, "gpu", 0)}]


async def test_a_holder_on_path_and_branch_is_named_once(pair: Pair, fold: Fold) -> None:
    branch = [*PATH[:8], *range(0x2000, 0x2008)]
    await fold.do(A, Bind(), put(PATH), put(branch, 8))

    holders, reading = await look(pair.reader, branch)
    assert holders == [{(A, "gpu", 0)}] * 16
    assert [mask for _, _, mask in reading.segments[0].holders] == [0xFFFF]


async def test_blocks_grow_one_by_one_and_go_in_any_order(pair: Pair, fold: Fold) -> None:
    await fold.open(A, B)
    for at in range(16):
        await fold.do(A, put(PATH, at, at + 1))
    for at in (15, 3, 0, 8):
        await fold.do(B, put(PATH, at, at + 1))
    for at in (0, 15, 7):
        await fold.do(A, take(PATH, at, at + 1))

    want = {((A, "gpu", 0), key) for at, key in enumerate(PATH) if at not in {0, 7, 15}}
    want |= {((B, "gpu", 0), PATH[at]) for at in (0, 3, 8, 15)}
    assert await claims(pair.reader) == want
