"""``kvledger admin topics``: create the topics of an installation, or check those that are there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from kvledger.admin import check_topics, connect, create_topics
from kvledger.errors import EXIT_SERVICE, BadInput
from kvledger_wire.topics import EVENT_PARTITIONS_DEFAULT, RETENTION_DAYS_DEFAULT, TopicSpec, topic_specs

PARTITIONS_MAX = 10_000
"""More than any cluster of routers needs; a guard against a slip of the finger, as the count is fixed for life."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvledger admin``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    topics = actions.add_parser(
        "topics",
        help="create the topics, or check them",
        description="Create the topics that are missing and check all of them: partition count, cleanup policy, "
        "retention, timestamp type. Existing topics are never changed. Exit code 1 if one is not as it must be.",
    )
    topics.add_argument("--check", action="store_true", help="create nothing, only check")
    topics.add_argument(
        "--kafka",
        metavar="HOST:PORT",
        default=os.environ.get("KVLEDGER_KAFKA"),
        help="bootstrap address (default: $KVLEDGER_KAFKA)",
    )
    topics.add_argument(
        "--partitions",
        type=int,
        default=os.environ.get("KVLEDGER_PARTITIONS") or EVENT_PARTITIONS_DEFAULT,
        metavar="N",
        help="partitions of the event topic, fixed for its life (default: %(default)s)",
    )
    topics.add_argument("--replication", type=int, default=1, metavar="N", help="copies (default: %(default)s)")
    topics.add_argument(
        "--retention-days",
        type=int,
        default=RETENTION_DAYS_DEFAULT,
        metavar="N",
        help="how long events are kept (default: %(default)s)",
    )
    topics.add_argument(
        "--topic-prefix",
        metavar="P",
        default=os.environ.get("KVLEDGER_TOPIC_PREFIX", ""),
        help="goes before each topic's name (default: $KVLEDGER_TOPIC_PREFIX, else none)",
    )
    topics.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Create or check; prints a line per topic and per problem."""
    _validate(args)
    specs = topic_specs(partitions=args.partitions, retention_days=args.retention_days, prefix=args.topic_prefix)
    client = connect(args.kafka)
    created = [] if args.check else create_topics(client, specs, replication=args.replication)
    problems = check_topics(client, specs)
    if args.json:
        print(json.dumps({"topics": [_row(spec, created, problems[spec.name]) for spec in specs]}))
    else:
        _print_lines(specs, created, problems)
    return EXIT_SERVICE if any(problems.values()) else 0


def _validate(args: argparse.Namespace) -> None:
    if not args.kafka:
        msg = "no Kafka named: give --kafka HOST:PORT or set KVLEDGER_KAFKA"
        raise BadInput(msg)
    if not 1 <= args.partitions <= PARTITIONS_MAX:
        msg = f"--partitions {args.partitions} is not between 1 and {PARTITIONS_MAX}"
        raise BadInput(msg)
    for flag, value in (("--replication", args.replication), ("--retention-days", args.retention_days)):
        if value < 1:
            msg = f"{flag} {value} is less than 1"
            raise BadInput(msg)


def _row(spec: TopicSpec, created: Sequence[str], problems: Sequence[str]) -> dict[str, object]:
    status = "created" if spec.name in created else "wrong" if problems else "ok"
    return {"name": spec.name, "partitions": spec.partitions, "status": status, "problems": list(problems)}


def _print_lines(specs: Sequence[TopicSpec], created: Sequence[str], problems: dict[str, list[str]]) -> None:
    for spec in specs:
        for problem in problems[spec.name]:
            print(problem)
        if not problems[spec.name]:
            what = "created" if spec.name in created else "is as it must be"
            print(f"topic {spec.name} {what} ({spec.partitions} partitions, {spec.config['cleanup.policy']})")
