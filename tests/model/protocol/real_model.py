"""The real code as parts of the world: it has to keep the promises that the model keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from protocol_engine import Engine
from protocol_parts import Setup
from real_bridge import RealBridge
from real_engine import Payloads
from real_index import RealQuery, RealShard, RealWorker
from real_log import RealLog


class RealCode:
    """Makes the real parts."""

    duplicates = False
    turns = 5

    def __init__(self) -> None:
        self._payloads = Payloads()

    def fit(self, setup: Setup) -> Setup:
        return msgspec.structs.replace(setup, shards=1)  # as yet an index is not sharded

    def log(self, setup: Setup) -> RealLog:
        return RealLog(setup)

    def bridge(self, log: RealLog, engines: Mapping[int, Engine], without_replay: Iterable[int]) -> RealBridge:
        return RealBridge(log, engines, without_replay, self._payloads)

    def worker(self, log: RealLog, partition: int) -> RealWorker:
        return RealWorker(log, partition)

    def shard(self, _setup: Setup, number: int) -> RealShard:
        return RealShard(number, self._payloads)

    def query(self, _log: RealLog, engines: Mapping[int, Engine], shards: list[RealShard]) -> RealQuery:
        return RealQuery(engines, shards[0])
