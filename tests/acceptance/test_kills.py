"""Processes killed in the middle of a recording: the run still ends equal to the truth."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

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


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["fold", "bridge"])
async def test_a_process_killed_in_the_middle_changes_no_answer(
    pipeline: Pipeline, victim: Literal["fold", "bridge"]
) -> None:
    """SIGKILL after each 15th request, restart, go on.

        requests  ------15----------30----------45------>
        victim    ######X  ########X  ########X  #######     X = SIGKILL, right after batches were published

    The fold goes on from what Redis holds; the bridge claims the rank anew and rebuilds it from the engine's replay.
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
                    process = pipeline.fold if victim == "fold" else engine.bridge
                    os.kill(process.pid, signal.SIGKILL)
                    process.join(10)
                    process.kill()
                    process.start()
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
