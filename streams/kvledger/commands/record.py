"""``kvledger record``: a session of a running vLLM server as a recording that ``kvledger verify`` can check."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from kvledger.errors import BadInput, Unavailable
from kvledger.live.server import Served, Server
from kvledger.live.tap import Tap
from kvledger.live.trace import Trace
from kvledger.live.workload import Job, Workload
from kvledger_bridge.discovery import read_models
from kvledger_index.model import ModelEntry

KEY: Final = "OPENAI_API_KEY"
COUNT_DEFAULT: Final = 60
VOCABULARY: Final = 256
"""Made-up prompts use token ids below this; also a vocabulary of bytes has as many."""

PROMPT_TOKENS_MAX: Final = 4096
"""Longest made-up prompt with its answer, also where the server takes more."""

ANSWER_TOKENS_DEFAULT: Final = 16
BLOCK_TOKENS_DEFAULT: Final = 16
QUIET_SECONDS_DEFAULT: Final = 0.05
QUIET_SECONDS_ALONE: Final = 0.5
"""Without a replay endpoint nobody can be asked whether that was all."""

EPILOG: Final = """\
Start the server with

  vllm serve MODEL --enable-prompt-tokens-details --kv-events-config \\
    '{"enable_kv_cache_events": true, "publisher": "zmq",
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'

and record from its first request on, while nothing else uses it.
A recording holds token ids and salts of the requests: keep it like the prompts themselves.
Exit code: 0 recorded, 1 the server is not there or does not report cached tokens, 2 bad input.
"""


class Line(msgspec.Struct, frozen=True):
    """One line of ``--requests``: token ids, or a prompt in words that the server turns into them; or ``"t": "reset"``.

    ``lora`` is the name under which the server serves an adapter.
    """

    t: str = "req"
    tokens: tuple[int, ...] | None = None
    prompt: str | None = None
    salt: str | None = None
    lora: str | None = None
    max_tokens: int = ANSWER_TOKENS_DEFAULT


_line = msgspec.json.Decoder(Line)
Answered = Callable[[Sequence[int]], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``kvledger record``."""
    parser.description = (
        "Send requests to an OpenAI-compatible vLLM server, one at a time, and write what its\nengine published beside "
        "the number of tokens that it found cached. 'kvledger verify FILE'\nthen shows whether kvledger predicts them."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the server's command is to be copied
    parser.epilog = EPILOG
    parser.add_argument("--endpoint", required=True, metavar="URL", help="the server: http://HOST:PORT")
    parser.add_argument(
        "--data", required=True, metavar="ADDR", help="the engine's events: tcp://HOST:5557 (kv_events_config.endpoint)"
    )
    parser.add_argument(
        "--replay", metavar="ADDR", help="tcp://HOST:5558 (replay_endpoint); without it, start before the first request"
    )
    parser.add_argument(
        "--requests",
        type=Path,
        metavar="FILE.jsonl",
        help='one a line: {"tokens": […]} or {"prompt": "…"}, and "salt", "lora", "max_tokens"; '
        '{"t": "reset"} empties the prefix cache (default: made-up prompts)',
    )
    parser.add_argument(
        "--count", type=int, default=COUNT_DEFAULT, metavar="N", help="made-up prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of the made-up prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("recording.jsonl.gz"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    parser.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="models file whose entry for the model goes into the recording: for engines before 0.22, chunked "
        "attention and EAGLE, which the events do not describe",
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=None,
        metavar="SECONDS",
        help=f"silence after which the engine counts as at rest (default: {QUIET_SECONDS_DEFAULT}, "
        f"{QUIET_SECONDS_ALONE} without --replay)",
    )
    parser.add_argument(
        "--key-env", default=KEY, metavar="NAME", help="variable with an API key (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Record until the requests are done or Ctrl-C; what was recorded by then is written."""
    _validate(args)
    server = Server(args.endpoint, key=os.environ.get(args.key_env))
    served = server.describe(args.model)
    entry = _entry(args.models, served.model)
    jobs, answered = _jobs(args, server, served)
    first = next(jobs, None)  # what is wrong with the file's first line is said before anything is sent
    if first is None:
        msg = f"{args.requests}: no requests"
        raise BadInput(msg)
    quiet = args.quiet if args.quiet is not None else QUIET_SECONDS_DEFAULT if args.replay else QUIET_SECONDS_ALONE
    recorder = Recorder(server, served)
    with (
        Tap(args.data, args.replay, quiet_seconds=quiet) as tap,
        Trace(args.out, _meta(served, entry)) as trace,
        suppress(KeyboardInterrupt),
    ):
        recorder.run(tap, trace, chain([first], jobs), answered)
    _report(args, tap, trace)
    return 0


class Recorder:
    """Requests to a server and the engine's messages, in the order of a recording."""

    def __init__(self, server: Server, served: Served) -> None:
        self._server, self._served = server, served

    def run(self, tap: Tap, trace: Trace, jobs: Iterator[Job], answered: Answered) -> None:
        """One request at a time; the engine is at rest between two."""
        trace.published(tap.catch_up())
        for job in jobs:
            if job.after_reset:
                self._server.reset()
                trace.published(tap.catch_up())
                trace.reset()
            trace.begin()
            done = self._server.complete(
                job.lora or self._served.model, job.tokens, max_tokens=job.max_tokens, salt=job.salt
            )
            trace.published(tap.catch_up())
            trace.request(job.tokens, salt=job.salt, lora=job.lora, cached=done.cached, out=done.out)
            answered(done.out)
            if sys.stderr.isatty():
                print(f"\r{trace.requests} requests, {trace.batches} batches", end="", file=sys.stderr, flush=True)


def _validate(args: argparse.Namespace) -> None:
    for flag, address in (("--data", args.data), ("--replay", args.replay)):
        if address is not None and not re.fullmatch(r"(tcp|ipc)://[^*]+", address):
            msg = f"{flag} {address!r} is no address to connect to; write tcp://HOST:PORT or ipc://PATH"
            raise BadInput(msg)
    for flag, path in (("--requests", args.requests), ("--models", args.models)):
        if path is not None and not path.is_file():
            msg = f"{flag} {path} is not a file"
            raise BadInput(msg)
    if args.count < 1:
        msg = f"--count {args.count} is less than 1"
        raise BadInput(msg)
    if args.quiet is not None and not 0 <= args.quiet <= 60:
        msg = f"--quiet {args.quiet} is not between 0 and 60 seconds"
        raise BadInput(msg)


def _entry(models: Path | None, model: str) -> ModelEntry | None:
    if models is None:
        return None
    entries = read_models(models)
    if model not in entries:
        msg = f"{models} has no entry for {model!r}; it has {', '.join(entries)}"
        raise BadInput(msg)
    return entries[model]


def _meta(served: Served, entry: ModelEntry | None) -> dict[str, Any]:
    """What is known before the first message. With an entry, its groups; else those that the events will name."""
    meta: dict[str, Any] = {"vllm": served.vllm, "model": served.model, "recorded": "server"}
    if entry is None:
        return meta
    meta["groups"] = [
        {
            "group_idx": group.group,
            "kind": group.kind,
            "block_size": group.block_size,
            "sliding_window": group.window,
            "attention_chunk_size": group.chunk,
            "is_eagle": group.eagle,
        }
        for group in entry.groups
    ]
    meta["hash_block_size"] = entry.hash_block_size
    meta["cache_hit_alignment_tokens"] = entry.alignment
    meta["partial_hash_hits"] = entry.partial_hash_hits
    meta["report_mode"] = "full" if entry.full_reports else None
    meta["config"] = {} if entry.multimodal is False else None  # a text model's configuration names no vision
    return meta


def _jobs(args: argparse.Namespace, server: Server, served: Served) -> tuple[Iterator[Job], Answered]:
    """The requests of the file, else made-up ones: shared prefixes, turns and repeats of random tokens."""
    if args.requests:
        return _read(args.requests, server, served), lambda _answer: None
    workload = Workload(
        seed=args.seed,
        count=args.count,
        vocabulary=VOCABULARY,
        block_tokens=BLOCK_TOKENS_DEFAULT,
        prompt_tokens_max=min(served.tokens_max, PROMPT_TOKENS_MAX),
        resets=False,  # few servers allow it
    )
    return workload.jobs(), workload.answered


def _read(path: Path, server: Server, served: Served) -> Iterator[Job]:
    """The lines of a requests file, lazily. Raises BadInput with the line that is wrong, never with its content."""
    after_reset = False
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            asked = _line.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"{path}:{number}: {error}"
            raise BadInput(msg) from error
        if asked.t == "reset":
            after_reset = True
        elif asked.t == "req":
            tokens = _tokens(asked, server, served, f"{path}:{number}")
            yield Job(tokens, asked.salt, asked.max_tokens, asked.lora, after_reset)
            after_reset = False


def _tokens(asked: Line, server: Server, served: Served, where: str) -> tuple[int, ...]:
    if (asked.tokens is None) == (asked.prompt is None):
        msg = f'{where}: a request has either "tokens" or "prompt"'
        raise BadInput(msg)
    tokens = asked.tokens if asked.tokens is not None else server.tokenize(served.model, asked.prompt or "")
    if not tokens or asked.max_tokens < 1 or len(tokens) + asked.max_tokens > served.tokens_max:
        msg = (
            f"{where}: {len(tokens)} tokens and an answer of {asked.max_tokens}; the server takes 1 to "
            f"{served.tokens_max} together, at least one of each"
        )
        raise BadInput(msg)
    return tokens


def _report(args: argparse.Namespace, tap: Tap, trace: Trace) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _tell(f"wrote {args.out}: {trace.requests} requests, {trace.batches} batches of the engine")
    if tap.first is None:
        msg = (
            f"the engine published nothing at {args.data}; is that the endpoint of its kv_events_config, and is "
            f"enable_kv_cache_events true?"
        )
        raise Unavailable(msg)
    if tap.first > 0:
        _tell(
            f"the recording starts at batch {tap.first}, so it lacks what the engine cached before: predictions from "
            f"it will be at_least, not exact. Restart the engine and record from its first request"
        )
    _tell(f"check it with: kvledger verify {args.out}")


def _tell(sentence: str) -> None:
    print(f"kvledger record: {sentence}", file=sys.stderr, flush=True)
