"""A ledger with its log, and a second ledger recalled from that log, for tests of snapshot and recall."""

from __future__ import annotations

from typing import Any

from kvledger_bridge.decode import Batch
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_bridge.recall import Recall, Recalled
from kvledger_bridge.snapshot import PART_ENTRIES_MAX, parts, restated
from kvledger_bridge.unit import Covered, records
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import RankState, accept
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import SCHEMA, Fence, Opened, decode_event, encode


class Life:
    """One life of one rank, with everything that its bridge wrote."""

    def __init__(self, entry: ModelEntry, **limits: int) -> None:
        self.entry = entry
        self.ledger = Ledger(entry, **limits)
        self.state = RankState()
        self.log: list[tuple[int | str | None, Any]] = []
        self.write(RANK_WIDE, Fence(SCHEMA, 7, "b", "", ""))
        self.write(RANK_WIDE, Opened(SCHEMA, 7, (7, 1), 0, entry, entry.stride, -1, b"", partial=False, why=""))

    def write(self, group: int | str | None, record: Any) -> None:
        record = decode_event(encode(record))
        accept(self.state, group, record, len(self.log))
        self.log.append((group, record))

    def take(self, seq: int, batch: Batch) -> list[Piece]:
        pieces = self.ledger.apply(seq, batch)
        covered = Covered(7, (7, 1), seq, b"d" * 16)
        for group, record in records(covered, self.state.n + 1, pieces, ()):
            self.write(group, record)
        return pieces

    def checkpoint(self, entries_max: int = PART_ENTRIES_MAX) -> int:
        """Write one; returns the offset of its first part."""
        at = len(self.log)
        for place, part in enumerate(parts(self.ledger, self.state.seq, entries_max=entries_max)):
            self.write(RANK_WIDE, restated(self.entry, self.state, part, place))
        return at

    def recall(self, since: int = 0) -> Recalled:
        """The rank as its log tells it from offset ``since`` on."""
        recall = Recall(self.entry)
        for offset in range(since, len(self.log)):
            recall.take(*self.log[offset], offset)
        assert recall.why == ""
        return recall.finish()


def differences(was: Ledger, now: Ledger) -> list[str]:
    """What a recalled ledger knows otherwise; raises where it claims more, or counts otherwise."""
    found = []
    lanes = {(lane.group, lane.code): lane for lane in now.lanes}
    for lane in was.lanes:
        other = lanes.pop((lane.group, lane.code), None)
        if other is None:
            assert not lane.copies
            assert not lane.unplaced
            continue
        name = (lane.group, lane.code)
        copies = {block.key: count for block, count in lane.copies.items()}
        again = {block.key: count for block, count in other.copies.items()}
        ours, theirs = _resident(lane), _resident(other)
        assert sum(ours.values()) == sum(theirs.values()), name
        assert set(again) <= set(copies), f"lane {name} claims more"
        if again != copies:
            found.append(f"lane {name}: {len(copies) - len(again)} keys are not known")
        if not lane.opaque <= other.opaque | set(other.copies) and lane.opaque - other.opaque:
            found.append(f"lane {name}: opaque")
        if lane.opaque != other.opaque:
            found.append(f"lane {name}: {len(lane.opaque)} opaque are {len(other.opaque)}")
    assert not lanes or not any(lane.copies or lane.unplaced for lane in lanes.values())
    return found


def _resident(lane: Any) -> dict[int, int]:
    return {**{block.hash: count for block, count in lane.copies.items()}, **lane.unplaced}
