"""The read end in Redis: plain commands, so that a router needs no right to write, to load functions or to run scripts.

Nothing is locked, and no MULTI is used: at maxmemory Redis refuses every command of one, also reads. Instead an answer
looks at what moves before its rows and behind them. Whatever changes a rank's blocks changes its stamp or the version
in the same step, so a rank that looks the same both times did not change in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from redis.asyncio import Redis

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.errors import Corrupt
from kvledger_index.keyspace import NAMESPACE_DEFAULT, Keyspace
from kvledger_index.model import GROUP_NONE_LANE, MEDIA
from kvledger_index.rows import NO_ROW, Holders, RowView, merge, parse_row, parse_side, split_row
from kvledger_index.server import address_of, connect, failures
from kvledger_index.values import PartitionValue, decode_card, decode_now, decode_partition, pack_keys
from kvledger_index.views import Catalogue, Claimed, PartitionView, Pulse, RankView, Reading, Segment

DEADLINE_SECONDS_DEFAULT = 1.0
"""Per reply. A router sets its own deadline around a call; this one only bounds a call without."""

CONNECTIONS_MAX = 64
"""Calls under way at once; more wait their turn, within the caller's deadline."""

_KEY_BYTES = 8
_SEGMENT_BYTES = SEGMENT_STRIDES * _KEY_BYTES
_SCAN_COUNT = 1_000
"""Keys that one SCAN visits: about 0.3 ms of Redis."""


class _First(NamedTuple):
    """What the first round trip brought."""

    now: dict[bytes, bytes]
    partitions: list[bytes | None]
    time_ms: int
    rows: list[bytes | None]
    still: bool
    """Nothing of the model changed while this was read."""


class RedisReader:
    """``IndexReader`` over one Redis. Safe for concurrent calls and for cancelling them: a connection whose call was
    cancelled is closed, never reused in the middle of an answer.
    """

    def __init__(self, client: Redis, *, namespace: str = NAMESPACE_DEFAULT) -> None:
        """Over a client of one's own making (Sentinel), which must not repeat commands by itself."""
        self._keyspace = Keyspace(namespace)
        self._client = client
        self._gate = asyncio.Semaphore(CONNECTIONS_MAX)
        self.address = address_of(client)
        self.corrupt = 0
        """Stored values met so far that could not be read."""

    @classmethod
    def from_url(
        cls, url: str, *, namespace: str = NAMESPACE_DEFAULT, deadline_seconds: float = DEADLINE_SECONDS_DEFAULT
    ) -> Self:
        """A reader for a Redis URL; connects with the first call. Raises InvalidInput."""
        client = connect(url, timeout_seconds=deadline_seconds, connections_max=CONNECTIONS_MAX)
        return cls(client, namespace=namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; safe to call twice."""
        await self._client.aclose(close_connection_pool=True)

    async def models(self) -> list[str]:
        """Names of the models that have a catalogue."""
        return sorted(raw.decode() for raw in await self._call("SMEMBERS", self._keyspace.models))

    async def catalogue(self, model: str) -> Catalogue:
        """All ranks of a model. A card that cannot be read leaves its rank out and is counted."""
        fields: dict[bytes, bytes] = await self._call("HGETALL", self._keyspace.catalogue(model))
        version = fields.pop(b"v", b"")
        ranks: dict[str, RankView] = {}
        for name, raw in fields.items():
            try:
                slots, card = decode_card(raw)
            except Corrupt:
                self.corrupt += 1
                continue
            ranks[name.decode()] = RankView(card, slots)
        return Catalogue(version, ranks)

    async def partitions(self) -> dict[int, PartitionView]:
        """Progress of every partition that was ever placed. One that cannot be read is left out and counted."""
        fields: dict[bytes, bytes] = await self._call("HGETALL", self._keyspace.partitions)
        stored, corrupt = _partitions([int(name) for name in fields], list(fields.values()))
        self.corrupt += corrupt
        return {number: value.view() for number, value in stored.items()}

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        """Holders of a prompt's keys and of engine hashes: one round trip, a second one where the prompt leaves a row
        that has a side, or where something of the model changed meanwhile.
        """
        paths = _pieces(pack_keys(keys), _SEGMENT_BYTES)
        segments = len(paths)
        paths += _pieces(pack_keys(hashes), _KEY_BYTES)  # a segment of one is a path that nothing can leave
        numbers = sorted({view.card.partition for view in catalogue.ranks.values()})
        first = await self._first(model, numbers, paths)
        version = first.now.get(b"v", b"")
        stored, corrupt = _partitions(numbers, first.partitions)
        views = {number: value.view() for number, value in stored.items()}
        pulses, bad = _pulses(catalogue, first.now, stored)
        corrupt += bad
        rows, bad = _rows(first.rows, paths)
        corrupt += bad
        holders = [row.holders for row in rows]
        moved: frozenset[str] = frozenset()
        leaving = [at for at, row in enumerate(rows) if row.side and row.shared * _KEY_BYTES < len(paths[at])]
        if leaving or not first.still:
            wanted = [(paths[at][:_KEY_BYTES], paths[at][rows[at].shared * _KEY_BYTES :]) for at in leaving]
            sides, later = await self._second(model, wanted)
            version = later.get(b"v", b"")
            moved = _moved(first.now, later)
            for at, fields in zip(leaving, sides, strict=True):
                masks, bad = _side_masks(fields, rows[at].shared)
                corrupt += bad
                holders[at] = merge(holders[at], masks)
        self.corrupt += corrupt
        found = [Segment(each) for each in holders]
        return Reading(version, first.time_ms, pulses, views, found[:segments], moved, corrupt, tuple(found[segments:]))

    async def _first(self, model: str, numbers: Sequence[int], paths: Sequence[bytes]) -> _First:
        keys = self._keyspace
        commands: list[tuple[Any, ...]] = [("TIME",), ("HGETALL", keys.now(model))]
        if numbers:
            commands.append(("HMGET", keys.partitions, *map(str, numbers)))
        if paths:
            commands.append(("MGET", *(keys.row(path[:_KEY_BYTES]) for path in paths)))
            commands.append(("HMGET", keys.now(model), "v", "t"))
        answers = await self._pipeline(commands)
        (seconds, micros), now = answers[:2]
        return _First(
            now,
            answers[2] if numbers else [],
            int(seconds) * 1000 + int(micros) // 1000,
            answers[-2] if paths else [],
            not paths or answers[-1] == [now.get(b"v"), now.get(b"t")],
        )

    async def _second(
        self, model: str, wanted: Sequence[tuple[bytes, bytes]]
    ) -> tuple[list[list[bytes | None]], dict[bytes, bytes]]:
        """What stands in the sides for (first key, keys), and behind that the model's moving parts once more."""
        keys = self._keyspace
        commands: list[tuple[Any, ...]] = [
            ("HMGET", keys.side(first), *_pieces(path, _KEY_BYTES)) for first, path in wanted
        ]
        *sides, now = await self._pipeline([*commands, ("HGETALL", keys.now(model))])
        return sides, now

    async def dump(self, model: str | None = None, rank: str | None = None) -> AsyncIterator[Claimed]:
        """Every block claimed by a live slot, in the order that SCAN brings rows; no block twice.

        Ranks are those of the start; what changes meanwhile may be missed or be old. O(index).
        """
        owners: dict[int, tuple[str, str]] = {}
        for each in [model] if model is not None else await self.models():
            for name, view in (await self.catalogue(each)).ranks.items():
                if rank in {None, name}:
                    owners.update({slot: (name, MEDIA[code]) for code, slot in enumerate(view.slots) if slot})
        done: set[bytes] = set()
        cursor = b"0"
        while owners:
            cursor, names = await self._call(
                "SCAN", cursor, "MATCH", self._keyspace.row_pattern, "COUNT", _SCAN_COUNT, "TYPE", "string"
            )
            fresh = [name for name in dict.fromkeys(names) if name not in done]
            done.update(fresh)
            for claim in await self._claims(fresh, owners):
                yield claim
            if cursor in {0, b"0"}:
                return

    async def _claims(self, names: Sequence[bytes], owners: Mapping[int, tuple[str, str]]) -> list[Claimed]:
        """Claims of the rows called ``names`` and of their sides."""
        claims: list[Claimed] = []
        branching: list[bytes] = []
        for name, raw in zip(names, await self._call("MGET", *names) if names else (), strict=True):
            if raw is None:
                continue
            try:
                nodes, side, entries = split_row(raw)
            except Corrupt:
                self.corrupt += 1
                continue
            if side:
                branching.append(name)
            claims += (
                _claim(owners[slot], lane, key)
                for slot, lane, mask in entries
                if slot in owners
                for position, key in enumerate(nodes)
                if mask >> position & 1
            )
        for name in branching:
            fields: dict[bytes, bytes] = await self._call("HGETALL", name + b"/")
            for raw_key, raw in fields.items():
                try:
                    holders = parse_side(raw)
                except Corrupt:
                    self.corrupt += 1
                    continue
                key = int.from_bytes(raw_key, "big")
                claims += (_claim(owners[slot], lane, key) for slot, lane in holders if slot in owners)
        return claims

    async def _call(self, *command: Any) -> Any:
        async with self._gate:
            with failures(self.address):
                return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py types its arguments, not itself

    async def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip; others' may run between them."""
        async with self._gate:
            with failures(self.address):
                async with self._client.pipeline(transaction=False) as pipe:
                    for command in commands:
                        pipe.execute_command(*command)
                    answers: list[Any] = await pipe.execute()
                    return answers


def _pieces(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def _claim(owner: tuple[str, str], lane: int, key: int) -> Claimed:
    return Claimed(owner[0], None if lane == GROUP_NONE_LANE else lane, owner[1], key)


def _partitions(numbers: Sequence[int], raws: Sequence[bytes | None]) -> tuple[dict[int, PartitionValue], int]:
    found: dict[int, PartitionValue] = {}
    corrupt = 0
    for number, raw in zip(numbers, raws, strict=True):
        if raw is None:
            continue
        try:
            found[number] = decode_partition(raw)
        except Corrupt:
            corrupt += 1
    return found, corrupt


def _pulses(
    catalogue: Catalogue, moving: Mapping[bytes, bytes], partitions: Mapping[int, PartitionValue]
) -> tuple[dict[str, Pulse], int]:
    """Pulses of the catalogue's ranks, and how many could not be read."""
    pulses: dict[str, Pulse] = {}
    corrupt = 0
    for name, view in catalogue.ranks.items():
        raw, partition = moving.get(name.encode()), partitions.get(view.card.partition)
        if raw is None or partition is None:
            continue
        try:
            broker_ms, now = decode_now(raw)
        except Corrupt:
            corrupt += 1
            continue
        pulses[name] = Pulse(now, partition.heard_ms(broker_ms))
    return pulses, corrupt


def _rows(raws: Sequence[bytes | None], paths: Sequence[bytes]) -> tuple[list[RowView], int]:
    """Rows matched with the prompt, and how many could not be read."""
    seen: dict[tuple[bytes, int], Holders] = {}
    rows: list[RowView] = []
    corrupt = 0
    for raw, path in zip(raws, paths, strict=True):
        row = NO_ROW
        if raw is not None:
            try:
                row = parse_row(raw, path, seen)
            except Corrupt:
                corrupt += 1
        rows.append(row)
    return rows, corrupt


def _side_masks(fields: Sequence[bytes | None], position: int) -> tuple[dict[tuple[int, int], int], int]:
    """Masks by holder of side fields whose first key stands at ``position``, and how many could not be read."""
    masks: dict[tuple[int, int], int] = {}
    corrupt = 0
    for at, raw in enumerate(fields, start=position):
        if raw is None:
            continue
        try:
            for who in parse_side(raw):
                masks[who] = masks.get(who, 0) | 1 << at
        except Corrupt:
            corrupt += 1
    return masks, corrupt


def _moved(first: Mapping[bytes, bytes], later: Mapping[bytes, bytes]) -> frozenset[str]:
    """Ranks whose stamp differs between two looks; one that shows in only one of them differs."""
    names = {name for name in first.keys() | later.keys() if first.get(name) != later.get(name)} - {b"v", b"t"}
    return frozenset(name.decode() for name in names if _stamp(first.get(name)) != _stamp(later.get(name)))


def _stamp(raw: bytes | None) -> tuple[int, ...] | None:
    """The stamp within a moving part; an unreadable one equals no other reading of it."""
    if raw is None:
        return None
    try:
        _, now = decode_now(raw)
    except Corrupt:
        return ()
    return (now.owner, now.life_owner, now.life_count, now.n)
