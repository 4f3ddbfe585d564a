"""The pipeline in one process, without sockets: payload -> ledger -> records -> fold -> memory -> router."""

from __future__ import annotations

import secrets
import time
from typing import Any

import xxhash

from kvledger_bridge.decode import decode_batch
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.unit import Covered, records
from kvledger_engine.recording import Meta
from kvledger_index.memory import MemoryIndex
from kvledger_router import Holder, Index, Media
from kvledger_streams.fold import fold, fresh
from kvledger_streams.tally import Tally
from kvledger_wire.partition import record_key
from kvledger_wire.records import LIVE, SCHEMA, Fence, Heartbeat, Opened, encode


class InProcess:
    """One engine from its first batch on; one partition."""

    def __init__(self, meta: Meta, *, engine_hashes: bool = True) -> None:
        self.entry = meta.entry()
        self.index = MemoryIndex()
        self.router = Index(self.index, model=self.entry.model, deadline_seconds=5.0, engine_hashes=engine_hashes)
        self.ledger = Ledger(self.entry)
        self.records = 0
        self._n = 0
        self._tally = Tally()
        self._offset = 0
        self._state = fresh(0, partitions=1, topic_id="t", restart=0, broker_ms=0)

    async def start(self) -> None:
        await self.index.seek(0, "t", 0, 0, drop=True)
        opened = Opened(
            SCHEMA,
            1,
            (1, 1),
            0,
            self.entry,
            self.entry.stride,
            -1,
            b"",
            partial=False,
            why="start",
            engine_version=None,
        )
        await self._fold([("*", Fence(SCHEMA, 1, "b", "0", "start")), ("*", opened)])

    async def publish(self, seq: int, payload: bytes) -> None:
        """One batch of the engine."""
        batch = decode_batch(payload)
        pieces = self.ledger.apply(seq, batch, LIVE)
        covered = Covered(1, (1, 1), seq, xxhash.xxh3_128_digest(payload))
        unit: list[tuple[int | str | None, Any]] = list(
            records(covered, self._n + 1, pieces, self.ledger.take_uncertain())
        )
        if not unit:
            unit = [("*", Heartbeat(SCHEMA, 1, (1, 1), self._n + 1, seq, covered.digest))]
        self._n += len(unit)
        await self._fold(unit)

    async def predict(self, tokens: Any, *, lora: str | None, salt: str | None, mm: Any) -> Holder:
        """What the router says now."""
        media = [Media(identifier, offset, length) for offset, length, identifier in mm or ()]
        match = await self.router.match(tokens, lora=lora, salt=salt, media=media)
        return next(iter(match))

    async def _fold(self, unit: list[tuple[int | str | None, Any]]) -> None:
        log = []
        for group, record in unit:
            log.append((self._offset, time.time_ns() // 1_000_000, record_key("r", 0, group), encode(record), None))
            self._offset += 1
        self.records += len(log)
        for step in fold(self._state, log, end=self._offset, nonce=lambda: secrets.token_bytes(16), tally=self._tally):
            outcome = await self.index.apply(step)
            assert outcome.verdict == "applied", outcome.why
