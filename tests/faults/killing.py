"""Kills the bridge of one engine at random moments, and asks after every request what the engine itself reported.

    engine    batches, replay buffer of a few steps ------------------------------------------------>
    bridge    ######X ########X        X = SIGKILL at a random moment, started again at once
                      ..##########X    every other time the next one already runs: a rolling update

The buffer is far too short to begin at 0, so a bridge that did not restore the rank from the log would open a partial
life. ``python tests/faults/killing.py KILLS SEED`` is the heavy form.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from kvledger.stack import Stack
from kvledger.stack.process import Process
from kvledger.verify.check import looking_ahead
from kvledger.verify.pipeline import PARTITIONS, Pipeline, RunningEngine
from kvledger_engine.recording import Meta, Published, Request, Reset, read
from kvledger_wire.records import Checkpoint, decode_event
from kvledger_wire.topics import EVENTS

RECORDING = Path(__file__).parents[1] / "fixtures/engine-traces/gemma3_vllm0.20.2_s51.jsonl.gz"

BUFFER_STEPS = 32
"""More than what is ever under way, fewer than what the engine publishes before the first kill."""

FIRST_KILL = 40
KILLS_PER_PASS = 20
MOMENT_SECONDS_MAX = 0.3
READ_SECONDS_MAX = 60.0

SETTINGS = {
    "KVLEDGER_BRIDGE_CHECKPOINT_BYTES_MIN": "20000",
    "KVLEDGER_BRIDGE_TOPIC_CHECK_SECONDS": "0.5",
    "KVLEDGER_BRIDGE_RESTORING_SECONDS": "1",
    "KVLEDGER_BRIDGE_LEASE_SECONDS": "5",
}
"""Under which a recording of this size has checkpoints, and a bridge whose successor was killed is back in time. (Two
that start at once may claim in either order: then the one that is killed is the owner.)"""


class Report(msgspec.Struct):
    """What came of it."""

    kills: int = 0
    overlaps: int = 0
    engine_lives: int = 0
    compared: int = 0
    wrong: list[str] = msgspec.field(default_factory=list)
    lines: list[dict[str, Any]] = msgspec.field(default_factory=list)
    checkpoints: set[int] = msgspec.field(default_factory=set)
    """Where the log has the first part of one: a bridge may be killed before it can say so."""

    def of(self, event: str) -> list[dict[str, Any]]:
        """What the bridges logged of one kind."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def from_checkpoints(self) -> int:
        """Restores that began at a checkpoint."""
        return sum(line["start"] in self.checkpoints for line in self.of("rank_restored"))

    def text(self) -> str:
        """In a few lines."""
        seconds = sorted(line["seconds"] for line in self.of("rank_restored"))
        return (
            f"{self.kills} kills, {self.overlaps} of them of a bridge whose successor already ran\n"
            f"{self.compared} answers compared, {len(self.wrong)} wrong\n"
            f"{self.engine_lives} lives of the engine, {len(self.of('rank_opened'))} on the log\n"
            f"{len(seconds)} restores, {self.from_checkpoints} of them from checkpoints, at most {seconds[-1]:.2f} s\n"
        )


class Supervised:
    """The bridge of one engine as its supervisor has it: killed, and there again a moment later."""

    def __init__(self, bridge: Process) -> None:
        self.all = [bridge]
        self.present = bridge
        self._restarting = False

    @property
    def running(self) -> bool:
        return self._restarting or self.present.running

    def __getattr__(self, name: str) -> Any:
        return getattr(self.present, name)

    async def kill(self, *, overlap: bool) -> None:
        """SIGKILL; ``overlap``: once the next one has taken the rank over, or was itself claimed over by this one, if
        both began at once: then it has to notice the silence.
        """
        self._restarting = True
        old = self.present
        if overlap:
            name = self.all[0].log.with_suffix(f".{len(self.all)}.log")
            self.present = Process(old.name, old._command, log=name, environment=old._environment)
            self.all.append(self.present)
            self.present.start()
            decided = functools.partial(says, name, {"rank_claimed", "rank_superseded"})
            await asyncio.to_thread(self.present.wait_ready, decided, 60.0)
        os.kill(old.pid, signal.SIGKILL)
        await asyncio.to_thread(old.join, 30)
        old.kill()
        if not overlap:
            old.start()
        self._restarting = False

    def stop(self) -> None:
        for each in self.all:
            each.stop()


def says(log: Path, events: set[str]) -> bool:
    """Whether a bridge has logged one of these."""
    return any(line["event"] in events for line in lines(log))


def lines(log: Path) -> Iterator[dict[str, Any]]:
    """What a bridge logged, as far as it came before it was killed."""
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and "event" in said:
            yield said


async def killing(pipeline: Pipeline, *, kills: int, seed: int) -> Report:
    """Play the recording, over again while there are kills left; every pass is another life of the engine."""
    rnd, report = random.Random(seed), Report()
    steps = list(looking_ahead(read(RECORDING)))
    engine: RunningEngine | None = None
    while report.kills < kills:
        report.engine_lives += 1
        published = sum(isinstance(step, Published) for step in steps)
        count = min(KILLS_PER_PASS, kills - report.kills)
        points = set(rnd.sample(range(FIRST_KILL, published), count))
        engine = await one_pass(pipeline, engine, steps, points, rnd, report)
    assert engine is not None
    await engine.close()
    bridge: Any = engine.bridge
    report.lines = [line for process in bridge.all for line in lines(process.log)]
    report.checkpoints = await asyncio.to_thread(checkpoints, pipeline)
    return report


def checkpoints(pipeline: Pipeline) -> set[int]:
    """Offsets of first parts on the log of the one rank that there is."""
    consumer = Consumer(
        {
            "bootstrap.servers": pipeline._stack.kafka,
            "group.id": "kills",  # never joined
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    topic = pipeline.prefix + EVENTS
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
    found, unread = set(), set(range(PARTITIONS))
    end = time.monotonic() + READ_SECONDS_MAX
    while unread:
        if time.monotonic() > end:
            msg = f"{topic} was not read within {READ_SECONDS_MAX:.0f} s"
            raise TimeoutError(msg)
        for message in consumer.consume(1000, timeout=0.1):
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error().str()
                unread.discard(message.partition())
                continue
            record = decode_event(message.value())
            if isinstance(record, Checkpoint) and record.part == 0:
                found.add(int(message.offset()))
    consumer.close()
    return found


async def one_pass(
    pipeline: Pipeline,
    engine: RunningEngine | None,
    steps: list[Any],
    points: set[int],
    rnd: random.Random,
    report: Report,
) -> RunningEngine:
    """The recording once; a kill begins at each of ``points`` (batches) and strikes some time later."""
    under_way: list[asyncio.Task[None]] = []
    batches, after_reset = 0, False
    for step in steps:
        match step:
            case Meta() if engine is None:
                engine = await pipeline.engine(step, buffer_steps=BUFFER_STEPS)
                engine.bridge = Supervised(engine.bridge)  # type: ignore[assignment]  # stands for whichever runs
            case Published():
                assert engine is not None
                await engine.publish(step)
                if batches in points:
                    await asyncio.gather(*under_way)
                    overlap = report.kills % 2 == 1
                    under_way = [
                        asyncio.create_task(strike(engine, rnd.random() * MOMENT_SECONDS_MAX, overlap=overlap))
                    ]
                    report.kills += 1
                    report.overlaps += overlap
                batches += 1
            case Reset():
                after_reset = True
            case Request() if after_reset:
                after_reset = False
            case Request():
                assert engine is not None
                answer = await engine.predict(step.tokens, lora=step.lora, salt=step.salt)
                report.compared += 1
                if (answer.hit_tokens, answer.status) != (step.cached, "exact"):
                    report.wrong.append(f"request {report.compared}: {answer} instead of {step.cached}")
            case _:
                pass
    assert engine is not None
    await asyncio.gather(*under_way)
    await engine.settle()
    return engine


async def strike(engine: RunningEngine, seconds: float, *, overlap: bool) -> None:
    """Wherever it is by then."""
    bridge: Any = engine.bridge
    await asyncio.sleep(seconds)
    await bridge.kill(overlap=overlap)


def main(words: list[str], environment: Mapping[str, str] = SETTINGS) -> int:
    """KILLS SEED: play, print what came of it; 1 where an answer was wrong or a life was lost."""
    kills, seed = int(words[0]), int(words[1]) if words[1:] else 1
    os.environ.update(environment)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, Stack(Path(folder), local=True) as stack:
        stack.start()
        with Pipeline(stack) as pipeline:
            report = asyncio.run(killing(pipeline, kills=kills, seed=seed))
    sys.stdout.write("\n".join([*report.wrong, report.text()]))
    return 1 if report.wrong or len(report.of("rank_opened")) != report.engine_lives else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
