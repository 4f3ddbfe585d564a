"""Names and shapes of the topics (DESIGN §2, §5)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

EVENTS = "kvledger.events"
REPLICAS = "kvledger.replicas"
DEAD_LETTER = "kvledger.dead-letter"

EVENT_PARTITIONS_DEFAULT = 12
"""Fixed for the life of a topic: more partitions would move ranks while both orders are read."""

RETENTION_DAYS_DEFAULT = 7
_DAY_MS = 86_400_000


class TopicSpec(msgspec.Struct, frozen=True):
    """How a topic must look. ``partitions`` and every entry of ``config`` are checked at startup."""

    name: str
    partitions: int
    config: dict[str, str]


def topic_specs(
    *, partitions: int = EVENT_PARTITIONS_DEFAULT, retention_days: int = RETENTION_DAYS_DEFAULT, prefix: str = ""
) -> tuple[TopicSpec, ...]:
    """The three topics of one installation; ``prefix`` goes before each name."""
    retention = str(retention_days * _DAY_MS)
    return (
        TopicSpec(
            prefix + EVENTS,
            partitions,
            {"cleanup.policy": "delete", "retention.ms": retention, "message.timestamp.type": "LogAppendTime"},
        ),
        TopicSpec(
            prefix + REPLICAS,
            1,
            {"cleanup.policy": "compact,delete", "message.timestamp.type": "LogAppendTime", "retention.ms": "-1"},
        ),
        TopicSpec(
            prefix + DEAD_LETTER,
            1,
            {"cleanup.policy": "delete", "retention.ms": retention, "message.timestamp.type": "LogAppendTime"},
        ),
    )


def differences(spec: TopicSpec, partitions: int, config: Mapping[str, str]) -> list[str]:
    """What about an existing topic is not as ``spec`` says, each with the change to make; empty if all is well.

    ``partitions`` and ``config`` are what the broker reports; a setting that it does not report counts as different.
    Policies are compared as sets (``compact,delete`` = ``delete,compact``).
    """
    found = []
    if partitions != spec.partitions:
        found.append(
            f"topic {spec.name} has {partitions} partitions and {spec.partitions} are configured: a rank's place "
            f"depends on the count, so configure {partitions} or use another topic prefix (docs/operations.md)"
        )
    for name, wanted in spec.config.items():
        actual = config.get(name)
        if actual is None or _words(actual) != _words(wanted):
            found.append(f"topic {spec.name} has {name}={actual}: set it to {wanted}")
    return found


def _words(value: str) -> frozenset[str]:
    """The parts of a list-valued setting; order and spaces mean nothing."""
    return frozenset(word.strip() for word in value.split(","))
