"""What the tests of the fold share: a log folded in one go, and the few records that no ``RankLog`` writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from ranklog import RankLog, prompt

from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_index.units import Step
from kvledger_streams.fold import PartitionState, fold, fresh
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire
from kvledger_wire.partition import record_key

TOPIC = "topic-1"
ENTRY = ModelEntry(model="m", groups=(GroupSpec(0, "full_attention", 16),))
PROMPTS = [prompt("p", 40), prompt("p", 40, fork=20, branch="b"), prompt("q", 9)]
KEYS = PROMPTS[0]

Log = list[tuple[bytes | None, bytes | None]]


def nonces() -> Callable[[], bytes]:
    """16 bytes, each time others."""
    numbers = itertools.count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def state_at(restart: int = 0, *, partitions: int = 1) -> PartitionState:
    """A partition of which nothing is known."""
    return fresh(0, partitions=partitions, topic_id=TOPIC, restart=restart, broker_ms=0)


def steps_of(
    log: Log, state: PartitionState | None = None, *, start: int = 0, tally: Tally | None = None
) -> list[Step]:
    """Fold a whole log, offset i appended at 1000 + i ms."""
    records = [(start + i, 1000 + start + i, key, value, None) for i, (key, value) in enumerate(log)]
    return list(fold(state or state_at(start), records, end=start + len(log), nonce=nonces(), tally=tally or Tally()))


def opened_rank(**entry: Any) -> tuple[RankLog, Log]:
    """A rank in its first life, and its log."""
    log: Log = []
    rank = RankLog(log, entry=msgspec.structs.replace(ENTRY, **entry))
    rank.open()
    return rank, log


def key_of(rank: RankLog, group: int | str | None = "*") -> bytes:
    """The bytes of a record key of this rank."""
    return record_key(rank.replica, rank.rank, group)


def put_run(rank: RankLog, run: wire.Run, *, op: int = wire.STORED, medium: int = 0, group: Any = 0) -> None:
    """Write a run as it is, right or wrong."""
    rank.events(wire.Change(op, medium, 1, 0.0, (run,)), group=group)
