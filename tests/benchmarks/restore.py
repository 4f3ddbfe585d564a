"""What a checkpoint takes to write and a rank takes to come back, per ledger size.

Workload, fixed seed: one dense group of 16-token blocks, prompts of 64 blocks in chunks of 32 that share stems; a tenth
of them evicted again, so that a tenth as many names are kept for children. ``tail``: as many blocks again as records
behind the checkpoint. ``part_ms`` is the longest single part, the time for which the node's other ranks wait; the same
for ``record_ms``, the longest record read back. CPU seconds of this process, which collects garbage meanwhile, as a
bridge does. Prints a table, largest first, or ``--json``.

    python tests/benchmarks/restore.py [--blocks 200000] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from kvledger_bridge.decode import Batch, BlockRemoved, BlockStored
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.recall import Recall
from kvledger_bridge.snapshot import parts, restated
from kvledger_bridge.unit import Covered, records
from kvledger_index.model import ModelEntry
from kvledger_wire.accept import RankState, accept
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import SCHEMA, Opened, decode_event, encode

SEED = 5
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 64
CHUNK_BLOCKS = 32
ENTRY = ModelEntry(model="m")


class Rank:
    """A ledger and its log, encoded."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self.ledger = Ledger(ENTRY)
        self.state = RankState()
        self.log: list[tuple[int | str | None, bytes]] = []
        self.seq = -1
        self.write(RANK_WIDE, Opened(SCHEMA, 1, (1, 1), 0, ENTRY, 16, -1, b"", partial=False, why=""))

    def write(self, group: int | str | None, record: Any) -> None:
        accept(self.state, group, record, len(self.log))
        self.log.append((group, encode(record)))

    def take(self, *events: Any) -> None:
        self.seq += 1
        pieces = self.ledger.apply(self.seq, Batch(1.0, 0, events))
        for group, record in records(Covered(1, (1, 1), self.seq, b"d" * 16), self.state.n + 1, pieces, ()):
            self.write(group, record)

    def grow(self, blocks: int) -> None:
        for _ in range(blocks // PROMPT_BLOCKS):
            names = [self.random.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
            tokens = [self.random.randrange(1 << 17) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)]
            for first in range(0, PROMPT_BLOCKS, CHUNK_BLOCKS):
                last = first + CHUNK_BLOCKS
                parent = names[first - 1] if first else None
                span = tuple(tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS])
                self.take(BlockStored(tuple(names[first:last]), parent, span, BLOCK_TOKENS, medium="GPU", group_idx=0))
            if self.random.random() < 0.1:
                self.take(BlockRemoved(tuple(reversed(names)), "GPU", 0))


def measure(blocks: int) -> dict[str, Any]:
    """One ledger size."""
    rank = Rank()
    rank.grow(blocks)
    since, longest = len(rank.log), 0.0
    began = time.process_time()
    source = parts(rank.ledger, rank.seq)
    for place in range(1 << 30):
        at = time.process_time()
        part = next(source)
        rank.write(RANK_WIDE, restated(ENTRY, rank.state, part, place))
        longest = max(longest, time.process_time() - at)
        if part.last:
            break
    written = time.process_time() - began
    checkpoint = rank.log[since:]
    size = sum(len(value) for _, value in checkpoint)
    load, _ = read(checkpoint)
    rank.grow(blocks)
    both, slowest = read(rank.log[since:])
    return {
        "blocks": blocks,
        "checkpoint_mb": round(size / 1e6, 2),
        "parts": len(checkpoint),
        "largest_part_kb": round(max(len(value) for _, value in checkpoint) / 1e3),
        "write_s": round(written, 2),
        "part_ms": round(longest * 1e3, 1),
        "load_s": round(load, 2),
        "tail_s": round(both - load, 2),
        "record_ms": round(slowest * 1e3, 1),
    }


def read(log: list[tuple[int | str | None, bytes]]) -> tuple[float, float]:
    """Seconds for all, and for the slowest record."""
    recall, slowest = Recall(ENTRY), 0.0
    began = time.process_time()
    for offset, (group, value) in enumerate(log):
        at = time.process_time()
        recall.take(group, decode_event(value), offset)
        slowest = max(slowest, time.process_time() - at)
    if recall.why:
        raise RuntimeError(recall.why)
    recall.finish()
    return time.process_time() - began, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(options.blocks // share) for share in (1, 4, 16)]
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    sys.stdout.write("  ".join(f"{name:>15}" for name in rows[0]) + "\n")
    for row in rows:
        sys.stdout.write("  ".join(f"{value:>15}" for value in row.values()) + "\n")


if __name__ == "__main__":
    main()
