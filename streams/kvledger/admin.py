"""Creating and checking the topics of an installation with Kafka's admin API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from kvledger.errors import Unavailable
from kvledger_wire.topics import TopicSpec, differences

REQUEST_SECONDS_MAX: Final = 15.0
PAUSE_SECONDS: Final = 0.1
MISSING: Final = "missing"


def connect(bootstrap: str) -> Any:
    """An admin client. Raises Unavailable if no broker answers."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 500})
    try:
        client.list_topics(timeout=REQUEST_SECONDS_MAX)
    except KafkaException as error:
        msg = f"Kafka does not answer at {bootstrap} ({error.args[0].str()}); check the address and that it runs"
        raise Unavailable(msg) from error
    return client


def create_topics(client: Any, specs: Sequence[TopicSpec], *, replication: int = 1) -> list[str]:
    """Create the topics that are missing and wait until brokers tell of them. Returns the names created.

    A controller answers before the brokers have heard, so what is created is looked for afterwards. Existing ones are
    left as they are, right or wrong: ``check_topics`` tells. Raises Unavailable with Kafka's words.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    wanted = [
        NewTopic(spec.name, num_partitions=spec.partitions, replication_factor=replication, config=dict(spec.config))
        for spec in specs
    ]
    created = []
    for name, outcome in client.create_topics(wanted, operation_timeout=REQUEST_SECONDS_MAX).items():
        try:
            outcome.result(REQUEST_SECONDS_MAX)
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                msg = f"Kafka refused to create topic {name}: {error.args[0].str()}"
                raise Unavailable(msg) from error
    _await_leaders(client, created)
    return created


def _await_leaders(client: Any, names: Sequence[str]) -> None:
    """Raises Unavailable where a topic that was created has no leader for each partition in time."""
    from confluent_kafka import KafkaException

    end = time.monotonic() + REQUEST_SECONDS_MAX
    waiting = list(names)
    while waiting:
        try:
            present = client.list_topics(timeout=REQUEST_SECONDS_MAX).topics
        except KafkaException as error:
            msg = f"Kafka did not describe its topics: {error.args[0].str()}"
            raise Unavailable(msg) from error
        waiting = [name for name in waiting if name not in present or not _is_led(present[name])]
        if waiting and time.monotonic() > end:
            msg = f"Kafka created {', '.join(waiting)} and does not serve them after {REQUEST_SECONDS_MAX:.0f} s"
            raise Unavailable(msg)
        if waiting:
            time.sleep(PAUSE_SECONDS)


def _is_led(topic: Any) -> bool:
    return bool(topic.partitions) and all(each.leader >= 0 for each in topic.partitions.values())


def check_topics(client: Any, specs: Sequence[TopicSpec]) -> dict[str, list[str]]:
    """Name of each topic -> what is wrong with it, in words that say what to change; an empty list is a good topic.

    Two requests for all topics together. Raises Unavailable if Kafka does not answer them.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource, ResourceType

    try:
        present = client.list_topics(timeout=REQUEST_SECONDS_MAX).topics
        known = [spec for spec in specs if spec.name in present]
        resources = [ConfigResource(ResourceType.TOPIC, spec.name) for spec in known]
        asked = client.describe_configs(resources, request_timeout=REQUEST_SECONDS_MAX) if resources else {}
        configs = {resource.name: outcome.result(REQUEST_SECONDS_MAX) for resource, outcome in asked.items()}
    except KafkaException as error:
        msg = f"Kafka did not describe its topics: {error.args[0].str()}"
        raise Unavailable(msg) from error
    found: dict[str, list[str]] = {}
    for spec in specs:
        if spec.name not in configs:
            found[spec.name] = [f"topic {spec.name} is {MISSING}: create it with 'kvledger admin topics'"]
        else:
            config = {name: entry.value for name, entry in configs[spec.name].items()}
            found[spec.name] = differences(spec, len(present[spec.name].partitions), config)
    return found
