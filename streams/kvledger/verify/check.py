"""Walk a recording: publish what the engine published, predict before looking, compare (``kvledger verify FILE…``)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from kvledger.verify.blind import BlindIndex
from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger.verify.report import Comparison, Report
from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import Begin, Meta, Probe, Published, Request, Reset, Step, read

Watch = Callable[[Report, Comparison], None]
"""Called after each prediction, for progress."""

Start = Callable[[Meta], Awaitable[RunningEngine]]
"""How a recording's engine comes to be."""


async def check(pipeline: Pipeline, path: Path, *, blind: bool = False, watch: Watch | None = None) -> Report:
    """One recording through ``pipeline``; what goes wrong with the file ends up in the report's ``error``."""
    return await play(path, pipeline.engine, blind=blind, watch=watch)


async def play(path: Path, start: Start, *, blind: bool = False, watch: Watch | None = None) -> Report:
    """The same, with engines that ``start`` makes; each is closed at its end."""
    report = Report(file=str(path), model="", engine=None)
    started = time.monotonic()
    walk = _Walk(start, report, blind=blind, watch=watch)
    try:
        for step in looking_ahead(read(path)):
            await walk.take(step)
    except BadRecording as error:
        report.error = str(error)
    finally:
        await walk.close()
        report.seconds = time.monotonic() - started
    if report.error is None and not report.model:
        report.error = "no meta line: not a recording"
    return report


def looking_ahead(steps: Iterator[Step]) -> Iterator[Step]:
    """Put each request before the messages that it caused.

    In engine traces the request's own line (tokens, answer) stands behind the messages that it caused; ``begin`` marks
    the moment before it. The prediction belongs to that moment, so the request is moved to its ``begin``.
    """
    waiting: list[Step] | None = None
    for step in steps:
        if isinstance(step, Begin):
            yield from waiting or ()
            waiting = []
        elif waiting is None:
            yield step
        elif isinstance(step, Request):
            yield step
            yield from waiting
            waiting = None
        else:
            waiting.append(step)
    yield from waiting or ()


class _Walk:
    """The state of one recording: the engine that plays it and what is counted."""

    def __init__(self, start: Start, report: Report, *, blind: bool, watch: Watch | None) -> None:
        self._begin, self._report, self._watch = start, report, watch
        self._engine: RunningEngine | None = None
        self._blind: BlindIndex | None = None
        self._want_blind = blind
        self._after_reset = False
        self._number = 0

    async def take(self, step: Step) -> None:
        """One line of the recording."""
        match step:
            case Meta():
                await self._start(step)
            case Published():
                await self._publish(step)
            case Reset():
                self._after_reset = True
            case Request(cached=actual) | Probe(hit=actual):
                await self._predict(step, actual)
            case _:
                pass

    async def close(self) -> None:
        """Stop the engine and take its totals."""
        if self._engine is not None:
            self._report.unplaced = await self._engine.unplaced()
            self._report.batches = self._engine.published
            await self._engine.close()
            self._engine = None

    async def _start(self, meta: Meta) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._report.model = meta.name
        self._report.engine = meta.vllm
        self._engine = await self._begin(meta)
        self._blind = BlindIndex(self._engine.entry) if self._want_blind else None

    async def _publish(self, batch: Published) -> None:
        engine = self._running()
        await engine.publish(batch)
        if self._blind is not None:
            self._blind.apply(batch.seq, batch.payload)

    async def _predict(self, asked: Request | Probe, actual: int | None) -> None:
        media = asked.mm or ()
        answer = await self._running().predict(asked.tokens, lora=asked.lora, salt=asked.salt, media=media)
        self._number += 1
        blind = None
        if self._blind is not None:
            blind = self._blind.predict(asked.tokens, lora=asked.lora, salt=asked.salt, media=media)
        one = Comparison(
            number=self._number,
            predicted=answer.hit_tokens,
            actual=actual,
            status=answer.status,
            as_of=answer.as_of,
            after_reset=self._after_reset,
            blind=blind,
        )
        self._report.add(one)
        self._after_reset = False
        if self._watch is not None:
            self._watch(self._report, one)

    def _running(self) -> RunningEngine:
        if self._engine is None:
            msg = f"{self._report.file}: no meta line before the first message or request"
            raise BadRecording(msg)
        return self._engine
