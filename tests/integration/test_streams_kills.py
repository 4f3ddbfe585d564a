"""Workers that are killed, frozen and doubled at random moments: the result is that of single delivery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import workerkills
from streamsworld import PARTITIONS, Installation
from workerkills import Act, kill_workers

SEED = 7
ACTS: list[Act] = ["kill", "zombie", "kill", "join", "kill"]


@pytest.fixture
def world(kafka: str, redis_url: str, topic_prefix: str, namespace: str, create_topics: Any, tmp_path: Path) -> Any:
    """An installation with empty topics, gone with all its workers after the test."""
    create_topics(topic_prefix, partitions=PARTITIONS)
    with Installation(kafka, redis_url, topic_prefix, namespace, tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kills_zombies_and_changing_numbers_of_workers_leave_what_single_delivery_leaves(
    world: Installation,
) -> None:
    """``make worker-kills KILLS=100`` does more of it."""
    report = await kill_workers(world, ACTS, SEED)

    assert dict(report.acts) == {"kill": 3, "zombie": 1, "join": 1}
    assert await world.is_true()
    assert len(world.truth) > 50, "ranks that hold nothing prove nothing"


async def test_an_index_that_is_not_what_the_ranks_say_is_noticed(
    world: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary: one rank's word is lost on its way to the log."""
    monkeypatch.setattr(workerkills, "SETTLED_SECONDS_MAX", 3.0)
    act = Installation.act

    def forgetful(self: Installation, *words: Any) -> None:
        act(self, *words)
        self.writers[0].held.add((0, "gpu", 1))

    monkeypatch.setattr(Installation, "act", forgetful)

    with pytest.raises(TimeoutError, match="the index is what the ranks say"):
        await kill_workers(world, ["kill"], SEED)
