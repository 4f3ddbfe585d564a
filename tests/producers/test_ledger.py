"""What the ledger counts and tells: copies, clears, pieces, facts and doubts."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_rank import CPU, GPU, OTHER, STORAGE, Rank, cleared, removed, stored, text

from kvledger_bridge.ledger import REASONS_MAX
from kvledger_index.model import GroupSpec
from kvledger_wire.records import CLEARED, REMOVED, REPLAYED, STORED

# -- copies ---------------------------------------------------------------------------------------------------------


def test_one_of_two_copies_removed_leaves_the_block_and_only_the_edges_are_effective() -> None:
    # event       store  store  remove  remove
    # copies   0      1      2       1       0
    # effective       1      0       0       1
    rank = Rank()
    effective = [
        run.effective
        for event in (stored([1], text(1)), stored([1], text(1)), removed(1), removed(1))
        for change in rank.changes(event)
        for run in change.runs
    ]

    assert effective == [1, 0, 0, 1]
    assert rank.ledger.resident(0) == {}


def test_seven_blocks_stay_a_chain_when_the_first_copy_of_one_goes() -> None:
    rank = Rank()
    chain = text(7)
    rank.take(
        stored([1, 2, 3], chain[:48]), stored([1, 2, 3], chain[:48]), stored([4, 5, 6, 7], chain[48:], 3), removed(3)
    )

    assert rank.ledger.resident(0) == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}
    rank.take(removed(3))
    assert 3 not in rank.ledger.resident(0)


def test_engines_that_announce_only_the_last_removal_are_sets() -> None:
    rank = Rank(copies="last")
    rank.take(stored([1, 2], text(2)), stored([1, 2], text(2)), stored([3], (), size=0), stored([3], (), size=0))
    changes = rank.changes(removed(1), removed(3))

    assert rank.ledger.resident(0) == {2: 1}
    assert [run.effective for run in changes[0].runs] == [1]


def test_removals_of_unknown_hashes_are_counted_and_say_nothing() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)))

    assert rank.take(removed(9), removed(1, group=1), removed(1, medium="CPU")) == []
    assert rank.ledger.counts.removals_unknown == 3
    assert rank.ledger.resident(0) == {1: 1}


def test_copies_never_go_below_zero() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), removed(1), removed(1), removed(1), stored([1], text(1)))

    assert rank.ledger.resident(0) == {1: 1}


def test_a_removal_in_one_lane_leaves_the_others_alone() -> None:
    rank = Rank()
    rank.take(
        stored([1], text(1)),
        stored([1], text(1), group_idx=1),
        stored([1], (), size=0, medium="CPU"),
        stored([1], (), size=0, medium="STORAGE"),
        removed(1, group=1),
        removed(1, medium="cpu"),
    )

    assert [rank.ledger.resident(*lane) for lane in ((0,), (1,), (0, "cpu"), (0, "storage"))] == [
        {1: 1},
        {},
        {},
        {1: 1},
    ]


def test_no_group_is_a_namespace_of_its_own_beside_group_0() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), stored([1], (), size=0, group_idx=None, medium="CPU"), removed(1))

    assert rank.ledger.resident(0) == {}
    assert rank.ledger.resident(None, "cpu") == {1: 1}
    assert rank.ledger.groups == (0, None)


@pytest.mark.parametrize(
    ("word", "medium"),
    [
        (None, GPU),
        ("GPU", GPU),
        ("gpu", GPU),
        ("CPU", CPU),
        ("cpu", CPU),
        ("FS", STORAGE),
        ("OBJ", STORAGE),
        ("Storage", STORAGE),
        ("CXL", OTHER),
        ("", OTHER),
    ],
)
def test_media_are_told_apart_by_their_word_and_unknown_ones_are_never_gpu(word: str | None, medium: int) -> None:
    rank = Rank()
    [change] = rank.changes(stored([1], text(1), medium=word))

    assert change.medium == medium


def test_byte_and_integer_forms_of_a_hash_are_one() -> None:
    rank = Rank()
    long = b"\xaa" * 24 + (7).to_bytes(8, "big")
    rank.take(stored([7], text(1)), stored([long], (), size=16, group_idx=None, medium="CPU"))

    assert rank.ledger.placed(None, "cpu") == rank.ledger.placed(0)
    rank.take(stored([-1], text(1, 1)), removed(2**64 - 1))
    assert rank.ledger.resident(0) == {7: 1}


# -- clears and pieces ----------------------------------------------------------------------------------------------


def test_a_clear_empties_gpu_cpu_and_other_and_keeps_storage() -> None:
    rank = Rank()
    rank.take(stored([1], text(1)), stored([2], text(2), group_idx=1))
    for medium in ("CPU", "STORAGE", "CXL"):
        rank.take(stored([1], (), size=0, medium=medium))
    [piece] = rank.take(cleared())

    assert piece.group == "*"
    assert [(change.op, change.medium) for change in piece.changes] == [
        (CLEARED, GPU),
        (CLEARED, CPU),
        (CLEARED, OTHER),
    ]
    assert rank.ledger.resident(0) == rank.ledger.resident(1) == {}
    assert [bool(rank.ledger.resident(0, medium)) for medium in ("cpu", "storage", "other")] == [False, True, False]


def test_a_batch_is_cut_at_each_clear() -> None:
    rank = Rank()
    pieces = rank.take(
        stored([1], text(1), group_idx=1),
        stored([1], text(1)),
        cleared(),
        stored([1], text(1)),
        cleared(),
        cleared(),
        stored([1], text(1), group_idx=2),
        origin=REPLAYED,
    )

    assert [piece.group for piece in pieces] == [1, 0, "*", 0, "*", "*", 2]
    assert {change.origin for piece in pieces for change in piece.changes} == {REPLAYED}
    assert all(run.effective for piece in pieces for change in piece.changes for run in change.runs)
    assert rank.ledger.counts.clears == 3


def test_unplaced_counts_are_those_of_their_side_of_the_clear() -> None:
    rank = Rank()
    pieces = rank.take(stored([8, 9], text(3)), cleared(), stored([7], text(2)))

    assert [piece.unplaced for piece in pieces] == [((GPU, 2),), (), ((GPU, 1),)]


def test_names_outlive_a_clear() -> None:
    rank = Rank()
    tokens = text(2)
    rank.take(stored([1], tokens[:16]), cleared(), stored([2], tokens[16:], 1))

    assert rank.ledger.placed(0) == {2: rank.keys(tokens)[1]}


def test_an_orphan_does_not_outlive_a_clear() -> None:
    rank = Rank()
    rank.take(stored([2], text(1), 1), cleared())

    assert not rank.ledger.lineage._orphans
    assert not rank.ledger.lineage.loose


def test_adjacent_events_of_one_kind_share_a_change_and_order_is_kept() -> None:
    rank = Rank()
    tokens = text(4)
    [piece] = rank.take(
        stored([1, 2], tokens[:32]),
        stored([3, 4], tokens[32:], 2),
        removed(4),
        removed(3),
        stored([3], tokens[32:48], 2),
    )

    assert [change.op for change in piece.changes] == [STORED, REMOVED, STORED]
    assert {(change.seq, change.ts) for change in piece.changes} == {(0, 1.5)}
    assert len(piece.changes[0].runs) == 2


def test_a_batch_without_changes_has_no_pieces() -> None:
    rank = Rank()

    assert rank.take() == []


# -- facts and doubts -----------------------------------------------------------------------------------------------


def test_a_spec_is_given_when_heard_and_again_when_it_changes() -> None:
    rank = Rank()
    full: dict[str, Any] = {"kv_cache_spec_kind": "full_attention"}
    specs = [
        piece.spec
        for event in (
            stored([1], text(1)),
            stored([1], text(1)),
            stored([2], text(2), **full),
            stored([3], text(1, size=64), size=64, **full),
            stored([4], text(1, 4)),
        )
        for piece in rank.take(event)
    ]

    assert specs == [
        GroupSpec(0, None, 16),
        None,
        GroupSpec(0, "full_attention", 16),
        GroupSpec(0, "full_attention", 64),
        None,
    ]


def test_lower_tiers_teach_no_spec() -> None:
    rank = Rank()
    [piece] = rank.take(stored([1], (), size=0, medium="CPU", group_idx=None))

    assert piece.spec is None


def test_a_size_that_the_stride_does_not_divide_is_unplaced_and_names_the_setting() -> None:
    rank = Rank()
    [piece] = rank.take(stored([1, 2], text(2, size=24), size=24, group_idx=1))

    assert rank.unplaced(1) == {1, 2}
    [reason] = piece.uncertain
    assert "stride 16 does not divide block size 24 of group 1" in reason
    assert "hash_block_size" in reason
    [piece] = rank.take(stored([3], text(1, size=24), size=24, group_idx=1))
    assert piece.uncertain == ()


def test_a_size_above_the_model_entrys_is_named() -> None:
    rank = Rank(groups=(GroupSpec(0, "full_attention", 16),))
    [piece] = rank.take(stored([1], text(2), size=32))

    assert "blocks of 32 tokens where the model entry says 16" in piece.uncertain[0]
    assert rank.unplaced() == set()


def test_unknown_tags_make_the_rank_uncertain_unless_they_are_harmless() -> None:
    rank = Rank(harmless_tags=("BlockInactive",))
    assert rank.take(unknown=("BlockInactive", "TierBlocksCleared", "TierBlocksCleared")) == []

    assert [reason.split(":")[0] for reason in rank.ledger.take_uncertain()] == ["unknown event tag TierBlocksCleared"]
    assert rank.ledger.take_uncertain() == ()


def test_reasons_that_no_piece_carried_come_with_the_next_one() -> None:
    rank = Rank()
    rank.take(unknown=("BlockInactive",))
    [piece] = rank.take(cleared())

    assert len(piece.uncertain) == 1
    assert rank.ledger.take_uncertain() == ()


def test_gpu_events_with_and_without_a_group_are_doubtful_and_cpu_ones_are_not() -> None:
    rank = Rank()
    calm = rank.take(stored([1], text(1)), stored([1], (), size=0, medium="CPU", group_idx=None))
    assert all(piece.uncertain == () for piece in calm)
    pieces = rank.take(stored([2], text(2), group_idx=None))

    assert "without one" in pieces[0].uncertain[0]


@pytest.mark.parametrize("group", [-1, 255, 2**40])
def test_groups_that_no_lane_can_name_are_refused_with_a_reason(group: int) -> None:
    rank = Rank()
    assert rank.take(stored([1], text(1), group_idx=group), removed(1, group=group)) == []

    assert rank.ledger.counts.events_refused == 2
    assert str(group) in rank.ledger.take_uncertain()[0]
    rank.take(stored([1], text(1)))
    assert rank.ledger.placed(0) == {1: rank.keys(text(1))[0]}


def test_reasons_are_bounded() -> None:
    rank = Rank()
    rank.take(unknown=tuple(f"Tag{i}" for i in range(100)))
    reasons = rank.ledger.take_uncertain()

    assert len(reasons) == REASONS_MAX + 1
    assert reasons[-1].startswith("more than")
