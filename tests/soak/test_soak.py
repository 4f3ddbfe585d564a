"""The soak in short."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from actions import ACTIONS
from fleet import SMALL
from schedule import KINDS, draw
from soaking import Soak, is_caught
from world import Plan, World

from kvledger.stack import Stack

SECONDS = 8.0
SEED = 4
"""One that draws most of the kinds below."""

FAILOVER_SECONDS_MAX = 10.0
SHORT = ("restart, contiguous", "batches dropped", "bridge killed", "worker killed", "redis flushed", "links swallow")
TARGETS = [*(f"rank {number}" for number in range(8)), "bridge 0", "bridge 1", "worker 0", "worker 1", "redis", "kafka"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_engines_log_and_index_agree_after_a_few_faults(stack: Stack, tmp_path: Path) -> None:
    """Two replicas of two ranks, one bridge, one worker, a Redis of its own; the run's Kafka is not harmed.

    First a few seconds by the schedule, then a Redis that is set back and one that fails over to a replica. The canary
    leaves one claim out of what the index says, and nothing fails but the comparison.
    """
    plan = Plan(SMALL, bridges=1, workers=1, questions_per_second=40, kafka=stack.kafka)
    kinds = [kind for kind in KINDS if kind.name in SHORT]
    with Stack(tmp_path / "soak", local=True) as private, World(private, plan, SEED, "soak-test") as world:
        faults = draw(SEED, SECONDS, world.targets, gap_seconds=0.7, kinds=kinds)
        soak = Soak(world, faults)
        with soak.used():
            soak.suffer(SECONDS)
            older = soak.trial("redis older", "redis", 2.0)
            failover = soak.trial("redis failover", "redis", 0.0)
        result = soak.reckon()
        canary = soak.compare(canary=True)

    assert result.broken == [], result.totals
    assert len({fault.kind for fault in faults}) >= 5
    assert older.heard["stale"] + older.heard["unknown"] > 0, "routers hear that the index was set back"
    assert failover.live_seconds < FAILOVER_SECONDS_MAX
    assert is_caught(canary)
    assert not is_caught([*canary, "another promise"])


def test_every_kind_of_fault_can_be_done() -> None:
    assert set(ACTIONS) == {kind.name for kind in KINDS}
    assert set(SHORT) <= set(ACTIONS)


def test_a_seed_draws_the_same_faults_and_they_are_over_in_time() -> None:
    drawn = draw(7, 1200, TARGETS, gap_seconds=2)

    assert drawn == draw(7, 1200, TARGETS, gap_seconds=2)
    assert drawn != draw(8, 1200, TARGETS, gap_seconds=2)
    assert len(drawn) > 100
    assert {fault.kind for fault in drawn} == {kind.name for kind in KINDS}
    assert max(fault.at + fault.seconds for fault in drawn) <= 1200
    for target in TARGETS:
        mine = [fault for fault in drawn if fault.target == target]
        assert all(one.at + one.seconds <= other.at for one, other in itertools.pairwise(mine))
