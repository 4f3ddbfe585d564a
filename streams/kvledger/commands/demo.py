"""``kvledger demo``: three recorded engines through everything, predictions beside the engines' own answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvledger.errors import BadInput
from kvledger.verify.check import play
from kvledger.verify.pipeline import Pipeline, RunningEngine, open_pipeline
from kvledger.verify.report import Comparison, Report
from kvledger_engine.recording import Meta, read

RECORDINGS = Path(__file__).parents[3] / "tests" / "fixtures" / "engine-traces"
"""Where the repository keeps them."""

EXIT_DIFFERS = 1
LINE_EVERY = 50
"""Without a terminal a line stands for so many predictions."""
PLAIN_COLUMNS = 100


class Part(NamedTuple):
    """One engine of the demo."""

    replica: str
    file: str
    about: str


PARTS = (
    Part("hybrid-a", "gemma3_s11.jsonl.gz", "5 window + 1 full"),
    Part("hybrid-b", "gemma3_vllm0.20.2_s51.jsonl.gz", "5 window + 1 full"),
    Part("plain-c", "llama_s11.jsonl.gz", "1 full"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``kvledger demo``."""
    parser.description = (
        "Start Kafka, Redis, a bridge and a fold, let three stand-in engines publish what real vLLM engines published, "
        "ask the index about each recorded prompt before its engine answers, and compare."
    )
    parser.epilog = "Exit code: 0 only if every prediction equals the engine's own answer."
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, metavar="DIR", help="where the recordings are")
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", help="use this Kafka (default: KVLEDGER_KAFKA, else a local one)"
    )
    parser.add_argument("--redis", metavar="URL", help="use this Redis (default: KVLEDGER_REDIS, else a local one)")


def run(args: argparse.Namespace) -> int:
    """Play all parts at once; one line of totals at the end."""
    for part in PARTS:
        if not (args.recordings / part.file).is_file():
            msg = f"{args.recordings / part.file}: no such recording; run this from a clone, or name --recordings DIR"
            raise BadInput(msg)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_COLUMNS)
    console.print(
        "three recorded vLLM engines, replayed over real sockets; each request is predicted before it is answered"
    )
    started = time.monotonic()
    with open_pipeline(kafka=args.kafka, redis=args.redis, progress=_say) as pipeline:
        board = Board(console)
        with Live(board.table(), console=console, refresh_per_second=8, transient=False) as live:
            board.live = live if console.is_terminal else None
            reports = asyncio.run(_play(pipeline, args.recordings, board))
            live.update(board.table())
        if not console.is_terminal:
            console.print()
    return _totals(console, reports, time.monotonic() - started)


async def _play(pipeline: Pipeline, folder: Path, board: Board) -> list[Report]:
    metas = {part.replica: _meta(folder / part.file) for part in PARTS}
    # one entry per model: the newest engine's, as an operator would write it once
    entries = {meta.name: meta.entry() for meta in reversed(list(metas.values()))}
    engines = pipeline.attach({replica: entries[meta.name] for replica, meta in metas.items()})
    by_name = {engine.replica: engine for engine in engines}

    async def one(part: Part) -> Report:
        async def start(_meta: Meta) -> RunningEngine:
            await by_name[part.replica].settle()
            return by_name[part.replica]

        return await play(folder / part.file, start, watch=board.watcher(part))

    return await asyncio.gather(*(one(part) for part in PARTS))


def _meta(path: Path) -> Meta:
    for step in read(path):
        if isinstance(step, Meta):
            return step
    msg = f"{path}: no meta line"
    raise BadInput(msg)


class Board:
    """What the demo shows while it runs: one row per engine."""

    def __init__(self, console: Console) -> None:
        self.live: Live | None = None
        self._console = console
        self._rows: dict[str, tuple[Report, Comparison]] = {}

    def watcher(self, part: Part):  # type: ignore[no-untyped-def]  # noqa: ANN201 - a closure of check.Watch's type
        """Called after each prediction of this engine."""

        def watch(report: Report, one: Comparison) -> None:
            self._rows[part.replica] = (report, one)
            if self.live is not None:
                self.live.update(self.table())
            elif report.predictions % LINE_EVERY == 0:
                self._console.print(f"{part.replica}: {report.predictions} predictions, {report.exact} exact")

        return watch

    def table(self) -> Table:
        """The present state: the last prediction of each engine beside its answer, and the counts so far."""
        table = Table()
        for head in ("replica", "engine", "KV-cache groups"):
            table.add_column(head)
        for head in ("predicted", "engine's own", "status", "exact", "wrong"):
            table.add_column(head, justify="right")
        for part in PARTS:
            row = self._rows.get(part.replica)
            if row is None:
                table.add_row(part.replica, "", part.about, "", "", "", "0", "0")
                continue
            report, one = row
            table.add_row(
                part.replica,
                report.engine,
                part.about,
                str(one.predicted),
                "" if one.actual is None else str(one.actual),
                one.status,
                f"{report.exact} of {report.predictions}",
                str(report.over + report.under),
            )
        return table


def _totals(console: Console, reports: list[Report], seconds: float) -> int:
    predictions = sum(report.predictions for report in reports)
    exact = sum(report.exact for report in reports)
    called = sum(report.called_exact for report in reports)
    after = sum(report.after_reset for report in reports)
    agree = all(report.agrees and report.called_exact == report.predictions for report in reports)
    for report in reports:
        if report.error:
            console.print(f"{report.file}: {report.error}", markup=False)
    console.print(
        f"{'all agree' if agree else 'NOT all agree'}: {exact} of {predictions} predictions equal the engine's own "
        f"answer, {called} called exact, {after} right after an idle reset left out, {seconds:.0f} s",
        soft_wrap=True,
    )
    return 0 if agree else EXIT_DIFFERS


def _say(sentence: str) -> None:
    print(f"kvledger demo: {sentence}", file=sys.stderr, flush=True)
