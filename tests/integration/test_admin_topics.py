"""``kvledger admin topics`` against a real Kafka."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvledger.admin import check_topics, connect, create_topics
from kvledger.cli import main
from kvledger.errors import Unavailable
from kvledger_wire.topics import TopicSpec, topic_specs

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def topics(kafka: str, topic_prefix: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on this test's topics: exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["admin", "topics", "--kafka", kafka, "--topic-prefix", topic_prefix, *words])
        return code, capsys.readouterr().out

    return run


def test_topics_are_created_once_and_then_found_good(topics: Run, topic_prefix: str) -> None:
    first = topics("--partitions", "3")
    second = topics("--partitions", "3")

    assert first[0] == second[0] == 0
    assert f"topic {topic_prefix}kvledger.events created (3 partitions, delete)" in first[1]
    assert f"topic {topic_prefix}kvledger.events is as it must be (3 partitions, delete)" in second[1]


def test_a_check_creates_nothing(topics: Run, topic_prefix: str) -> None:
    expected = (1, f"topic {topic_prefix}kvledger.events is missing: create it with 'kvledger admin topics'")
    for _ in range(2):
        code, printed = topics("--check")
        assert (code, printed.splitlines()[0]) == expected


def test_a_wrong_partition_count_is_refused_and_left_alone(topics: Run) -> None:
    topics("--partitions", "3")

    code, printed = topics("--partitions", "5", "--json")

    assert code == 1
    rows: list[dict[str, Any]] = json.loads(printed)["topics"]
    assert [row["status"] for row in rows] == ["wrong", "ok", "ok"]
    assert "has 3 partitions and 5 are configured" in rows[0]["problems"][0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("cleanup.policy", "compact"), ("message.timestamp.type", "CreateTime"), ("retention.ms", "1000")],
)
def test_a_wrong_setting_is_named_with_the_right_one(kafka: str, topic_prefix: str, setting: str, value: str) -> None:
    wanted = topic_specs(partitions=2, prefix=topic_prefix)[0]
    client = connect(kafka)
    create_topics(client, [TopicSpec(wanted.name, 2, {**wanted.config, setting: value})])

    assert check_topics(client, [wanted]) == {
        wanted.name: [f"topic {wanted.name} has {setting}={value}: set it to {wanted.config[setting]}"]
    }


def test_what_kafka_refuses_is_said_in_its_words(kafka: str, topic_prefix: str) -> None:
    with pytest.raises(Unavailable, match=r"refused to create topic .*replication factor"):
        create_topics(connect(kafka), topic_specs(prefix=topic_prefix), replication=3)


def test_no_kafka_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvledger.admin.REQUEST_SECONDS_MAX", 0.3)

    assert main(["admin", "topics", "--kafka", "127.0.0.1:1"]) == 1
    assert "Kafka does not answer at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["topics"], "no Kafka named: give --kafka HOST:PORT or set KVLEDGER_KAFKA"),
        (["topics", "--kafka", "x:1", "--partitions", "0"], "--partitions 0 is not between 1 and 10000"),
        (["topics", "--kafka", "x:1", "--retention-days", "0"], "--retention-days 0 is less than 1"),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["admin", *words]) == 2
    assert capsys.readouterr().err == f"kvledger: {said}\n"
