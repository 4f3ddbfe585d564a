"""``make live`` without a vLLM: our program in a process of its own, with a package of that name that only caches.

What the real one answers is checked by ``make live`` itself; here it is how we talk to it, and what is said when it
fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from kvledger.errors import Unavailable
from kvledger.live.__main__ import _all
from kvledger.live.engine import Engine
from kvledger.live.families import BLOCK_TOKENS, MODEL_TOKENS_MAX, VOCABULARY
from kvledger.live.session import run_family
from kvledger.live.workload import Job, Workload
from kvledger.stack import silent
from kvledger.verify.check import check
from kvledger.verify.pipeline import Pipeline, open_pipeline

VLLM = """
from types import SimpleNamespace as Some
from recordserver import Cache, answer_of
from kvledger_engine.standin import StandIn

__version__ = "0.32.0"
FLAWS = {flaws!r}


class SamplingParams(Some):
    pass


class FullAttentionSpec(Some):
    pass


class LLM:
    def __init__(self, *, kv_events_config, block_size, num_gpu_blocks_override, **settings):
        print("vLLM prints to stdout")
        if "start" in FLAWS:
            raise RuntimeError("no such model")
        config = kv_events_config
        self.cache = Cache(StandIn(data=config.endpoint, replay=config.replay_endpoint).start(), block_size)
        groups = [Some(kv_cache_spec=FullAttentionSpec(block_size=block_size))]
        scheduler = Some(kv_cache_config=Some(kv_cache_groups=groups, num_blocks=num_gpu_blocks_override))
        self.llm_engine = Some(engine_core=Some(engine_core=Some(scheduler=scheduler)))

    def generate(self, prompts, how, use_tqdm):
        if "answer" in FLAWS:
            raise RuntimeError("out of memory")
        (prompt,) = prompts
        out = answer_of(how.max_tokens)
        cached = self.cache.run(prompt["prompt_token_ids"], out, prompt.get("cache_salt"))
        return [Some(num_cached_tokens=cached + ("lies" in FLAWS), outputs=[Some(token_ids=out)])]

    def reset_prefix_cache(self):
        self.cache.reset()
        return "reset" not in FLAWS
"""

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    """An engine whose interpreter finds our package of the name vllm."""

    def make(*flaws: str) -> Engine:
        package = tmp_path / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(VLLM.format(flaws=flaws))
        (package / "config.py").write_text("from types import SimpleNamespace as KVEventsConfig\n")
        python = tmp_path / "python"
        places = [tmp_path / "site", Path(__file__).parent]
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{":".join(map(str, places))}" exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        work = tmp_path / "work"
        work.mkdir()
        return Engine(python, "llama", work, progress=silent)

    return make


def workload(count: int) -> Workload:
    return Workload(
        seed=1, count=count, vocabulary=VOCABULARY, block_tokens=BLOCK_TOKENS, prompt_tokens_max=MODEL_TOKENS_MAX
    )


async def test_an_engine_tells_its_groups_and_answers(make_engine: MakeEngine) -> None:
    tokens = tuple(range(3, 3 + 2 * BLOCK_TOKENS + 1))
    async with make_engine() as engine:
        ready = await engine.start()
        first = await engine.ask(Job(tokens, None, 2))
        again = await engine.ask(Job(tokens, None, 2))
        salted = await engine.ask(Job(tokens, "s", 2))

    assert (ready.vllm, ready.num_blocks) == ("0.32.0", 70)
    assert [(group["group_idx"], group["kind"], group["block_size"]) for group in ready.groups] == [
        (0, "full_attention", BLOCK_TOKENS)
    ]
    assert [first.cached, again.cached, salted.cached] == [0, 2 * BLOCK_TOKENS, 0]
    assert len(again.out) == 2


async def test_a_stopped_engine_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.start()
    child = engine._child
    assert child is not None
    await engine.stop()
    await engine.stop()

    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize("flaw", ["start", "answer"])
async def test_an_engine_that_ends_is_quoted(make_engine: MakeEngine, flaw: str) -> None:
    words = {"start": "no such model", "answer": "out of memory"}[flaw]

    async def use() -> None:
        async with make_engine(flaw) as engine:
            await engine.start()
            await engine.ask(Job((1, 2, 3), None, 1))

    with pytest.raises(Unavailable, match=f"(?s)the llama engine ended with code 1.*{words}"):
        await use()


async def test_a_refused_reset_is_an_error(make_engine: MakeEngine) -> None:
    async with make_engine("reset") as engine:
        await engine.start()
        with pytest.raises(Unavailable, match="refused to reset"):
            await engine.reset()


async def test_families_after_one_that_cannot_be_served_are_tried(make_engine: MakeEngine, tmp_path: Path) -> None:
    python = make_engine("start")._python
    args = argparse.Namespace(requests=1, vllm="0.32.0", seed=1, out=tmp_path / "out", verify=True)

    reports = await _all(create_autospec(Pipeline, instance=True), python, ["llama", "gemma3"], tmp_path / "work", args)

    assert [report.model for report in reports] == ["llama", "gemma3"]
    assert all("engine ended with code 1" in (report.error or "") for report in reports)
    assert not any(report.agrees for report in reports)


@pytest.mark.slow
async def test_a_session_is_predicted_and_its_recording_too(
    make_engine: MakeEngine, kafka: str, redis_url: str, tmp_path: Path
) -> None:
    out = tmp_path / "llama.jsonl.gz"
    with open_pipeline(kafka=kafka, redis=redis_url) as pipeline:
        live = await run_family(pipeline, make_engine(), workload(25), out)
        played = await check(pipeline, out)

    assert (live.answered, live.exact, live.called_exact, live.after_reset) == (25, 25, 25, played.after_reset)
    assert (played.answered, played.exact, played.called_exact) == (25, 25, 25)
    assert live.after_reset > 0
    assert live.agrees


@pytest.mark.slow
async def test_an_engine_that_answers_otherwise_is_seen(
    make_engine: MakeEngine, kafka: str, redis_url: str, tmp_path: Path
) -> None:
    """The canary: a comparison that cannot fail would prove nothing."""
    with open_pipeline(kafka=kafka, redis=redis_url) as pipeline:
        report = await run_family(pipeline, make_engine("lies"), workload(3), tmp_path / "a.jsonl")

    assert (report.exact, report.under) == (0, 3)
    assert not report.agrees
