"""Processes killed in the middle of a recording: the run still ends equal to the truth."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import SETTINGS, killing

from kvledger.stack import Stack
from kvledger.verify.check import looking_ahead
from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_engine.recording import Meta, Published, Request, Reset, read

KILLS = 3
RECORDING = Path(__file__).parents[1] / "fixtures/engine-traces/gemma3_vllm0.20.2_s51.jsonl.gz"


@pytest.fixture
def pipeline(stack: Stack) -> Iterator[Pipeline]:
    """A pipeline of its own on the run's services."""
    _ = stack.kafka, stack.redis
    with Pipeline(stack) as running:
        yield running


@pytest.mark.timeout(300)
async def test_bridges_killed_at_random_moments_lose_no_life_and_change_no_answer(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of ``make kills``: the engine's buffer does not begin at 0, and the answers stay exact."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    _ = stack.kafka, stack.redis
    with Pipeline(stack) as pipeline:
        report = await killing(pipeline, kills=KILLS, seed=1)

    assert report.wrong == []
    assert (report.kills, report.overlaps, report.compared) == (KILLS, 1, 60)
    assert len(report.of("rank_opened")) == report.engine_lives == 1
    assert len(report.of("rank_restored")) >= KILLS - 1  # the last one may strike when all is said
    assert report.from_checkpoints > 0


@pytest.mark.timeout(180)
async def test_a_worker_killed_in_the_middle_changes_no_answer(pipeline: Pipeline) -> None:
    """SIGKILL after each 15th request, restart, go on from what Redis holds.

    requests  ------15----------30----------45------>
    fold      ######X  ########X  ########X  #######     X = SIGKILL, right after batches were published
    """
    engine: RunningEngine | None = None
    compared = kills = 0
    after_reset = False
    for step in looking_ahead(read(RECORDING)):
        match step:
            case Meta():
                engine = await pipeline.engine(step)
            case Published():
                assert engine is not None
                await engine.publish(step)
                if kills < KILLS and compared == (kills + 1) * 15:
                    os.kill(pipeline.fold.pid, signal.SIGKILL)
                    pipeline.fold.join(10)
                    pipeline.fold.kill()
                    pipeline.fold.start()
                    kills += 1
            case Reset():
                after_reset = True
            case Request() if not after_reset:
                assert engine is not None
                answer = await engine.predict(step.tokens, lora=step.lora, salt=step.salt)

                assert (answer.hit_tokens, answer.status) == (step.cached, "exact"), f"request {compared}"
                compared += 1
            case Request():
                after_reset = False
            case _:
                pass
    assert engine is not None
    await engine.close()

    assert compared == 60
    assert kills == KILLS
