"""How a bridge reads topics: by partitions that it names itself, joining no group and committing nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from confluent_kafka import Consumer

from kvledger_bridge.settings import Settings


def reader(
    settings: Settings,
    options: Mapping[str, Any],
    role: str,
    *,
    reset: Literal["earliest", "latest", "error"],
    logger: logging.Logger,
) -> Any:
    """A consumer, to be assigned and closed by the caller. Returns at once.

    ``role`` ends the name of its group, which brokers want and nobody joins; ``reset`` is what becomes of an offset
    that the log does not have.
    """
    return Consumer(
        {
            **options,
            "group.id": f"{settings.topic_prefix}kvledger.bridge.{role}",
            "enable.auto.commit": False,
            "auto.offset.reset": reset,
        },
        logger=logger,
    )
