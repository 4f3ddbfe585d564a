"""What only a Redis can do to an index: forget functions, refuse, fill up, fail over, hang, hold rubbish."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from index_pairs import MODEL, Fold, RedisPair, claims, look, put, redis_pair, take

from kvledger_index.errors import IndexFailure, Refused, Unavailable
from kvledger_index.keyspace import Keyspace
from kvledger_index.reader import RedisReader
from kvledger_index.rows import split_row
from kvledger_index.units import NEVER, Bind, Clear, Drop, Stamp
from kvledger_index.writer import Library, RedisWriter, library

A, B, C = "replica-a/0", "replica-b/0", "replica-c/1"
PATH = tuple(range(0x1000, 0x1010))
FIRST = PATH[0].to_bytes(8, "big")


@pytest.fixture
async def pair(redis_url: str, namespace: str) -> AsyncIterator[RedisPair]:
    async with redis_pair(lambda: redis_url, namespace) as opened:
        yield opened


@pytest.fixture
async def fold(pair: RedisPair) -> Fold:
    fold = Fold(pair.writer)
    await fold.seek()
    return fold


@pytest.fixture
async def private(redis_server: Any, namespace: str) -> AsyncIterator[RedisPair]:
    """A pair on a server of its own."""
    server = redis_server()
    async with (
        RedisWriter.from_url(server.url, namespace=namespace) as writer,
        RedisReader.from_url(server.url, namespace=namespace) as reader,
    ):
        yield RedisPair(writer, reader, namespace)


# --- functions


async def test_functions_are_loaded_on_demand(private: RedisPair) -> None:
    """Nobody called check(); a server that restarted or failed over may come without them at any time."""
    fold = Fold(private.writer)
    await fold.seek()
    assert (await fold.do(A, Bind(), put(PATH))).applied == 1
    assert private.redis_writer.loads == 1

    for lose in (("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH")):
        await private.raw.execute_command(*lose)
        assert (await fold.do(A, put(PATH, 0, 3, lane=1))).applied == 1
    assert private.redis_writer.loads == 3
    assert len(await claims(private.reader)) == 19


async def test_an_emptied_server_refuses_and_is_rebuilt(private: RedisPair) -> None:
    fold = Fold(private.writer)
    await fold.seek()
    await fold.do(A, Bind(), put(PATH))
    old = await private.reader.catalogue(MODEL)
    await private.raw.execute_command("FLUSHALL")
    await private.raw.execute_command("FUNCTION", "FLUSH")

    assert (await fold.do(A, put(PATH))).verdict == "refused"
    assert await private.writer.load(0) == (None, {})
    assert (await private.reader.read(old, MODEL, PATH)).version == b""
    await fold.seek()
    fold.stamps.clear()
    await fold.do(A, Bind(), put(PATH, 0, 2))
    assert await claims(private.reader) == {((A, "gpu", 0), key) for key in PATH[:2]}


async def test_builds_of_the_functions_live_side_by_side(
    pair: RedisPair, fold: Fold, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a rolling update workers of two builds call in turn; neither takes the other's functions away."""
    other = Library(library().body + "\n-- another build")
    monkeypatch.setattr("kvledger_index.writer.library", lambda: other)
    async with RedisWriter.from_url(redis_url, namespace=namespace) as newer:
        writers = [newer, pair.redis_writer]
        await newer.check()
        for turn in range(4):
            fold.writer = writers[turn % 2]
            await fold.do(A, Bind() if not turn else put(PATH, turn, turn + 1))
        assert newer.loads == 1
    assert pair.redis_writer.loads == 1
    await pair.raw.execute_command("FUNCTION", "DELETE", f"kvledger0_{other.build}")
    assert len(await claims(pair.reader)) == 3


async def test_a_reader_needs_no_function(private: RedisPair) -> None:
    fold = Fold(private.writer)
    await fold.seek()
    await fold.do(A, Bind(), put(PATH))
    await private.raw.execute_command("FUNCTION", "FLUSH")
    await private.raw.execute_command("SCRIPT", "FLUSH")
    holders, _ = await look(private.reader, PATH)

    assert holders == [{(A, "gpu", 0)}] * 16
    assert await private.raw.execute_command("FUNCTION", "LIST") == []


# --- what the server must be like


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_is_refused(redis_server: Any, policy: str) -> None:
    server = redis_server(settings=("--maxmemory-policy", policy))
    async with RedisWriter.from_url(server.url) as writer:
        with pytest.raises(Refused, match=rf"{policy}.*CONFIG SET maxmemory-policy noeviction") as refused:
            await writer.check()

        assert f"127.0.0.1:{server.port}" in str(refused.value)


async def test_a_replica_is_refused_and_a_primary_that_becomes_one_takes_no_writes(redis_server: Any) -> None:
    primary, replica = redis_server(), redis_server()
    async with RedisWriter.from_url(replica.url) as writer:
        fold = Fold(writer)
        await fold.seek()
        await writer._client.execute_command("REPLICAOF", "127.0.0.1", str(primary.port))  # type: ignore[no-untyped-call]  # redis-py
        with pytest.raises(Unavailable, match="replica"):
            await fold.open(A)
        with pytest.raises(Refused, match=f"replica|slave.*{primary.port}"):
            await writer.check()


async def test_a_cluster_is_refused(redis_server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        bus = probe.getsockname()[1]  # by default the port + 10000, which may lie beyond the last one
    server = redis_server(settings=("--cluster-enabled", "yes", "--cluster-port", str(bus)))
    async with RedisWriter.from_url(server.url) as writer:
        with pytest.raises(Refused, match="Cluster"):
            await writer.check()
        with pytest.raises(Refused, match="Cluster"):
            await writer.seek(0, "t", 0, 0, drop=True)


async def test_a_wrong_password_is_an_operator_s_matter_and_is_not_repeated(redis_server: Any) -> None:
    server = redis_server()
    admin = RedisWriter.from_url(server.url)
    await admin._call("CONFIG", "SET", "requirepass", "right-secret")
    url = server.url.replace("redis://", "redis://:wrong-secret@")
    async with RedisWriter.from_url(url) as writer, RedisReader.from_url(server.url) as reader:
        for call in (writer.check(), reader.catalogue(MODEL)):
            with pytest.raises(Refused, match="user and password") as refused:
                await call
            assert "secret" not in str(refused.value)
    await admin._call("CONFIG", "SET", "requirepass", "")
    await admin.aclose()


async def test_nobody_there_is_unavailable_with_the_address(redis_server: Any) -> None:
    server = redis_server()
    server.stop()
    async with RedisWriter.from_url(server.url) as writer, RedisReader.from_url(server.url) as reader:
        for call in (writer.check(), writer.load(0), reader.catalogue(MODEL), reader.models()):
            with pytest.raises(Unavailable, match=f"127.0.0.1:{server.port}"):
                await call


async def test_a_hanging_server_costs_the_timeout_once(redis_server: Any) -> None:
    """Neither end tries again by itself."""
    server = redis_server()
    async with (
        RedisWriter.from_url(server.url, timeout_seconds=0.2) as writer,
        RedisReader.from_url(server.url, deadline_seconds=0.2) as reader,
    ):
        await writer.check()
        catalogue = await reader.catalogue(MODEL)
        loop = asyncio.get_running_loop()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            for call in (writer.load(0), reader.catalogue(MODEL), reader.read(catalogue, MODEL, PATH)):
                began = loop.time()
                with pytest.raises(Unavailable):
                    await call
                assert loop.time() - began < 1
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert await writer.load(0) == (None, {})


async def test_a_restarted_server_is_found_again(redis_server: Any) -> None:
    server = redis_server(append_only=True)
    async with RedisWriter.from_url(server.url) as writer, RedisReader.from_url(server.url) as reader:
        fold = Fold(writer)
        await fold.seek()
        await fold.do(A, Bind(), put(PATH))
        server.stop()
        with pytest.raises(Unavailable):
            await fold.do(A, take(PATH))
        server.start()

        assert (await fold.do(A, take(PATH, 8))).applied == 1
        assert await claims(reader) == {((A, "gpu", 0), key) for key in PATH[:8]}


async def test_a_full_server_takes_no_blocks_but_lets_them_go(redis_server: Any, namespace: str) -> None:
    server = redis_server()
    async with redis_pair(lambda: server.url, namespace) as pair:
        fold = Fold(pair.writer)
        await fold.seek()
        branch = [*PATH[:4], 77]
        await fold.do(A, Bind(), put(PATH), put(branch, 4))
        await pair.raw.execute_command("CONFIG", "SET", "maxmemory", "1mb")
        before = await claims(pair.reader)
        with pytest.raises(Unavailable, match="maxmemory"):
            await fold.do(B, Bind(), put(PATH))

        assert await claims(pair.reader) == before
        assert (await look(pair.reader, branch))[0] == [{(A, "gpu", 0)}] * 5, "routers still read"
        assert B not in (await pair.writer.load(0)).ranks, "nothing of the step was written"
        for op in (take(PATH, 8), Clear("cpu"), Drop()):
            assert (await fold.do(A, op)).applied == 1
        assert (await fold.apply(at_end=True)).verdict == "applied"
        await fold.seek(fold.restart, drop=False)
        assert await claims(pair.reader) == set()
        await pair.raw.execute_command("CONFIG", "SET", "maxmemory", "0")
        assert (await fold.do(B, Bind(), put(PATH))).applied == 1


async def test_all_slots_given_is_refused_before_anything_is_written(pair: RedisPair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    await pair.raw.set(pair.keyspace.slot, 2**32 - 5)
    before = await pair.snapshot()
    with pytest.raises(Refused, match="slots"):
        await fold.do(B, put(PATH), Bind(), Clear("gpu"))
    assert await pair.snapshot() == before

    await fold.do(B, Bind(), put(PATH))
    assert (await pair.reader.catalogue(MODEL)).ranks[B].slots == (2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1)
    assert len(await claims(pair.reader)) == 32


# --- raw keys


async def test_every_key_is_under_the_prefix_and_none_expires(redis_server: Any) -> None:
    server = redis_server()
    async with redis_pair(lambda: server.url, "mine") as pair:
        fold = Fold(pair.writer)
        await fold.seek()
        await fold.do(A, Bind(), put(PATH), put([PATH[0], 5, 6]))
        await fold.do(A, Clear("gpu"))
        keys = sorted(await pair.raw.keys("*"))

        space = Keyspace("mine")
        assert keys == sorted([
            space.catalogue(MODEL),
            space.now(MODEL),
            space.models,
            space.partitions,
            space.ranks(0),
            space.slot,
            space.dead,
            space.row(FIRST),
            space.side(FIRST),
        ])  # fmt: skip
        assert all(key.startswith(b"mine0:{0}:") for key in keys)
        assert {await pair.raw.ttl(key) for key in keys} == {-1}


async def test_namespaces_do_not_meet(pair: RedisPair, fold: Fold, redis_url: str, namespace: str) -> None:
    await fold.do(A, Bind(), put(PATH))
    async with redis_pair(lambda: redis_url, namespace + "x") as other:
        assert await other.writer.load(0) == (None, {})
        assert await claims(other.reader) == set()


async def test_removed_blocks_leave_nothing_and_a_stub_is_one_byte(pair: RedisPair, fold: Fold) -> None:
    branch = [*PATH[:4], 77]
    await fold.do(A, Bind(), put(PATH), put(branch, 4))
    await fold.do(A, take(PATH))
    assert await pair.raw.get(pair.keyspace.row(FIRST)) == b"\x80"
    assert await pair.raw.hkeys(pair.keyspace.side(FIRST)) == [(77).to_bytes(8, "big")]

    await fold.do(A, take(branch, 4))
    assert not [key for key in await pair.keys() if key.startswith(pair.keyspace.row_prefix)]


async def test_dead_slots_are_listed_for_the_scrubber(pair: RedisPair, fold: Fold) -> None:
    await fold.open(A, B)
    await fold.do(A, Clear("cpu"))
    await fold.do(A, Bind())
    await fold.do(B, Drop())
    await fold.seek()

    dead = [int.from_bytes(raw, "little") for raw in await pair.raw.lrange(pair.keyspace.dead, 0, -1)]
    assert sorted(dead) == list(range(1, 14))
    assert dead[0] == 2


async def test_a_run_of_sixteen_is_one_entry_of_seven_bytes(pair: RedisPair, fold: Fold) -> None:
    await fold.open(A, B)
    await fold.do(A, put(PATH))
    alone = await pair.raw.strlen(pair.keyspace.row(FIRST))
    await fold.do(B, put(PATH))

    assert alone == 1 + 16 * 8 + 7
    assert await pair.raw.strlen(pair.keyspace.row(FIRST)) == alone + 7


async def test_slots_that_look_alike_across_entries_are_told_apart(pair: RedisPair, fold: Fold) -> None:
    """
    Entry of slot 256, lane 0, mask 0x0100    00 01 00 00 00 00 01
    slot 1, lane 0                               01 00 00 00 00     stands in it, but not at its start.
    """
    await fold.open(A)
    await pair.raw.set(pair.keyspace.slot, 255)
    await fold.open(B)
    assert (await pair.reader.catalogue(MODEL)).ranks[B].slots[0] == 256
    await fold.do(B, put(PATH, 0, 9, mask=0x100))
    branch = [*PATH[:8], 5]
    await fold.do(B, put(branch, 8))
    await fold.do(A, take(PATH, 8, 9), take(branch, 8))
    await fold.do(A, put(PATH, 0, 2), put(branch, 8))

    want = {((B, "gpu", 0), PATH[8]), ((B, "gpu", 0), 5), ((A, "gpu", 0), 5)}
    assert await claims(pair.reader) == want | {((A, "gpu", 0), key) for key in PATH[:2]}
    assert split_row(await pair.raw.get(pair.keyspace.row(FIRST)))[2] == ((256, 0, 0x100), (1, 0, 0b11))


async def test_stamps_compare_as_bytes_whatever_the_locale(redis_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lua's own comparison of strings follows LC_COLLATE, which folds and reorders bytes where that locale is there."""
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    server = redis_server()
    async with RedisWriter.from_url(server.url) as writer:
        fold = Fold(writer)
        await fold.seek()
        for n in (*range(0x30, 0x80), 0xC0, 0xE0, 0xFF, 0x100, 0x141, 0x161):
            before = fold.stamps.get(A, NEVER)
            stamp = Stamp(7, 7, 1, n)
            assert (await fold.do(A, before=before, after=stamp)).applied == 1
            assert (await fold.do(A, before=before, after=stamp)).duplicates == 1
            later = stamp._replace(n=n + 1)
            ahead = fold.unit(A, before=later, after=later._replace(n=n + 2))
            assert (await writer.apply(fold.step(ahead))).verdict == "refused"


# --- answers of two round trips


async def test_a_rank_that_moves_between_the_two_looks_of_an_answer_is_named(
    pair: RedisPair, fold: Fold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``now``, rows | A's blocks go | ``now``, side: A moved, B did not."""
    branch = [*PATH[:4], 77, 78]
    await fold.do(A, Bind(), put(PATH), put(branch, 4))
    await fold.do(B, Bind(), put(PATH))
    catalogue = await pair.reader.catalogue(MODEL)
    look_at_sides = pair.redis_reader._second

    async def meanwhile(*args: Any) -> Any:
        await fold.do(A, take(branch, 4))
        return await look_at_sides(*args)

    monkeypatch.setattr(pair.redis_reader, "_second", meanwhile)
    reading = await pair.reader.read(catalogue, MODEL, branch)
    assert reading.moved == {A}
    assert reading.version == catalogue.version
    assert set(reading.pulses) == {A, B}

    reading = await pair.reader.read(catalogue, MODEL, PATH)
    assert reading.moved == frozenset(), "a prompt that stays on the path needs one look"


async def test_a_catalogue_that_changes_between_the_two_looks_shows_in_the_version(
    pair: RedisPair, fold: Fold, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = [*PATH[:4], 77]
    await fold.do(A, Bind(), put(PATH), put(branch, 4))
    catalogue = await pair.reader.catalogue(MODEL)
    look_at_sides = pair.redis_reader._second

    async def meanwhile(*args: Any) -> Any:
        await fold.do(B, Bind())
        return await look_at_sides(*args)

    monkeypatch.setattr(pair.redis_reader, "_second", meanwhile)
    reading = await pair.reader.read(catalogue, MODEL, branch)
    assert reading.version == (await pair.reader.catalogue(MODEL)).version != catalogue.version
    assert reading.moved == {B}


@pytest.mark.parametrize("after", range(1, 5))
async def test_a_rank_that_moves_while_an_answer_is_read_is_named(
    pair: RedisPair, fold: Fold, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Nothing is locked: another client's step may run between any two commands of the first look.

    TIME | now | parts | rows | v and t      A's blocks go behind the first, second, …
    """
    await fold.do(A, Bind(), put(PATH))
    await fold.do(B, Bind(), put(PATH))
    catalogue = await pair.reader.catalogue(MODEL)
    pipeline = pair.redis_reader._pipeline
    looks = 0

    async def interrupted(commands: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks > 1:
            return await pipeline(commands)
        first = await pipeline(commands[:after])
        await fold.do(A, take(PATH))
        return first + await pipeline(commands[after:])

    monkeypatch.setattr(pair.redis_reader, "_pipeline", interrupted)
    reading = await pair.reader.read(catalogue, MODEL, PATH)
    gpu = catalogue.ranks[B].slots[0]

    assert reading.moved == ({A} if after > 1 else frozenset())
    assert reading.version == catalogue.version
    assert (gpu, 0, 0xFFFF) in reading.segments[0].holders
    assert looks == (2 if after > 1 else 1)


async def test_an_unloading_while_an_answer_is_read_shows_in_the_version(
    pair: RedisPair, fold: Fold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may leave the stamp where it is."""
    await fold.do(A, Bind(), put(PATH))
    catalogue = await pair.reader.catalogue(MODEL)
    pipeline = pair.redis_reader._pipeline

    async def interrupted(commands: Any) -> Any:
        monkeypatch.setattr(pair.redis_reader, "_pipeline", pipeline)
        first = await pipeline(commands[:3])
        await fold.do(A, Drop(), before=fold.stamps[A], after=fold.stamps[A])
        return first + await pipeline(commands[3:])

    monkeypatch.setattr(pair.redis_reader, "_pipeline", interrupted)
    reading = await pair.reader.read(catalogue, MODEL, PATH)

    assert reading.version == (await pair.reader.catalogue(MODEL)).version != catalogue.version


async def test_many_branches_cost_two_round_trips(pair: RedisPair, fold: Fold, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list(range(16 * 20))
    branches = [[key if key % 16 < 8 else key + 1000 for key in keys[at : at + 16]] for at in range(0, len(keys), 16)]
    await fold.do(A, Bind(), *(put(keys[at : at + 16]) for at in range(0, len(keys), 16)))
    await fold.do(A, *(put(branch, 8) for branch in branches))
    catalogue = await pair.reader.catalogue(MODEL)
    trips = 0
    pipeline = pair.redis_reader._pipeline

    async def counted(commands: Any) -> Any:
        nonlocal trips
        trips += 1
        return await pipeline(commands)

    monkeypatch.setattr(pair.redis_reader, "_pipeline", counted)
    await pair.reader.read(catalogue, MODEL, keys)
    assert trips == 1
    reading = await pair.reader.read(catalogue, MODEL, [key for branch in branches for key in branch])
    assert trips == 3
    assert [segment.holders[0][2] for segment in reading.segments] == [0xFFFF] * 20


async def test_a_cancelled_answer_leaves_no_connection_in_the_middle_of_one(pair: RedisPair, fold: Fold) -> None:
    """A router cancels at its deadline, at any await of the call."""
    other = [*PATH[:4], *range(500, 512)]
    await fold.do(A, Bind(), put(PATH), put(other, 4))
    catalogue = await pair.reader.catalogue(MODEL)
    cut = 0
    for turns in range(40):
        task = asyncio.ensure_future(pair.reader.read(catalogue, MODEL, other))
        for _ in range(turns):
            await asyncio.sleep(0)
        cut += task.cancel()
        await asyncio.wait({task})
        for path in (PATH, other):
            holders, reading = await look(pair.reader, path)
            assert holders == [{(A, "gpu", 0)}] * 16
            assert reading.corrupt == 0
    assert cut > 3


async def test_more_callers_than_connections_wait_their_turn(pair: RedisPair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    catalogue = await pair.reader.catalogue(MODEL)
    readings = await asyncio.gather(*(pair.reader.read(catalogue, MODEL, PATH) for _ in range(300)))

    assert {len(reading.segments[0].holders) for reading in readings} == {1}
    clients = await pair.raw.client_list()
    assert len(clients) < 120


# --- rubbish


@pytest.mark.parametrize("rubbish", [b"", b"\x11", b"\x01short", b"\x00odd", b"\x7f" * 200, b"\xff"])
async def test_a_row_that_cannot_be_read_counts_as_absent_and_is_counted(
    pair: RedisPair, fold: Fold, rubbish: bytes
) -> None:
    other = tuple(range(50, 66))
    await fold.do(A, Bind(), put(PATH), put(other))
    await pair.raw.set(pair.keyspace.row(FIRST), rubbish)
    holders, reading = await look(pair.reader, PATH + other)

    assert holders == [*[set()] * 16, *[{(A, "gpu", 0)}] * 16]
    assert reading.corrupt == 1
    assert await claims(pair.reader) == {((A, "gpu", 0), key) for key in other}
    assert pair.redis_reader.corrupt == 2
    await fold.do(A, put(PATH, 0, 4))
    holders, reading = await look(pair.reader, PATH)
    assert holders == [*[{(A, "gpu", 0)}] * 4, *[set()] * 12]
    assert reading.corrupt == 0


async def test_a_row_that_cannot_be_read_does_not_lose_its_side(pair: RedisPair, fold: Fold) -> None:
    branch = [*PATH[:4], 77]
    await fold.do(A, Bind(), put(PATH), put(branch, 4))
    await pair.raw.set(pair.keyspace.row(FIRST), b"?")
    await fold.do(A, put(PATH, 0, 2))

    holders, _ = await look(pair.reader, branch)
    assert holders == [{(A, "gpu", 0)}, {(A, "gpu", 0)}, set(), set(), {(A, "gpu", 0)}]


async def test_a_card_pulse_partition_or_side_that_cannot_be_read_is_left_out(pair: RedisPair, fold: Fold) -> None:
    branch = [*PATH[:4], 77]
    await fold.apply(fold.unit(A, Bind(), put(PATH), put(branch, 4)), fold.unit(B, Bind(), put(branch)))
    await pair.raw.hset(pair.keyspace.side(FIRST), (77).to_bytes(8, "big"), b"1234")
    holders, reading = await look(pair.reader, branch)
    assert (holders[4], reading.corrupt) == (set(), 1)
    assert holders[3] == {(A, "gpu", 0), (B, "gpu", 0)}

    await pair.raw.hset(pair.keyspace.now(MODEL), A, b"rubbish")
    _, reading = await look(pair.reader, PATH)
    assert (set(reading.pulses), reading.corrupt) == ({B}, 1)

    await pair.raw.hset(pair.keyspace.partitions, "0", b"rubbish")
    _, reading = await look(pair.reader, PATH)
    assert (reading.pulses, reading.partitions, reading.corrupt) == ({}, {}, 1)

    await pair.raw.hset(pair.keyspace.catalogue(MODEL), B, b"rubbish")
    assert set((await pair.reader.catalogue(MODEL)).ranks) == {A}


async def test_a_partition_whose_values_cannot_be_read_is_rebuilt(pair: RedisPair, fold: Fold) -> None:
    await fold.do(A, Bind(), put(PATH))
    await pair.raw.hset(pair.keyspace.ranks(0), A, b"rubbish")
    assert (await pair.writer.load(0)).progress is None

    await fold.seek()
    fold.stamps.clear()
    await fold.do(A, Bind(), put(PATH, 0, 1))
    assert await claims(pair.reader) == {((A, "gpu", 0), PATH[0])}


async def test_another_program_s_keys_in_the_namespace_are_refused_in_words(pair: RedisPair, fold: Fold) -> None:
    await pair.raw.lpush(pair.keyspace.catalogue(MODEL), "mine")
    with pytest.raises(Refused, match="another program"):
        await pair.reader.catalogue(MODEL)
    with pytest.raises(Refused, match="another program"):
        await fold.do(A, Bind())


async def test_every_error_is_one_of_the_index_s_own(pair: RedisPair) -> None:
    with pytest.raises(IndexFailure):
        await pair.redis_writer._call("NONSENSE")
