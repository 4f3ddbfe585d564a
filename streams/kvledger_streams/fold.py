"""The fold: what a partition's log does to the index (DESIGN §6). Pure: records in, compare-and-set steps out.

    (offset, log times, key bytes, value bytes) ──decode──> record ──accept──> effects ──> ops of a rank's unit
                                                                                             │
                       Step: units of many ranks, restart and read offset <── cut at limits ─┤
                       Steps of a piece each, of one unit that is larger than a step <───────┘

The state of a partition is a function of its log: it is rebuilt from what the index stored, or from the log's start.
A record that cannot be used costs its rank, never the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from kvledger_index.model import GROUP_MAX
from kvledger_index.units import (
    NEVER,
    STEP_OPS_MAX,
    Bind,
    Card,
    Drop,
    Now,
    Op,
    Piece,
    RankUnit,
    Stamp,
    Step,
    piece_of,
)
from kvledger_streams.errors import UnreadableState
from kvledger_streams.ops import Tiers, card_of, now_of, ops_of, proves, size_of, size_of_effect, stamp_of, watch
from kvledger_streams.tally import Tally
from kvledger_wire.accept import Dropped, Effect, Loading, Opening, RankState, accept, unload
from kvledger_wire.errors import Poison
from kvledger_wire.partition import parse_key, partition_of
from kvledger_wire.records import Checkpoint, EventRecord, Events, Fence, decode_event

OPS_PER_STEP_MAX = STEP_OPS_MAX
"""A step is cut before the record that would exceed this; a single unit above it is applied in pieces."""

PIECE_OPS_MAX = STEP_OPS_MAX // 2
"""Ops of a piece. Pieces follow each other without a pause, so a router that asks twice waits for two of them."""

UNIT_OPS_MAX = 400_000
"""Ops that a unit may become at most, in all its pieces: 200,000 blocks that leave the GPU one by one and come back.
Above it the rank is unloaded. A worker holds the records of a unit, which takes about as much memory as they have
bytes, and the ops of one piece.
"""

BYTES_PER_STEP_MAX = 512 * 1024
"""A step is cut behind so many bytes of values, whatever came of them: they decode in 1.5 ms, and nothing else runs."""

RANKS_PER_STEP_MAX = 256
"""The same for ranks: each one carries its state and perhaps a card, about 1 KB."""

KEYS_CACHED_MAX = 16_384
"""Parsed record keys that are remembered: some bytes each, and a worker meets ranks times groups of them."""

STATE_VERSION = 2
"""Raise it when a rank's card comes out differently for the same state: stored cards are then written again."""

LogRecord = tuple[int, int, bytes | None, bytes | None, int | None]
"""(offset, log time in ms, key, value, up to which log time its picture is whole as ``known.known_of`` reads it)."""


class PartitionState(msgspec.Struct):
    """One partition in the middle of being folded.

    ``restart`` is what the index has stored as such, ``read`` the next offset to read, ``broker_ms`` the newest log
    time known. ``tails`` names the ranks with an unfinished unit and where it began. ``partitions`` is the topic's
    count, ``cards`` what the catalogue was last given, ``tiers`` what lower tiers did. ``heard`` is the log time of
    each rank's last unit, ``proven`` that of its last record that ``ops.proves`` its picture, ``forgotten`` names those
    that left the catalogue and were not heard of since. ``starts`` tells below which offset a rank's records are passed
    over in a rebuild: they would be read for nothing, as the rank is loaded there (ADR 8). ``told`` are ranks without a
    picture of which that was said.
    """

    partition: int
    partitions: int
    topic_id: str
    restart: int
    read: int
    broker_ms: int
    ranks: dict[str, RankState]
    cards: dict[str, Card | None]
    tails: dict[str, int]
    tiers: dict[str, Tiers]
    heard: dict[str, int]
    proven: dict[str, int]
    forgotten: set[str]
    starts: Mapping[str, int] = {}
    told: set[str] = set()


class _Blob(msgspec.Struct, frozen=True, array_like=True):
    """What is stored of a rank, read back by ``resume`` only."""

    version: int
    state: RankState
    tiers: tuple[tuple[int, int, int, bool], ...] = ()
    heard_ms: int = -1
    forgotten: bool = False
    proven_ms: int = -1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Blob)


def resume(
    partition: int,
    *,
    partitions: int,
    topic_id: str,
    restart: int,
    broker_ms: int,
    stored: Mapping[str, tuple[Stamp, bytes]],
) -> PartitionState:
    """The state to go on from, as ``IndexWriter.load`` gave it. Raises UnreadableState: drop and rebuild then."""
    ranks: dict[str, RankState] = {}
    cards: dict[str, Card | None] = {}
    tiers: dict[str, Tiers] = {}
    heard: dict[str, int] = {}
    proven: dict[str, int] = {}
    forgotten: set[str] = set()
    for rank, (stamp, blob) in stored.items():
        try:
            kept = _decoder.decode(blob)
        except msgspec.DecodeError as error:
            msg = f"state of {rank}, {len(blob)} bytes: {error}"
            raise UnreadableState(msg) from error
        if stamp_of(kept.state) != stamp:
            msg = f"state of {rank} stands at {tuple(stamp_of(kept.state))}, its stamp at {tuple(stamp)}"
            raise UnreadableState(msg)
        ranks[rank] = kept.state
        tiers[rank] = {(lane, medium): (last, removes) for lane, medium, last, removes in kept.tiers}
        # older builds did not keep the time: silence counts from now on
        heard[rank] = kept.heard_ms if kept.heard_ms >= 0 else broker_ms
        # nor did they tell a sign of life from a proof: there was none
        proven[rank] = kept.proven_ms if kept.proven_ms >= 0 else heard[rank]
        if kept.forgotten:
            forgotten.add(rank)
        known = kept.version == STATE_VERSION and not kept.forgotten
        cards[rank] = card_of(kept.state, partition) if known else None
    return PartitionState(
        partition=partition,
        partitions=partitions,
        topic_id=topic_id,
        restart=restart,
        read=restart,
        broker_ms=broker_ms,
        ranks=ranks,
        cards=cards,
        tails={},
        tiers=tiers,
        heard=heard,
        proven=proven,
        forgotten=forgotten,
    )


def fresh(
    partition: int,
    *,
    partitions: int,
    topic_id: str,
    restart: int,
    broker_ms: int,
    starts: Mapping[str, int] | None = None,
) -> PartitionState:
    """A partition of which nothing is known: rebuilt from ``restart`` on, each rank from its own start."""
    facts = {"partitions": partitions, "restart": restart, "broker_ms": broker_ms}
    state = resume(partition, topic_id=topic_id, stored={}, **facts)
    state.starts = starts or {}
    return state


def seed(state: PartitionState, owners: Mapping[str, int], *, nonce: Callable[[], bytes]) -> Iterator[Step]:
    """Steps, to be applied before anything of a rebuild is read: of these ranks lower owners are ended already.

    Their Fence is behind the start, or gone with the log's head; what they send late must not count for all that. They
    are kept like ranks that were forgotten: some hundred bytes each, outside the catalogue. O(ranks).
    """
    ranks = sorted(owners)
    for at in range(0, len(ranks), RANKS_PER_STEP_MAX):
        units = []
        for rank in ranks[at : at + RANKS_PER_STEP_MAX]:
            state.ranks[rank] = RankState(owner=owners[rank])
            state.cards[rank], state.heard[rank] = None, state.broker_ms
            state.forgotten.add(rank)
            units.append(_leaving(state.ranks[rank], rank, NEVER, state.broker_ms))
        yield _step(state, tuple(units), at_end=False, nonce=nonce())


def fold(
    state: PartitionState, records: Iterable[LogRecord], *, end: int, nonce: Callable[[], bytes], tally: Tally
) -> Iterator[Step]:
    """Steps for records in offset order, each to be applied before the next is asked for.

    At least one step comes, also without records: it says that the worker is alive. ``end`` is the log end as last
    heard; the last step is ``at_end`` iff everything before it is read. Records below ``state.read`` are skipped.
    ``state`` runs ahead of the index: after a step that was not applied it is worthless, ``resume`` anew.
    ``nonce`` gives 16 fresh random bytes. O(records + ops).
    """
    cut = _Cut(state, nonce, tally)
    for offset, broker_ms, key, value, known_ms in records:
        if offset < state.read:
            continue
        tally.records += 1
        state.broker_ms = max(state.broker_ms, broker_ms)
        home = cut.locate(offset, key)
        if home is not None and offset >= state.starts.get(home.rank, 0):
            record = cut.read(offset, home, value)
            if cut.crowded(home, record):
                yield cut.step(at_end=False)
            cut.take(offset, broker_ms, known_ms, home, record)
        state.read = offset + 1
        if cut.full:
            yield from cut.pieces()
            yield cut.step(at_end=False)
    yield cut.step(at_end=state.read >= end)


def forget(state: PartitionState, seconds: float, *, nonce: Callable[[], bytes], tally: Tally) -> Step | None:
    """A step that takes closed ranks, and those unheard of for ``seconds``, out of the catalogue; None: there are none.

    To be asked for at the log's end only, where nothing of them is still to be read. Time is the log's: the newest
    record of the partition less the rank's last unit, so a silent partition forgets nobody. Owner, life and n stay, so
    records of a fenced owner stay fenced; the rank is unloaded and comes back with its next Opened or checkpoint.
    At most RANKS_PER_STEP_MAX ranks at once. O(ranks).
    """
    since = state.broker_ms - int(seconds * 1000)
    due = [
        rank
        for rank, each in state.ranks.items()
        if rank not in state.forgotten and each.entry is not None and (each.closed or state.heard[rank] < since)
    ]
    if not due:
        return None
    units = tuple(_farewell(state, rank, tally) for rank in due[:RANKS_PER_STEP_MAX])
    return _step(state, units, at_end=True, nonce=nonce())


def _step(state: PartitionState, units: tuple[RankUnit, ...], *, at_end: bool, nonce: bytes) -> Step:
    """The next step; the restart offset moves up to the first record of anything unfinished."""
    restart = min(state.tails.values(), default=state.read)
    step = Step(
        partition=state.partition,
        topic_id=state.topic_id,
        restart_before=state.restart,
        restart=restart,
        read=state.read,
        units=units,
        at_end=at_end,
        broker_ms=state.broker_ms,
        nonce=nonce,
    )
    state.restart = restart
    return step


def _farewell(state: PartitionState, rank: str, tally: Tally) -> RankUnit:
    """Keep of a rank what tells old records from new ones, and which model it was of."""
    old, heard_ms = state.ranks[rank], state.heard[rank]
    kept = RankState(
        owner=old.owner, life=old.life, n=old.n, closed=old.closed, entry=old.entry, stride=old.stride, at=old.at
    )
    state.ranks[rank], state.cards[rank], state.tiers[rank] = kept, None, {}
    state.tails.pop(rank, None)
    state.forgotten.add(rank)
    why = "closed" if old.closed else f"unheard of for {(state.broker_ms - heard_ms) // 1000} s"
    tally.forgotten += 1
    tally.note("forgotten", rank, state.read, why)
    return _leaving(kept, rank, stamp_of(kept), heard_ms)


def _leaving(kept: RankState, rank: str, before: Stamp, heard_ms: int) -> RankUnit:
    """A unit that leaves nothing of a rank in the catalogue but keeps its state."""
    return RankUnit(
        rank=rank,
        model=kept.entry.model if kept.entry else "",
        before=before,
        after=stamp_of(kept),
        ops=(Drop(),),
        now=now_of(kept, {}, heard_ms, heard_ms),
        state=_encoder.encode(_Blob(STATE_VERSION, kept, (), heard_ms, forgotten=True)),
        card=None,
        broker_ms=heard_ms,
        leaves=True,
    )


class _Making:
    """A rank's unit while its records are gathered. ``rest``: ops of one that is larger than a step, not made yet."""

    __slots__ = ("before", "broker_ms", "ops", "rest", "seq")

    def __init__(self, before: Stamp, seq: int) -> None:
        self.before = before
        self.seq = seq
        self.ops: list[Op] = []
        self.rest: Iterator[Op] | None = None
        self.broker_ms = 0


class _Cut:
    """Gathers a partition's records into one step at a time."""

    def __init__(self, state: PartitionState, nonce: Callable[[], bytes], tally: Tally) -> None:
        self._state = state
        self._nonce = nonce
        self._tally = tally
        self._making: dict[str, _Making] = {}
        self._ops = self._bytes = 0
        self._large: str | None = None
        """The rank whose unit is larger than a step: the only one in it then."""
        self._piece: Piece | None = None

    @property
    def full(self) -> bool:
        return (
            self._ops >= OPS_PER_STEP_MAX
            or len(self._making) >= RANKS_PER_STEP_MAX
            or self._bytes >= BYTES_PER_STEP_MAX
            or self._large is not None
        )

    def locate(self, offset: int, raw_key: bytes | None) -> _Home | None:
        """Whose record this is; None where nobody can be told, or where the rank lives in another partition."""
        state = self._state
        try:
            home = _home_of(raw_key, state.partitions)
        except Poison as error:
            self._tally.unreadable_keys += 1
            self._tally.note("unreadable_key", "", offset, str(error))
            return None
        if home.partition != state.partition:
            self._tally.misplaced += 1
            why = f"in partition {state.partition}, its place is {home.partition} of {state.partitions}"
            self._tally.note("misplaced", home.rank, offset, why)
            return None
        return home

    def read(self, offset: int, home: _Home, value: bytes | None) -> EventRecord | None:
        self._bytes += len(value or b"")
        try:
            if not home.lane_ok:
                msg = f"record key names group {home.group}, highest is {GROUP_MAX}"
                raise Poison(msg)  # noqa: TRY301 - the same end as for bytes that do not decode
            return decode_event(value)
        except Poison as error:
            self._tally.unreadable_values += 1
            self._tally.note("unreadable_value", home.rank, offset, str(error))
            return None

    def crowded(self, home: _Home, record: EventRecord | None) -> bool:
        """Whether this record would carry a step that holds something beyond its limit."""
        if not self._making:
            return False
        ends = record.end if isinstance(record, Events) else home.rank in self._state.tails
        if record is None or not (ends or isinstance(record, Checkpoint)):
            return False
        rank = self._state.ranks.get(home.rank)
        size = size_of(record) + sum(size_of(each) for _, each in (rank.tail if rank else ()))
        return self._ops + size > OPS_PER_STEP_MAX

    def take(self, offset: int, broker_ms: int, known_ms: int | None, home: _Home, record: EventRecord | None) -> None:
        """One record: what it does goes to its rank's unit."""
        rank = self._state.ranks.get(home.rank)
        if rank is None:
            if record is None:
                return  # nothing is known of that rank, so nothing is lost
            rank = self._state.ranks[home.rank] = RankState()
        before, was_loaded, seq = stamp_of(rank), rank.loaded, rank.seq
        effects, ops = self._effects(rank, home, record, offset)
        if rank.tail:
            self._state.tails[home.rank] = rank.tail_from
        else:
            self._state.tails.pop(home.rank, None)
        if rank.loaded:
            self._state.told.discard(home.rank)
        elif record is not None and not (effects or rank.load or rank.closed or isinstance(record, Fence)):
            self._unusable(home.rank, rank, record, offset)
        if not effects and stamp_of(rank) == before:
            return
        making = self._making.get(home.rank)
        if making is None:
            making = self._making[home.rank] = _Making(before, seq)
        making.broker_ms = broker_ms
        if proves(record):
            # not by when it arrived: it may have waited, or come while more was still missing
            self._state.proven[home.rank] = broker_ms if known_ms is None else max(0, min(known_ms, broker_ms))
        if isinstance(ops, list):
            self._add(making, ops)
        else:
            making.rest, self._large = ops, home.rank
        restated = isinstance(record, Checkpoint)
        watch(self._state.tiers.setdefault(home.rank, {}), effects, broker_ms, restated=restated)
        self._observe(home.rank, offset, effects, was_loaded=was_loaded)
        begun = any(isinstance(effect, Loading) for effect in effects)
        if isinstance(record, Checkpoint) and rank.loaded and (begun or not was_loaded):
            self._tally.loaded += 1
            self._tally.note("loaded", home.rank, offset, f"a checkpoint of {record.part + 1} parts")

    def _unusable(self, name: str, rank: RankState, record: EventRecord, offset: int) -> None:
        """It changes nothing, and the rank has no picture. Its bridge may think that all is well: told once."""
        self._tally.unusable += 1
        if name not in self._state.told:
            self._state.told.add(name)
            why = (
                f"owner {rank.owner} ended {record.owner}"
                if record.owner < rank.owner
                else "no life before it is known"
            )
            self._tally.note("unusable", name, offset, why)

    def step(self, *, at_end: bool) -> Step:
        """Close what was gathered; of a unit in pieces the last one."""
        units = tuple(self._unit(rank, making) for rank, making in self._making.items())
        step = _step(self._state, units, at_end=at_end, nonce=self._nonce())
        if self._piece is not None:
            step = msgspec.structs.replace(step, piece=self._piece)
        self._tally.units += len(units)
        self._tally.ops += self._ops
        self._making = {}
        self._ops = self._bytes = 0
        self._large = self._piece = None
        return step

    def pieces(self) -> Iterator[Step]:
        """All but the last piece of a unit that is larger than a step; none of any other. Ops are made for each when it
        is asked for, so that no piece is a long stretch of work.
        """
        if self._large is None:
            return
        ((rank, making),) = self._making.items()
        whole, token, number = self._unmade(rank, making), self._nonce(), 0
        ops = self._next_ops(rank, making)
        while ahead := self._next_ops(rank, making):
            yield piece_of(whole, tuple(ops), number, token, self._nonce())
            ops, number = ahead, number + 1
        making.ops = ops
        if number:
            self._piece = Piece(token, number, last=True)

    def _unmade(self, rank: str, making: _Making) -> Step:
        """A step of a unit whose ops are not made yet. Until they are applied its index holds no whole batch, so the
        sequence that it covers is that of before.
        """
        state, at = self._state, self._state.restart
        after, model = stamp_of(state.ranks[rank]), self._model_of(rank)
        now = Now(*after, seq=making.seq)
        unit = RankUnit(rank, model, making.before, after, (), now, b"", None, making.broker_ms)
        return Step(state.partition, state.topic_id, at, at, at, (unit,), at_end=False, broker_ms=0, nonce=bytes(16))

    def _next_ops(self, rank: str, making: _Making) -> list[Op]:
        """Ops of the next piece; none at the end. What cannot be made unloads the rank, whatever went before."""
        ops: list[Op] = []
        try:
            ops += islice(making.rest or (), PIECE_OPS_MAX)
        except Exception as error:  # noqa: BLE001 - one record must not stop the other ranks of its partition
            state = self._state.ranks[rank]
            why = _reason(error)
            unload(state, state.at, why)
            making.rest = None
            watch(self._state.tiers[rank], [Dropped(why)], making.broker_ms)
            self._observe(rank, state.at, [Dropped(why)], was_loaded=True)
            ops = [Drop()]
        self._ops += len(ops)
        return ops

    def _effects(
        self, rank: RankState, home: _Home, record: EventRecord | None, offset: int
    ) -> tuple[list[Effect], list[Op] | Iterator[Op]]:
        """Accept one record. A record that breaks us is a hole of its rank, whatever the reason. Ops of a unit that is
        larger than a step are not made yet.
        """
        try:
            effects = accept(rank, home.group, record, offset)
            if not effects:
                return effects, []
            size = sum(map(size_of_effect, effects))
            if size > UNIT_OPS_MAX:
                msg = f"unit of {size} ops > {UNIT_OPS_MAX}"
                raise Poison(msg)  # noqa: TRY301 - the same end as for a record that is wrong
            if size > OPS_PER_STEP_MAX:
                return effects, chain.from_iterable(map(ops_of, effects))
            return effects, [op for effect in effects for op in ops_of(effect)]
        except Exception as error:  # noqa: BLE001 - one record must not stop the other ranks of its partition
            why = _reason(error)
            unload(rank, offset, why)
            return [Dropped(why)], [Drop()]

    def _add(self, making: _Making, ops: list[Op]) -> None:
        for op in ops:
            if isinstance(op, Bind | Drop):  # nothing that was done to the old slots matters any more
                self._ops -= len(making.ops)
                making.ops.clear()
            making.ops.append(op)
            self._ops += 1

    def _observe(self, rank: str, offset: int, effects: list[Effect], *, was_loaded: bool) -> None:
        for effect in effects:
            if isinstance(effect, Opening):
                self._tally.opened += 1
                self._tally.note("opened", rank, offset, effect.record.why)
            elif isinstance(effect, Loading) and was_loaded:
                self._tally.unloaded += 1
                self._tally.note("unloaded", rank, offset, "a hole before a checkpoint, which is loaded")
            elif isinstance(effect, Dropped):
                self._state.told.add(rank)
                self._tally.unloaded += 1
                self._tally.note("unloaded", rank, offset, effect.why)

    def _unit(self, rank: str, making: _Making) -> RankUnit:
        state = self._state.ranks[rank]
        card = card_of(state, self._state.partition)
        changed = card != self._state.cards.get(rank)
        self._state.cards[rank] = card
        kept = msgspec.structs.replace(state, tail=(), tail_from=-1) if state.tail else state
        tiers = self._state.tiers.get(rank, {})
        told = tuple((*tier, *known) for tier, known in tiers.items())
        # of a rank that was loaded from a checkpoint nothing may have been proven yet
        proven_ms = self._state.proven.setdefault(rank, 0)
        self._state.heard[rank] = making.broker_ms
        self._state.forgotten.discard(rank)
        return RankUnit(
            rank=rank,
            model=self._model_of(rank),
            before=making.before,
            after=stamp_of(state),
            ops=tuple(making.ops),
            now=now_of(state, tiers, making.broker_ms, proven_ms),
            state=_encoder.encode(_Blob(STATE_VERSION, kept, told, making.broker_ms, proven_ms=proven_ms)),
            card=card if changed else None,
            broker_ms=making.broker_ms,
        )

    def _model_of(self, rank: str) -> str:
        entry = self._state.ranks[rank].entry
        return entry.model if entry else ""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Poison) else f"{type(error).__name__} while folding"


class _Home(NamedTuple):
    """A parsed record key, with the partition where its rank belongs."""

    rank: str
    group: int | str | None
    partition: int
    lane_ok: bool


@lru_cache(maxsize=KEYS_CACHED_MAX)
def _home_of(raw_key: bytes | None, partitions: int) -> _Home:
    key = parse_key(raw_key)
    lane_ok = not isinstance(key.group, int) or 0 <= key.group <= GROUP_MAX
    return _Home(key.rank_id, key.group, partition_of(key.replica, key.rank, partitions), lane_ok)
