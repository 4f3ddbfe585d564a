"""``kvledger verify``: compare predictions with a recorded engine's own answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from kvledger.errors import EXIT_INPUT, BadInput
from kvledger.verify.ask import answer
from kvledger.verify.check import check
from kvledger.verify.pipeline import Pipeline, open_pipeline
from kvledger.verify.report import Comparison, Report, table

EXIT_DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``kvledger verify``."""
    parser.description = (
        "Send a recording of a vLLM engine through the whole pipeline (ZMQ, bridge, Kafka, fold, Redis, router), "
        "predict each request before looking at the engine's own answer, and compare. '-' reads JSON lines and answers "
        'each {"t": "ask"} with one line; see docs/verify.md for both formats.'
    )
    parser.epilog = "Exit code: 0 all agree, 1 something differs or was wrongly called exact, 2 bad input."
    parser.add_argument("recordings", nargs="+", metavar="FILE.jsonl[.gz] | -")
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", help="use this Kafka (default: KVLEDGER_KAFKA, else a local one)"
    )
    parser.add_argument("--redis", metavar="URL", help="use this Redis (default: KVLEDGER_REDIS, else a local one)")
    parser.add_argument("--group-blind", action="store_true", help="also show what an index without groups would say")
    parser.add_argument("--json", action="store_true", help="one JSON object per recording, with every difference")


def run(args: argparse.Namespace) -> int:
    """Check each recording in order, or run the filter."""
    if "-" in args.recordings:
        if args.recordings != ["-"]:
            msg = "'-' reads from standard input and stands alone: kvledger verify -"
            raise BadInput(msg)
        if args.group_blind or args.json:
            msg = "--group-blind and --json go with recordings in files; 'verify -' always answers in JSON lines"
            raise BadInput(msg)
    paths = [Path(name) for name in args.recordings if name != "-"]
    for path in paths:
        if not path.is_file():
            msg = f"{path}: no such file"
            raise BadInput(msg)
    with open_pipeline(kafka=args.kafka, redis=args.redis, progress=_say) as pipeline:
        if not paths:
            return asyncio.run(_filter(pipeline))
        return asyncio.run(_files(pipeline, paths, blind=args.group_blind, as_json=args.json))


async def _filter(pipeline: Pipeline) -> int:
    bad = await answer(pipeline, sys.stdin.buffer, sys.stdout.buffer)
    return EXIT_INPUT if bad else 0


async def _files(pipeline: Pipeline, paths: list[Path], *, blind: bool, as_json: bool) -> int:
    reports: list[Report] = []
    for path in paths:

        def watch(report: Report, _one: Comparison, name: str = path.name) -> None:
            if sys.stderr.isatty():
                print(f"\r{name}: {report.predictions} predictions, {report.exact} exact", end="", file=sys.stderr)

        report = await check(pipeline, path, blind=blind, watch=watch)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        _say(f"{path.name}: {report.exact} of {report.answered} exact, {report.seconds:.0f} s")
        reports.append(report)
        if as_json:
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.flush()
    if not as_json:
        print(table(reports))
    if any(report.error for report in reports):
        return EXIT_INPUT
    return 0 if all(report.agrees for report in reports) else EXIT_DIFFERS


def _say(sentence: str) -> None:
    print(f"kvledger verify: {sentence}", file=sys.stderr, flush=True)
