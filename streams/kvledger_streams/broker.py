"""What Kafka says of the event topic: its identity, its shape, and what each partition's log holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from kvledger_streams.errors import Unavailable
from kvledger_streams.progress import Bounds, Topic
from kvledger_wire.errors import WrongTopic
from kvledger_wire.topics import EVENTS, TopicSpec, differences

SHAPE = {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"}
"""Settings of the event topic without which the fold is wrong: compaction would punch holes, producers' clocks differ.
Retention is the operator's."""


NEW_TOPIC_SECONDS = 2.0
"""For a topic that was created right before us to be known to every broker."""


class Broker:
    """Kafka's admin API for one topic. Every call is bounded by ``request_seconds``; all raise Unavailable."""

    def __init__(self, bootstrap: str, topic: str, *, request_seconds: float) -> None:
        """Connects with the first call. Raises Unavailable where ``bootstrap`` is no address."""
        self._topic = topic
        self._bootstrap = bootstrap
        self._seconds = request_seconds
        try:
            self._client = AdminClient(
                {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 500},
                logger=logging.getLogger("librdkafka"),
            )
        except KafkaException as error:
            raise self._unavailable(error) from error

    async def describe(self) -> Topic:
        """The topic's id and partition count; one request. Raises WrongTopic if there is none."""
        found = await self._ask(self._client.describe_topics(TopicCollection([self._topic]), **self._bound))
        (topic,) = found.values()
        high, low = topic.topic_id.get_most_significant_bits(), topic.topic_id.get_least_significant_bits()
        return Topic(f"{high & _U64:016x}{low & _U64:016x}", len(topic.partitions))

    async def check(self, partitions: int = 0) -> Topic:
        """Raise WrongTopic unless the topic is there and fit; ``partitions`` 0 takes any count.

        A topic that is missing is waited for a moment: brokers hear of a new one some time after it was created.
        """
        deadline = time.monotonic() + NEW_TOPIC_SECONDS
        while True:
            try:
                topic = await self.describe()
                break
            except WrongTopic:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(NEW_TOPIC_SECONDS / 10)
        resource = ConfigResource(ResourceType.TOPIC, self._topic)
        (entries,) = (await self._ask(self._client.describe_configs([resource], **self._bound))).values()
        config = {name: entry.value for name, entry in entries.items()}
        wrong = differences(TopicSpec(self._topic, partitions or topic.partitions, SHAPE), topic.partitions, config)
        if wrong:
            raise WrongTopic("; ".join(wrong))
        return topic

    async def bounds(self, partitions: Collection[int], topic: Topic) -> dict[int, Bounds]:
        """What the logs hold; three requests, whatever the number of partitions.

        ``newest_ms`` is that of the whole topic: it tells how long ago a rank was last heard, and its own partition may
        have nothing newer than that rank's last word.
        """
        asked = [TopicPartition(self._topic, number) for number in sorted(partitions)]
        every = [TopicPartition(self._topic, number) for number in range(topic.partitions)]
        first, last, newest = await asyncio.gather(
            self._offsets(asked, OffsetSpec.earliest()),
            self._offsets(asked, OffsetSpec.latest()),
            self._offsets(every, OffsetSpec.max_timestamp()),
        )
        newest_ms = max((each.timestamp for each in newest.values()), default=0)
        return {
            number: Bounds(topic.id, first[number].offset, last[number].offset, max(0, newest_ms))
            for number in first
            if number in last
        }

    async def _offsets(self, asked: Iterable[Any], spec: Any) -> dict[int, Any]:
        futures = self._client.list_offsets(dict.fromkeys(asked, spec), **self._bound)
        return {place.partition: found for place, found in (await self._ask(futures)).items()}

    @property
    def _bound(self) -> dict[str, float]:
        return {"request_timeout": self._seconds}

    async def _ask(self, futures: dict[Any, Future[Any]]) -> dict[Any, Any]:
        waiting: list[Awaitable[Any]] = [asyncio.wrap_future(future) for future in futures.values()]
        try:
            # librdkafka keeps the time; ours is for the case that it does not
            answers = await asyncio.wait_for(asyncio.gather(*waiting), 2 * self._seconds)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                prefix = self._topic.removesuffix(EVENTS)
                flag = f" --topic-prefix {prefix}" if prefix else ""
                msg = f"topic {self._topic} is not there: create it with 'kvledger admin topics{flag}'"
                raise WrongTopic(msg) from error
            raise self._unavailable(error) from error
        except TimeoutError as error:
            raise self._unavailable(error) from error
        return dict(zip(futures, answers, strict=True))

    def _unavailable(self, error: Exception) -> Unavailable:
        words = error.args[0].str() if isinstance(error, KafkaException) else "no answer in time"
        return Unavailable(f"Kafka does not answer at {self._bootstrap} ({words}); check the address and that it runs")


_U64 = (1 << 64) - 1
