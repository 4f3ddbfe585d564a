"""Where the ledger places hashes: names, masked events, parents and orphans, doubtful hashes, lower tiers."""

from __future__ import annotations

import pytest
from ledger_rank import CPU, GPU, Rank, hashes_of, keys_of, removed, stored, text

from kvledger_bridge.decode import BlockRemoved
from kvledger_bridge.ledger import Piece
from kvledger_index.model import GroupSpec
from kvledger_wire.records import ATTACHED, LIVE, REMOVED, STORED, Run

# -- placement ------------------------------------------------------------------------------------------------------


def test_a_chain_gets_the_keys_of_its_prompt() -> None:
    rank = Rank()
    tokens = text(40)
    rank.take(stored(range(1, 21), tokens[:320]), stored(range(21, 41), tokens[320:], 20))

    assert dict(zip(range(1, 41), rank.keys(tokens), strict=True)) == rank.ledger.placed(0)


def test_blocks_of_different_sizes_meet_in_the_key_at_their_end() -> None:
    rank = Rank(hash_block_size=16)
    tokens = text(1, size=256)
    rank.take(
        stored([16, 32, 48, 64], tokens[:64]),
        stored([32, 64], tokens[:64], size=32, group_idx=1),
        stored([64], tokens[:64], size=64, group_idx=2),
        stored([256], tokens[64:], 64, size=192, group_idx=2),
    )
    keys = rank.keys(tokens)

    assert {16: keys[0], 32: keys[1], 48: keys[2], 64: keys[3]} == rank.ledger.placed(0)
    assert {32: keys[1], 64: keys[3]} == rank.ledger.placed(1)
    assert {64: keys[3], 256: keys[15]} == rank.ledger.placed(2)


def test_a_block_larger_than_a_segment_says_nothing_of_segments_in_which_no_block_ends() -> None:
    rank = Rank(hash_block_size=16)
    tokens = text(2, size=320)  # blocks of 20 strides, segments of 16
    [change] = rank.changes(stored([1, 2], tokens, size=320))
    keys = rank.keys(tokens)

    assert [(run.position, keys_of(run), run.blocks) for run in change.runs] == [
        (0, keys[16:20], 0b1000),
        (0, keys[32:40], 0b1000_0000),
    ]


def test_runs_are_cut_at_segments_and_name_row_position_and_parent() -> None:
    rank = Rank()
    tokens = text(36)
    rank.take(stored(range(1, 11), tokens[:160]))
    [change] = rank.changes(stored(range(11, 37), tokens[160:], 10))
    keys = rank.keys(tokens)
    big = [key.to_bytes(8, "big") for key in keys]

    names = b"".join(i.to_bytes(8, "big") for i in range(11, 17))

    assert [Run(big[0], 10, big[9], b"".join(big[10:16]), 0x3F, 0x3F, names, 0)] == list(change.runs[:1])
    assert [(run.row, run.position, run.parent, len(run.keys) // 8) for run in change.runs[1:]] == [
        (big[16], 0, bytes(8), 16),
        (big[32], 0, bytes(8), 4),
    ]


@pytest.mark.parametrize("order", [(2, 3, 4, 5), (5, 4, 3, 2)])
def test_neighbours_removed_one_by_one_share_a_run_in_either_direction(order: tuple[int, ...]) -> None:
    rank = Rank()
    tokens = text(6)
    rank.take(stored([1, 2, 3, 4, 5, 6], tokens))
    [change] = rank.changes(*[removed(each) for each in order])
    [run] = change.runs

    assert (run.position, keys_of(run), hashes_of(run.hashes)) == (1, rank.keys(tokens)[1:5], [2, 3, 4, 5])
    assert (run.blocks, run.effective) == (0b1111, 0b1111)


def test_a_run_does_not_turn_nor_repeat_a_block() -> None:
    rank = Rank()
    rank.take(stored([1, 2, 3], text(3)), stored([1, 2, 3], text(3)))
    [change] = rank.changes(removed(2), removed(3), removed(2), removed(1))

    assert [hashes_of(run.hashes) for run in change.runs] == [[2, 3], [1, 2]]
    assert [run.effective for run in change.runs] == [0b00, 0b10]


def test_a_masked_event_is_placed_by_a_dense_event_later_in_its_batch() -> None:
    rank = Rank()
    tokens = text(4)
    pieces = rank.take(
        stored([3, 4], tokens, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=32),
        stored([1, 2, 3, 4], tokens),
    )
    keys = rank.keys(tokens)

    assert rank.ledger.placed(1) == {3: keys[2], 4: keys[3]}
    assert [piece.group for piece in pieces] == [1, 0]
    assert pieces[0].changes[0].origin == LIVE
    assert keys_of(pieces[0].changes[0].runs[0]) == keys[2:4]


def test_a_masked_hash_that_nobody_names_is_told_and_never_claimed() -> None:
    rank = Rank()
    [piece] = rank.take(stored([8, 9], text(4)))

    assert piece.unplaced == ((GPU, 2),)
    assert piece.changes[0].runs == ()
    assert hashes_of(piece.changes[0].unplaced) == [8, 9]
    [piece] = rank.take(removed(8))
    assert hashes_of(piece.changes[0].unplaced) == [8]
    assert piece.unplaced == ((GPU, 1),)


def test_unplaced_counts_hashes_not_copies_and_restates_every_medium() -> None:
    rank = Rank()
    rank.take(stored([8], text(2)), stored([8], text(2)), stored([5], (), size=0, medium="CPU"))
    [piece] = rank.take(stored([1], text(1)))

    assert piece.unplaced == ((GPU, 1), (CPU, 1))
    assert rank.ledger.resident(0) == {8: 2, 1: 1}


def test_a_hash_named_later_is_attached_in_all_its_lanes_with_its_copies() -> None:
    rank = Rank()
    tokens = text(2)
    rank.take(
        stored([2], tokens),
        stored([2], tokens),
        stored([2], tokens, group_idx=1),
        stored([2], (), size=0, medium="CPU"),
    )
    pieces = rank.take(stored([1, 2], tokens, group_idx=2))
    key = rank.keys(tokens)[1]

    attached = [
        (p.group, c.medium, c.op, [r.effective for r in c.runs])
        for p in pieces
        for c in p.changes
        if c.origin == ATTACHED
    ]
    assert attached == [(0, GPU, STORED, [1]), (0, CPU, STORED, [1]), (1, GPU, STORED, [1])]
    assert [piece.unplaced for piece in pieces] == [(), (), ()]
    assert rank.ledger.resident(0) == {2: 2}
    assert rank.ledger.placed(0, "cpu") == {2: key}
    assert rank.ledger.counts.attached == 3


def test_an_event_without_tokens_finds_its_hashes_by_name_only() -> None:
    """Offloading connectors: no tokens, block size 0 (>= 0.20) or the real one (before)."""
    rank = Rank()
    rank.take(stored([1, 2], text(2)))
    for size in (0, 16):
        rank.take(stored([1], (), size=size, medium="CPU"), stored([7], (), size=size, medium="CPU"))

    assert rank.ledger.placed(0, "cpu") == {1: rank.keys(text(1))[0]}
    assert rank.unplaced(0, "cpu") == {7}


def test_an_empty_list_of_hashes_changes_nothing_but_teaches_the_group() -> None:
    rank = Rank()
    event = stored([], text(2), group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=48)
    [piece] = rank.take(event)

    assert piece == Piece(1, (), (), GroupSpec(1, "sliding_window", 16, 48))
    assert rank.take(event) == []


def test_a_piece_of_a_block_with_a_known_parent_is_placed_at_its_own_end() -> None:
    rank = Rank(groups=(GroupSpec(0, "full_attention", 64),), hash_block_size=16)
    tokens = text(5)
    rank.take(stored([4], tokens[:64], size=64), stored([5], tokens[64:], 4))

    assert rank.ledger.placed(0) == {4: rank.keys(tokens)[3], 5: rank.keys(tokens)[4]}


@pytest.mark.parametrize("bad", [(-1,) * 16, (2**32,) * 16])
def test_tokens_that_no_key_can_hold_leave_their_hashes_unplaced(bad: tuple[int, ...]) -> None:
    rank = Rank()
    rank.take(stored([1], bad))

    assert rank.unplaced() == {1}
    assert rank.ledger.lineage.unreadable == 1


def test_hashes_over_tokens_to_come_are_unplaced() -> None:
    rank = Rank()
    rank.take(
        stored([1, 2], text(2), lookahead_token_ids=((5,), (6,))), stored([3], text(1, 1), lookahead_token_ids=())
    )

    assert rank.unplaced() == {1, 2}
    assert 3 in rank.ledger.placed(0)


# -- parents and orphans --------------------------------------------------------------------------------------------


def test_an_orphan_waits_and_is_attached_when_its_parent_appears() -> None:
    rank = Rank()
    tokens = text(4)
    [piece] = rank.take(stored([3, 4], tokens[32:], 2))
    assert piece.unplaced == ((GPU, 2),)

    [piece] = rank.take(stored([1, 2], tokens[:32]))
    attached, live = piece.changes

    assert (attached.origin, live.origin) == (ATTACHED, LIVE)
    assert keys_of(attached.runs[0]) == rank.keys(tokens)[2:]
    assert attached.runs[0].effective == 0b11
    assert piece.unplaced == ()


def test_orphans_of_orphans_follow() -> None:
    rank = Rank()
    tokens = text(200)
    for i in reversed(range(1, 200)):
        rank.take(stored([i + 1], tokens[16 * i : 16 * i + 16], i))
    assert len(rank.unplaced()) == 199

    rank.take(stored([1], tokens[:16]))

    assert dict(zip(range(1, 201), rank.keys(tokens), strict=True)) == rank.ledger.placed(0)


def test_parents_and_children_of_one_batch_are_placed_in_any_order() -> None:
    rank = Rank()
    tokens = text(4)
    [piece] = rank.take(stored([4], tokens[48:], 3), stored([2, 3], tokens[16:48], 1), stored([1], tokens[:16]))

    assert {change.origin for change in piece.changes} == {LIVE}
    assert dict(zip(range(1, 5), rank.keys(tokens), strict=True)) == rank.ledger.placed(0)


def test_an_orphan_is_dropped_with_the_removal_of_its_last_hash() -> None:
    rank = Rank()
    tokens = text(3)
    rank.take(stored([2, 3], tokens[16:], 1), removed(2))
    assert len(rank.ledger.lineage._orphan_order) == 1
    rank.take(removed(3))
    assert not rank.ledger.lineage._orphans
    assert not rank.ledger.lineage._orphan_of

    rank.take(stored([1], tokens[:16]), stored([3], text(2)))

    assert rank.unplaced() == {3}, "its tokens were forgotten"


def test_orphans_are_bounded_and_the_oldest_go_first() -> None:
    rank = Rank(orphans_max=3)
    tokens = text(6)
    rank.take(stored([2], tokens[16:32], 1))
    rank.take(stored([4, 5, 6], tokens[48:], 3))
    assert rank.ledger.lineage.orphans_dropped == 1

    rank.take(stored([1], tokens[:16]))
    assert rank.unplaced() == {2, 4, 5, 6}
    rank.take(stored([1, 2, 3], tokens[:48]))
    assert rank.unplaced() == set()


def test_an_event_that_is_alone_above_the_limit_is_not_kept() -> None:
    rank = Rank(orphans_max=1)
    rank.take(stored([2, 3], text(2), 1))

    assert not rank.ledger.lineage._orphan_order
    assert rank.unplaced() == {2, 3}


def test_an_orphan_that_several_groups_announce_is_kept_once() -> None:
    rank = Rank()
    rank.take(*[stored([2], text(1), 1, group_idx=group) for group in range(6)])

    assert len(rank.ledger.lineage._orphan_order) == 1


def test_an_orphan_is_never_re_rooted() -> None:
    rank = Rank()
    rank.take(stored([2], text(1), 1))

    assert rank.ledger.placed(0) == {}


def test_a_parent_need_not_be_resident_within_the_limit() -> None:
    rank = Rank(parents_max=1)
    tokens = text(3)
    rank.take(stored([1], tokens[:16]), removed(1))
    rank.take(stored([2], tokens[16:32], 1))
    assert rank.unplaced() == set()
    rank.take(removed(2), stored([9], text(1, 9)), removed(9))
    rank.take(stored([3], tokens[32:], 2))

    assert rank.unplaced() == {3}, "block 2 was the oldest of two, one too many"


def test_a_parent_in_use_is_kept_over_one_that_was_touched_earlier() -> None:
    rank = Rank(parents_max=2)
    rank.take(stored([1], text(1)), stored([2], text(1, 2)), removed(1), removed(2))
    rank.take(stored([3], text(1, 3), 1), removed(3))  # 1 is younger than 2 now
    rank.take(stored([4], text(1, 4), 2))

    assert rank.unplaced() == {4}


def test_an_event_that_names_its_own_hash_as_parent_ends() -> None:
    rank = Rank()
    rank.take(stored([1], text(1), 1), stored([2, 1], text(2), 1))
    rank.take(stored([1], text(1)))

    assert 2 in rank.ledger.resident(0)


# -- hashes seen under two keys -------------------------------------------------------------------------------------


def test_a_hash_seen_under_two_keys_is_taken_back_and_counts_as_unplaced() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), stored([1], text(1)), stored([1], text(1), group_idx=1))
    pieces = rank.take(stored([1], text(1, 7)))

    first = pieces[0].changes
    assert [(change.op, change.origin) for change in first] == [(REMOVED, ATTACHED), (STORED, LIVE)]
    assert (first[0].runs[0].effective, hashes_of(first[1].unplaced)) == (1, [1])
    assert [(piece.group, piece.unplaced) for piece in pieces] == [(0, ((GPU, 1),)), (1, ((GPU, 1),))]
    assert rank.ledger.resident(0) == {1: 3}
    assert rank.ledger.placed(0) == rank.ledger.placed(1) == {}
    assert rank.ledger.counts.retracted == 2


def test_such_a_hash_stays_unplaced_and_drains_with_its_removals() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), stored([1], text(1, 7)))
    assert rank.ledger.resident(0) == {1: 2}
    rank.take(stored([1, 2], text(2)))
    assert rank.unplaced() == {1}
    assert rank.ledger.placed(0) == {2: rank.keys(text(2))[1]}
    [piece] = rank.take(removed(1), removed(1), removed(1))

    assert piece.unplaced == ()


def test_one_prefix_under_two_hashes_makes_the_rank_uncertain_once() -> None:
    """Engines before 0.17 do not publish salts or media: equal tokens, other blocks."""
    rank = Rank()
    rank.take(stored([1], text(1)))
    [piece] = rank.take(stored([2], text(1)))
    assert len(piece.uncertain) == 1
    assert "two engine hashes" in piece.uncertain[0]
    [piece] = rank.take(removed(1))

    assert piece.uncertain == ()
    assert piece.changes[0].runs[0].effective == 0, "the other hash still holds the key"
    [piece] = rank.take(removed(2))
    assert piece.changes[0].runs[0].effective == 1


def test_a_span_that_names_one_hash_twice_leaves_it_unplaced() -> None:
    rank = Rank()
    rank.take(stored([1, 1, 2, 1], text(4)))

    assert rank.ledger.resident(0) == {1: 3, 2: 1}
    assert rank.ledger.placed(0) == {2: rank.keys(text(4))[2]}


def test_a_block_that_lost_its_name_is_forgotten() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), stored([1], text(1, 7)))
    lineage = rank.ledger.lineage

    assert not lineage._keys
    assert not lineage._idle
    rank.take(stored([2], text(1)))
    assert rank.ledger.placed(0) == {2: rank.keys(text(1))[0]}


# -- lower tiers ----------------------------------------------------------------------------------------------------


def test_a_lower_tiers_tokens_never_name_a_gpu_block() -> None:
    """Connectors leave salts out of their events: the tokens are not the whole identity."""
    rank = Rank()
    tokens = text(2)
    rank.take(stored([1], tokens[:16], medium="CPU"), stored([1], tokens))

    assert rank.ledger.placed(0, "cpu") == {1: rank.keys(tokens)[0]}
    assert rank.unplaced() == {1}


def test_a_lower_tiers_name_is_no_parent_of_a_gpu_event() -> None:
    rank = Rank()
    tokens = text(2)
    rank.take(stored([2], tokens[16:], 1), stored([2], tokens[16:], 1, medium="CPU"))
    rank.take(stored([1], tokens[:16], medium="CPU"))

    assert rank.unplaced() == {2}
    assert set(rank.ledger.placed(0, "cpu")) == {1}, "the orphan kept is the GPU's"
    rank.take(stored([1], tokens[:16]))
    assert rank.unplaced() == rank.unplaced(0, "cpu") == set()


def test_an_orphan_of_a_lower_tier_is_attached_there() -> None:
    rank = Rank()
    tokens = text(2)
    rank.take(stored([2], tokens[16:], 1, medium="CPU"))
    rank.take(stored([1], tokens[:16], medium="CPU"))

    assert dict(zip((1, 2), rank.keys(tokens), strict=True)) == rank.ledger.placed(0, "cpu")


def test_a_gpu_event_overrules_what_a_lower_tier_said() -> None:
    rank = Rank()
    salted = stored([1], text(1), extra_keys=(("tenant",),))
    rank.take(stored([1], text(1), medium="CPU"))
    [piece] = rank.take(salted)
    [key] = rank.keys(text(1), salt="tenant")

    assert [(change.op, change.medium, change.origin) for change in piece.changes] == [
        (REMOVED, CPU, ATTACHED),
        (STORED, CPU, ATTACHED),
        (STORED, GPU, LIVE),
    ]
    assert rank.ledger.placed(0) == rank.ledger.placed(0, "cpu") == {1: key}


def test_a_lower_tier_does_not_overrule_a_gpu_event() -> None:
    rank = Rank()
    rank.take(stored([1, 2], text(2), extra_keys=(("tenant",), None)))
    rank.take(stored([1, 2], text(2), medium="CPU"))

    assert rank.ledger.placed(0) == rank.ledger.placed(0, "cpu")
    assert rank.ledger.counts.retracted == 0


def test_hashes_of_another_hash_space_share_keys_without_doubt() -> None:
    """LMCache announces chunks of 256 tokens under hashes of its own, without a group."""
    rank = Rank()
    tokens = text(16)
    rank.take(stored(range(1, 17), tokens))
    pieces = rank.take(stored([999], tokens, size=256, group_idx=None, medium="cpu"))

    assert pieces[0].uncertain == ()
    assert list(rank.ledger.placed(None, "cpu").values()) == [rank.keys(tokens)[15]]
    rank.take(BlockRemoved((999,), "cpu"))
    assert rank.ledger.resident(None, "cpu") == {}


def test_a_lower_tiers_odd_block_size_leaves_the_rank_certain() -> None:
    rank = Rank()
    pieces = rank.take(stored([1], text(1, size=37), size=37, group_idx=None, medium="cpu"))

    assert pieces[0].uncertain == ()
    assert rank.unplaced(None, "cpu") == {1}
