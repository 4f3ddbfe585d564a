"""Settings of a stream worker: flags, then environment, then defaults; what is wrong is named."""

from __future__ import annotations

import msgspec
import pytest

from kvledger_streams.errors import BadSettings
from kvledger_streams.settings import Settings, read_settings, variable_of

GIVEN = {"kafka": "k:9092", "redis": "redis://r"}


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {"KVLEDGER_KAFKA": "env:1", "KVLEDGER_NAMESPACE": "env", "KVLEDGER_STREAMS_POLL_RECORDS_MAX": "7"}
    settings = read_settings({"kafka": "flag:1", "redis": "redis://r", "namespace": None}, environment)

    assert (settings.kafka, settings.namespace, settings.poll_records_max) == ("flag:1", "env", 7)
    assert settings.topic_prefix == ""


@pytest.mark.parametrize("missing", ["kafka", "redis"])
def test_an_address_that_nobody_gave_is_asked_for_by_flag_and_variable(missing: str) -> None:
    with pytest.raises(BadSettings, match=f"--{missing} or KVLEDGER_{missing.upper()}"):
        read_settings({name: value for name, value in GIVEN.items() if name != missing}, {})


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KVLEDGER_STREAMS_ALIVE_SECONDS", "soon", "alive_seconds"),
        ("KVLEDGER_STREAMS_ALIVE_SECONDS", "0", "alive_seconds is 0"),
        ("KVLEDGER_STREAMS_ALIVE_SECONDS", "3.1", "stale between two stamps"),
        ("KVLEDGER_STREAMS_STOP_SECONDS", "nan", "stop_seconds is nan"),
        ("KVLEDGER_PARTITIONS", "-3", "partitions is -3"),
        ("KVLEDGER_STREAMS_RETRY_SECONDS_MIN", "9", "the back-off only grows"),
        ("KVLEDGER_STREAMS_SCRUB_BUDGET_SECONDS", "0.021", "routers wait for Redis"),
        ("KVLEDGER_STREAMS_SCRUB_SECONDS", "0.001", "Redis has other work"),
        ("KVLEDGER_STREAMS_FETCH_WAIT_SECONDS", "3", "an idle partition is heard of once per fetch wait"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(variable: str, value: str, words: str) -> None:
    with pytest.raises(BadSettings, match=words):
        read_settings(GIVEN, {variable: value})


def test_a_bad_setting_is_never_quoted() -> None:
    """A Redis URL may hold a password, and an operator may put it into the wrong variable."""
    with pytest.raises(BadSettings) as caught:
        read_settings(GIVEN, {"KVLEDGER_PARTITIONS": "redis://:secret@r"})

    assert "secret" not in str(caught.value)


def test_two_indexes_of_one_log_are_two_groups() -> None:
    groups = {
        read_settings(GIVEN | more, {}).consumer_group
        for more in ({}, {"namespace": "blue"}, {"topic_prefix": "x."}, {"group": "mine"})
    }

    assert groups == {"kvledger.streams.kvl", "kvledger.streams.blue", "x.kvledger.streams.kvl", "mine"}


def test_the_topic_takes_the_prefix() -> None:
    assert read_settings(GIVEN | {"topic_prefix": "x."}, {}).topic == "x.kvledger.events"


def test_every_setting_has_a_variable_of_its_own() -> None:
    names = [field.name for field in msgspec.structs.fields(Settings)]

    assert len({variable_of(name) for name in names}) == len(names)
