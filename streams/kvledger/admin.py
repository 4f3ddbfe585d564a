"""Creating and checking the topics of an installation with Kafka's admin API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvledger.errors import Unavailable
from kvledger_wire.topics import TopicSpec, differences

REQUEST_SECONDS_MAX: Final = 15.0
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
    """Create the topics that are missing and wait until a leader serves them. Returns the names created.

    Existing ones are left as they are, right or wrong: ``check_topics`` tells. Raises Unavailable with Kafka's words.
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
    return created


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
