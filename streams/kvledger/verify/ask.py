"""``kvledger verify -``: the pipeline as a filter. JSON lines in, one JSON line out per ``ask``.

Lines in: ``meta`` (starts another engine, with an index of its own life), ``ev`` and ``batch`` (what it published) and
``{"t": "ask", "id": …, "tokens": […], "salt", "lora", "mm"}``. For each ask, once everything above it is visible in the
index: ``{"id", "predicted", "status", "as_of"}``, flushed before the next line is read.
A line that cannot be used is named on stderr and skipped. A lost message then shows as a gap, never as a wrong
``exact``; a question that cannot be asked is answered by 0, ``unknown``, so that whoever waits for its line goes on;
a ``meta`` that cannot be used ends the engine before it, and nothing is answered for it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, BinaryIO

import msgspec

from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import Ask, Meta, Published, Step, parse
from kvledger_index.errors import InvalidInput


class Reply(msgspec.Struct, frozen=True):
    """One line of output."""

    id: Any
    predicted: int
    status: str
    as_of: int


async def answer(pipeline: Pipeline, lines: BinaryIO, out: BinaryIO) -> int:
    """Run the filter until ``lines`` ends; returns how many lines could not be used."""
    filtering = _Filter(pipeline)
    try:
        number = 0
        while line := await asyncio.to_thread(lines.readline):
            number += 1
            if line.strip() and (reply := await filtering.take(line, number)):
                out.write(msgspec.json.encode(reply) + b"\n")
                out.flush()
    finally:
        await filtering.end()
    return filtering.bad


class _Peek(msgspec.Struct):
    """What can be told of a line that does not fit."""

    t: Any = None
    id: Any = None


_peek = msgspec.json.Decoder(_Peek)


class _Filter:
    """The engine that speaks, and what could not be used."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.bad = 0
        self._pipeline = pipeline
        self._engine: RunningEngine | None = None

    async def take(self, line: bytes, number: int) -> Reply | None:
        """One line; the reply where it asks."""
        try:
            return await self._step(parse(line, where=f"line {number}"), number)
        except (BadRecording, InvalidInput) as error:
            self.bad += 1
            text = str(error).removeprefix(where := f"line {number}: ")
            print(f"kvledger verify: {where}{text}", file=sys.stderr, flush=True)  # noqa: T201 - the command's own stderr
            return await self._instead(line)

    async def end(self) -> None:
        """Stop the engine, if there is one."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    async def _step(self, step: Step, number: int) -> Reply | None:
        if isinstance(step, Meta):
            await self.end()
            self._engine = await self._pipeline.engine(step)
            return None
        if not isinstance(step, Ask | Published):
            return None
        if self._engine is None:
            msg = f"line {number}: no meta line before the first message or question"
            raise BadRecording(msg)
        if isinstance(step, Published):
            await self._engine.publish(step)
            return None
        found = await self._engine.predict(step.tokens, lora=step.lora, salt=step.salt, media=step.mm or ())
        return Reply(step.id, found.hit_tokens, found.status, found.as_of)

    async def _instead(self, line: bytes) -> Reply | None:
        """What follows from a line that could not be used."""
        try:
            peek = _peek.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if peek.t == "meta":
            await self.end()
        return Reply(peek.id, 0, "unknown", -1) if peek.t == "ask" else None
