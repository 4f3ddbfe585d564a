"""What every implementation promises of dead slots: freed piece by piece, and no answer changes by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from index_pairs import MODEL, Fold, Pair, RedisPair, claims, look, put, redis_pair, take

from kvledger_index.errors import InvalidInput
from kvledger_index.rows import split_row
from kvledger_index.units import (
    SCRUB_DEFAULT,
    SCRUB_KEYS_MAX,
    SCRUB_SECONDS_MAX,
    Bind,
    Clear,
    Drop,
    Op,
    Scrubbed,
    ScrubBudget,
)
from kvledger_index.writer import Library, RedisWriter, library

A, B, C = "replica-a/0", "replica-b/0", "replica-c/1"
PATH = tuple(range(0x1000, 0x1010))
BRANCH = (*PATH[:4], *range(0x2004, 0x2010))
FIRST = PATH[0].to_bytes(8, "big")
SMALL = ScrubBudget(keys=1, seconds=SCRUB_SECONDS_MAX)
NO_TIME = ScrubBudget(keys=SCRUB_KEYS_MAX, seconds=1e-6)
CALLS_MAX = 20_000


@pytest.fixture
async def redis(redis_url: str, namespace: str) -> AsyncIterator[RedisPair]:
    async with redis_pair(lambda: redis_url, namespace) as opened:
        yield opened


@pytest.fixture
async def private(redis_server: Any, namespace: str) -> AsyncIterator[RedisPair]:
    """A server of its own: SCAN walks what others put there, too."""
    server = redis_server()
    async with redis_pair(lambda: server.url, namespace) as opened:
        yield opened


async def folded(pair: Pair) -> Fold:
    fold = Fold(pair.writer)
    await fold.seek()
    return fold


async def scrub_all(pair: Pair, budget: ScrubBudget = SCRUB_DEFAULT) -> list[Scrubbed]:
    """Until there is nothing to do."""
    done: list[Scrubbed] = []
    while not done or not done[-1].idle:
        done.append(await pair.writer.scrub(budget))
        assert len(done) < CALLS_MAX, "does not come to an end"
    return done


async def rows_of(pair: RedisPair) -> list[bytes]:
    return [key for key in await pair.keys() if key.startswith(pair.keyspace.row_prefix)]


async def some_lives(fold: Fold) -> None:
    """Living and dead holders on path and branches, rows of dead ones only, stubs, and a dead slot without a row."""
    await fold.open(A, B, C)
    for rank in (A, B, C):
        await fold.do(rank, put(PATH), put(BRANCH, 4), put(range(50, 60)), put(PATH, medium="cpu"))
    await fold.do(A, *(put(range(base, base + 16)) for base in range(0x9000, 0x9800, 16)))
    await fold.do(C, put([70, 71, 72]))
    await fold.do(C, put([70, 81, 82], 1))
    await fold.do(C, take([70, 71, 72]))
    await fold.do(A, Bind(), put(PATH, 0, 3))
    await fold.do(B, Clear("gpu"), put(BRANCH, 4, 8), Clear("storage"))


# --- every implementation


async def test_an_index_without_dead_slots_has_nothing_to_scrub(pair: Pair) -> None:
    fold = await folded(pair)
    await fold.do(A, Bind(), put(PATH), put(BRANCH, 4))

    assert await pair.writer.scrub(SCRUB_DEFAULT) == Scrubbed(0, 0, 0, 0, idle=True, ended=False)


@pytest.mark.parametrize("budget", [SCRUB_DEFAULT, SMALL, NO_TIME], ids=["default", "one key", "no time"])
async def test_no_answer_changes_by_a_scrub(pair: Pair, budget: ScrubBudget) -> None:
    fold = await folded(pair)
    await some_lives(fold)
    prompts: list[tuple[int, ...]] = [PATH, BRANCH, tuple(range(50, 60)), (70, 71, 72), (70, 81, 82), PATH + BRANCH]
    catalogue, loaded, claimed = (
        await pair.reader.catalogue(MODEL),
        await pair.writer.load(0),
        await claims(pair.reader),
    )
    answers = [(await look(pair.reader, prompt))[0] for prompt in prompts]
    for number in range(CALLS_MAX):
        idle = (await pair.writer.scrub(budget)).idle
        if idle or number % 10 == 0:
            assert [(await look(pair.reader, prompt))[0] for prompt in prompts] == answers
            assert await claims(pair.reader) == claimed
        if idle:
            break

    assert (await pair.reader.catalogue(MODEL), await pair.writer.load(0)) == (catalogue, loaded)


async def test_steps_go_on_between_two_scrubs(pair: Pair) -> None:
    """What lived before and what comes meanwhile stays; what dies meanwhile is freed by the next pass."""
    fold = await folded(pair)
    await some_lives(fold)
    await pair.writer.scrub(SMALL)
    await fold.do(A, put(PATH, 3), put(BRANCH, 4), put(range(0x9000, 0x9010)))
    await pair.writer.scrub(SMALL)
    await fold.do(C, Drop())
    await pair.writer.scrub(SMALL)
    await fold.do(C, Bind(), put(BRANCH))
    want = await claims(pair.reader)
    await scrub_all(pair, SMALL)

    assert await claims(pair.reader) == want
    holders, reading = await look(pair.reader, BRANCH)
    assert holders[5] == {(A, "gpu", 0), (B, "gpu", 0), (C, "gpu", 0)}
    slots = {slot for view in (await pair.reader.catalogue(MODEL)).ranks.values() for slot in view.slots}
    assert {slot for segment in reading.segments for slot, _, _ in segment.holders} <= slots, "no dead one is left"


@pytest.mark.parametrize(
    "budget",
    [
        ScrubBudget(0, 0.001),
        ScrubBudget(SCRUB_KEYS_MAX + 1, 0.001),
        ScrubBudget(1, 0.0),
        ScrubBudget(1, SCRUB_SECONDS_MAX * 1.01),
        ScrubBudget(1, float("nan")),
    ],
)
async def test_a_budget_out_of_bounds_is_the_caller_s_fault(pair: Pair, budget: ScrubBudget) -> None:
    with pytest.raises(InvalidInput, match="scrub of"):
        await pair.writer.scrub(budget)


# --- Redis


@pytest.mark.parametrize("budget", [SCRUB_DEFAULT, SMALL, NO_TIME], ids=["default", "one key", "no time"])
async def test_nothing_but_living_blocks_is_left(redis: RedisPair, budget: ScrubBudget) -> None:
    fold = await folded(redis)
    await some_lives(fold)
    before = len(await rows_of(redis))
    done = await scrub_all(redis, budget)

    assert sum(each.rows for each in done) == 128, "rows that A's first life held alone"
    assert len(await rows_of(redis)) == before - 128
    assert not [key for key in await redis.keys() if key.startswith((redis.keyspace.dead, redis.keyspace.scrub))]
    await fold.seek()
    await scrub_all(redis, budget)
    assert set(await redis.keys()) == {redis.keyspace.partitions, redis.keyspace.slot}


async def test_a_path_that_only_the_dead_held_leaves_a_stub_for_its_branches(redis: RedisPair) -> None:
    fold = await folded(redis)
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(BRANCH, 4))
    await fold.do(A, Drop())
    await scrub_all(redis)

    assert await redis.raw.get(redis.keyspace.row(FIRST)) == b"\x80"
    assert len(await redis.raw.hkeys(redis.keyspace.side(FIRST))) == 12


async def test_a_side_that_only_the_dead_held_goes_and_its_row_says_so(redis: RedisPair) -> None:
    fold = await folded(redis)
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(BRANCH, 4))
    await fold.do(B, Drop())
    await scrub_all(redis)

    _, side, entries = split_row(await redis.raw.get(redis.keyspace.row(FIRST)))
    assert (side, [mask for _, _, mask in entries]) == (False, [0xFFFF])
    assert not await redis.raw.exists(redis.keyspace.side(FIRST))


async def test_slots_that_look_alike_across_entries_are_told_apart(redis: RedisPair) -> None:
    """Slot 1 dies; the bytes of slot 256 with mask 0x0100 show it, but not where an entry starts."""
    fold = await folded(redis)
    await fold.open(A)
    await redis.raw.set(redis.keyspace.slot, 255)
    await fold.open(B)
    await fold.do(A, put(PATH, 0, 2))
    await fold.do(B, put(PATH, 0, 9, mask=0x100), put([*PATH[:8], 5], 8))
    await fold.do(A, Drop())
    await scrub_all(redis)

    assert split_row(await redis.raw.get(redis.keyspace.row(FIRST)))[2] == ((256, 0, 0x100),)
    assert await claims(redis.reader) == {((B, "gpu", 0), PATH[8]), ((B, "gpu", 0), 5)}


async def test_a_side_of_many_branches_is_freed_over_many_calls(redis: RedisPair) -> None:
    """A first segment that every prompt shares for a moment may have a hundred thousand branches."""
    fold = await folded(redis)
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(PATH, 0, 1))
    for base in range(0, 5000, 500):
        await fold.do(A, *(put([PATH[0], 10_000 + base + n], 1) for n in range(500)))
    await fold.do(B, *(put([PATH[0], 10_000 + n], 1) for n in range(100)))
    await fold.do(A, Bind())
    done = await scrub_all(redis, SMALL)

    assert sum(each.entries for each in done) == 5001
    assert max(each.looked for each in done) < 1000
    assert await redis.raw.hlen(redis.keyspace.side(FIRST)) == 100
    assert len(await claims(redis.reader)) == 101


async def test_workers_share_one_pass(redis: RedisPair, redis_url: str, namespace: str) -> None:
    """Where it stands is in Redis: two of them do half of it each, and none twice."""
    fold = await folded(redis)
    await some_lives(fold)
    async with RedisWriter.from_url(redis_url, namespace=namespace) as other:
        done: list[Scrubbed] = []
        while not done or not done[-1].ended:
            done.append(await (redis.writer, other)[len(done) % 2].scrub(ScrubBudget(keys=64, seconds=0.02)))
    size = await redis.raw.dbsize()

    assert sum(each.looked for each in done) <= 2 * size + 200
    assert (await redis.writer.scrub(SCRUB_DEFAULT)).idle


async def test_a_pass_starts_again_on_a_server_that_knows_no_cursor_of_it(private: RedisPair) -> None:
    """A cursor of SCAN names buckets of one process; after a restart or a failover it would leave rows out."""
    fold = await folded(private)
    await fold.do(A, Bind(), *(put(range(base, base + 16)) for base in range(0, 0x4000, 16)))
    await fold.do(A, Drop())
    for _ in range(20):
        await private.writer.scrub(SMALL)
    left = len(await rows_of(private))
    assert 0 < left < 1024
    await private.raw.hset(private.keyspace.scrub, mapping={"run": "another process", "at": "end"})
    await scrub_all(private)

    assert await rows_of(private) == []


async def test_a_row_that_cannot_be_read_stays_for_readers_to_say_so(redis: RedisPair) -> None:
    fold = await folded(redis)
    await fold.do(A, Bind(), put(PATH), put(BRANCH, 4))
    await redis.raw.set(redis.keyspace.row(FIRST), b"?")
    await fold.do(A, Drop())
    await scrub_all(redis)

    assert await redis.raw.get(redis.keyspace.row(FIRST)) == b"?"
    assert (await look(redis.reader, PATH))[1].corrupt == 1


async def test_other_programs_keys_are_left_alone(private: RedisPair) -> None:
    fold = await folded(private)
    await private.raw.mset({f"theirs:{n}": n for n in range(3000)})
    await fold.do(A, Bind(), put(PATH), put(BRANCH, 4))
    await fold.do(A, Drop())
    await scrub_all(private, SMALL)

    assert await rows_of(private) == []
    assert await private.raw.dbsize() == len(await private.keys()) + 3000


async def test_a_full_server_is_scrubbed(private: RedisPair) -> None:
    """It is what makes room there."""
    fold = await folded(private)
    await fold.do(A, Bind(), put(PATH), put(BRANCH, 4))
    await fold.do(A, Drop())
    await private.raw.config_set("maxmemory", 1)
    await scrub_all(private)

    assert await rows_of(private) == []


async def test_more_dead_slots_than_a_call_takes_are_freed(redis: RedisPair) -> None:
    """200 clears a second are some engines' habit."""
    fold = await folded(redis)
    await fold.open(A)
    for _ in range(5):
        clears: list[Op] = [Clear("gpu"), put(PATH)] * 1000
        await fold.do(A, *clears)
    assert await redis.raw.llen(redis.keyspace.dead) == 5000
    done = await scrub_all(redis)

    assert done[0].slots == 5000
    assert sum(each.entries for each in done) == 4999
    assert await claims(redis.reader) == {((A, "gpu", 0), key) for key in PATH}


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("", ""),
        ("dead = call('SISMEMBER', scrub_slots, slot) == 1", "dead = true"),
        ("if side then\n    scrub_side", "if false then\n    scrub_side"),
        ("in_pieces('RPUSH', rows, left)", ""),
        ("if stored[1] and stored[2] ~= run then", "if false then"),
    ],
)
async def test_a_scrubber_that_lacks_a_rule_is_found_out(
    private: RedisPair, line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of this suite: without a rule, living blocks go or dead ones stay; with all of them, neither."""
    body = library().body
    assert line in body
    monkeypatch.setattr(private.writer, "_library", Library(body.replace(line, instead)))
    fold = await folded(private)
    await some_lives(fold)
    want = await claims(private.reader)
    await private.writer.scrub(NO_TIME)
    await private.writer.scrub(NO_TIME)
    await private.raw.hset(private.keyspace.scrub, "run", "another process")
    await private.raw.hset(private.keyspace.scrub, "at", "end")
    await scrub_all(private, NO_TIME)
    kept = await claims(private.reader)
    await fold.seek()
    await scrub_all(private, NO_TIME)

    assert ((kept, await rows_of(private)) == (want, [])) == (line == "")
