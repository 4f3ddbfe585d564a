"""One family from its first request to its last: predict, ask, compare, record."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvledger.live.engine import Engine, Ready
from kvledger.live.tap import Tap
from kvledger.live.trace import Trace
from kvledger.live.workload import Job, Workload
from kvledger.verify.pipeline import Followed, Pipeline
from kvledger.verify.report import Comparison, Report
from kvledger_engine.recording import Group, Meta
from kvledger_index.model import ModelEntry

Watch = Callable[[Report, Comparison], None]
"""Called after each request, for progress."""

GROUPS_SINCE: Final = (0, 20)
"""Events carry a group from this release on; before it, they switch the hybrid cache manager off."""


def described(ready: Ready, engine: Engine) -> dict[str, Any]:
    """The ``meta`` of this engine's recording."""
    groups = [dict(group) for group in ready.groups]
    if _release(ready.vllm) < GROUPS_SINCE:
        for group in groups:
            group["group_idx"] = None
    return {
        "vllm": ready.vllm,
        "model": engine.model,
        "config": engine.config,
        "groups": groups,
        "num_blocks": ready.num_blocks,
        "recorded": "live",
    }


def entry_of(meta: Mapping[str, Any]) -> ModelEntry:
    """What an operator would write in the models file for the engine of a recording."""
    groups = tuple(
        Group(**{name: group[name] for name in Group.__struct_fields__ if name in group}) for group in meta["groups"]
    )
    return Meta(model=meta["model"], vllm=meta["vllm"], groups=groups, config=meta["config"]).entry()


class Session:
    """An engine, its bridge and the tap beside; ``run`` takes requests from a workload and reports."""

    def __init__(self, engine: Engine, followed: Followed, tap: Tap, trace: Trace, report: Report) -> None:
        self._engine, self._followed, self._tap, self._trace, self._report = engine, followed, tap, trace, report
        self._number = 0

    async def run(self, workload: Workload, watch: Watch | None = None) -> None:
        """Every request of the workload, one at a time."""
        await self._followed.settle()
        for job in workload.jobs():
            await self._catch_up()
            if job.after_reset:
                await self._engine.reset()
                self._trace.reset()
            one, out = await self._turn(job)
            workload.answered(out)
            self._report.add(one)
            if watch is not None:
                watch(self._report, one)
        await self._catch_up()
        self._report.unplaced = await self._followed.unplaced()
        self._report.batches = self._followed.published

    async def _turn(self, job: Job) -> tuple[Comparison, list[int]]:
        """Predict, then look."""
        answer = await self._followed.predict(job.tokens, lora=job.lora, salt=job.salt)
        self._trace.begin()
        reply = await self._engine.ask(job)
        await self._catch_up()
        self._trace.request(job.tokens, salt=job.salt, lora=job.lora, cached=reply.cached, out=reply.out)
        self._number += 1
        one = Comparison(
            number=self._number,
            predicted=answer.hit_tokens,
            actual=reply.cached,
            status=answer.status,
            as_of=answer.as_of,
            after_reset=job.after_reset,
        )
        return one, reply.out

    async def _catch_up(self) -> None:
        batches = await asyncio.to_thread(self._tap.catch_up)
        self._trace.published(batches)
        for batch in batches:
            self._followed.heard(batch.seq)


async def run_family(
    pipeline: Pipeline, engine: Engine, workload: Workload, out: Path, *, watch: Watch | None = None
) -> Report:
    """Start the engine and a bridge for it, run the workload, write the recording to ``out``. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with engine:
        meta = described(await engine.start(), engine)
        report = Report(file=f"{engine.family}, live", model=engine.model, engine=meta["vllm"])
        entry = entry_of(meta)
        followed = pipeline.follow(f"live-{engine.family}", entry, data=engine.data, replay=engine.replay)
        try:
            with Tap(engine.data, engine.replay, topic=engine.topic.encode()) as tap, Trace(out, meta) as trace:
                await Session(engine, followed, tap, trace, report).run(workload, watch)
        finally:
            await followed.close()
    report.seconds = loop.time() - started
    return report


def _release(version: str) -> tuple[int, ...]:
    """(0, 20) of 0.20.2+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
