"""The write end in Redis: one function call per step (``functions/apply.lua``), see ``contract.IndexWriter``."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from functools import cache
from importlib.resources import files
from typing import Any, Self

from redis import exceptions
from redis.asyncio import Redis

from kvledger_index.errors import Corrupt, InvalidInput, Refused, Unavailable
from kvledger_index.keyspace import NAMESPACE_DEFAULT, Keyspace
from kvledger_index.server import address_of, connect, failures, faults
from kvledger_index.units import (
    NEVER,
    NONCE_BYTES,
    SCRUB_DEFAULT,
    Outcome,
    Progress,
    Put,
    Scrubbed,
    ScrubBudget,
    Stamp,
    Step,
    Stored,
    check_budget,
    check_numbers,
    check_step,
    out_of_turn,
    unplaced,
)
from kvledger_index.values import (
    LEAVE,
    NEVER_BYTES,
    decode_partition,
    decode_rank,
    decode_stamp,
    encode_card,
    encode_ms,
    encode_now,
    encode_ops,
    encode_piece,
    encode_stamp,
    text,
)

TIMEOUT_SECONDS_DEFAULT = 5.0
"""Per reply: far above what a call takes (10 ms), far below a Kafka session (45 s), which a writer must not outlast."""

CONNECTIONS_MAX = 8
"""Partitions of one worker written at the same time; more callers wait their turn."""

_LIBRARY_PARTS = ("rows.lua", "apply.lua", "seek.lua", "load.lua", "scrub.lua")


class Library:
    """The functions as Redis gets them. Names carry a digest of the source, so builds live side by side and a caller
    reaches its own or none: nothing to compare, and nothing that a newer build could break for an older one.
    """

    def __init__(self, body: str) -> None:
        """Of the source without its first lines, which name the build."""
        self.build = hashlib.sha256(body.encode()).hexdigest()[:12]
        self.body = body
        self.source = f"#!lua name=kvledger0_{self.build}\nlocal BUILD = '{self.build}'\n{body}"

    def name(self, operation: str) -> str:
        """The function's name in Redis."""
        return f"kvledger0_{operation}_{self.build}"


@cache
def library() -> Library:
    """The one library of this build."""
    folder = files("kvledger_index") / "functions"
    return Library("\n".join((folder / part).read_text("utf-8") for part in _LIBRARY_PARTS))


class RedisWriter:
    """``IndexWriter`` over one primary. Safe for concurrent calls; each is one round trip."""

    def __init__(self, client: Redis, *, namespace: str = NAMESPACE_DEFAULT) -> None:
        """Over a client of one's own making (Sentinel), which should not repeat commands by itself."""
        self._keyspace = Keyspace(namespace)
        self._client = client
        self._library = library()
        self._gate = asyncio.Semaphore(CONNECTIONS_MAX)
        self.address = address_of(client)
        self.loads = 0
        """How often the library had to be loaded: more than once means that servers come without it."""

    @classmethod
    def from_url(
        cls, url: str, *, namespace: str = NAMESPACE_DEFAULT, timeout_seconds: float = TIMEOUT_SECONDS_DEFAULT
    ) -> Self:
        """A writer for a Redis URL; connects with the first call. Raises InvalidInput."""
        client = connect(url, timeout_seconds=timeout_seconds, connections_max=CONNECTIONS_MAX)
        return cls(client, namespace=namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def check(self) -> None:
        """Raise Refused where the server would lose the index, with what to change; load the functions."""
        info = await self._call("INFO")
        found = faults(info)
        if found:
            raise Refused(f"Redis at {self.address} cannot hold the index: " + "; ".join(found))
        await self._load_library()

    async def load(self, partition: int) -> Stored:
        """Progress and ranks of a partition (``functions/load.lua``).

        A value that cannot be read counts as no progress: the partition is rebuilt, which writes it anew.
        """
        raw, flat = await self._fcall("load", str(partition))
        ranks: dict[str, tuple[Stamp, bytes]] = {}
        progress: Progress | None = None
        try:
            for name, value in zip(flat[::2], flat[1::2], strict=True):
                rank = decode_rank(value)
                if rank.stamp != NEVER:  # else it has slots for the first pieces of its first unit, and no more
                    ranks[name.decode()] = (rank.stamp, rank.state)
            if raw is not None:
                progress = decode_partition(raw).progress
        except (Corrupt, UnicodeDecodeError):
            progress = None
        return Stored(progress, ranks)

    async def seek(self, partition: int, topic_id: str, restart: int, target: int, *, drop: bool) -> None:
        """Record a (re)seek (``functions/seek.lua``)."""
        check_numbers(partition, restart, target)
        answer = await self._fcall(
            "seek",
            str(partition),
            topic_id,
            encode_ms(restart),
            encode_ms(target),
            "1" if drop else "0",
            secrets.token_bytes(NONCE_BYTES),
        )
        if not answer[0]:
            raise InvalidInput(
                f"partition {partition} stands in topic {text(answer[1])}, seek in {topic_id} must drop it"
            )

    async def apply(self, step: Step) -> Outcome:
        """Apply a step (``functions/apply.lua``): eight arguments per unit, whatever it holds."""
        check_step(step)
        needed, units = 0, list[str | bytes]()
        for unit in step.units:
            ops, slots = encode_ops(unit.ops)
            needed += slots
            units += (
                unit.rank,
                unit.model,
                encode_stamp(unit.before),
                encode_stamp(unit.after),
                encode_now(unit.broker_ms, unit.now),
                unit.state,
                LEAVE if unit.leaves else b"" if unit.card is None else encode_card(unit.card),
                ops,
            )
        adds = any(isinstance(op, Put) and op.add for unit in step.units for op in unit.ops)
        answer = await self._fcall(
            "apply" if adds else "shrink",
            str(step.partition),
            step.topic_id,
            encode_ms(step.restart_before),
            encode_ms(step.restart) + encode_ms(step.read),
            "1" if step.at_end else "0",
            encode_ms(step.broker_ms),
            step.nonce,
            str(needed),
            NEVER_BYTES,
            b"" if step.piece is None else encode_piece(step.piece),
            *units,
        )
        if answer[0]:
            return Outcome("applied", int(answer[1]), int(answer[2]), "")
        return Outcome("refused", 0, 0, _refusal(step, answer))

    async def scrub(self, budget: ScrubBudget = SCRUB_DEFAULT) -> Scrubbed:
        """Free what dead slots occupy (``functions/scrub.lua``); how far it is stands in Redis."""
        check_budget(budget)
        state, entries, rows, looked, slots = await self._fcall("scrub", str(budget.keys), f"{budget.seconds:.6f}")
        return Scrubbed(int(entries), int(rows), int(looked), int(slots), idle=state == 0, ended=state == 2)

    async def aclose(self) -> None:
        """Close every connection; safe to call twice."""
        await self._client.aclose(close_connection_pool=True)

    async def _fcall(self, operation: str, *args: str | bytes) -> Any:
        """Call a function; where the server does not know it (new, restarted, flushed), load it and call again.

        A call of an unknown function did nothing, so the second one is not a repetition.
        """
        call = ("FCALL", self._library.name(operation), 1, self._keyspace.prefix, *args)
        try:
            return await self._call(*call)
        except Refused as refused:
            if "Function not found" not in str(refused):
                raise
        await self._load_library()
        return await self._call(*call)

    async def _load_library(self) -> None:
        self.loads += 1
        await self._call("FUNCTION", "LOAD", "REPLACE", self._library.source)

    async def _call(self, *command: str | bytes | int) -> Any:
        async with self._gate:
            try:
                with failures(self.address):
                    return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py types its arguments, not itself
            except Unavailable as gone:
                if isinstance(gone.__cause__, exceptions.ReadOnlyError):
                    # a primary that became a replica keeps its connections: only a new one finds the new primary
                    await self._client.connection_pool.disconnect()
                raise


def _refusal(step: Step, answer: list[Any]) -> str:
    match answer[1:]:
        case [b"partition"]:
            return unplaced(step.partition)
        case [b"progress", topic_id, restart]:
            have, want = (
                (text(topic_id), int.from_bytes(restart, "big", signed=True)),
                (step.topic_id, step.restart_before),
            )
            return f"partition {step.partition} stands at {have}, the step expects {want}"
        case [b"rank", rank, stamp]:
            name = text(rank)
            before = next((tuple(unit.before) for unit in step.units if unit.rank == name), None)
            return f"rank {name} stands at {tuple(decode_stamp(stamp))}, the unit expects {before}"
        case [b"piece", rank] if step.piece is not None:
            return out_of_turn(text(rank), step.piece.number)
        case rest:  # pragma: no cover - the function answers nothing else
            return f"refused: {rest}"
