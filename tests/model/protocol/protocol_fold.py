"""A stream worker: reads a partition, stages units, commits them to one shard by compare and set."""

from __future__ import annotations

import msgspec
from protocol_accept import RankState, Stamp, accept
from protocol_index import NO_STAMP, Progress, Shard, Unit
from protocol_log import Log
from protocol_records import RANKS, Record
from protocol_rules import Rules


class Memory(msgspec.Struct):
    """What a worker holds in memory: all of it can be lost."""

    start: int
    position: int
    stored_restart: int
    ranks: dict[int, RankState]
    stamps: dict[int, Stamp]
    """What it believes stored."""
    tails: dict[int, int]
    """Rank -> offset of the first record of its unfinished unit."""

    def copied(self) -> Memory:
        ranks = {rank: state.copied() for rank, state in self.ranks.items()}
        return Memory(self.start, self.position, self.stored_restart, ranks, dict(self.stamps), dict(self.tails))


class Job(msgspec.Struct):
    """A call that is ready, and may be made late."""

    before: int
    units: list[Unit]
    restart: int
    read: int


class Worker:
    """The worker of (partition, shard)."""

    def __init__(self, rules: Rules, log: Log, partition: int) -> None:
        self.rules, self.log, self.partition = rules, log, partition
        self.memory: Memory | None = None

    def assign(self, shard: Shard) -> Memory:
        """Assigned, or refused: take what is stored and seek."""
        rules, log, partition = self.rules, self.log, self.partition
        stored, end = shard.progress.get(partition), len(log.partitions[partition])
        usable = stored is not None and not (
            (stored.restart < log.base[partition] and rules.below_start_rebuilds) or stored.restart > end
        )
        if stored is None or not usable:
            shard.drop_partition([rank for rank in RANKS if log.partition(rank) == partition], partition)
            start = log.rebuild_start(partition)
        else:
            start = stored.restart
        shard.progress[partition] = Progress(start, start, end)
        shard.unsettled.discard(partition)
        ranks = {r: card.state.copied() for r, card in shard.cards.items() if log.partition(r) == partition}
        self.memory = Memory(start, start, start, ranks, {r: state.stamp() for r, state in ranks.items()}, {})
        return self.memory

    def stage(self, shard: Shard, count: int) -> Job:
        """Fold the next records in memory."""
        memory = self.memory or self.assign(shard)
        records = self.log.partitions[self.partition]
        start = max(memory.position, self.log.base[self.partition])
        end = min(start + count, len(records))
        units: list[Unit] = []
        for offset in range(start, end):
            unit = self._take(memory, records[offset], offset)
            units += [unit] if unit else []
        memory.position = max(start, end)
        before = memory.stored_restart
        unfinished = memory.tails.values() if self.rules.restart_low else ()
        low = min((memory.position, *unfinished))
        memory.stored_restart = low
        return Job(before, units, low, memory.position)

    def _take(self, memory: Memory, record: Record, offset: int) -> Unit | None:
        rank = record.rank
        if rank not in memory.ranks:
            memory.ranks[rank] = RankState(owner=self.log.ended_before(rank, memory.start))
        state = memory.ranks[rank]
        before = state.copied()
        effects = accept(self.rules, state, record, offset)
        if state.tail:
            memory.tails.setdefault(rank, offset)
        else:
            memory.tails.pop(rank, None)
        after = state.copied()
        before.tail = after.tail = ()
        if not effects and before == after:
            return None
        stamp = memory.stamps.get(rank, NO_STAMP)
        memory.stamps[rank] = after.stamp()
        return Unit(rank, stamp, after, effects)

    def commit(self, shard: Shard, job: Job) -> bool:
        """The one call to Redis; False: refused, whatever was applied before the refusal stands."""
        stored = shard.progress.get(self.partition)
        if self.rules.restart_compare_and_set and (stored is None or stored.restart != job.before):
            return False
        for unit in job.units:
            card = shard.cards.get(unit.rank)
            stamp = card.state.stamp() if card else NO_STAMP
            if stamp == unit.before or not self.rules.compare_and_set:
                shard.apply(unit)
            elif unit.after.stamp() > stamp:
                return False
        if stored is None:
            shard.progress[self.partition] = Progress(job.restart, job.read, 0)
        else:
            stored.restart, stored.read = job.restart, job.read
        return True

    def stage_apart(self, shard: Shard, count: int) -> Job | None:
        """A call that was computed and is made later, if at all: memory stays as it was."""
        if self.memory is None:
            return None
        before = self.memory.copied()
        job = self.stage(shard, count)
        self.memory = before
        return job

    def forget(self) -> None:
        """The partition is assigned anew."""
        self.memory = None

    def fold(self, shard: Shard, count: int) -> None:
        """One turn."""
        below = self.memory is not None and self.memory.position < self.log.base[self.partition]
        if below and self.rules.running_below_start_rebuilds:
            self.memory = None
        if not self.commit(shard, self.stage(shard, count)):
            self.memory = None
