"""``kvledger engine play``: a recording, spoken by a stand-in engine over real ZMQ sockets."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, TextIO

import msgspec

from kvledger.errors import BadInput
from kvledger_engine.play import play
from kvledger_engine.recording import Meta, Published, Step, read
from kvledger_engine.standin import BUFFER_STEPS_DEFAULT, StandIn
from kvledger_engine.truth import Truth

ADDRESS_DEFAULT: Final = "tcp://127.0.0.1:0"
POLL_SECONDS: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``play`` is the only action today."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    sub = actions.add_parser(
        "play",
        help="play a recording",
        description=(
            "Plays the batches of a recording and then keeps serving replay until SIGTERM. The first line on stdout is "
            "a JSON object with the actual addresses; one more line follows when everything has been published. "
            "With --truth, OUT gets JSON lines: 'life' counts restarts from 1, 'rank' is what the batches name, and "
            "'resident' is what the recorded engine holds after batch 'seq': lane to hash to copies. A lane is a "
            "group, '-' where events name none, with '@medium' behind it where that is not the GPU; hashes are "
            "decimal, or hexadecimal where the engine sends bytes. It is counted from the events alone, not by the "
            "bridge's code, so it may be held against 'kvledger dump'."
        ),
    )
    sub.add_argument("trace", type=Path, metavar="TRACE", help="engine or manager trace, JSON lines, plain or gzip")
    sub.add_argument(
        "--data",
        default=ADDRESS_DEFAULT,
        metavar="ADDR",
        help="where to publish; as with vLLM an address with '*' or '::' is bound and any other connected to, "
        "except that port 0 is bound (default: %(default)s)",
    )
    sub.add_argument(
        "--replay",
        default=ADDRESS_DEFAULT,
        metavar="ADDR",
        help="where to answer replay requests, or 'none' (default: %(default)s)",
    )
    sub.add_argument("--mode", choices=("auto", "bind", "connect"), default="auto", help="overrules the rule of --data")
    sub.add_argument(
        "--rate",
        type=_rate,
        default=None,
        metavar="N|max",
        help="batches per second (default: max, as fast as it goes)",
    )
    sub.add_argument(
        "--framing",
        choices=("old", "new"),
        default="new",
        help="replay replies as up to vLLM 0.25 (old) or since (default: %(default)s)",
    )
    sub.add_argument(
        "--buffer-steps",
        type=_positive,
        default=BUFFER_STEPS_DEFAULT,
        metavar="N",
        help="batches kept for replay (default: %(default)s)",
    )
    sub.add_argument(
        "--subscribers", type=int, default=0, metavar="N", help="wait for so many subscribers before the first batch"
    )
    sub.add_argument(
        "--truth", type=Path, default=None, metavar="OUT", help="write what the engine holds, at the end of each life"
    )
    sub.add_argument(
        "--truth-every", type=_positive, default=None, metavar="N", help="write it after every N batches too"
    )
    sub.add_argument("--loop", action="store_true", help="play again and again, as a restarted engine each time")
    sub.add_argument("--exit", action="store_true", help="leave once everything is published instead of serving replay")


def run(args: argparse.Namespace) -> int:
    """Play until the end or SIGTERM; a second signal ends the process at once."""
    stop = threading.Event()
    _stop_on_signal(stop)
    engine = StandIn(
        data=args.data,
        replay=None if args.replay == "none" else args.replay,
        mode=args.mode,
        framing=args.framing,
        buffer_steps=args.buffer_steps,
    )
    meta, steps = _opened(args.trace)  # a file that cannot be read is refused before a port is taken
    with _Truths.open(args.truth, args.truth_every) as truths, engine:
        _print(event="listening", data=engine.data, replay=engine.replay, model=meta.name, vllm=meta.vllm)
        while not stop.is_set() and engine.subscribers() < args.subscribers:
            stop.wait(POLL_SECONDS)
        while not stop.is_set():
            count = play(
                engine,
                steps,
                batches_per_second=args.rate,
                clock=time.monotonic,
                wait=stop.wait,
                published=truths.published,
            )
            truths.end()
            _print(event="played", batches=count, head=engine.head)
            if not args.loop:
                break
            engine.restart()
            meta, steps = _opened(args.trace)
        if not args.exit:
            stop.wait()
    _print(event="stopped")
    return 0


class _Truths:
    """Lines of what each life of the engine holds; without a file nothing is counted."""

    def __init__(self, out: TextIO | None, every: int | None) -> None:
        self._out, self._every = out, every
        self._life, self._count = 1, 0
        self._truth = Truth()

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, every: int | None) -> Iterator[Self]:
        """Start the file anew. Raises BadInput where it cannot be written."""
        if path is None:
            if every is not None:
                raise BadInput("--truth-every says how often --truth is written: give --truth OUT too")
            yield cls(None, None)
            return
        try:
            out = path.open("w")
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from error
        with out:
            yield cls(out, every)

    def published(self, batch: Published) -> None:
        """Count one batch, and write where it is time."""
        if self._out is None:
            return
        self._truth.apply(batch.seq, batch.payload)
        self._count += 1
        if self._every and self._count % self._every == 0:
            self._write()

    def end(self) -> None:
        """The life is over: what it held last, unless that stands there already."""
        if not self._every or self._count % self._every:
            self._write()
        self._life, self._count, self._truth = self._life + 1, 0, Truth()

    def _write(self) -> None:
        if self._out is not None:
            held = {"life": self._life} | msgspec.to_builtins(self._truth.held())
            self._out.write(msgspec.json.encode(held).decode() + "\n")
            self._out.flush()


def _opened(path: Path) -> tuple[Meta, Iterator[Step]]:
    """The first line, which must be a ``meta``, and the rest, lazily."""
    steps = read(path)
    first = next(steps, None)
    if not isinstance(first, Meta):
        msg = f"{path}:1: a recording starts with a line of kind 'meta'"
        raise BadInput(msg)
    return first, steps


def _stop_on_signal(stop: threading.Event) -> None:
    def handle(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)


def _print(**fields: Any) -> None:
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    sys.stdout.flush()


def _rate(word: str) -> float | None:
    if word == "max":
        return None
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        msg = f"{word!r} is neither a positive number of batches per second nor 'max'"
        raise argparse.ArgumentTypeError(msg)
    return rate


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        msg = f"{word!r} is not a positive number"
        raise argparse.ArgumentTypeError(msg)
    return int(word)
