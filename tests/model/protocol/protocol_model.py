"""The abstract model: the parts of the world by the rules, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from protocol_bridge import Bridge
from protocol_engine import Engine
from protocol_fold import Worker
from protocol_index import Shard
from protocol_log import Log
from protocol_parts import Setup
from protocol_query import Query
from protocol_rules import Rules


class Model:
    """Makes the abstract parts, with the rules given."""

    turns = 14

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.duplicates = not rules.idempotent
        self._nonce = itertools.count(1)

    def fit(self, setup: Setup) -> Setup:
        return setup

    def log(self, setup: Setup) -> Log:
        return Log(self.rules, setup.partitions)

    def bridge(self, log: Log, engines: Mapping[int, Engine], without_replay: Iterable[int]) -> Bridge:
        return Bridge(self.rules, log, engines, without_replay)

    def worker(self, log: Log, partition: int) -> Worker:
        return Worker(self.rules, log, partition)

    def shard(self, setup: Setup, number: int) -> Shard:
        return Shard(self.rules, number, setup.shards, lambda: next(self._nonce))

    def query(self, log: Log, engines: Mapping[int, Engine], shards: list[Shard]) -> Query:
        return Query(self.rules, log, engines, shards)
