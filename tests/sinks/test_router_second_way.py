"""Asking by the engine's own hashes (ADR 5): exact where block keys alone are not, free where nobody needs it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fleet import FULL, PROMPT, WINDOW, Clock, Fleet, World, new_world, only, prompt
from test_hits import STRIDE, Case, bits_of, cases, h_of

from kvledger_index.enginehash import ExtraForm, Item, Namespace, Scheme, chain, low64
from kvledger_index.memory import MemoryIndex
from kvledger_index.model import GroupSpec
from kvledger_index.views import Catalogue, Reading
from kvledger_router import Index, InvalidInput, Media
from kvledger_router.hits import compile_rule, hit
from kvledger_router.prompt import CHAIN_BLOCKS_MAX, Prompt

SCHEME = Scheme("sha256", "0", "tagged", (("adapter", "/adapters/a"),), 16)
A, B = "pod-a/0", "pod-b/0"


def named(tokens: Sequence[int], block: int = 16, scheme: Scheme = SCHEME, **more: Any) -> list[int]:
    """The engine's hashes of a prompt, as they stand in the index."""
    return [low64(digest) for digest in chain(scheme, None, tokens, block, **more)]


class Spy(MemoryIndex):
    """Remembers how many hashes each reading asked for."""

    asked: list[int]

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        self.asked.append(len(hashes))
        return await super().read(catalogue, model, keys, hashes)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as ready:
        yield ready


@pytest.fixture
async def spied() -> AsyncIterator[tuple[Fleet, Spy, Index]]:
    clock = Clock()
    memory = Spy(clock_ms=clock)
    memory.asked = []
    fleet = Fleet(memory)
    await fleet.start()
    async with Index(memory, model=fleet.model, deadline_seconds=5.0, clock=clock.seconds) as index:
        yield fleet, memory, index


# -- what it finds ---------------------------------------------------------------------------------------------------


async def test_blocks_without_a_key_are_found_by_engine_hash(world: World) -> None:
    """The tail of the window was published without its tokens."""
    await world.fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
    await world.fleet.store(A, PROMPT)
    await world.fleet.store_hashes(A, named(PROMPT)[8:10], group=1, unplaced=((1, 0, 2),))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (160, "exact")


async def test_what_is_not_found_is_not_this_prompts(world: World) -> None:
    """Hashes of other prompts are resident; none of this one's: the lower number is the engine's."""
    await world.fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
    await world.fleet.store(A, PROMPT)
    await world.fleet.store_hashes(A, named(prompt(161, seed=3)), group=1, unplaced=((1, 0, 10),))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (0, "exact")


async def test_opaque_hashes_may_still_be_anything(world: World) -> None:
    await world.fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
    await world.fleet.store(A, PROMPT)
    await world.fleet.store_hashes(A, named(PROMPT)[8:9], group=1, unplaced=((1, 0, 4),), opaque=((1, 0, 1),))
    (report,) = (await world.index.explain(PROMPT)).ranks

    assert (report.holder.hit_tokens, report.holder.status, report.hit_tokens_max) == (0, "at_least", 160)
    assert "1 unplaced" in report.holder.reason


async def test_a_piece_of_a_block_is_found_where_hits_may_end_inside_blocks(world: World) -> None:
    """Blocks of 64, hash blocks of 16: the state at 144 was announced alone."""
    groups = (GroupSpec(0, "full_attention", 64), GroupSpec(1, "mamba", 64))
    await world.fleet.open(A, groups=groups, scheme=SCHEME, hash_block_size=16, partial_hash_hits=True)
    await world.fleet.store(A, PROMPT, size=64)
    names = named(PROMPT)
    await world.fleet.store_hashes(A, [names[8]], group=0, unplaced=((0, 0, 1), (1, 0, 1)))
    await world.fleet.store_hashes(A, [names[8]], group=1, unplaced=((0, 0, 1), (1, 0, 1)))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (144, "exact")


async def test_only_block_ends_are_asked_for_where_hits_end_at_blocks(spied: tuple[Fleet, Spy, Index]) -> None:
    fleet, memory, index = spied
    groups = (GroupSpec(0, "full_attention", 64), GroupSpec(1, "sliding_window", 32, window=32))
    await fleet.open(A, groups=groups, scheme=SCHEME, hash_block_size=16)
    await fleet.store(A, PROMPT, size=64)
    await fleet.store_hashes(A, [named(PROMPT)[3], named(PROMPT)[7]], group=1, unplaced=((1, 0, 2),))
    holder = only(await index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (128, "exact")
    assert memory.asked[-1] == 5


async def test_adapter_salt_and_media_are_hashed_as_the_engine_does(world: World) -> None:
    media = [Media("image", 20, 40), Media("video", 100, 3)]
    items = [Item(each.identifier, each.offset, each.length or 0) for each in media]
    names = named(PROMPT, namespace=Namespace("adapter", "salt", "/adapters/a"), items=items)
    await world.fleet.open(A, scheme=SCHEME)
    await world.fleet.store_hashes(A, names[:8], unplaced=((0, 0, 8),))

    async def ask(**more: Any) -> tuple[int, str]:
        holder = only(await world.index.match(PROMPT, **more))
        return holder.hit_tokens, holder.status

    assert await ask(lora="adapter", salt="salt", media=reversed(media)) == (128, "exact")
    assert await ask(lora="adapter", salt="other", media=media) == (0, "exact")
    assert await ask(lora="adapter", salt="salt", media=[media[0], Media("video", 100, 13)]) == (112, "exact")
    assert await ask() == (0, "exact")


async def test_each_rank_is_asked_by_its_own_engines_hashes(world: World) -> None:
    """Two schemes and two hash block sizes in one fleet; a hash counts for the rank whose way it is."""
    other = Scheme("xxhash_cbor", "7", "bare")
    await world.fleet.open(A, scheme=SCHEME)
    await world.fleet.open(B, scheme=other, hash_block_size=32, groups=(GroupSpec(0, "full_attention", 32),))
    await world.fleet.store_hashes(A, named(PROMPT)[:3], unplaced=((0, 0, 13),))
    await world.fleet.store_hashes(A, named(PROMPT, 32, other)[:5], unplaced=((0, 0, 13),))
    await world.fleet.store_hashes(B, named(PROMPT, 32, other)[:2], unplaced=((0, 0, 2),))
    match = await world.index.match(PROMPT)

    assert {holder.replica: (holder.hit_tokens, holder.status) for holder in match} == {
        "pod-a": (48, "exact"),
        "pod-b": (64, "exact"),
    }


async def test_lower_tiers_are_found_by_engine_hash_too(world: World) -> None:
    await world.fleet.open(A, scheme=SCHEME)
    await world.fleet.store(A, PROMPT, range(3))
    await world.fleet.store_hashes(A, named(PROMPT)[3:6], medium="cpu", unplaced=((0, 1, 3),))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens, holder.status) == (48, 48, "exact")


# -- what is veiled --------------------------------------------------------------------------------------------------


async def test_veiled_hashes_bear_on_prompts_with_extra_keys_alone() -> None:
    """The second way is switched off, so that all that is known of the window's two hashes is that both are veiled."""
    async with new_world(engine_hashes=False) as world:
        await world.fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
        for salt in (None, "s"):
            await world.fleet.store(A, PROMPT, salt=salt)
        await world.fleet.store_hashes(A, [7, 8], group=1, unplaced=((1, 0, 2),), veiled=((1, 0, 2),))
        plain = only(await world.index.match(PROMPT))
        salted = only(await world.index.match(PROMPT, salt="s"))

    assert (plain.hit_tokens, plain.status) == (0, "exact")
    assert (salted.hit_tokens, salted.status) == (0, "at_least")


async def test_only_as_many_hashes_as_are_veiled_are_ruled_out() -> None:
    async with new_world(engine_hashes=False) as world:
        await world.fleet.open(A, scheme=SCHEME)
        await world.fleet.store_hashes(A, range(5), unplaced=((0, 0, 5),), veiled=((0, 0, 3), (1, 0, 9)))
        (report,) = (await world.index.explain(PROMPT)).ranks

    assert (report.holder.status, report.hit_tokens_max) == ("at_least", 32)
    assert "2 unplaced" in report.holder.reason


async def test_for_a_plain_prompt_veiled_hashes_need_no_asking(spied: tuple[Fleet, Spy, Index]) -> None:
    fleet, memory, index = spied
    await fleet.open(A, scheme=SCHEME)
    await fleet.store_hashes(
        A, named(PROMPT, namespace=Namespace(salt="s"))[:3], unplaced=((0, 0, 3),), veiled=((0, 0, 3),)
    )
    plain = [only(await index.match(PROMPT)) for _ in range(2)]
    salted = [only(await index.match(PROMPT, salt="s")) for _ in range(2)]
    plain.append(only(await index.match(PROMPT)))

    assert {(holder.hit_tokens, holder.status) for holder in plain} == {(0, "exact")}
    assert {(holder.hit_tokens, holder.status) for holder in salted} == {(48, "exact")}
    assert memory.asked == [0, 0, 0, 10, 10, 0]


@pytest.mark.parametrize(
    ("opaque", "veiled", "most"),
    [
        pytest.param(2, 0, 32, id="opaque ones may be anything"),
        pytest.param(2, 4, 0, id="all four are veiled, opaque or not"),
        pytest.param(2, 3, 16, id="one is not, and may be opaque"),
        pytest.param(2, 1, 32, id="three are not, of which two at most cannot be asked for"),
    ],
)
async def test_a_hash_may_be_opaque_and_veiled(world: World, opaque: int, veiled: int, most: int) -> None:
    await world.fleet.open(A, scheme=SCHEME)
    some: dict[str, Any] = {"opaque": ((0, 0, opaque),), "veiled": ((0, 0, veiled),)}
    await world.fleet.store_hashes(A, range(4), unplaced=((0, 0, 4),), **some)
    (report,) = (await world.index.explain(PROMPT)).ranks

    assert report.hit_tokens_max == most
    assert report.holder.status == ("at_least" if most else "exact")


# -- what it costs ---------------------------------------------------------------------------------------------------


async def test_nobody_pays_where_every_hash_has_a_key(spied: tuple[Fleet, Spy, Index]) -> None:
    fleet, memory, index = spied
    await fleet.open(A, scheme=SCHEME)
    await fleet.store(A, PROMPT)
    await fleet.open(B, groups=(FULL, WINDOW))
    await fleet.store_hashes(B, [7], group=1, unplaced=((1, 0, 1),))
    for _ in range(3):
        await index.match(PROMPT)

    assert memory.asked == [0, 0, 0]


async def test_the_first_question_that_meets_such_a_rank_reads_twice_and_the_next_ones_once(
    spied: tuple[Fleet, Spy, Index],
) -> None:
    fleet, memory, index = spied
    await fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
    await fleet.store(A, PROMPT)
    await fleet.store_hashes(A, [7], group=1, unplaced=((1, 0, 1),))
    for _ in range(3):
        await index.match(PROMPT)
    assert memory.asked == [0, 10, 10, 10]
    assert index.counters.hash_rereads == 1

    await fleet.store_hashes(A, [7], group=1, add=False)
    memory.asked.clear()
    for _ in range(2):
        await index.match(PROMPT)

    assert memory.asked == [10, 0]


async def test_opaque_hashes_alone_are_not_asked_for(spied: tuple[Fleet, Spy, Index]) -> None:
    fleet, memory, index = spied
    await fleet.open(A, groups=(FULL, WINDOW), scheme=SCHEME)
    await fleet.store_hashes(A, [7], group=1, unplaced=((1, 0, 1),), opaque=((1, 0, 1),))
    await index.match(PROMPT)

    assert memory.asked == [0]


async def test_a_plain_prompt_has_one_chain_whatever_adapters_its_engines_know(
    spied: tuple[Fleet, Spy, Index],
) -> None:
    fleet, memory, index = spied
    for number, paths in enumerate([(), (("x", "/x"),)]):
        await fleet.open(f"pod-{number}/0", scheme=Scheme("sha256", "0", "tagged", paths, 16))
        await fleet.store_hashes(f"pod-{number}/0", [7], unplaced=((0, 0, 1),))
    await index.match(PROMPT)
    await index.match(PROMPT)

    assert memory.asked[-1] == 10


# -- where it cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "asked", "why"),
    [
        (None, {}, "not known how the engine hashes"),
        (Scheme("sha256", "0", block=16), {"lora": "stranger"}, "path of the LoRA adapter"),
        (Scheme("sha256", "0"), {}, "name hash_block_size"),
        (Scheme("sha256", "0", block=24), {}, "name hash_block_size"),
        (SCHEME, {"media": [Media("image", 3)]}, "length of a multimodal item"),
        (SCHEME, {"lora": "stranger"}, "path of the LoRA adapter"),
    ],
)
async def test_without_the_second_way_an_answer_is_bounded_and_says_why(
    world: World, scheme: Scheme | None, asked: dict[str, Any], why: str
) -> None:
    await world.fleet.open(A, groups=(FULL, WINDOW), scheme=scheme)
    media = [(item.offset, item.identifier) for item in asked.get("media", ())]
    await world.fleet.store(A, PROMPT, lora=asked.get("lora"), salt=asked.get("salt"), media=media)
    await world.fleet.store_hashes(A, [7, 8], group=1, unplaced=((1, 0, 2),))
    (report,) = (await world.index.explain(PROMPT, **asked)).ranks

    assert (report.holder.hit_tokens, report.holder.status, report.hit_tokens_max) == (0, "at_least", 160)
    assert why in report.engine_hashes


async def test_an_adapters_path_does_not_matter_before_it_was_hashed(world: World) -> None:
    scheme = Scheme("sha256", "0", "offsets", block=16)
    names = named(PROMPT, scheme=scheme, namespace=Namespace("stranger"))
    await world.fleet.open(A, scheme=scheme)
    await world.fleet.store_hashes(A, names[:4], unplaced=((0, 0, 4),))
    holder = only(await world.index.match(PROMPT, lora="stranger"))

    assert (holder.hit_tokens, holder.status) == (64, "exact")


@pytest.mark.parametrize("form", ["tagged", "offsets", "bare"])
async def test_where_the_form_of_extra_keys_is_not_known_each_is_asked_for(world: World, form: ExtraForm) -> None:
    names = named(PROMPT, scheme=Scheme("sha256", "0", form), namespace=Namespace(None, "s"))
    item = Item("image", 20, 4)
    pictured = named(PROMPT, scheme=Scheme("sha256", "0", form), items=[item])
    await world.fleet.open(A, scheme=Scheme("sha256", "0", block=16))
    await world.fleet.store_hashes(A, [*names[:4], *pictured[1:3], *pictured[:1]], unplaced=((0, 0, 7),))
    salted = only(await world.index.match(PROMPT, salt="s"))
    media = only(await world.index.match(PROMPT, media=[Media("image", 20, 4)]))

    assert (salted.hit_tokens, salted.status) == (64, "exact")
    assert (media.hit_tokens, media.status) == (48, "exact")


async def test_explain_says_what_the_second_way_did(world: World) -> None:
    await world.fleet.open(A, B, scheme=SCHEME)
    await world.fleet.store_hashes(B, named(PROMPT)[:1], unplaced=((0, 0, 1),))
    reports = (await world.index.explain(PROMPT)).ranks

    assert {report.holder.replica: report.engine_hashes.split(":")[0] for report in reports} == {
        "pod-a": "not asked for by engine hash",
        "pod-b": "asked for by 10 engine hashes, beside the block keys",
    }


async def test_it_can_be_switched_off() -> None:
    async with new_world(engine_hashes=False) as world:
        await world.fleet.open(A, scheme=SCHEME)
        await world.fleet.store_hashes(A, named(PROMPT)[:2], unplaced=((0, 0, 2),))
        (report,) = (await world.index.explain(PROMPT)).ranks

    assert (report.holder.hit_tokens, report.holder.status, report.hit_tokens_max) == (0, "at_least", 32)
    assert "switched off" in report.engine_hashes


def test_a_prompt_too_long_to_chain_says_so() -> None:
    long = Prompt("m", [1] * (16 * (CHAIN_BLOCKS_MAX + 1)), None, None, ())

    assert long.obstacle(SCHEME, 32) == ""
    assert str(CHAIN_BLOCKS_MAX) in long.obstacle(SCHEME, 16)


async def test_a_media_length_that_covers_nothing_is_the_callers_mistake(world: World) -> None:
    with pytest.raises(InvalidInput, match="length 0"):
        await world.index.match(PROMPT, media=[Media("image", 3, 0)])


# -- tiers that never announce removals ------------------------------------------------------------------------------


async def test_a_silent_tier_expires_after_its_last_store(world: World) -> None:
    """Last store 4 s before the rank's last record, then 5 s of silence; ``expire_seconds`` is 8.

    store  4 s  record  3.9 s  counted   1 s  expired
    """
    await world.fleet.open(A, expire_seconds=8.0)
    await world.fleet.store(A, PROMPT, range(2))
    await world.fleet.store(A, PROMPT, medium="storage", silent=((0, 2, 4_000),))

    async def extended() -> tuple[int, int]:
        await world.fleet.tick()
        holder = only(await world.index.match(PROMPT))
        return holder.hit_tokens, holder.extended_tokens

    assert await extended() == (32, 128)
    world.clock.pass_seconds(3.9)
    assert await extended() == (32, 128)
    world.clock.pass_seconds(0.2)

    assert await extended() == (32, 0)


async def test_expiry_is_per_tier_and_group_and_never_about_the_gpu(world: World) -> None:
    await world.fleet.open(A)
    await world.fleet.store(A, PROMPT, range(2))
    await world.fleet.store(A, PROMPT, range(2, 4), medium="cpu")
    await world.fleet.store(A, PROMPT, range(2, 9), medium="storage", silent=((0, 2, 601_000), (0, 1, 599_000)))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens, holder.status) == (32, 32, "exact")


async def test_a_clear_of_gpu_and_cpu_spares_storage(world: World) -> None:
    await world.fleet.open(A)
    for medium in ("gpu", "cpu", "storage"):
        await world.fleet.store(A, PROMPT, medium=medium)
    await world.fleet.clear(A, "gpu")
    await world.fleet.clear(A, "cpu")
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.extended_tokens) == (0, 160)


async def test_groups_that_a_tier_reports_must_serve_the_extension_too(world: World) -> None:
    """The tier holds all of full attention, and of the window group blocks 4 and 5 only: a tail of two ends at 96."""
    await world.fleet.open(A, groups=(FULL, WINDOW))
    await world.fleet.store(A, PROMPT, range(2))
    await world.fleet.store(A, PROMPT, range(2), group=1)
    await world.fleet.store(A, PROMPT, medium="cpu")
    assert only(await world.index.match(PROMPT)).extended_tokens == 128

    await world.fleet.store(A, PROMPT, [4, 5], group=1, medium="cpu")

    assert only(await world.index.match(PROMPT)).extended_tokens == 64


# -- always ----------------------------------------------------------------------------------------------------------


def scattered(case: Case, rng: random.Random) -> dict[int | None, dict[str, list[int]]]:
    """Each group's strides, dealt out to what has a key, what has none, and what nobody can ask for."""
    out: dict[int | None, dict[str, list[int]]] = {}
    for group, ends in case.held.items():
        weights = rng.choice([(1, 0, 0), (8, 2, 0), (8, 1, 1), (3, 3, 3), (0, 1, 0)])
        dealt: dict[str, list[int]] = {"placed": [], "unplaced": [], "opaque": []}
        for end in sorted(ends):
            (kind,) = rng.choices(sorted(dealt), (weights[2], weights[0], weights[1]))
            dealt[kind].append(end // STRIDE - 1)
        out[group] = dealt
    return out


@settings(max_examples=150, deadline=None)
@given(cases(), st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.sampled_from([None, "s"]))
async def test_the_truth_lies_within_the_bounds_and_exact_means_equal(
    case: Case, rng: random.Random, known: bool, switched_on: bool, salt: str | None
) -> None:
    """Random groups, residency dealt out at random to keys, hashes and nobody; strangers' hashes beside them, some of
    them veiled; with a salt, the prompt's own may be veiled, too.
    """
    tokens = [rng.randrange(50_000) for _ in range(case.tokens)]
    h = h_of(case)
    # entries elsewhere than at hash blocks do not exist
    held = {group: frozenset(end for end in of if end % h == 0) for group, of in case.held.items()}
    case = case._replace(held=held)
    dealt = scattered(case, rng)
    names = named(tokens, h, namespace=Namespace(salt=salt))
    async with new_world(engine_hashes=switched_on) as world:
        world.fleet.stride = STRIDE
        facts = {"stride": STRIDE, "hash_block_size": h, "partial_hash_hits": case.partial}
        await world.fleet.open(A, groups=case.groups, scheme=SCHEME if known else None, **facts)
        counts = _counts(dealt, rng, plain=salt is None)
        for group, kinds in dealt.items():
            await world.fleet.store(A, tokens, kinds["placed"], group=group, size=STRIDE, salt=salt)
            singles = [names[(stride + 1) * STRIDE // h - 1] for stride in kinds["unplaced"]]
            strangers: Iterable[int] = (rng.getrandbits(64) for _ in range(2))
            await world.fleet.store_hashes(A, [*singles, *strangers], group=group, **counts)
        (report,) = (await world.index.explain(tokens, salt=salt)).ranks
    rule = compile_rule(case.groups, stride=STRIDE, hash_block_size=h, partial_hash_hits=case.partial)
    truth = hit(rule, case.tokens, {group: bits_of(of) for group, of in case.held.items()})

    assert truth is not None
    assert report.hit_tokens_max is not None
    assert report.holder.hit_tokens <= truth <= report.hit_tokens_max
    assert report.holder.status in {"exact", "at_least"}
    assert report.holder.status != "exact" or report.holder.hit_tokens == truth
    if known and switched_on and not counts["opaque"]:
        assert report.holder.status == "exact"


def _counts(dealt: dict[int | None, dict[str, list[int]]], rng: random.Random, *, plain: bool) -> dict[str, Any]:
    """Unplaced, opaque and veiled counts by lane, as a bridge would state them; two strangers stand in each lane, and
    two more that nobody can ask for in some. Any of them may be veiled, and of a prompt that is not plain any hash.
    """
    unplaced, opaque, veiled = [], [], []
    for group, kinds in dealt.items():
        assert group is not None
        own = len(kinds["unplaced"]) + len(kinds["opaque"])
        dark = rng.choice([0, 2]) if kinds["opaque"] else 0
        unplaced.append((group, 0, own + 2 + dark))
        if kinds["opaque"]:
            opaque.append((group, 0, len(kinds["opaque"]) + dark))
        veiled.append((group, 0, rng.randint(0, 2 + dark + (0 if plain else own))))
    return {"unplaced": tuple(unplaced), "opaque": tuple(opaque), "veiled": tuple(veiled)}


async def test_canary_a_hash_of_a_plain_prompt_that_is_called_veiled_makes_a_wrong_answer_exact(world: World) -> None:
    """The property above rests on what the bridge proved: a lie would show."""
    await world.fleet.open(A, scheme=SCHEME)
    await world.fleet.store_hashes(A, named(PROMPT)[:2], unplaced=((0, 0, 2),), veiled=((0, 0, 2),))
    holder = only(await world.index.match(PROMPT))

    assert (holder.hit_tokens, holder.status) == (0, "exact")
