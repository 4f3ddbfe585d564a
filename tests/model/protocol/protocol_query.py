"""A router's question: the catalogue and one lane's rows first, another lane by the slots it learnt some time later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from protocol_engine import Engine
from protocol_index import Shard
from protocol_log import Log
from protocol_parts import Answer
from protocol_records import GPU_LANES, Life
from protocol_rules import Rules


class Seen(msgspec.Struct, frozen=True):
    """A rank in the first read."""

    slots: dict[str, int]
    life: Life
    n: int
    ghost: int | None
    seq: int
    held: set[int]


class Look(msgspec.Struct, frozen=True):
    """A shard's first read."""

    version: int
    ranks: dict[int, Seen]


class Query:
    """One question over all shards."""

    def __init__(self, rules: Rules, log: Log, engines: Mapping[int, Engine], shards: list[Shard]) -> None:
        self.rules, self.log, self.engines = rules, log, engines
        self.looks = [self._look(shard) for shard in shards]

    def _look(self, shard: Shard) -> Look:
        ranks = {}
        for rank, card in shard.cards.items():
            partition, state = self.log.partition(rank), card.state
            if shard.status(rank, partition) == "exact" and partition not in shard.unsettled:
                ranks[rank] = Seen(dict(card.slots), state.life, state.n, state.ghost, state.seq, shard.bits(rank, 0))
        return Look(shard.version, ranks)

    def answers(self, shards: list[Shard]) -> Iterator[Answer]:
        """The second read, and what is exact by both; nothing if the answer has to be taken again."""
        parts: dict[int, list[tuple[Seen, set[int]]]] = {}
        for look, shard in zip(self.looks, shards, strict=True):
            if self.rules.version_with_rows and shard.version != look.version:
                return
            for rank, seen in look.ranks.items():
                card = shard.cards.get(rank)
                if self.rules.query_same_n and (card is None or card.state.n != seen.n):
                    continue
                parts.setdefault(rank, []).append((seen, shard.row(seen.slots.get("gpu", -1), 1)))
        for rank, got in parts.items():
            if len(got) < len(shards) or (self.rules.query_same_shards and len({(s.life, s.n) for s, _ in got}) > 1):
                continue
            told = {0: set[int]().union(*(seen.held for seen, _ in got)), 1: set[int]().union(*(row for _, row in got))}
            first, engine = got[0][0], self.engines[rank]
            yield Answer(rank, told, {lane: engine.truth(lane, first.ghost, first.seq) for lane in GPU_LANES})
