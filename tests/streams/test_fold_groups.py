"""Which groups have a part in a hit on a rank."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_streams.ops import MIXED_GROUPS, card_of, groups_of
from kvledger_wire.accept import RankState


def heard(entry: tuple[GroupSpec, ...] = (), wired: tuple[GroupSpec, ...] = (), **facts: Any) -> RankState:
    return RankState(owner=1, life=(1, 1), n=1, entry=ModelEntry(model="m", groups=entry), groups=wired, **facts)


def test_the_entry_wins_field_by_field_where_it_says_something() -> None:
    state = heard(
        (GroupSpec(0, None, None, window=512, eagle=True), GroupSpec(1, "full_attention")),
        (GroupSpec(0, "sliding_window", 16, window=1024, chunk=7), GroupSpec(1, "mamba", 32)),
        heard=(0, 1),
        heard_gpu=(0, 1),
    )

    assert groups_of(state) == (
        GroupSpec(0, "sliding_window", 16, window=512, chunk=7, eagle=True),
        GroupSpec(1, "full_attention", 32),
    )


def test_numbered_events_take_the_numbered_groups_of_the_entry_and_those_heard() -> None:
    state = heard((GroupSpec(None, "mamba"), GroupSpec(2, "full_attention", 16)), heard=(0, None), heard_gpu=(0,))

    assert groups_of(state) == (GroupSpec(0), GroupSpec(2, "full_attention", 16))


def test_events_without_a_group_take_the_entrys_null_group() -> None:
    state = heard(
        (GroupSpec(None, "sliding_window", window=64), GroupSpec(0, "full_attention")),
        (GroupSpec(None, None, 16),),
        heard=(None,),
        heard_gpu=(None,),
    )

    assert groups_of(state) == (GroupSpec(None, "sliding_window", 16, window=64),)


def test_events_without_a_group_are_full_attention_where_nobody_says_else() -> None:
    several = (GroupSpec(0, "mamba"), GroupSpec(1, "full_attention"))
    state = heard(several, (GroupSpec(None, None, 32),), heard=(None,), heard_gpu=(None,))

    assert groups_of(state) == (GroupSpec(None, "full_attention", 32),)


def test_offload_events_without_a_group_do_not_decide() -> None:
    """Hybrid engines publish CPU copies without a group beside GPU events with one."""
    state = heard((), (GroupSpec(0, "full_attention", 16),), heard=(None, 0), heard_gpu=(0,))

    assert groups_of(state) == (GroupSpec(0, "full_attention", 16),)


@pytest.mark.parametrize(
    ("entry", "groups"),
    [
        ((), ()),
        ((GroupSpec(1, "full_attention"),), (GroupSpec(1, "full_attention"),)),
        ((GroupSpec(None, "mamba"),), (GroupSpec(None, "mamba"),)),
    ],
)
def test_before_the_first_gpu_event_the_entry_speaks_alone(
    entry: tuple[GroupSpec, ...], groups: tuple[GroupSpec, ...]
) -> None:
    assert groups_of(heard(entry)) == groups


def test_a_rank_that_mixes_both_is_uncertain() -> None:
    card = card_of(heard(heard=(None, 0), heard_gpu=(None, 0)), 0)

    assert card is not None
    assert card.uncertain == (MIXED_GROUPS,)
    assert [group.group for group in card.groups] == [0]


def test_events_without_a_group_take_the_only_group_of_the_entry_whatever_its_number() -> None:
    """An engine before 0.20 has one group; naming it 0 in the entry must not turn a window into full attention."""
    state = RankState(
        entry=ModelEntry(model="m", groups=(GroupSpec(0, "sliding_window", 32, window=128),)),
        heard=(None,),
        heard_gpu=(None,),
    )

    assert groups_of(state) == (GroupSpec(None, "sliding_window", 32, window=128),)
