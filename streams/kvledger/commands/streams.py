"""``kvledger streams``: one stream worker, in the foreground. Run as many as the event topic has partitions."""

from __future__ import annotations

import argparse
import os

FLAGS = ("kafka", "redis", "topic_prefix", "namespace", "group", "partitions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvledger streams``; each has an environment variable, finer settings have only that."""
    parser.add_argument("--kafka", metavar="HOST:PORT", help="bootstrap addresses (default: $KVLEDGER_KAFKA)")
    parser.add_argument("--redis", metavar="URL", help="redis:// URL of the primary (default: $KVLEDGER_REDIS)")
    parser.add_argument(
        "--topic-prefix", metavar="P", help="goes before each topic's name (default: $KVLEDGER_TOPIC_PREFIX, else none)"
    )
    parser.add_argument(
        "--namespace", metavar="NS", help="goes before each key in Redis (default: $KVLEDGER_NAMESPACE, else kvl)"
    )
    parser.add_argument(
        "--group", metavar="G", help="consumer group (default: $KVLEDGER_GROUP, else from prefix and namespace)"
    )
    parser.add_argument(
        "--partitions",
        metavar="N",
        type=int,
        help="refuse an event topic of another partition count (default: $KVLEDGER_PARTITIONS, else take any)",
    )
    parser.epilog = (
        "Logs are JSON lines on stdout. SIGTERM or Ctrl-C ends it after the call in flight; a second one at once. "
        "Exit code 0 after a clean stop, 1 where Kafka or Redis is not there or does not fit, 2 for bad settings."
    )


def run(args: argparse.Namespace) -> int:
    """Run a worker until it is told to stop."""
    from kvledger_streams.settings import read_settings

    settings = read_settings({name: getattr(args, name) for name in FLAGS}, os.environ)

    from kvledger_streams.app import run as serve  # after the settings: importing Faust takes 0.6 s

    return serve(settings)
