"""The real fold over the real index in memory, and a real router."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from protocol_engine import Engine
from protocol_parts import Answer, AsOf
from protocol_records import GROUP, MEDIUM
from real_engine import BLOCKS, MODEL, PROMPTS, Payloads, hit_tokens
from real_log import NOW_MS, TOPIC_ID, RealLog, name_of

from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Step
from kvledger_router import Index
from kvledger_router.standing import Limits, standing, verdict
from kvledger_streams.fold import PartitionState, fold, fresh, resume, seed
from kvledger_streams.progress import Plan, plan, rebuild
from kvledger_streams.tally import Tally
from kvledger_wire.accept import RankState

T = TypeVar("T")

_nonces = itertools.count(1)


def run(call: Coroutine[Any, Any, T]) -> T:
    """A call to the index in memory, which never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    call.close()
    msg = "a call to the index in memory waited"
    raise AssertionError(msg)


def _nonce() -> bytes:
    return next(_nonces).to_bytes(16, "big")


class RealShard:
    """One index in memory."""

    def __init__(self, number: int, payloads: Payloads) -> None:
        self.number, self.payloads = number, payloads
        self.unsettled: set[int] = set()
        self.index = MemoryIndex(clock_ms=lambda: NOW_MS)

    def copied(self) -> RealShard:
        """A snapshot."""
        twin = RealShard(self.number, self.payloads)
        twin.index.restore(self.index.snapshot())
        return twin

    def status(self, rank: int, partition: int) -> str:
        """What the router's own judgement says of the rank, whatever the prompt; named as the model names it."""
        catalogue = run(self.index.catalogue(MODEL))
        view = catalogue.ranks.get(name_of(rank))
        if view is None:
            return "unknown"
        reading = run(self.index.read(catalogue, MODEL, []))
        place = reading.partitions.get(partition)
        status = verdict(list(standing(view.card, reading.pulses.get(name_of(rank)), place, NOW_MS, Limits()))).status
        if status == "unknown" and not view.card.closed:
            return "loading"
        if status == "stale" and place is not None and place.read >= place.target and place.alive_ms:
            return "suspended" if view.card.suspended else "unproven"
        return status

    def state(self, rank: int, partition: int) -> RankState | None:
        """What the fold stored of a rank."""
        stored = run(self.index.load(partition))
        if name_of(rank) not in stored.ranks:
            return None
        ranks = {name_of(rank): stored.ranks[name_of(rank)]}
        facts = {"partitions": partition + 1, "restart": 0, "broker_ms": NOW_MS}
        return resume(partition, topic_id=TOPIC_ID, stored=ranks, **facts).ranks[name_of(rank)]

    def as_of(self, rank: int) -> AsOf:
        catalogue = run(self.index.catalogue(MODEL))
        state = self.state(rank, catalogue.ranks[name_of(rank)].card.partition)
        return self.payloads.as_of(state.digest) if state else AsOf(None, -1)

    def bits(self, rank: int, lane: int) -> set[int]:
        return run(self._bits(rank, lane))

    async def _bits(self, rank: int, lane: int) -> set[int]:
        return {
            BLOCKS[claimed.key]
            async for claimed in self.index.dump(MODEL, name_of(rank))
            if (claimed.group, claimed.medium) == (GROUP[lane], MEDIUM[lane])
        }


class RealWorker:
    """A stream worker without Faust and Kafka."""

    def __init__(self, log: RealLog, partition: int) -> None:
        self.log, self.partition = log, partition
        self.state: PartitionState | None = None

    def forget(self) -> None:
        self.state = None

    def _assign(self, shard: RealShard) -> PartitionState:
        stored, bounds = run(shard.index.load(self.partition)), self.log.bounds(self.partition)
        made = plan(stored.progress, bounds)
        facts: dict[str, Any] = {"partitions": self.log.count, "topic_id": TOPIC_ID, "broker_ms": NOW_MS}
        if isinstance(made, Plan):
            self.state = resume(self.partition, restart=made.restart, stored=stored.ranks, **facts)
        else:
            made = rebuild(bounds, made, self.log.starts(self.partition))
            self.state = fresh(self.partition, restart=made.restart, starts=made.starts, **facts)
        run(shard.index.seek(self.partition, TOPIC_ID, made.restart, made.target, drop=made.drop))
        for step in seed(self.state, made.owners, nonce=_nonce):
            run(shard.index.apply(step))
        shard.unsettled.discard(self.partition)
        return self.state

    def _steps(self, state: PartitionState, count: int) -> Iterator[Step]:
        log = self.log.partitions[self.partition]
        records = [(o, NOW_MS, *log[o], None) for o in range(state.read, min(state.read + count, len(log)))]
        return fold(state, records, end=len(log), nonce=_nonce, tally=Tally())

    def stage_apart(self, shard: RealShard, count: int) -> list[Step] | None:
        """Steps that are made later, if at all."""
        if self.state is None or self.state.read < self.log.base[self.partition]:
            return None
        return list(self._steps(copy.deepcopy(self.state), count))

    def commit(self, shard: RealShard, job: list[Step]) -> bool:
        return all(run(shard.index.apply(step)).verdict == "applied" for step in job)

    def fold(self, shard: RealShard, count: int) -> None:
        """One turn: read, fold, apply; a refusal or a place that is not in the log any more is found anew."""
        if self.state is not None and self.state.read < self.log.base[self.partition]:
            self.state = None
        state = self.state or self._assign(shard)
        for step in self._steps(state, count):
            if run(shard.index.apply(step)).verdict == "refused":
                self.state = None
                return


class RealQuery:
    """A router that knows the catalogue from before, and asks now."""

    def __init__(self, engines: Mapping[int, Engine], shard: RealShard) -> None:
        self.engines = engines
        self.index = Index(shard.index, model=MODEL, deadline_seconds=60.0)
        asyncio.run(self._warm())

    async def _warm(self) -> None:
        await self.index.match(PROMPTS[0])

    def answers(self, shards: list[RealShard]) -> Iterator[Answer]:
        """What is called exact, of one block's prompt after the other."""
        return iter(asyncio.run(self._ask(shards[0])))

    async def _ask(self, shard: RealShard) -> list[Answer]:
        self.index._reader = shard.index
        names = {name_of(rank): rank for rank in self.engines}
        found = []
        for block, prompt in PROMPTS.items():
            for holder in await self.index.match(prompt):
                rank = names[f"{holder.replica}/{holder.rank}"]
                if holder.status == "exact":
                    as_of = shard.as_of(rank)
                    told = (block, holder.hit_tokens, holder.as_of)
                    found.append(Answer(rank, told, (block, hit_tokens(self.engines[rank], block, as_of), as_of.seq)))
        return found
