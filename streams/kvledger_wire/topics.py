"""Names and shapes of the topics (DESIGN §2, §5)."""

from __future__ import annotations

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
