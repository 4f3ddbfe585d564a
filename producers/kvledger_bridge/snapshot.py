"""A ledger -> the parts of a checkpoint: all that is resident, and all names that children may need (DESIGN §5).

    lanes       copies by hash, placed or not
    parents     strong names that no GPU lane tells, newest first: those of blocks that are not resident last in a part
    weak        names that lower tiers gave and no lane tells
    ambiguous   hashes that are placed no more

``kvledger_bridge.recall`` reads them back. What is not in them: tokens, so orphans, which stay unplaced after a recall.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from struct import Struct
from typing import NamedTuple

from kvledger_bridge.blocks import Block
from kvledger_bridge.lanes import Lane
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.lineage import Names
from kvledger_bridge.runs import OpenChange
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import RankState
from kvledger_wire.records import LIVE, SCHEMA, STORED, Checkpoint, Held, Run

PART_ENTRIES_MAX = 2048
"""Blocks and hashes of one part: at most about 200 KiB, where each is a run of its own with a digest, so well within
``unit.RECORD_BYTES_MAX``; and about 12 ms of work, as the other ranks wait meanwhile."""

COPIES_MAX = 0xFFFF
"""What the log can say of copies of one block; a removal too many is counted, a claim too many would stay."""


class Part(NamedTuple):
    """What one record of a checkpoint says of the ledger; the ``last`` one may say nothing.

    ``opaque`` restates (group, medium code, count): after a recall it may be more than records said before.
    """

    opaque: tuple[tuple[int | None, int, int], ...]
    lanes: tuple[Held, ...] = ()
    parents: tuple[Run, ...] = ()
    weak: tuple[Run, ...] = ()
    ambiguous: bytes = b""
    last: bool = False


def parts(ledger: Ledger, seq: int, *, entries_max: int = PART_ENTRIES_MAX) -> Iterator[Part]:
    """The ledger as it stands after batch ``seq``; it must not change until the last part was taken.

    O(``entries_max``) per part, but for steps over names that need no telling (100 ns each).
    """
    names = ledger.lineage.names
    digests = ledger.lineage.chains.recorded
    told: set[int] = set()
    opaque = tuple((lane.group, lane.code, len(lane.opaque)) for lane in ledger.lanes if lane.opaque)
    for lane in ledger.lanes:
        for held in _held(lane, names, told, (seq, ledger.ts), digests=digests, entries_max=entries_max):
            yield Part(opaque, lanes=(held,))
    untold = _strong(names, told)
    while some := list(islice(untold, entries_max)):
        yield Part(opaque, parents=_runs(some, digests=digests))
    untold = ((name, block) for name, block in names.weak.items() if name not in told)
    while some := list(islice(untold, entries_max)):
        yield Part(opaque, weak=_runs(some, digests=False))
    doubtful = iter(names.ambiguous)
    while hashes := list(islice(doubtful, entries_max)):
        yield Part(opaque, ambiguous=_pack(hashes))
    yield Part(opaque, last=True)


def _held(
    lane: Lane, names: Names, told: set[int], at: tuple[int, float], *, digests: bool, entries_max: int
) -> Iterator[Held]:
    """One lane; ``told`` takes the names that its runs tell in the table to which a reader will add them."""
    seq, ts = at
    blocks = iter(lane.copies.items())
    while some := list(islice(blocks, entries_max)):
        change = OpenChange(STORED, lane.code, LIVE, digests=digests)
        copies: dict[int, int] = {}
        for block, count in some:
            name = _name_of(block, names, gpu=lane.gpu)
            if lane.gpu or name in names.weak:
                told.add(name)
            copies[block.key] = count
            change.add_block(block, name, effective=True)
        whole = change.finish(seq, ts)
        counts = [copies[key] for run in whole.runs for key in _block_keys(run)]
        yield Held(lane.group, whole, _copies(counts))
    loose = iter(lane.unplaced.items())
    while rest := list(islice(loose, entries_max)):
        change = OpenChange(STORED, lane.code, LIVE)
        for name, _ in rest:
            change.add_unplaced(name, effective=True)
        yield Held(
            lane.group,
            change.finish(seq, ts),
            _copies([count for _, count in rest]),
            opaque=_bitmap(name in lane.opaque for name, _ in rest),
            veiled=_bitmap(name in lane.veiled for name, _ in rest),
        )


def _name_of(block: Block, names: Names, *, gpu: bool) -> int:
    """The name by which a lane may know a block: GPU lanes a strong one, others a weak one where it has one."""
    table = names.strong if gpu else names.weak
    every: list[int] = [block.hash, *names.others.get(block, ())]
    return next((name for name in every if table.get(name) is block), block.hash)


def _strong(names: Names, told: set[int]) -> Iterator[tuple[int, Block]]:
    """Strong names that no GPU lane told: of blocks that are not resident, the newest first, then of the others."""
    for block in reversed(names.idle):
        for name in (block.hash, *names.others.get(block, ())):
            if name not in told and names.strong.get(name) is block:
                yield name, block
    for name, block in names.strong.items():
        if block.refs and name not in told:
            yield name, block


def _runs(some: Iterable[tuple[int, Block]], *, digests: bool) -> tuple[Run, ...]:
    change = OpenChange(STORED, 0, LIVE, digests=digests)
    for name, block in some:
        change.add_block(block, name, effective=False)
    return change.finish(-1, 0.0).runs


def _block_keys(run: Run) -> Iterator[int]:
    for at in range(0, len(run.keys), 8):  # runs of blocks that came one by one name a block at every key
        yield int.from_bytes(run.keys[at : at + 8], "big")


def _copies(counts: list[int]) -> bytes:
    if all(count == 1 for count in counts):
        return b""
    return Struct(f">{len(counts)}H").pack(*[min(count, COPIES_MAX) for count in counts])


def _bitmap(bits: Iterable[bool]) -> bytes:
    """Bit j % 8 of byte j // 8, without zero bytes at the end."""
    number = sum(1 << place for place, bit in enumerate(bits) if bit)
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def _pack(hashes: list[int]) -> bytes:
    return Struct(f">{len(hashes)}Q").pack(*hashes)


def restated(entry: ModelEntry, state: RankState, part: Part, place: int) -> Checkpoint:
    """Part ``place`` (from 0) as the next record of a rank whose readers stand at ``state``."""
    return Checkpoint(
        schema=SCHEMA,
        owner=state.owner,
        life=state.life,
        n=state.n + 1,
        part=place,
        last=part.last,
        entry=entry,
        stride=state.stride,
        seq=state.seq,
        digest=state.digest,
        partial=state.partial,
        suspended=state.suspended,
        uncertain=state.uncertain,
        engine_version=state.engine_version,
        process=state.process,
        groups=state.groups,
        heard=state.heard,
        heard_gpu=state.heard_gpu,
        scheme=state.scheme,
        unplaced=state.unplaced,
        opaque=part.opaque,
        veiled=state.veiled,
        lanes=part.lanes,
        parents=part.parents,
        ambiguous=part.ambiguous,
        weak=part.weak,
    )
