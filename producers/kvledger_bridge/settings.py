"""Settings of a bridge: read once, from flags first, then the environment, then these defaults."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from kvledger_bridge.commands import Limits
from kvledger_bridge.errors import InvalidConfig
from kvledger_bridge.schedule import Rates
from kvledger_wire.topics import DEAD_LETTER, EVENTS, REPLICAS

SHARED = frozenset({"kafka", "topic_prefix", "partitions", "replicas", "models"})
"""Settings that other commands know by the same name: ``KVLEDGER_KAFKA``. The others are ``KVLEDGER_BRIDGE_…``."""

CHECKPOINT_SIZE_FACTOR = 4.0
"""Checkpoints are at most a quarter of what is written."""

OWNED_OPTIONS = frozenset(
    {
        "acks",
        "bootstrap.servers",
        "enable.idempotence",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.timeout.ms",
        "partitioner",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)
"""Options of librdkafka that the order and completeness of the log rest on: not for operators."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. ``kafka`` has no default: a bridge on the wrong one looks healthy."""

    kafka: str
    """Bootstrap addresses, ``host:port`` with commas."""
    topic_prefix: str = ""
    """Goes before each topic's name."""
    id: str = ""
    """How this bridge is called in claims and fences; empty: the host's name."""
    partitions: int = 0
    """Partitions that the event topic must have; 0: as it has."""
    kafka_options: str = ""
    """Further options of librdkafka, ``name=value`` with commas: TLS, SASL."""
    replicas: str = ""
    """Path of the replicas file."""
    models: str = ""
    """Path of the models file."""

    queue_records_max: int = 20_000
    """Records handed to Kafka's client and not acknowledged. Above it engines are not read: their buffers hold on."""
    queue_bytes_max: int = 64 * 2**20
    linger_seconds: float = 0.002
    """How long the client waits for more records of a partition: a routing answer is not worth less for it."""
    request_seconds: float = 10.0
    """For one answer of Kafka at start."""
    topic_check_seconds: float = 5.0
    """How often the topics' ids and partition counts are looked at: one of the same name may be another one."""
    turn_batches_max: int = 64
    """Batches applied per rank and turn: one busy engine must not make the others wait."""
    turn_live_max: int = 512
    """Live messages read per rank and turn."""
    turn_replay_max: int = 2_048
    """Replay messages read per rank and turn: engines up to 0.32 drop what is read too slowly."""
    loads_max: int = 8
    """Whole replay buffers that are read at the same time."""
    restore_turn_seconds: float = 0.02
    """Of a turn for reading ranks back from the log: what it may delay the ranks that are followed meanwhile by."""
    restoring_seconds: float = 5.0
    """A rank that is still being read back says so this often: other bridges take silence for an absence."""
    lease_seconds: float = 30.0
    """A bridge that claimed a rank over and is silent about it for so long counts as gone; doubles each time."""
    alive_seconds: float = Limits().alive_seconds
    checkpoint_bytes_min: int = 64 * 2**20
    """A rank's ledger is written anew once its partition has grown by so much, and by four times what all its ranks'
    ledgers take: what a restarted bridge or an empty index reads again."""
    checkpoint_retention_share: float = 0.25
    """And at least after this share of the event topic's retention, idle ranks' too."""
    dead_letters_per_second_max: float = 10.0
    dead_letter_raw: bool = False
    """Keep the bytes of unreadable batches on the dead-letter topic. They hold prompts: opt in knowingly."""
    silent_seconds: float = 30.0
    """A rank whose engine is away for so long, or that was never heard, is named in the log with what seems wrong."""
    report_seconds: float = 10.0
    """Between two canonical log lines."""
    stop_seconds: float = 10.0
    """For everything that a stop takes."""
    idle_probe_seconds: float = Limits().idle_probe_seconds
    replay_seconds_max: float = Limits().replay_seconds_max

    @property
    def events_topic(self) -> str:
        """The event topic."""
        return self.topic_prefix + EVENTS

    @property
    def replicas_topic(self) -> str:
        """The topic of claims and pointers."""
        return self.topic_prefix + REPLICAS

    @property
    def dead_letter_topic(self) -> str:
        """The topic of what could not be read."""
        return self.topic_prefix + DEAD_LETTER

    @property
    def limits(self) -> Limits:
        """Bounds of one session."""
        return Limits(
            idle_probe_seconds=self.idle_probe_seconds,
            replay_seconds_max=self.replay_seconds_max,
            alive_seconds=self.alive_seconds,
        )

    def rates(self, retention_seconds: float) -> Rates:
        """When checkpoints are due on a topic that keeps records for so long."""
        return Rates(
            bytes_min=self.checkpoint_bytes_min,
            size_factor=CHECKPOINT_SIZE_FACTOR,
            seconds_max=retention_seconds * self.checkpoint_retention_share,
        )

    @property
    def options(self) -> dict[str, str]:
        """``kafka_options`` as pairs."""
        return dict(_pairs(self.kafka_options))


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Settings from flags (None: not given) and environment. Raises InvalidConfig naming what is wrong."""
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
            raise InvalidConfig(msg)
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        # msgspec's text names the field and the type it wants, never the value: options may hold a password
        name = str(error).rpartition("$.")[2].rstrip("`")
        msg = f"bad setting {name}, perhaps from {variable_of(name)}: {error}"
        raise InvalidConfig(msg) from error
    return checked(settings)


def checked(settings: Settings) -> Settings:
    """The same settings, with the bridge's name filled in; raises InvalidConfig where they do not fit together."""
    if not settings.id:
        settings = msgspec.structs.replace(settings, id=socket.gethostname() or f"pid-{os.getpid()}")
    for field in msgspec.structs.fields(Settings):
        value = getattr(settings, field.name)
        if field.name == "partitions" or isinstance(value, bool | str):
            continue
        if not (value > 0 and math.isfinite(value)):
            msg = f"{_named(field.name)} is {value}, must be above 0 and finite"
            raise InvalidConfig(msg)
    if settings.partitions < 0:
        msg = f"{_named('partitions')} is {settings.partitions}, must be 0 (as the topic has) or its count"
        raise InvalidConfig(msg)
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,200}", settings.topic_prefix):
        msg = f"{_named('topic_prefix')} may hold letters, digits, '.', '_' and '-' only, as Kafka's topic names do"
        raise InvalidConfig(msg)
    if settings.lease_seconds < LEASE_WORDS_MIN * settings.restoring_seconds:
        msg = (
            f"{_named('lease_seconds')} is {settings.lease_seconds}, must be at least {LEASE_WORDS_MIN} * "
            f"{_named('restoring_seconds')} {settings.restoring_seconds}: "
            "a bridge that is still restoring would be taken for gone"
        )
        raise InvalidConfig(msg)
    if settings.checkpoint_retention_share > CHECKPOINT_SHARE_MAX:
        msg = (
            f"{_named('checkpoint_retention_share')} is {settings.checkpoint_retention_share}, "
            f"must be at most {CHECKPOINT_SHARE_MAX}: "
            "retention could take a checkpoint before the next one is written"
        )
        raise InvalidConfig(msg)
    if settings.idle_probe_seconds > FRESH_SECONDS:
        msg = (
            f"{_named('idle_probe_seconds')} is {settings.idle_probe_seconds}, must be at most {FRESH_SECONDS}: "
            "routers would call idle ranks stale between two probes"
        )
        raise InvalidConfig(msg)
    _pairs(settings.kafka_options)
    return settings


LEASE_WORDS_MIN = 3
"""Words of a restoring bridge within a lease: one may be late."""

CHECKPOINT_SHARE_MAX = 0.5
"""A checkpoint that is due may have to wait, and retention deletes whole segments."""

FRESH_SECONDS = 3.0
"""What routers call fresh by default (DESIGN §8)."""


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"KVLEDGER_{'' if name in SHARED else 'BRIDGE_'}{name.upper()}"


def _named(name: str) -> str:
    """A setting as an operator knows it."""
    return f"{name} ({variable_of(name)})"


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            msg = "kafka_options must be name=value pairs with commas between, such as security.protocol=SSL"
            raise InvalidConfig(msg)
        if name.strip() in OWNED_OPTIONS:
            msg = f"kafka_options must not set {name.strip()}: the order of the log rests on it"
            raise InvalidConfig(msg)
        pairs.append((name.strip(), value.strip()))
    return pairs
