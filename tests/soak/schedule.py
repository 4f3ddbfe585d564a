"""What goes wrong and when: drawn from a seed, so that a seed brings a failure back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CALM_EVERY = 12
"""After so many faults, on average, comes a calm in which everything may heal."""

CALM_SECONDS = 12.0


class Kind(NamedTuple):
    """A fault: how often it is drawn beside the others, how long it lasts, and what it keeps busy meanwhile.

    ``on`` is what it happens to: one of several ``rank``, ``bridge``, ``worker``, or the only ``redis``, ``kafka``.
    Faults on one target do not overlap; those on different ones do.
    """

    name: str
    on: str
    weight: float
    seconds: tuple[float, float]


KINDS = (
    # the engine
    Kind("restart", "rank", 3, (0, 0)),
    Kind("restart, contiguous", "rank", 2, (0.2, 2)),
    Kind("restart, away", "rank", 1, (0.5, 6)),
    Kind("batches dropped", "rank", 3, (2, 8)),
    Kind("batches lost", "rank", 2, (1, 4)),
    Kind("batches twice", "rank", 2, (2, 6)),
    Kind("batches swapped", "rank", 2, (2, 6)),
    Kind("batches malformed", "rank", 2, (2, 5)),
    Kind("sequence skipped", "rank", 1, (0, 0)),
    Kind("replay silent", "rank", 2, (2, 8)),
    Kind("replay truncated", "rank", 1, (2, 8)),
    Kind("replay with holes", "rank", 1, (2, 8)),
    Kind("replay twice", "rank", 1, (2, 8)),
    Kind("clear storm", "rank", 1, (1, 3)),
    Kind("flap", "rank", 2, (0, 0)),
    # its links
    Kind("links paused", "rank", 2, (0.5, 6)),
    Kind("links swallow", "rank", 2, (0.5, 10)),
    Kind("links cut", "rank", 2, (0, 0)),
    Kind("live link cut", "rank", 2, (0, 0)),
    # our processes
    Kind("bridge killed", "bridge", 3, (0.1, 3)),
    Kind("bridge stopped", "bridge", 2, (0.1, 3)),
    Kind("bridge frozen", "bridge", 2, (1, 10)),
    Kind("bridges overlap", "bridge", 2, (1, 6)),
    Kind("worker killed", "worker", 3, (0.1, 4)),
    Kind("worker frozen", "worker", 3, (1, 12)),
    Kind("worker away", "worker", 2, (4, 12)),
    # Redis and its links
    Kind("redis killed", "redis", 2, (0.2, 4)),
    Kind("redis frozen", "redis", 2, (0.5, 5)),
    Kind("redis flushed", "redis", 2, (0, 0)),
    Kind("redis functions flushed", "redis", 1, (0, 0)),
    Kind("redis older", "redis", 2, (5, 30)),
    Kind("redis empty", "redis", 1, (0, 0)),
    Kind("redis failover", "redis", 2, (0.5, 4)),
    Kind("redis slow", "redis", 1, (2, 6)),
    Kind("redis links swallow", "redis", 2, (1, 6)),
    Kind("redis links cut", "redis", 1, (0, 0)),
    # Kafka and its link
    Kind("kafka frozen", "kafka", 2, (1, 10)),
    Kind("kafka killed", "kafka", 1, (0.5, 3)),
    Kind("kafka link paused", "kafka", 1, (1, 6)),
    Kind("kafka link swallows", "kafka", 1, (1, 6)),
    Kind("kafka link cut", "kafka", 2, (0, 0)),
)


class Fault(NamedTuple):
    """One of them: from ``at`` for ``seconds``, on a target such as ``rank 3`` or ``redis``."""

    at: float
    kind: str
    target: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:7.1f}  {self.kind} ({self.target}, {self.seconds:.1f} s)"


def draw(
    seed: int, seconds: float, targets: Sequence[str], *, gap_seconds: float, kinds: Iterable[Kind] = KINDS
) -> list[Fault]:
    """Faults in order, the last one over before ``seconds``; ``gap_seconds`` is the mean time from one to the next."""
    rnd = random.Random(f"faults {seed}")
    usable = [kind for kind in kinds if any(target.startswith(kind.on) for target in targets)]
    busy = dict.fromkeys(targets, 0.0)
    found: list[Fault] = []
    at = gap_seconds
    while True:
        at += rnd.expovariate(1 / gap_seconds) + (CALM_SECONDS if rnd.random() < 1 / CALM_EVERY else 0.0)
        kind = rnd.choices(usable, [one.weight for one in usable])[0]
        target = rnd.choice([one for one in targets if one.startswith(kind.on)])
        lasts = round(rnd.uniform(*kind.seconds), 1)
        if at > seconds:
            return found
        if busy[target] <= at and at + lasts <= seconds:
            found.append(Fault(round(at, 1), kind.name, target, lasts))
            busy[target] = at + lasts + SETTLE_SECONDS.get(kind.on, 0.0)


SETTLE_SECONDS = {"kafka": 20.0, "redis": 4.0, "bridge": 3.0, "worker": 3.0}
"""Until the same target may be met again: a broker needs so long to come back at all."""
