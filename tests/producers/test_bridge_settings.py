"""Settings come from flags, then the environment, then defaults, and are checked together."""

from __future__ import annotations

import io
import json
import socket

import msgspec
import pytest

from kvledger_bridge.errors import InvalidConfig
from kvledger_bridge.settings import OWNED_OPTIONS, Settings, read_settings, variable_of
from kvledger_bridge.telemetry import Code, Telemetry

KAFKA = {"KVLEDGER_KAFKA": "k:9092"}


def test_flags_go_before_the_environment_and_that_before_defaults() -> None:
    environment = KAFKA | {"KVLEDGER_TOPIC_PREFIX": "env.", "KVLEDGER_BRIDGE_TURN_BATCHES_MAX": "7"}

    settings = read_settings({"topic_prefix": "flag.", "id": None}, environment)

    assert (settings.kafka, settings.topic_prefix, settings.turn_batches_max) == ("k:9092", "flag.", 7)
    assert settings.id == socket.gethostname()
    assert settings.events_topic == "flag.kvledger.events"


def test_every_setting_has_a_variable_of_its_own() -> None:
    names = [field.name for field in msgspec.structs.fields(Settings)]

    assert len({variable_of(name) for name in names}) == len(names)
    assert variable_of("kafka") == "KVLEDGER_KAFKA"
    assert variable_of("id") == "KVLEDGER_BRIDGE_ID"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "kafka is not set: use --kafka or KVLEDGER_KAFKA"),
        (KAFKA | {"KVLEDGER_PARTITIONS": "many"}, "partitions"),
        (KAFKA | {"KVLEDGER_PARTITIONS": "-1"}, r"\(KVLEDGER_PARTITIONS\) is -1, must be 0"),
        (
            KAFKA | {"KVLEDGER_BRIDGE_STOP_SECONDS": "0"},
            r"stop_seconds \(KVLEDGER_BRIDGE_STOP_SECONDS\) is 0.0, must be above 0",
        ),
        (KAFKA | {"KVLEDGER_BRIDGE_RESTORE_TURN_SECONDS": "inf"}, r"\(KVLEDGER_BRIDGE_RESTORE_TURN_SECONDS\) is inf"),
        (KAFKA | {"KVLEDGER_BRIDGE_LEASE_SECONDS": "inf"}, "is inf, must be above 0 and finite"),
        (KAFKA | {"KVLEDGER_BRIDGE_LEASE_SECONDS": "nan"}, "is nan, must be above 0 and finite"),
        (KAFKA | {"KVLEDGER_BRIDGE_LEASE_SECONDS": "14"}, r"\(KVLEDGER_BRIDGE_RESTORING_SECONDS\) 5.0"),
        (KAFKA | {"KVLEDGER_TOPIC_PREFIX": "a b"}, r"topic_prefix \(KVLEDGER_TOPIC_PREFIX\) may hold"),
        (KAFKA | {"KVLEDGER_BRIDGE_IDLE_PROBE_SECONDS": "5"}, "stale between two probes"),
        (KAFKA | {"KVLEDGER_BRIDGE_KAFKA_OPTIONS": "acks=1"}, "must not set acks"),
        (KAFKA | {"KVLEDGER_BRIDGE_KAFKA_OPTIONS": "sasl.password"}, "name=value"),
    ],
)
def test_bad_settings_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        read_settings({}, environment)


def test_no_error_shows_a_password() -> None:
    options = "sasl.password=hunter2,acks=1"
    with pytest.raises(InvalidConfig) as caught:
        read_settings({}, KAFKA | {"KVLEDGER_BRIDGE_KAFKA_OPTIONS": options, "KVLEDGER_PARTITIONS": "x"})

    assert "hunter2" not in str(caught.value)


def test_options_of_the_client_pass_through() -> None:
    settings = read_settings(
        {}, KAFKA | {"KVLEDGER_BRIDGE_KAFKA_OPTIONS": "security.protocol=SSL, ssl.ca.location=/ca"}
    )

    assert settings.options == {"security.protocol": "SSL", "ssl.ca.location": "/ca"}
    assert not OWNED_OPTIONS & set(settings.options)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_logs_are_json_lines_with_a_code() -> None:
    stream = io.StringIO()
    Telemetry(stream).opened("r/0", life=(3, 1), seq=-1, partial=False, why="first contact")

    (line,) = lines(stream)
    assert list(line)[:3] == ["ts", "level", "event"]
    assert line["event"] == "rank_opened"
    assert line["life"] == [3, 1]


def test_the_same_trouble_is_said_once_in_a_while_and_counted() -> None:
    now = [0.0]
    stream = io.StringIO()
    telemetry = Telemetry(stream, lambda: now[0])
    for i in range(10):
        now[0] = i * 1.0
        telemetry.suspended("r/0", "disconnected")
    telemetry.suspended("r/1", "disconnected")

    said = [(line["rank"], line.get("left_out")) for line in lines(stream)]
    assert said == [("r/0", None), ("r/0", 4), ("r/1", None)]


def test_every_code_is_explained_in_the_docstring() -> None:
    import kvledger_bridge.telemetry as module

    text = module.__doc__ or ""
    for code in Code.__args__:  # type: ignore[attr-defined]  # a Literal has its words there
        assert f"    {code} " in text
