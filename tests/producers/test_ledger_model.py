"""The ledger against a dict of counters: copies, masked and orphaned stores, removals, clears, small limits.

The model is an engine as DESIGN §3 describes it: a hash is content (the path of block ids from token 0), a lane counts
copies. It knows every prompt, so it can say what a key must be; the ledger only sees events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from struct import unpack
from typing import Any

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvledger_bridge.decode import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.model import MEDIA, ModelEntry, medium_of
from kvledger_wire.records import ATTACHED, CLEARED, REMOVED, STORED, Change

BLOCK = 16
PATHS_MAX = 20
Path = tuple[int, ...]
Lane = tuple[int | None, str]
GPU_LANES: list[Lane] = [(0, "GPU"), (1, "GPU"), (2, "gpu")]
LANES: list[Lane] = [*GPU_LANES, (0, "CPU"), (None, "CPU"), (0, "STORAGE"), (0, "CXL")]
CLEARED_MEDIA = {"gpu", "cpu", "other"}

paths = st.lists(st.integers(0, 1), min_size=1, max_size=PATHS_MAX).map(tuple)
lanes = st.sampled_from(LANES)
gpu_lanes = st.sampled_from(GPU_LANES)


def name(path: Path) -> int:
    return xxhash.xxh3_64_intdigest(bytes(path), 7)


def tokens(path: Path) -> tuple[int, ...]:
    return tuple(block * 100 + i for block in path for i in range(BLOCK))


def key(path: Path) -> int:
    return prompt_keys("m", tokens(path), BLOCK)[-1]


STARTS: dict[str, Any] = {
    "parents_max": st.sampled_from([0, 3, 1000]),
    "orphans_max": st.sampled_from([0, 8, 1000]),
    "copies": st.sampled_from(["counted", "last"]),
}
"""What a machine starts with, its heirs' too."""


class LedgerMachine(RuleBasedStateMachine):
    """Rules add events to a batch; ``flush`` applies it to ledger, counters and a reader of the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.seq = -1
        self.counters: dict[Lane, Counter[int]] = defaultdict(Counter)
        self.content: dict[int, Path] = {}
        self.named: set[int] = set()
        self.orphans: list[tuple[int, tuple[int, ...], set[int]]] = []
        self.covered: set[int] = set()
        self.read: dict[tuple[int | str | None, int], set[int]] = defaultdict(set)
        self.read_unplaced: dict[tuple[int | str | None, int], int] = {}
        self.read_loose: dict[tuple[int | str | None, int], set[int]] = defaultdict(set)
        self.complete = True
        self.pieces: list[Piece] = []

    @initialize(**STARTS)
    def start(self, parents_max: int, orphans_max: int, copies: Any) -> None:
        self.counted = copies == "counted"
        self.complete = min(parents_max, orphans_max) == 1000
        entry = ModelEntry(model="m", copies=copies)
        self.ledger = Ledger(entry, parents_max=parents_max, orphans_max=orphans_max)

    # -- what engines do ------------------------------------------------------------------------------------------

    @rule(path=paths, start=st.integers(0, PATHS_MAX), lane=gpu_lanes, wide=st.booleans())
    def store(self, path: Path, start: int, lane: Lane, wide: bool) -> None:
        """A dense event; one that does not start at token 0 may have a parent that nobody announced."""
        start = min(start, len(path) - 1)
        per = 2 if wide and start % 2 == 0 and len(path) % 2 == 0 else 1
        ends = range(start + per, len(path) + 1, per)
        self.say(path, ends, BLOCK * per, start, lane)

    @rule(path=paths, start=st.integers(0, PATHS_MAX), lane=gpu_lanes, kept=st.sets(st.integers(1, PATHS_MAX)))
    def store_masked(self, path: Path, start: int, lane: Lane, kept: set[int]) -> None:
        start = min(start, len(path) - 1)
        ends = [end for end in range(start + 1, len(path) + 1) if end in kept]
        self.say(path, ends, BLOCK, start, lane)

    @rule(path=paths, lane=lanes)
    def store_placeholder(self, path: Path, lane: Lane) -> None:
        self.content[name(path)] = path
        self.events.append(BlockStored((name(path),), None, (), 0, medium=lane[1], group_idx=lane[0]))

    @rule(lane=lanes, pick=st.integers(0, 50), count=st.integers(1, 4))
    def remove(self, lane: Lane, pick: int, count: int) -> None:
        """Of what is resident, if anything is; else of what is not."""
        resident = sorted(self.counters[lane]) or sorted(self.content) or [1]
        for i in range(count):
            self.events.append(BlockRemoved((resident[(pick + i) % len(resident)],), lane[1], lane[0]))

    @rule()
    def clear(self) -> None:
        self.events.append(AllBlocksCleared())

    def say(self, path: Path, ends: Any, size: int, start: int, lane: Lane) -> None:
        for end in range(1, len(path) + 1):
            self.content[name(path[:end])] = path[:end]
        self.events.append(
            BlockStored(
                tuple(name(path[:end]) for end in ends),
                name(path[:start]) if start else None,
                tokens(path[start:]),
                size,
                medium=lane[1],
                group_idx=lane[0],
            )
        )

    # -- the model ------------------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        events, self.events = tuple(self.events), []
        self.seq += 1
        pieces = self.pieces = self.ledger.apply(self.seq, Batch(0.0, 0, events))
        self.name_all(events)
        for event in events:
            self.count(event)
        for piece in pieces:
            self.read_piece(piece)

    def name_all(self, events: tuple[Event, ...]) -> None:
        """What the batch's dense events and the orphans name, to the end."""
        dense = [
            (0 if event.parent_block_hash is None else event.parent_block_hash, event.block_hashes)
            for event in events
            if isinstance(event, BlockStored) and self.is_dense(event)
        ]
        known = {0, *self.named}
        waiting: list[tuple[Any, tuple[Any, ...]]] = [*dense, *((parent, names) for parent, names, _ in self.orphans)]
        while grown := [each for each in waiting if each[0] in known]:
            waiting = [each for each in waiting if each[0] not in known]
            known.update(each for _, names in grown for each in names)
        self.named = known - {0}
        for each in [each for each in self.orphans if each[0] in known]:
            self.forget(each)

    def is_dense(self, event: BlockStored) -> bool:
        hashes = event.block_hashes
        return bool(event.token_ids and hashes) and len(hashes) * event.block_size == len(event.token_ids)

    def count(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            for lane, counter in self.counters.items():
                if medium_of(lane[1]) in CLEARED_MEDIA:
                    counter.clear()
            self.drain()
            return
        counter = self.counters[self.lane(event)]
        for each in event.block_hashes:
            assert isinstance(each, int)
            if isinstance(event, BlockStored):
                counter[each] = counter[each] + 1 if self.counted else 1
            elif counter[each] > 1 and self.counted:
                counter[each] -= 1
            else:
                del counter[each]
        if isinstance(event, BlockStored):
            self.hold(event)
        else:
            self.drain()

    def lane(self, event: BlockStored | BlockRemoved) -> Lane:
        return next(each for each in LANES if each == (event.group_idx, event.medium))

    def loose(self) -> set[int]:
        return {each for counter in self.counters.values() for each in counter} - self.named

    def hold(self, event: BlockStored) -> None:
        """A dense event that names nothing yet is kept while a hash that only it tells is resident."""
        parent = event.parent_block_hash
        if not self.is_dense(event) or parent is None or parent in self.named:
            return
        assert isinstance(parent, int)
        names = tuple(each for each in event.block_hashes if isinstance(each, int))
        live = {each for each in names if each in self.loose() and each not in self.covered}
        if live:
            self.covered |= live
            self.orphans.append((parent, names, live))

    def drain(self) -> None:
        loose = self.loose()
        for orphan in list(self.orphans):
            self.covered -= orphan[2] - loose
            orphan[2].intersection_update(loose)
            if not orphan[2]:
                self.forget(orphan)

    def forget(self, orphan: tuple[int, tuple[int, ...], set[int]]) -> None:
        self.orphans.remove(orphan)
        self.covered -= orphan[2]

    def read_piece(self, piece: Piece) -> None:
        """As the fold does: set semantics, effective bits only."""
        for change in piece.changes:
            if change.op == CLEARED:
                for lane in [each for each in self.read if each[1] == change.medium]:
                    del self.read[lane]
                for lane in [each for each in self.read_unplaced if each[1] == change.medium]:
                    del self.read_unplaced[lane]
                for lane in [each for each in self.read_loose if each[1] == change.medium]:
                    del self.read_loose[lane]
            self.read_singles(change, self.read_loose[piece.group, change.medium])
            for run in change.runs:
                for i, each in enumerate(unpack(f">{len(run.keys) // 8}Q", run.keys)):
                    if run.effective >> i & 1:
                        held = self.read[piece.group, change.medium]
                        assert (each in held) == (change.op == REMOVED)
                        (held.remove if change.op == REMOVED else held.add)(each)
        if piece.group != "*":
            for lane in [each for each in self.read_unplaced if each[0] == piece.group]:
                del self.read_unplaced[lane]
            self.read_unplaced.update({(piece.group, medium): count for medium, count in piece.unplaced})

    def read_singles(self, change: Change, loose: set[int]) -> None:
        """A hash without a key stands in the index by itself; what is attached passes between there and its key."""
        if change.origin == ATTACHED:
            for run in change.runs:
                names = unpack(f">{len(run.hashes) // 8}Q", run.hashes)
                (loose.difference_update if change.op == STORED else loose.update)(names)
        for i, each in enumerate(unpack(f">{len(change.unplaced) // 8}Q", change.unplaced)):
            if change.unplaced_effective[i // 8] >> i % 8 & 1:
                assert (each in loose) == (change.op == REMOVED)
                (loose.remove if change.op == REMOVED else loose.add)(each)

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def copies_are_those_of_the_engine(self) -> None:
        if self.seq < 0 or self.events:
            return
        for lane in LANES:
            # lanes that differ only in the spelling of their medium are one
            assert dict(self.counters[lane]) == self.ledger.resident(*lane)

    @invariant()
    def every_key_is_that_of_its_prompt(self) -> None:
        if self.seq < 0 or self.events:
            return
        for lane in LANES:
            for each, placed in self.ledger.placed(*lane).items():
                assert placed == key(self.content[each])
            if self.complete:
                assert set(self.counters[lane]) & self.named == set(self.ledger.placed(*lane))

    @invariant()
    def a_reader_of_the_log_knows_what_the_ledger_knows(self) -> None:
        if self.seq < 0 or self.events:
            return
        for lane in LANES:
            group, code = lane[0], MEDIA.index(medium_of(lane[1]))
            placed = set(self.ledger.placed(*lane).values())
            assert placed == self.read[group, code]
            loose = set(self.ledger.resident(*lane)) - set(self.ledger.placed(*lane))
            assert loose == self.read_loose[group, code]
            assert len(loose) == self.read_unplaced.get((group, code), 0)

    @invariant()
    def limits_and_books_hold(self) -> None:
        if self.seq < 0:
            return
        lineage = self.ledger.lineage
        blocks = set(lineage._keys.values())
        refs = Counter(block for lane in self.ledger._lanes.values() for block in lane.copies)
        loose = Counter(each for lane in self.ledger._lanes.values() for each in lane.unplaced)
        assert len(lineage._idle) <= lineage._parents_max
        assert lineage._orphan_size <= lineage._orphans_max
        assert set(refs) <= blocks
        assert {block for block in blocks if not refs[block]} == set(lineage._idle)
        assert all(block.refs == refs[block] for block in blocks)
        assert set(lineage._strong.values()) == blocks
        assert dict(loose) == lineage.loose
        assert not set(loose) & set(lineage._strong)
        held = [span for kin in lineage._orphans.values() for span in kin]
        assert set(held) == set(lineage._orphan_order) == set(lineage._orphan_of.values())
        assert Counter(lineage._orphan_of.values()) == {span: span.live for span in held}
        assert sum(span.size for span in held) == lineage._orphan_size


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
