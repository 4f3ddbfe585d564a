"""Engines before and after vLLM PR #37688 (``group_idx``) and offload events without it, side by side in one run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.stack import Stack
from kvledger.verify.check import looking_ahead
from kvledger.verify.pipeline import Pipeline, RunningEngine
from kvledger_engine.recording import Meta, Published, Request, Reset, read
from kvledger_index.model import GroupSpec

TRACES = Path(__file__).parents[1] / "fixtures/engine-traces"
BEFORE, AFTER = TRACES / "gemma3_vllm0.17.1_s60.jsonl.gz", TRACES / "gemma3_vllm0.20.2_s51.jsonl.gz"


@pytest.fixture
def pipeline(stack: Stack) -> Iterator[Pipeline]:
    """A pipeline of its own on the run's services."""
    _ = stack.kafka, stack.redis
    with Pipeline(stack) as running:
        yield running


def with_offload(payload: bytes) -> bytes:
    """The same batch, each GPU store followed by the offloading connector's, as 0.20 sends it: no group, no tokens.

    Connector events stand behind all GPU events, their hashes are raw bytes where the GPU's are integers, and a removal
    names several (ENGINE §3.2).
    """
    batch: list[Any] = msgspec.msgpack.decode(payload)
    extra: list[Any] = []
    for event in batch[1]:
        if event[0] == "BlockStored" and event[1]:
            digests = [bytes(24) + each.to_bytes(8, "big") if isinstance(each, int) else each for each in event[1]]
            extra.append(["BlockStored", digests, None, [], 0, None, "CPU", None, None, None])
            if len(digests) > 1:
                extra.append(["BlockRemoved", digests[::2], "CPU", None])
    batch[1] += extra
    return msgspec.msgpack.encode(batch)


async def follow(engine: RunningEngine, path: Path, *, offload: bool) -> int:
    """Play a recording; every prediction must equal the engine's answer and be called exact."""
    compared = 0
    after_reset = False
    await engine.settle()
    for step in looking_ahead(read(path)):
        match step:
            case Published():
                payload = with_offload(step.payload) if offload else step.payload
                await engine.publish(msgspec.structs.replace(step, payload=payload))
            case Reset():
                after_reset = True
            case Request():
                answer = await engine.predict(step.tokens, lora=step.lora, salt=step.salt)
                if not after_reset:
                    assert (answer.hit_tokens, answer.status) == (step.cached, "exact"), (path.name, answer.reason)
                    compared += 1
                after_reset = False
            case _:
                pass
    return compared


@pytest.mark.timeout(180)
async def test_every_generation_is_exact_beside_the_others(pipeline: Pipeline) -> None:
    """One model, three replicas, one bridge: group ``null`` and the numbered ones in one entry.

    before     events without a group: one full-attention group
    after      five sliding-window groups and one full, by number; no kinds on the wire
    offloading the same, with CPU events that have no group: a lane of their own, never group 0, never GPU
    """
    metas = {path: next(step for step in read(path) if isinstance(step, Meta)) for path in (BEFORE, AFTER)}
    entry = metas[AFTER].entry("gemma3")
    entry = msgspec.structs.replace(entry, groups=(*entry.groups, GroupSpec(None, "full_attention", 32)))
    engines = pipeline.attach({"before": entry, "after": entry, "offloading": entry})

    compared = await asyncio.gather(
        *(
            follow(engine, path, offload=engine.replica == "offloading")
            for engine, path in zip(engines, (BEFORE, AFTER, AFTER), strict=True)
        )
    )
    index = pipeline.index("gemma3")
    shared = next(step.tokens for step in read(AFTER) if isinstance(step, Request))
    match = await index.match(shared)
    await index.aclose()
    for engine in engines:
        await engine.close()

    assert compared == [40, 60, 60]
    assert {holder.replica for holder in match} == {"before", "after", "offloading"}
