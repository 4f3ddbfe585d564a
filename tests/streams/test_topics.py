"""The shape of the topics, and the words for one that differs."""

from __future__ import annotations

import pytest

from kvledger_wire.topics import TopicSpec, differences, topic_specs

SPEC = TopicSpec("p.kvledger.replicas", 3, {"cleanup.policy": "compact,delete", "retention.ms": "-1"})
AS_ASKED = {"cleanup.policy": "compact,delete", "retention.ms": "-1"}


def test_a_topic_as_asked_has_no_differences() -> None:
    assert differences(SPEC, 3, {**AS_ASKED, "segment.bytes": "1"}) == []


def test_the_order_of_policies_means_nothing() -> None:
    assert differences(SPEC, 3, {**AS_ASKED, "cleanup.policy": "delete, compact"}) == []


@pytest.mark.parametrize(
    ("partitions", "config", "words"),
    [
        (4, AS_ASKED, "has 4 partitions and 3 are configured"),
        (3, {**AS_ASKED, "cleanup.policy": "delete"}, "has cleanup.policy=delete: set it to compact,delete"),
        (3, {"cleanup.policy": "compact,delete"}, "has retention.ms=None: set it to -1"),
    ],
)
def test_each_difference_says_what_to_change(partitions: int, config: dict[str, str], words: str) -> None:
    (found,) = differences(SPEC, partitions, config)

    assert found.startswith(f"topic p.kvledger.replicas {words}")


def test_an_installation_has_three_topics_under_its_prefix() -> None:
    specs = {spec.name: spec for spec in topic_specs(partitions=7, retention_days=2, prefix="p.")}

    assert {name: spec.partitions for name, spec in specs.items()} == {
        "p.kvledger.events": 7,
        "p.kvledger.replicas": 1,
        "p.kvledger.dead-letter": 1,
    }
    assert specs["p.kvledger.events"].config["retention.ms"] == str(2 * 24 * 3600 * 1000)
    assert {spec.config["message.timestamp.type"] for spec in specs.values()} == {"LogAppendTime"}
