"""One batch in a hundred cannot be read, each in another way: the rest is applied, and everybody is told."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from kvledger.stack import Stack
from kvledger.verify.pipeline import Answer, Pipeline
from kvledger_engine.recording import Meta, Published, Request, Reset, read
from kvledger_wire.partition import parse_key
from kvledger_wire.records import Unreadable, decode_dead_letter
from kvledger_wire.topics import DEAD_LETTER

RECORDING = Path(__file__).parents[1] / "fixtures/engine-traces/llama_s11.jsonl.gz"
EVERY = 100
LETTERS_SECONDS_MAX = 30.0


def malformed(_: bytes) -> bytes:
    """No msgpack at all."""
    return b"\xc1 not msgpack"


def truncated(payload: bytes) -> bytes:
    """As a sender that died leaves it."""
    return payload[: len(payload) // 2]


def unknown(payload: bytes) -> bytes:
    """An event of a release to come, behind the batch's own."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode([ts, [*events, {"type": "BlockTeleported", "block_hashes": [7]}], rank])


STATUSES = {"good": {"exact"}, "malformed": {"at_least"}, "truncated": {"at_least"}, "unknown": {"uncertain"}}

REASONS = {"malformed": "malformed", "truncated": "truncated", "unknown": "unknown event tag BlockTeleported"}

SPOIL: dict[str, Callable[[bytes], bytes]] = {"malformed": malformed, "truncated": truncated, "unknown": unknown}


@pytest.fixture
def pipeline(stack: Stack) -> Iterator[Pipeline]:
    """A pipeline of its own on the run's services."""
    stack.start()
    with Pipeline(stack) as running:
        yield running


def recorded() -> tuple[Meta, list[Published], list[Request]]:
    """What an engine published before it was reset, and the plain requests that it served."""
    meta, *steps = read(RECORDING)
    assert isinstance(meta, Meta)
    served = list(itertools.takewhile(lambda step: not isinstance(step, Reset), steps))
    plain = [step for step in served if isinstance(step, Request) and not (step.salt or step.lora or step.mm)]
    return meta, [step for step in served if isinstance(step, Published)], plain


def letters(kafka: str, topic: str, count: int) -> list[tuple[str, Unreadable]]:
    """(rank, dead letter), at least so many."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "none", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[tuple[str, Unreadable]] = []
    end = time.monotonic() + LETTERS_SECONDS_MAX
    while len(found) < count and time.monotonic() < end:
        for message in consumer.consume(100, timeout=0.2):
            if message.error() is None:
                letter = decode_dead_letter(message.value())
                found.append((parse_key(message.key()).replica, letter))
    consumer.close()
    return found


@pytest.mark.timeout(180)
async def test_one_unreadable_batch_in_a_hundred_is_a_dead_letter_by_reason_and_a_status(
    pipeline: Pipeline, stack: Stack
) -> None:
    """Four replicas play one recording: one as it was, three with every hundredth batch spoiled in their own way.

    What the first one is told of is exact. The others are never over; what came behind a lost batch is applied.
    """
    meta, batches, requests = recorded()
    engines = pipeline.attach(dict.fromkeys(["good", *SPOIL], meta.entry()))
    spoiled: Counter[str] = Counter()
    answers: dict[str, list[Answer]] = {}
    for engine in engines:
        await engine.settle()
        for number, batch in enumerate(batches):
            payload = batch.payload
            if engine.replica in SPOIL and number % EVERY == EVERY // 2:
                payload = SPOIL[engine.replica](payload)
                spoiled[engine.replica] += 1
            await engine.publish(msgspec.structs.replace(batch, payload=payload))
        answers[engine.replica] = [await engine.predict(request.tokens) for request in requests]
    log = engines[0].bridge.log.read_text()
    told = letters(stack.kafka, pipeline.prefix + DEAD_LETTER, spoiled.total())
    for engine in engines:
        await engine.close()
    hits = {name: [answer.hit_tokens for answer in each] for name, each in answers.items()}

    assert {name: {answer.status for answer in each} for name, each in answers.items()} == STATUSES
    assert hits["unknown"] == hits["good"], "all but the unknown event is applied"
    assert "BlockTeleported" in answers["unknown"][0].reason
    for name in ("malformed", "truncated"):
        assert all(lower <= true for lower, true in zip(hits[name], hits["good"], strict=True))
        assert 0 < sum(hits[name]) < sum(hits["good"])
    assert Counter(replica for replica, _ in told) == spoiled
    for name, reason in REASONS.items():
        assert all(reason in letter.reason for replica, letter in told if replica == name), told
    assert all(letter.raw == b"" for _, letter in told)
    assert log.count('"batch_unreadable"') >= len(SPOIL)
