"""Settings of a stream worker: read once, from flags first, then the environment, then these defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvledger_index.units import SCRUB_SECONDS_MAX
from kvledger_streams.errors import BadSettings
from kvledger_wire.topics import EVENTS, REPLICAS

SHARED = frozenset({"kafka", "redis", "topic_prefix", "namespace", "group", "partitions"})
"""Settings that other commands know by the same name: ``KVLEDGER_KAFKA``. The others are ``KVLEDGER_STREAMS_…``."""


FRESH_SECONDS = 3.0
"""What routers call fresh by default (DESIGN §8)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. ``kafka`` and ``redis`` have no default: a worker on the wrong ones looks healthy."""

    kafka: str
    """Bootstrap addresses, ``host:port`` with commas."""
    redis: str
    """``redis://…`` URL of the primary."""
    topic_prefix: str = ""
    """Goes before each topic's name."""
    namespace: str = "kvl"
    """Goes before each key in Redis."""
    group: str = ""
    """Kafka consumer group; empty: from prefix and namespace, because two indexes of one log are two groups."""
    partitions: int = 0
    """Partitions that the event topic must have; 0: as it has."""

    fetch_bytes_max: int = 1 << 20
    """Of one partition per answer: what a busy one may put before the others."""
    fetch_wait_seconds: float = 0.25
    """How long the broker holds a fetch without news. Also how fresh an idle worker's knowledge of the log's end is."""
    poll_records_max: int = 1_000
    """Records handed over at once: about 20 ms of folding, during which nothing else runs on the loop."""
    alive_seconds: float = 0.8
    """Between two stamps of a partition at whose end we stand. Below a second: routers call a rank fresh for 3."""
    end_age_seconds_max: float = 2.0
    """How old the broker's last answer may be for us to say that we stand at the log's end."""
    session_seconds: float = 6.0
    """Kafka moves a dead worker's partitions after this; the lowest that brokers allow by default."""
    request_seconds: float = 5.0
    """For one answer of Kafka's admin API; also the timeout of a Redis reply."""
    retry_seconds_min: float = 0.05
    retry_seconds_max: float = 2.0
    """Back-off of a partition that is blocked; doubles from min to max."""
    topic_check_seconds: float = 5.0
    """How often the topic's id and partition count are looked at: a topic of the same name may be another one."""
    forget_seconds: float = 86_400.0
    """By the log's clock: a rank that was silent for so long leaves the catalogue, and its blocks go."""
    scrub_seconds: float = 0.1
    """Between two scrubs of what dead slots occupy in Redis; ten times as long while batches are applied."""
    scrub_budget_seconds: float = 0.002
    """Of Redis' time for one scrub: what it may delay a batch or a router by. At most 0.02."""
    report_seconds: float = 10.0
    """Between two canonical log lines."""
    stop_seconds: float = 10.0
    """For everything that a stop takes."""

    @property
    def topic(self) -> str:
        """The event topic."""
        return self.topic_prefix + EVENTS

    @property
    def replicas_topic(self) -> str:
        """Where bridges say from where their ranks may be read."""
        return self.topic_prefix + REPLICAS

    @property
    def consumer_group(self) -> str:
        """The consumer group in use."""
        return self.group or f"{self.topic_prefix}kvledger.streams.{self.namespace}"


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Settings from flags (None: not given) and environment. Raises BadSettings naming what is wrong."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        variable = variable_of(field.name)
        flag = flags.get(field.name)
        if flag is not None:
            values[field.name] = flag
        elif variable in environment:
            values[field.name] = environment[variable]
        elif field.required:
            msg = f"{field.name} is not set: use --{field.name} or {variable}"
            raise BadSettings(msg)
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        # msgspec's text names the field and the type it wants, never the value: a Redis URL may hold a password
        name = str(error).rpartition("$.")[2].rstrip("`")
        msg = f"bad setting {name}, perhaps from {variable_of(name)}: {error}"
        raise BadSettings(msg) from error
    _check(settings)
    return settings


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"KVLEDGER_{'' if name in SHARED else 'STREAMS_'}{name.upper()}"


def _check(settings: Settings) -> None:
    for field in msgspec.structs.fields(Settings):
        value = getattr(settings, field.name)
        if field.name != "partitions" and isinstance(value, int | float) and not value > 0:
            msg = f"{field.name} is {value}, must be above 0"
            raise BadSettings(msg)
    if settings.partitions < 0:
        msg = f"partitions is {settings.partitions}, must be 0 (as the topic has) or its count"
        raise BadSettings(msg)
    if settings.scrub_budget_seconds > SCRUB_SECONDS_MAX:
        msg = f"scrub_budget_seconds is {settings.scrub_budget_seconds} > {SCRUB_SECONDS_MAX}: routers wait for Redis"
        raise BadSettings(msg)
    if settings.alive_seconds > FRESH_SECONDS:
        msg = (
            f"alive_seconds {settings.alive_seconds} > {FRESH_SECONDS}: "
            "routers would call idle partitions stale between two stamps"
        )
        raise BadSettings(msg)
    relations = (
        ("scrub_budget_seconds", "scrub_seconds", "Redis has other work"),
        ("retry_seconds_min", "retry_seconds_max", "the back-off only grows"),
        ("fetch_wait_seconds", "end_age_seconds_max", "an idle partition is heard of once per fetch wait"),
    )
    for low, high, reason in relations:
        if getattr(settings, low) > getattr(settings, high):
            msg = f"{low} {getattr(settings, low)} > {high} {getattr(settings, high)}: {reason}"
            raise BadSettings(msg)
