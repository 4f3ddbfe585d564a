"""The router's answers over an index in memory: numbers, statuses, order, hints, explanations."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from router_fleet import FULL, MODEL, PROMPT, STRIDE, WINDOW, Fleet, World, new_world, only, prompt

from kvledger_index.errors import InvalidInput
from kvledger_index.model import GroupSpec
from kvledger_router import Holder, Index, Media
from kvledger_router.standing import PRECEDENCE, Note, Status, verdict


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as ready:
        yield ready


# --- numbers -------------------------------------------------------------------------------------------------------


async def test_a_whole_prompt_held_by_a_fresh_rank_is_an_exact_hit(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT, seq=41)
    match = await world.index.match(PROMPT)

    assert only(match) == Holder("pod-a", 0, 160, 0, "exact", as_of=41, age_seconds=0.0, reason="")
    assert match.best() is match.holders[0]
    assert match.opinion


async def test_the_last_token_is_always_computed(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)

    assert only(await world.index.match(PROMPT[:160])).hit_tokens == 144


async def test_a_window_group_bounds_what_full_attention_holds(world: World) -> None:
    await world.fleet.open("pod-a/0", groups=(FULL, WINDOW))
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.store("pod-a/0", PROMPT, [3, 4], group=1)
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (80, "exact")


async def test_a_group_that_the_entry_names_and_nobody_heard_holds_nothing(world: World) -> None:
    """A life is complete from its empty start: silence of a known group is an exact 0."""
    await world.fleet.open("pod-a/0", groups=(FULL, WINDOW), heard=(0,))
    await world.fleet.store("pod-a/0", PROMPT)
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (0, "exact")


async def test_an_engine_without_group_numbers_is_judged_by_its_own_group(world: World) -> None:
    bare = GroupSpec(group=None, kind="full_attention", block_size=32)
    await world.fleet.open("pod-a/0", groups=(bare,))
    await world.fleet.store("pod-a/0", PROMPT, group=None, size=32)
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (160, "exact")


async def test_group_none_is_not_group_zero(world: World) -> None:
    """Bare events must not count for a numbered group: PR #37688's point, seen from the router."""
    await world.fleet.open("pod-a/0", groups=(FULL,))
    await world.fleet.store("pod-a/0", PROMPT, group=None)
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (0, "uncertain")
    assert "none" in holder.reason


async def test_ranks_with_different_block_sizes_are_judged_from_the_same_keys(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.open("pod-b/0", groups=(GroupSpec(group=0, kind="full_attention", block_size=48),))
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.store("pod-b/0", PROMPT, size=48)
    match = await world.index.match(PROMPT)

    assert [(h.replica, h.hit_tokens) for h in match] == [("pod-a", 160), ("pod-b", 144)]


async def test_namespaces_of_lora_salt_and_media_do_not_mix(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT[:32])
    await world.fleet.store("pod-a/0", PROMPT[:48], lora="adapter")
    await world.fleet.store("pod-a/0", PROMPT[:64], salt="s")
    await world.fleet.store("pod-a/0", PROMPT[:80], media=[(3, "image")])

    async def hits(**extra: object) -> int:
        return only(await world.index.match(PROMPT, **extra)).hit_tokens  # type: ignore[arg-type]  # one keyword each

    assert await hits() == 32
    assert await hits(lora="adapter") == 48
    assert await hits(salt="s") == 64
    assert await hits(media=[Media("image", 3)]) == 80
    assert await hits(media=[Media("image", 4)]) == 0


async def test_lower_tiers_extend_a_hit_without_a_hole(world: World) -> None:
    """Blocks of the two tiers continue each other.

    gpu      0 1 2
    cpu          2 3 4 . 6
    storage            5 .        -> hit 48, extended by blocks 3, 4, 5, 6
    """
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT, [0, 1, 2])
    await world.fleet.store("pod-a/0", PROMPT, [2, 3, 4, 6], medium="cpu")
    await world.fleet.store("pod-a/0", PROMPT, [5], medium="storage")
    await world.fleet.store("pod-a/0", PROMPT, [8], medium="cpu")
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens) == (48, 64)


async def test_lower_tiers_alone_are_no_hit(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT, medium="cpu")
    match = await world.index.match(PROMPT)

    assert (only(match).hit_tokens, only(match).extended_tokens) == (0, 160)
    assert match.best() is match.holders[0]


async def test_lower_tiers_of_larger_blocks_cover_whole_blocks_only(world: World) -> None:
    await world.fleet.open("pod-a/0", groups=(GroupSpec(group=0, kind="full_attention", block_size=32),))
    await world.fleet.store("pod-a/0", PROMPT, [0], size=32)
    await world.fleet.store("pod-a/0", PROMPT, [1, 2, 4], size=32, medium="cpu")

    assert only(await world.index.match(PROMPT)).extended_tokens == 64


async def test_a_tier_that_names_no_group_extends_too(world: World) -> None:
    """An offload connector without group numbers beside numbered GPU groups."""
    await world.fleet.open("pod-a/0", groups=(FULL,))
    await world.fleet.store("pod-a/0", PROMPT, [0])
    await world.fleet.store("pod-a/0", PROMPT, [1, 2], group=None, medium="cpu")
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens, holder.status) == (16, 32, "exact")


async def test_a_cleared_medium_holds_nothing_and_the_others_stay(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.store("pod-a/0", PROMPT, medium="storage")
    await world.index.match(PROMPT)
    await world.fleet.clear("pod-a/0")
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens, holder.status) == (0, 160, "exact")


@pytest.mark.parametrize("tokens", [0, 1, 15])
async def test_prompts_shorter_than_a_stride_hit_nothing_exactly(world: World, tokens: int) -> None:
    await world.fleet.open("pod-a/0")
    holder = only(await world.index.match(prompt(tokens)))

    assert (holder.hit_tokens, holder.status) == (0, "exact")


# --- statuses ------------------------------------------------------------------------------------------------------


async def test_an_unknown_model_has_no_holders_but_an_opinion(world: World) -> None:
    match = await world.index.match(PROMPT)

    assert match.opinion
    assert len(match) == 0
    assert match.best() is None
    assert "logical name" in match.reason
    assert "being rebuilt does not know it yet" in match.reason


async def test_a_replica_asked_for_but_never_seen_is_unknown(world: World) -> None:
    await world.fleet.open("pod-a/0", "pod-a/1", "pod-b/0")
    match = await world.index.match(PROMPT, replicas=["pod-a", "pod-z"])

    assert [(h.replica, h.rank, h.status) for h in match] == [
        ("pod-a", 0, "exact"),
        ("pod-a", 1, "exact"),
        ("pod-z", None, "unknown"),
    ]


async def test_a_rank_that_comes_up_is_seen_by_the_next_question(world: World) -> None:
    assert len(await world.index.match(PROMPT)) == 0

    await world.fleet.open("pod-a/0")

    assert len(await world.index.match(PROMPT)) == 1


@pytest.mark.parametrize(
    ("changes", "status", "word", "hit"),
    [
        ({"closed": True}, "unknown", "closed", 0),
        ({"loaded": False}, "unknown", "unloaded", 0),
        ({"suspended": True}, "stale", "suspended", 160),
        ({"uncertain": ("unknown event tag",)}, "uncertain", "unknown event tag", 160),
        ({"full_reports": True}, "uncertain", "full_reports", 160),
        ({"partial": True}, "at_least", "partial", 160),
        ({"partial": True, "full_reports": True}, "uncertain", "full_reports", 160),
        ({"full_reports": True, "suspended": True}, "stale", "suspended", 160),
        ({"closed": True, "suspended": True, "partial": True}, "unknown", "closed", 0),
    ],
)
async def test_what_the_card_says_decides_by_precedence(
    world: World, changes: dict[str, object], status: Status, word: str, hit: int
) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.become("pod-a/0", **changes)
    holder = only(await world.index.match(PROMPT))

    assert (holder.status, holder.hit_tokens) == (status, hit)
    assert word in holder.reason


async def test_a_group_without_a_rule_fails_closed(world: World) -> None:
    strange = GroupSpec(group=1, kind="telepathic_attention", block_size=16)
    await world.fleet.open("pod-a/0", groups=(FULL, strange))
    await world.fleet.store("pod-a/0", PROMPT)
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (0, "uncertain")
    assert "telepathic_attention" in holder.reason


async def test_a_suspended_rank_says_so_however_old_its_picture_is(world: World) -> None:
    await world.fleet.open("pod-a/0", suspended=True)
    await world.fleet.open("pod-b/0")
    world.clock.pass_seconds(4)
    world.fleet.log_ms += 4000
    await world.fleet.beat("pod-b/0")
    holder = (await world.index.match(PROMPT)).of("pod-a")

    assert holder is not None
    assert holder.reason.startswith("suspended: ")


async def test_a_silent_rank_is_stale_then_gone(world: World) -> None:
    """By Redis' clock alone.

    0 s     heard       exact
    2.9 s               exact
    3.9 s               stale: not heard for more than 3 s
    15.9 s              gone: the worker at the log's end is more than 15 s ahead of the rank's last record
    """
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.open("pod-b/0")
    seen: list[tuple[Status, int]] = []
    for seconds in (2.9, 1.0, 11.0, 1.0):
        world.clock.pass_seconds(seconds)
        world.fleet.log_ms += int(seconds * 1000)
        await world.fleet.beat("pod-b/0")
        holder = (await world.index.match(PROMPT)).of("pod-a")
        assert holder is not None
        seen.append((holder.status, holder.hit_tokens))

    assert seen == [("exact", 160), ("stale", 160), ("stale", 160), ("unknown", 0)]


async def test_a_rank_of_which_only_the_engine_is_seen_is_stale_and_not_gone(world: World) -> None:
    """Its process lives and nothing says that no batch was lost: however long, until something is proven again."""
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    seen: list[tuple[Status, int]] = []
    for unproven_ms in (3_000, 3_100, 60_000, 0):
        await world.fleet.beat("pod-a/0", unproven_ms=unproven_ms)
        holder = only(await world.index.match(PROMPT))
        seen.append((holder.status, holder.hit_tokens))
        if unproven_ms == 60_000:
            assert "known to be complete 60.0 s ago" in holder.reason

    assert seen == [("exact", 160), ("stale", 160), ("stale", 160), ("exact", 160)]


async def test_a_rank_that_is_being_loaded_is_unknown(world: World) -> None:
    """It has slots and some of its blocks stand in them; none of that is an answer."""
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.load("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT, [0, 1])
    holder = only(await world.index.match(PROMPT))

    assert (holder.status, holder.hit_tokens) == ("unknown", 0)


async def test_while_nobody_reads_the_partition_everything_is_stale_and_nothing_is_gone(world: World) -> None:
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    world.clock.pass_seconds(600)
    match = await world.index.match(PROMPT)
    holder = only(match)

    assert (holder.status, holder.hit_tokens, holder.age_seconds) == ("stale", 160, 600.0)
    assert "no worker" in holder.reason
    assert match.best() is None
    assert match.best(include_uncertain=True) is holder


async def test_a_redis_clock_that_goes_back_makes_nobody_fresh_who_is_not_stamped_again(world: World) -> None:
    """Set back by an hour, or another server's after a failover, and the worker is lost too: nobody would be stale."""
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    world.clock.pass_seconds(-3600)
    dead = only(await world.index.match(PROMPT))
    world.fleet.log_ms += 1_000
    await world.fleet.store("pod-a/0", PROMPT)
    alive = only(await world.index.match(PROMPT))

    assert (dead.status, "clock went back by 3600.0 s" in dead.reason) == ("stale", True)
    assert alive.status == "exact"


async def test_a_partition_behind_its_target_is_stale_until_it_is_read(world: World) -> None:
    """Old lives must not be served as exact while history is read again."""
    await world.fleet.start(target=100)
    await world.fleet.open("pod-a/0")
    before = only(await world.index.match(PROMPT))
    await world.fleet.tick(read=100)
    after = only(await world.index.match(PROMPT))

    assert before.status == "stale"
    assert "behind 100" in before.reason
    assert after.status == "exact"


async def test_unplaced_hashes_that_could_lengthen_the_hit_make_it_a_lower_bound(world: World) -> None:
    await world.fleet.open("pod-a/0", groups=(FULL, WINDOW))
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.store("pod-a/0", PROMPT, [3, 4], group=1)
    await world.fleet.beat("pod-a/0", unplaced=((1, 0, 2),))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (80, "at_least")
    assert "160" in holder.reason


async def test_unplaced_hashes_that_cannot_matter_leave_an_answer_exact(world: World) -> None:
    """Full attention ends the hit, whatever the window holds; and lower tiers never count."""
    await world.fleet.open("pod-a/0", groups=(FULL, WINDOW))
    await world.fleet.store("pod-a/0", PROMPT, [0, 1, 2])
    await world.fleet.store("pod-a/0", PROMPT, group=1)
    await world.fleet.beat("pod-a/0", unplaced=((1, 0, 2), (0, 1, 9)))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (48, "exact")


async def test_a_prompt_that_was_cut_is_a_lower_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvledger_router.prompt.PROMPT_TOKENS_MAX", 64)
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    match = await world.index.match(PROMPT)

    assert match.tokens == 161
    assert (only(match).hit_tokens, only(match).status) == (48, "at_least")
    assert "64 of 161" in only(match).reason


def test_every_status_but_exact_has_its_place_in_the_precedence() -> None:
    notes = [Note(status, status) for status in reversed(PRECEDENCE)]
    order: list[Status] = []
    while notes:
        order.append(verdict(notes).status)
        notes = [note for note in notes if note.status != order[-1]]

    assert tuple(order) == PRECEDENCE
    assert verdict([]) == Note("exact", "")


# --- order ---------------------------------------------------------------------------------------------------------


async def test_holders_come_best_first_and_uncertain_ones_after_trusted_ones(world: World) -> None:
    await world.fleet.open("pod-a/0", "pod-b/0", "pod-c/0")
    await world.fleet.open("pod-d/0", full_reports=True)
    await world.fleet.open("pod-e/0", closed=True)
    for name, blocks in (("pod-a/0", 2), ("pod-b/0", 5), ("pod-c/0", 2), ("pod-d/0", 9), ("pod-e/0", 10)):
        await world.fleet.store(name, PROMPT, range(blocks))
    await world.fleet.store("pod-c/0", PROMPT, [2, 3], medium="cpu")
    match = await world.index.match(PROMPT)
    best, daring = match.best(), match.best(include_uncertain=True)

    assert [h.replica for h in match] == ["pod-b", "pod-c", "pod-a", "pod-d", "pod-e"]
    assert best is not None
    assert best.replica == "pod-b"
    assert daring is not None
    assert daring.replica == "pod-d"


async def test_nobody_is_best_where_nobody_holds_anything(world: World) -> None:
    await world.fleet.open("pod-a/0")

    assert (await world.index.match(PROMPT)).best() is None


# --- hints ---------------------------------------------------------------------------------------------------------


async def test_a_burst_of_one_new_prompt_stays_together(world: World) -> None:
    """The hint ranks the replica first while the events are on their way, and says nothing of the cache."""
    await world.fleet.open("pod-a/0", "pod-b/0")
    match = await world.index.match(PROMPT)
    world.index.expect(match, "pod-b")
    follower = await world.index.match(PROMPT[:100])
    best = follower.best()

    assert best is not None
    assert (best.replica, best.hit_tokens, best.expected_tokens, best.status) == ("pod-b", 0, 96, "exact")


async def test_a_hint_expires(world: World) -> None:
    await world.fleet.open("pod-a/0")
    world.index.expect(await world.index.match(PROMPT), "pod-a", seconds=2)
    world.clock.pass_seconds(2)

    assert (await world.index.match(PROMPT)).best() is None


async def test_a_hint_is_about_the_shared_prefix_and_the_rank(world: World) -> None:
    await world.fleet.open("pod-a/0", "pod-a/1")
    world.index.expect(await world.index.match(PROMPT), "pod-a", rank=1)
    forked = PROMPT[:40] + prompt(100, seed=5)
    match = await world.index.match(forked)

    assert [(h.rank, h.expected_tokens) for h in match] == [(1, 32), (0, 0)]


# --- explain -------------------------------------------------------------------------------------------------------


async def test_explain_says_which_block_of_which_group_ended_the_hit(world: World) -> None:
    await world.fleet.open("pod-a/0", groups=(FULL, WINDOW))
    await world.fleet.store("pod-a/0", PROMPT)
    await world.fleet.store("pod-a/0", PROMPT, [3, 4, 9], group=1)
    found = await world.index.explain(PROMPT)
    report = found.ranks[0]

    assert report.holder == only(found.match)
    assert report.holder.hit_tokens == 80
    assert [(e.group, e.serves, e.limits, e.missing) for e in report.endings] == [
        (0, 160, False, None),
        (1, 80, True, (128, 144)),
    ]


async def test_explain_lists_every_reason_in_order_of_precedence(world: World) -> None:
    await world.fleet.open("pod-a/0", partial=True, full_reports=True, suspended=True)
    found = await world.index.explain(PROMPT)

    assert [note.status for note in found.ranks[0].notes] == ["stale", "uncertain", "at_least"]


async def test_explain_reports_only_ranks_that_the_index_knows(world: World) -> None:
    await world.fleet.open("pod-a/0")
    found = await world.index.explain(PROMPT, replicas=["pod-a", "pod-z"])

    assert len(found.match) == 2
    assert [r.holder.replica for r in found.ranks] == ["pod-a"]


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [None]])
async def test_tokens_outside_u32_are_the_callers_mistake(world: World, tokens: list[int]) -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        await world.index.match(tokens)


async def test_other_mistakes_of_the_caller_are_named(world: World) -> None:
    with pytest.raises(InvalidInput, match="media offset -3"):
        await world.index.match(PROMPT, media=[Media("secret-image", -3)])
    with pytest.raises(InvalidInput, match="names"):
        await world.index.match(PROMPT, replicas="pod-a")
    with pytest.raises(InvalidInput, match="got bytes"):
        await world.index.match(bytes(PROMPT[:4]))
    with pytest.raises(InvalidInput, match="deadline_seconds 0"):
        Index(world.memory, model=MODEL, deadline_seconds=0)
    with pytest.raises(InvalidInput, match="Redis URL"):
        Index.from_url("kafka://nowhere", model=MODEL)


async def test_ranks_of_another_stride_are_looked_up_by_their_own_keys(world: World) -> None:
    """While a model entry is being changed, two strides live side by side."""
    await world.fleet.open("pod-a/0")
    await world.fleet.store("pod-a/0", PROMPT)
    other = Fleet(world.memory, stride=32, partition=1)
    await other.start()
    await other.open("pod-b/0", groups=(GroupSpec(group=0, kind="full_attention", block_size=32),))
    await other.store("pod-b/0", PROMPT, range(3), size=32)
    match = await world.index.match(PROMPT)

    assert STRIDE == 16
    assert [(h.replica, h.hit_tokens, h.status) for h in match] == [
        ("pod-a", 160, "exact"),
        ("pod-b", 96, "exact"),
    ]


@pytest.mark.parametrize(
    ("knows", "reason"),
    [(True, "moving: a batch too large for one step"), (False, "it is heard of, but its picture was")],
)
async def test_a_rank_whose_batch_is_half_written_is_stale_and_says_so(world: World, knows: bool, reason: str) -> None:
    """Also to a router that was built before there were pieces: it goes by the age of the last proof."""
    await world.fleet.open("pod-a/0")
    await world.fleet.open("pod-b/0")
    await world.fleet.begin("pod-a/0")
    if not knows:
        heard, now = world.memory._store.now[MODEL]["pod-a/0"]
        world.memory._store.now[MODEL]["pod-a/0"] = (heard, msgspec.structs.replace(now, underway=False))
    match = await world.index.match(PROMPT)
    half, whole = match.of("pod-a"), match.of("pod-b")

    assert half is not None
    assert whole is not None
    assert (half.status, half.trusted, whole.status) == ("stale", False, "exact")
    assert half.reason.startswith(reason)
