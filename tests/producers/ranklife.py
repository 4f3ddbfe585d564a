"""A ledger with its log, and a second ledger recalled from that log, for tests of snapshot and recall."""

from __future__ import annotations

from typing import Any

import msgspec

from kvledger_bridge.decode import Batch
from kvledger_bridge.lanes import Lane
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_bridge.recall import Recall, Recalled
from kvledger_bridge.snapshot import PART_ENTRIES_MAX, parts, restated
from kvledger_bridge.unit import Covered, records
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import RankState, accept
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import SCHEMA, Fence, Opened, decode_event, encode

OWNER = 7


class Life:
    """One life of one rank, with everything that its bridge wrote."""

    def __init__(self, entry: ModelEntry, **limits: int) -> None:
        self.entry = entry
        self.limits = limits
        self.ledger = self.new_ledger(entry)
        self.state = RankState()
        self.log: list[tuple[int | str | None, Any]] = []
        self.write(RANK_WIDE, Fence(SCHEMA, OWNER, "b", "", ""))
        self.write(RANK_WIDE, Opened(SCHEMA, OWNER, (OWNER, 1), 0, entry, entry.stride, -1, b"", partial=False, why=""))

    def new_ledger(self, entry: ModelEntry) -> Ledger:
        return Ledger(entry, **self.limits)

    def write(self, group: int | str | None, record: Any) -> None:
        record = decode_event(encode(record))
        accept(self.state, group, record, len(self.log))
        self.log.append((group, record))

    def take(self, seq: int, batch: Batch, origin: int = 0) -> list[Piece]:
        pieces = self.ledger.apply(seq, batch, origin)
        covered = Covered(OWNER, (OWNER, 1), seq, b"d" * 16)
        for group, record in records(covered, self.state.n + 1, pieces, ()):
            self.write(group, record)
        return pieces

    def checkpoint(self, entries_max: int = PART_ENTRIES_MAX) -> int:
        """Write one; returns the offset of its first part."""
        at = len(self.log)
        for place, part in enumerate(parts(self.ledger, self.state.seq, entries_max=entries_max)):
            self.write(RANK_WIDE, restated(self.entry, self.state, part, place))
        return at

    def read(self, since: int = 0, entry: ModelEntry | None = None) -> Recall:
        """The log from offset ``since`` on, as it comes from Kafka."""
        recall = Recall(entry or self.entry, ledger=self.new_ledger)
        for offset in range(since, len(self.log)):
            recall.take(*self.log[offset], offset)
        return recall

    def recall(self, since: int = 0) -> Recalled:
        """The rank as its log tells it from offset ``since`` on."""
        recall = self.read(since)
        assert recall.why == ""
        return recall.finish()

    def replace(self, offset: int, **fields: Any) -> None:
        """Falsify what was written."""
        group, record = self.log[offset]
        self.log[offset] = (group, msgspec.structs.replace(record, **fields))


def differences(was: Ledger, now: Ledger) -> list[str]:
    """What a recalled ledger knows less of; fails where it claims more, or counts otherwise."""
    found = []
    lanes = {(lane.group, lane.code): lane for lane in now.lanes}
    for lane in was.lanes:
        name = (lane.group, lane.code)
        other = lanes.pop(name, Lane(*name))
        copies = {block.key: count for block, count in lane.copies.items()}
        again = {block.key: count for block, count in other.copies.items()}
        resident = sum(copies.values()) + sum(lane.unplaced.values())
        assert resident == sum(again.values()) + sum(other.unplaced.values()), f"lane {name} counts otherwise"
        assert all(copies.get(key, 0) >= count for key, count in again.items()), f"lane {name} claims more"
        assert set(lane.unplaced) <= set(other.unplaced), f"lane {name} places more"
        assert lane.opaque <= other.opaque, f"lane {name} can be asked for more"
        assert other.veiled <= lane.veiled, f"lane {name} rules out more"
        if again != copies:
            found.append(f"lane {name}: {len(copies) - len(again)} keys are not known")
        if lane.opaque != other.opaque:
            found.append(f"lane {name}: {len(other.opaque) - len(lane.opaque)} hashes more are opaque")
        if lane.veiled != other.veiled:
            found.append(f"lane {name}: {len(lane.veiled) - len(other.veiled)} hashes fewer are veiled")
    assert not any(lane.copies or lane.unplaced for lane in lanes.values())
    return found
