"""A unit of thousands of changes on a real Redis: nobody who asks that server waits for all of it."""

from __future__ import annotations

from typing import Any

import pytest
from foldlog import TOPIC, Log, nonces, state_at
from ranklog import RankLog
from redis.asyncio import Redis

from kvledger_index import units
from kvledger_index.reader import RedisReader
from kvledger_index.writer import RedisWriter
from kvledger_streams import fold as folding
from kvledger_streams.fold import fold
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire

BLOCKS = 20_000


async def longest_call(url: str, namespace: str) -> int:
    """Microseconds of the longest function call while a batch of that many single blocks is applied."""
    log: Log = []
    rank = RankLog(log)
    rank.open()
    names = b"".join((j + 1).to_bytes(8, "big") for j in range(BLOCKS))
    every = ((1 << BLOCKS) - 1).to_bytes(BLOCKS // 8, "little")
    rank.events(wire.Change(wire.STORED, 0, 1, 0.0, unplaced=names, unplaced_effective=every))
    records = [(offset, offset, *row, None) for offset, row in enumerate(log)]
    client: Any = Redis.from_url(url)
    async with (
        client,
        RedisWriter.from_url(url, namespace=namespace) as writer,
        RedisReader.from_url(url, namespace=namespace) as reader,
    ):
        await writer.check()
        await writer.seek(0, TOPIC, 0, len(log), drop=True)
        await client.config_set("slowlog-log-slower-than", 0)
        await client.config_set("slowlog-max-len", 10_000)
        await client.slowlog_reset()
        for step in fold(state_at(), records, end=len(log), nonce=nonces(), tally=Tally()):
            assert (await writer.apply(step)).verdict == "applied"
        calls = [entry for entry in await client.slowlog_get(10_000) if entry["command"].startswith(b"FCALL")]
        assert sum([1 async for _ in reader.dump()]) == BLOCKS
    return max(int(call["duration"]) for call in calls)


@pytest.mark.services
async def test_a_large_batch_holds_redis_a_piece_at_a_time(redis_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same in one call, as any other bound would be one of the machine: some 6 ms instead of 400."""
    server = redis_server()
    in_pieces = await longest_call(server.url, "pieces")
    for module, name in ((units, "STEP_OPS_MAX"), (folding, "PIECE_OPS_MAX")):
        monkeypatch.setattr(module, name, BLOCKS * 2)
    whole = await longest_call(server.url, "whole")

    assert in_pieces * 5 < whole
