"""Whether Kafka's topics are what the log's meaning rests on: looked at before a bridge starts, and while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from kvledger_bridge.errors import Refused, Unavailable
from kvledger_bridge.settings import Settings
from kvledger_bridge.unit import RECORD_BYTES_MAX
from kvledger_wire.topics import TopicSpec, differences, topic_specs

CHECKED_CONFIG = frozenset({"cleanup.policy", "message.timestamp.type"})
"""Settings of a topic that the log's meaning rests on; retention is the operator's."""

MESSAGE_BYTES_MIN = 2 * RECORD_BYTES_MAX
"""What ``max.message.bytes`` must allow: our bound on a record is an estimate."""

NEW_TOPIC_SECONDS = 3.0
"""A topic that is missing is waited for: brokers hear of a new one some time after it was created."""

ANSWER_CHECKS_MAX = 2.5
"""An answer may be so many looks old: one may be under way, and one may be late."""

PAUSE_SECONDS = 0.1


class Seen(NamedTuple):
    """A topic as it stands: another id is another topic of the same name."""

    id: str
    partitions: int


class Change(NamedTuple):
    """What became of a topic while we ran. ``resized``: ranks belong elsewhere now; else it lost what was written."""

    text: str
    resized: bool


class Topics:
    """The topics of one installation. ``check`` waits for Kafka; ``changes`` never does."""

    def __init__(self, settings: Settings, options: Mapping[str, Any], *, logger: Any) -> None:
        self._settings = settings
        self._client: Any = AdminClient(dict(options), logger=logger)
        self._names = (settings.events_topic, settings.replicas_topic, settings.dead_letter_topic)
        self.retention_seconds = float("inf")
        """How long the event topic keeps records, once it was checked."""
        self._seen: dict[str, Seen] = {}
        self._asked: dict[str, Any] = {}
        self._ask_at = 0.0
        self._answered_at = -ANSWER_CHECKS_MAX * settings.topic_check_seconds

    def check(self) -> int:
        """Return the partitions of the event topic.

        Raises Unavailable where Kafka does not answer, Refused where topics are missing or shaped wrongly.
        """
        settings = self._settings
        try:
            self._seen = self._wait_for_all()
            configs = self._configs()
        except KafkaException as error:
            why = error.args[0].str()
            msg = f"Kafka does not answer at {settings.kafka} ({why}); check the address and that it runs"
            raise Unavailable(msg) from error
        partitions = self._seen[settings.events_topic].partitions
        wrong = [
            line
            for spec in self._specs(settings.partitions or partitions)
            for line in differences(spec, self._seen[spec.name].partitions, configs[spec.name])
        ]
        room = int(configs[settings.events_topic].get("max.message.bytes") or MESSAGE_BYTES_MIN)
        if room < MESSAGE_BYTES_MIN:
            wrong.append(
                f"topic {settings.events_topic} has max.message.bytes={room}: set it to {MESSAGE_BYTES_MIN} or more"
            )
        kept = int(configs[settings.events_topic].get("retention.ms") or -1)
        if kept > 0:
            self.retention_seconds = kept / 1000
        if wrong:
            msg = f"{'; '.join(wrong)}. 'kvledger admin topics --check{self._prefix_flag()}' shows all of it"
            raise Refused(msg)
        return partitions

    def changes(self, now: float) -> list[Change]:
        """What became of the event and replicas topics since they were checked, asked every few seconds."""
        if not self._asked and now >= self._ask_at:
            self._ask_at = now + self._settings.topic_check_seconds
            self._asked = self._describe(self._names[:2])
        if not self._asked or not all(future.done() for future in self._asked.values()):
            return []
        asked, self._asked = self._asked, {}
        if all(future.exception() is None for future in asked.values()):
            self._answered_at = now
        found: list[Change] = []
        for name, future in asked.items():
            if future.exception() is not None:
                continue  # Kafka is away, or the topic is: the producer will tell
            before, seen = self._seen[name], _seen(future.result())
            if seen.partitions != before.partitions:
                text = f"topic {name} has {seen.partitions} partitions instead of {before.partitions}"
                found.append(Change(text, resized=True))
            elif seen.id != before.id:
                found.append(Change(f"topic {name} was re-created", resized=False))
            self._seen[name] = seen
        return found

    def answers(self, now: float) -> bool:
        """Whether Kafka answered one of the last looks."""
        return now - self._answered_at < ANSWER_CHECKS_MAX * self._settings.topic_check_seconds

    # ---- inside

    def _wait_for_all(self) -> dict[str, Seen]:
        end = time.monotonic() + NEW_TOPIC_SECONDS
        while True:
            present = self._client.list_topics(timeout=self._settings.request_seconds).topics
            missing = [name for name in self._names if name not in present]
            if not missing:
                asked = self._describe(self._names)
                return {name: _seen(future.result(self._settings.request_seconds)) for name, future in asked.items()}
            if time.monotonic() > end:
                msg = (
                    f"Kafka at {self._settings.kafka} has no topic {', '.join(missing)}: "
                    f"create the topics with 'kvledger admin topics{self._prefix_flag()}'"
                )
                raise Refused(msg)
            time.sleep(PAUSE_SECONDS)

    def _describe(self, names: tuple[str, ...]) -> dict[str, Any]:
        asked: dict[str, Any] = self._client.describe_topics(
            TopicCollection(list(names)), request_timeout=self._settings.request_seconds
        )
        return asked

    def _configs(self) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in self._names]
        asked = self._client.describe_configs(resources, request_timeout=self._settings.request_seconds)
        answers = {resource.name: future.result(self._settings.request_seconds) for resource, future in asked.items()}
        return {name: {key: entry.value for key, entry in answer.items()} for name, answer in answers.items()}

    def _specs(self, partitions: int) -> list[TopicSpec]:
        keep: Callable[[str], bool] = CHECKED_CONFIG.__contains__
        return [
            msgspec.structs.replace(spec, config={k: v for k, v in spec.config.items() if keep(k)})
            for spec in topic_specs(partitions=partitions, prefix=self._settings.topic_prefix)
        ]

    def _prefix_flag(self) -> str:
        return f" --topic-prefix {self._settings.topic_prefix}" if self._settings.topic_prefix else ""


def _seen(description: Any) -> Seen:
    topic_id = description.topic_id
    high, low = topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()
    return Seen(f"{high}:{low}", len(description.partitions))
