"""``kvledger up``: Kafka, Redis, fold and bridge on this machine, in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from kvledger.admin import check_topics, connect, create_topics
from kvledger.errors import EXIT_INTERRUPTED, BadInput, Unavailable
from kvledger.stack import Process, Stack
from kvledger_bridge.discovery import read_config
from kvledger_wire.topics import EVENT_PARTITIONS_DEFAULT, topic_specs

WATCH_SECONDS: Final = 0.2
"""How soon the death of a child is noticed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvledger up``."""
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep data and logs here (default: temporary)")
    parser.add_argument(
        "--partitions",
        type=int,
        default=os.environ.get("KVLEDGER_PARTITIONS") or EVENT_PARTITIONS_DEFAULT,
        metavar="N",
        help="partitions of the event topic when it is created (default: %(default)s)",
    )
    parser.add_argument("--replicas", type=Path, metavar="FILE", help="replicas file: run a bridge for these engines")
    parser.add_argument("--models", type=Path, metavar="FILE", help="models file, needed with --replicas")
    parser.add_argument(
        "--topic-prefix",
        metavar="P",
        default=os.environ.get("KVLEDGER_TOPIC_PREFIX", ""),
        help="goes before each topic's name (default: $KVLEDGER_TOPIC_PREFIX, else none)",
    )
    parser.add_argument(
        "--namespace",
        default="",
        metavar="NS",
        help="goes before each key in Redis (default: $KVLEDGER_NAMESPACE, else kvl)",
    )


def run(args: argparse.Namespace) -> int:
    """Start everything, watch it, stop it in reverse order. A child's death stops all and raises Unavailable."""
    _validate(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    children: list[Process] = []
    with Stack(args.data, progress=_tell) as stack:
        try:
            stack.start()
            _topics(stack, args)
            for child in _children(stack, args):
                children.append(child)
                child.start()
            # From here on a signal is noted, not raised: an exception in the middle of asking a child for its state
            # would leave that child's lock held, and nobody could wait for its end. (An event has a lock, too.)
            asked: list[int] = []
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _frame: asked.append(number))
            _announce(stack, children, args)
            _watch(stack, children, asked)
            _tell("stopping…")
        finally:
            # A second signal leaves at once: the kernel then ends the children.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _abort)
            for child in reversed(children):
                child.stop()
    _tell("stopped; nothing is left running")
    return 0


def _validate(args: argparse.Namespace) -> None:
    if args.partitions < 1:
        msg = f"--partitions {args.partitions} is less than 1"
        raise BadInput(msg)
    if (args.replicas is None) != (args.models is None):
        msg = "a bridge needs both --replicas FILE and --models FILE"
        raise BadInput(msg)
    for flag, path in (("--replicas", args.replicas), ("--models", args.models)):
        if path is not None and not path.is_file():
            msg = f"{flag} {path} is not a file"
            raise BadInput(msg)
    if args.replicas is not None:
        read_config(args.replicas, args.models)  # what is wrong in them is said before anything is started


def _topics(stack: Stack, args: argparse.Namespace) -> None:
    """Create what is missing; what is there must fit. Raises Unavailable with every difference."""
    specs = topic_specs(partitions=args.partitions, prefix=args.topic_prefix)
    client = connect(stack.kafka)
    create_topics(client, specs)
    wrong = [line for lines in check_topics(client, specs).values() for line in lines]
    if wrong:
        raise Unavailable("; ".join(wrong))


def _children(stack: Stack, args: argparse.Namespace) -> list[Process]:
    """Fold before bridge: the reader of the log is there when the first record is."""
    prefix = ["--topic-prefix", args.topic_prefix] if args.topic_prefix else []
    space = ["--namespace", args.namespace] if args.namespace else []
    kafka = ["--kafka", stack.kafka]
    commands = {"streams": [*kafka, "--redis", stack.redis, *prefix, *space]}
    if args.replicas is not None:
        commands["bridge"] = [*kafka, "--replicas", str(args.replicas), "--models", str(args.models), *prefix]
    return [
        Process(
            f"kvledger {name}",
            [sys.executable, "-m", "kvledger", name, *flags],
            log=stack.folder.path / f"{name}.log",
            held=(stack.folder.descriptor,),
        )
        for name, flags in commands.items()
    ]


def _announce(stack: Stack, children: Sequence[Process], args: argparse.Namespace) -> None:
    """The addresses, on stdout; what runs where, on stderr."""
    print(f"kafka {stack.kafka}")
    print(f"redis {stack.redis}", flush=True)
    for name, origin in sorted(stack.origins.items()):
        _tell(f"{name}: {origin}")
    for child in children:
        _tell(f"{child.name} runs as {child.pid}, its log is {child.log}")
    if args.replicas is None:
        _tell(
            f"no bridge, as no engines were named: add --replicas FILE --models FILE here, or run beside this "
            f"'kvledger bridge --kafka {stack.kafka} --replicas FILE --models FILE'"
        )
    _tell("Ctrl-C stops everything")


def _watch(stack: Stack, children: Sequence[Process], asked: Sequence[int]) -> None:
    """Return once a stop is asked for; raise Unavailable, with its last words, for the first child that ends before."""
    while not asked:
        time.sleep(WATCH_SECONDS)
        for process in (*children, *stack.processes):
            if not process.running:
                raise Unavailable(process.obituary(f"ended with code {process.returncode}"))


def _abort(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def _tell(sentence: str) -> None:
    print(f"kvledger up: {sentence}", file=sys.stderr, flush=True)
