"""What a rank's effects and state become in the index: ops, card, moving part. Pure, and no state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import msgspec

from kvledger_index.blockkeys import SEGMENT_STRIDES
from kvledger_index.model import MEDIA, GroupSpec, lane_code
from kvledger_index.units import Bind, Card, Clear, Drop, Now, Op, Put, Stamp
from kvledger_wire.accept import GPU, Applied, Dropped, Effect, Loading, Opening, RankState
from kvledger_wire.errors import Poison
from kvledger_wire.records import (
    ATTACHED,
    CLEARED,
    REMOVED,
    STORED,
    Change,
    Checkpoint,
    EventRecord,
    Events,
    Heartbeat,
    Lived,
    Opened,
    Resumed,
    Run,
)

MIXED_GROUPS = "GPU events with and without a group number"

Tiers = dict[tuple[int, int], tuple[int, bool]]
"""(lane, code of a lower medium) -> (log time in ms of its last store, whether it ever announced a removal)."""

STORED_AT_UNKNOWN = 0
"""In place of the former where a checkpoint told of the tier: it does not say when the tier last stored, so the tier
does not count before it stores again, or removes (ADR 8). Too little in lower tiers is never wrong, too much would be.
"""

_KEYS = tuple(Struct(f">{count}Q") for count in range(SEGMENT_STRIDES + 1))
_KEY = _KEYS[1]
_NO_PARENT = bytes(8)


def stamp_of(state: RankState) -> Stamp:
    """Where a rank stands; NEVER for one of which nothing was accepted."""
    return Stamp(state.owner, state.life[0], state.life[1], state.n)


def card_of(state: RankState, partition: int) -> Card | None:
    """The catalogue entry of a rank; None before its first Opened, when not even its model is known."""
    entry = state.entry
    if entry is None:
        return None
    uncertain = state.uncertain
    if None in state.heard_gpu and len(state.heard_gpu) > 1:
        uncertain = (*uncertain, MIXED_GROUPS)
    return Card(
        model=entry.model,
        partition=partition,
        stride=state.stride,
        loaded=state.loaded,
        suspended=state.suspended,
        partial=state.partial,
        uncertain=uncertain,
        closed=state.closed,
        groups=groups_of(state),
        heard=state.heard,
        hash_block_size=entry.hash_block_size,
        alignment=entry.alignment,
        partial_hash_hits=entry.partial_hash_hits,
        full_reports=entry.full_reports,
        engine_version=state.engine_version,
        process=state.process,
        scheme=state.scheme or entry.hash_scheme,
        expire_seconds=entry.expire_seconds,
    )


def groups_of(state: RankState) -> tuple[GroupSpec, ...]:
    """The groups that have a part in a hit on this rank, the wire's facts laid under the entry's.

    Numbered GPU events (or none yet): the entry's numbered groups and those heard. GPU events without a group: the
    entry's group ``null``, else its only group whatever the number (an engine before 0.20 has one), by default one
    full-attention group. Offload events do not decide.
    """
    entry = {spec.group: spec for spec in state.entry.groups} if state.entry else {}
    wire = {spec.group: spec for spec in state.groups}
    numbers = {group for group in (*entry, *wire, *state.heard) if group is not None}
    bare = None in state.heard_gpu and len(state.heard_gpu) == 1
    if bare or (not numbers and None in entry):
        only = next(iter(entry.values())) if len(entry) == 1 else None
        spec = _lay(None, entry.get(None, only), wire.get(None))
        return (spec if spec.kind else msgspec.structs.replace(spec, kind="full_attention"),)
    return tuple(_lay(group, entry.get(group), wire.get(group)) for group in sorted(numbers))


def _lay(group: int | None, entry: GroupSpec | None, wire: GroupSpec | None) -> GroupSpec:
    over, under = entry or GroupSpec(group), wire or GroupSpec(group)
    return GroupSpec(
        group=group,
        kind=under.kind if over.kind is None else over.kind,
        block_size=under.block_size if over.block_size is None else over.block_size,
        window=under.window if over.window is None else over.window,
        chunk=under.chunk if over.chunk is None else over.chunk,
        eagle=over.eagle or under.eagle,
    )


def now_of(state: RankState, tiers: Tiers, broker_ms: int, proven_ms: int) -> Now:
    """What moves with every unit: log times of its last record, and of the last one that ``proves``."""
    return Now(
        *stamp_of(state),
        seq=state.seq,
        unplaced=_lanes(state.unplaced),
        opaque=_lanes(state.opaque),
        veiled=_lanes(state.veiled),
        silent=tuple((*tier, max(0, broker_ms - last)) for tier, (last, removes) in tiers.items() if not removes),
        unproven_ms=max(0, broker_ms - proven_ms),
    )


def proves(record: EventRecord | None) -> bool:
    """Whether a record says that nothing was missing from the rank's picture at its time. A checkpoint restates the
    picture, and a heartbeat may only say that the engine lives.
    """
    return isinstance(record, Opened | Events | Resumed) or (isinstance(record, Heartbeat) and not record.alive)


def watch(tiers: Tiers, effects: list[Effect], broker_ms: int, *, restated: bool = False) -> None:
    """Lower tiers that never announce a removal would be claimed for ever: keep when each last stored (ADR 5).

    ``restated``: the effects are those of a checkpoint.
    """
    stored_ms = STORED_AT_UNKNOWN if restated else broker_ms
    for effect in effects:
        if not isinstance(effect, Applied):
            tiers.clear()
            continue
        for change in effect.changes:
            if isinstance(effect.group, str):  # a clear
                for tier in [tier for tier in tiers if tier[1] == change.medium]:
                    del tiers[tier]
            elif change.medium != GPU and change.origin != ATTACHED:  # attached: no copy came or went
                tier = (lane_code(effect.group), change.medium)
                last, removes = tiers.get(tier, (stored_ms, False))
                tiers[tier] = (stored_ms, removes) if change.op == STORED else (last, True)


def _lanes(counts: tuple[tuple[int | None, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((lane_code(group), medium, count) for group, medium, count in counts)


def ops_of(effect: Effect) -> Iterator[Op]:
    """What one effect does to the index, made one by one. Raises Poison, perhaps behind some ops, for changes that no
    bridge of this contract writes.
    """
    match effect:
        case Opening() | Loading():
            yield Bind()
        case Dropped():
            yield Drop()
        case Applied(group=str(), changes=changes):
            yield from map(_clear_of, changes)
        case Applied(group=group, changes=changes):
            lane = lane_code(group)  # type: ignore[arg-type]  # the str case is above
            for change in changes:
                yield from _puts_of(change, lane)


def size_of_effect(effect: Effect) -> int:
    """Ops that an effect may become, at most. O(changes), and O(runs) of attached ones."""
    return sum(map(_size_of_change, effect.changes)) if isinstance(effect, Applied) else 1


def size_of(record: EventRecord | Lived) -> int:
    """Ops that a record may become, at most."""
    match record:
        case Events():
            return sum(map(_size_of_change, record.changes))
        case Checkpoint():
            return 1 + sum(_size_of_change(held.change) for held in record.lanes)
        case _:
            return 1


def _size_of_change(change: Change) -> int:
    names = len(change.unplaced)
    if change.origin == ATTACHED:
        names += sum(len(run.hashes) for run in change.runs)
    return max(1, len(change.runs) + names // 8)


def _clear_of(change: Change) -> Clear:
    if change.op != CLEARED or not 0 <= change.medium < len(MEDIA):
        msg = f"rank-wide change with op {change.op}, medium {change.medium}: only clears are rank-wide"
        raise Poison(msg)
    return Clear(MEDIA[change.medium])


def _puts_of(change: Change, lane: int) -> Iterator[Put]:
    if change.op not in (STORED, REMOVED) or not 0 <= change.medium < len(MEDIA):
        msg = f"change of a group with op {change.op}, medium {change.medium}"
        raise Poison(msg)
    for run in change.runs:
        if run.effective:
            yield _put_of(change, lane, run)
    # an attached store gave a hash its key, so it leaves; an attached removal took the key, so it comes
    add = (change.op == STORED) != (change.origin == ATTACHED)
    if change.unplaced or change.unplaced_effective:
        yield from _hash_puts_of(change, lane, change.unplaced, _listed(change), add=add)
    if change.origin == ATTACHED:
        for run in change.runs:
            every = (1 << len(run.hashes) // 8) - 1
            yield from _hash_puts_of(change, lane, run.hashes, every, add=add)


def _listed(change: Change) -> int:
    """Which unplaced hashes of a change became resident without a key, or ceased to be.

    An older bridge does not say. Then none came and all that it names went: rather too few stand in the index, which
    ``accept`` calls opaque, than too many.
    """
    if change.unplaced_effective:
        return int.from_bytes(change.unplaced_effective, "little")
    return (1 << len(change.unplaced) // 8) - 1 if change.op == REMOVED and change.origin != ATTACHED else 0


def _hash_puts_of(change: Change, lane: int, hashes: bytes, bits: int, *, add: bool) -> Iterator[Put]:
    """A hash without a block key stands in the index under itself, the only key of its row (ADR 5)."""
    count, rest = divmod(len(hashes), 8)
    if rest or bits >> count:
        msg = f"{len(hashes)} bytes of hashes with bits {bits:#x}"
        raise Poison(msg)
    for j, name in enumerate(_KEY.iter_unpack(hashes)):
        if bits >> j & 1:
            yield Put(
                add=add,
                medium=MEDIA[change.medium],
                lane=lane,
                row=name[0],
                position=0,
                parent=0,
                keys=name,
                mask=1,
            )


def _put_of(change: Change, lane: int, run: Run) -> Put:
    """Effective bits only: the copies that the bridge counted away change nothing. Path keys before them stay."""
    count, rest = divmod(len(run.keys), 8)
    if (
        rest
        or run.position < 0
        or run.position + count > SEGMENT_STRIDES
        or run.effective >> count
        or len(run.row) != 8
        or len(run.parent) != 8
        or (run.position == 0 and (run.keys[:8] != run.row or run.parent != _NO_PARENT))
    ):
        msg = f"run of {len(run.keys)} key bytes at position {run.position} with bits {run.effective:#x}"
        raise Poison(msg)
    used = run.effective.bit_length()
    return Put(
        add=change.op == STORED,
        medium=MEDIA[change.medium],
        lane=lane,
        row=int.from_bytes(run.row, "big"),
        position=run.position,
        parent=int.from_bytes(run.parent, "big"),
        keys=_KEYS[used].unpack_from(run.keys),
        mask=run.effective,
    )
