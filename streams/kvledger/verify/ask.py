"""``kvledger verify -``: the pipeline as a filter. JSON lines in, one JSON line out per ``ask``.

Lines in: ``meta`` (starts another engine, with an index of its own life), ``ev`` and ``batch`` (what it published) and
``{"t": "ask", "id": …, "tokens": […], "salt", "lora", "mm"}``. For each ask, once everything above it is visible in the
index: ``{"id", "predicted", "status", "as_of"}``, flushed before the next line is read.
A line that cannot be used is named on stderr and skipped; a lost message then shows as a gap, never as a wrong
``exact``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, BinaryIO

import msgspec

from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import Ask, Meta, Published, Step, parse


class Reply(msgspec.Struct, frozen=True):
    """One line of output."""

    id: Any
    predicted: int
    status: str
    as_of: int


async def answer(pipeline: Pipeline, lines: BinaryIO, out: BinaryIO) -> int:
    """Run the filter until ``lines`` ends; returns how many lines could not be used."""
    engine: RunningEngine | None = None
    bad = 0
    try:
        number = 0
        while line := await asyncio.to_thread(lines.readline):
            number += 1
            if not line.strip():
                continue
            try:
                step = parse(line, where=f"line {number}")
                if isinstance(step, Meta):
                    if engine is not None:
                        await engine.close()
                    engine = await pipeline.engine(step)
                elif reply := await _step(engine, step, number):
                    out.write(msgspec.json.encode(reply) + b"\n")
                    out.flush()
            except BadRecording as error:
                bad += 1
                print(f"kvledger verify: {error}", file=sys.stderr, flush=True)  # noqa: T201  # the command's own stderr
    finally:
        if engine is not None:
            await engine.close()
    return bad


async def _step(engine: RunningEngine | None, step: Step, number: int) -> Reply | None:
    if not isinstance(step, Ask | Published):
        return None
    if engine is None:
        msg = f"line {number}: no meta line before the first message or question"
        raise BadRecording(msg)
    if isinstance(step, Published):
        await engine.publish(step)
        return None
    found = await engine.predict(step.tokens, lora=step.lora, salt=step.salt, media=step.mm or ())
    return Reply(step.id, found.hit_tokens, found.status, found.as_of)
