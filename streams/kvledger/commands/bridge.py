"""``kvledger bridge``: follow the engines of a node and write what they hold to Kafka, in the foreground."""

from __future__ import annotations

import argparse
import gc
import os
import signal
from pathlib import Path
from typing import Any

from kvledger.errors import BadInput

COLLECT_AFTER = (50_000, 20, 100)
"""Python's thresholds for looking for garbage. A ledger is millions of small objects without cycles, and a full look
goes through all of them; with the defaults several are part of a large batch, a turn that the node's ranks wait for."""

FLAGS = ("kafka", "topic_prefix", "partitions", "replicas", "models", "id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvledger bridge``; each has an environment variable, finer settings have only that."""
    parser.add_argument(
        "--replicas", metavar="FILE", help="which engines to follow, YAML (default: $KVLEDGER_REPLICAS)"
    )
    parser.add_argument(
        "--models", metavar="FILE", help="what is known of their models, YAML (default: $KVLEDGER_MODELS)"
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="bootstrap addresses (default: $KVLEDGER_KAFKA)")
    parser.add_argument(
        "--topic-prefix", metavar="P", help="goes before each topic's name (default: $KVLEDGER_TOPIC_PREFIX, else none)"
    )
    parser.add_argument(
        "--partitions",
        metavar="N",
        type=int,
        help="refuse an event topic of another partition count (default: $KVLEDGER_PARTITIONS, else take any)",
    )
    parser.add_argument(
        "--bridge-id",
        dest="id",
        metavar="ID",
        help="how claims and fences call this bridge (default: $KVLEDGER_BRIDGE_ID, else the host's name)",
    )
    parser.epilog = (
        "Logs are JSON lines on stdout. SIGTERM or Ctrl-C takes in nothing more, delivers what is queued and ends; "
        "a second one ends at once. Exit code 0 after a clean stop, 1 where Kafka is not there or its topics do not "
        "fit, 2 for bad files and settings."
    )


def run(args: argparse.Namespace) -> int:
    """Run a bridge until it is told to stop."""
    from kvledger_bridge.settings import read_settings

    settings = read_settings({name: getattr(args, name) for name in FLAGS}, os.environ)
    for name in ("replicas", "models"):
        if not getattr(settings, name):
            msg = f"{name} is not set: use --{name} FILE or KVLEDGER_{name.upper()}"
            raise BadInput(msg)

    from kvledger_bridge.bridge import Bridge
    from kvledger_bridge.discovery import read_config

    bridge = Bridge(settings, read_config(Path(settings.replicas), Path(settings.models)))

    def stop(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        bridge.stop()

    gc.set_threshold(*COLLECT_AFTER)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    bridge.run()
    return 0
