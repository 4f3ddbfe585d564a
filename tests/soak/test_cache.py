"""The soak's engines are honest: what they announce is what they hold, and the router's rule agrees with theirs."""

from __future__ import annotations

import random

import pytest
from cache import GPU, Cache, Chronicle, Shape, hit
from fleet import PLAIN, SHAPES, STATEFUL, WINDOWED, Engine, draw_prompts

from kvledger_engine.truth import Truth
from kvledger_index.enginehash import Scheme
from kvledger_index.model import GroupSpec
from kvledger_router.hits import compile_rule
from kvledger_router.hits import hit as predicted

PROMPTS = draw_prompts(1)
SCHEME = Scheme()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_announced_is_what_is_held(shape: Shape) -> None:
    """Counted from the events alone, by the stand-in's counter, in both encodings."""
    for arrays, steps in ((False, 150), (True, 50)):
        engine = Engine("r/0", shape, PROMPTS, 7, replay=False, arrays=arrays, found=True)
        engine._begin()
        truth = Truth()
        for number in range(steps):
            engine.step(number // 10)
            truth.apply(number, engine.standin._buffer[-1][2])
            held = {lane: set(names) for lane, names in truth.held().resident.items()}
            told = {
                f"{group}@{medium.lower()}" if medium != GPU else str(group): {str(name) for name in names}
                for (group, medium), names in engine.life.chronicle.held().items()
            }

            assert held == told


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_routers_rule_over_this_residency_is_the_engines_answer(shape: Shape) -> None:
    """Two ways that share nothing: all lengths tried here, bit operations there; also long after the batch."""
    rnd = random.Random(3)
    chronicle = Chronicle()
    cache = Cache(shape, chronicle)
    groups = tuple(GroupSpec(g.number, g.kind, g.block, window=g.window or None) for g in shape.groups)
    rule = compile_rule(groups, stride=16)
    for seq in range(200):
        cache.begin(seq)
        prompt = rnd.choice(PROMPTS[:24])
        cache.serve(prompt.tokens, prompt.names(SCHEME))
    seen = set()
    for seq in range(0, 200, 3):
        prompt = rnd.choice(PROMPTS[:24])
        names = prompt.names(SCHEME)

        def has(group: int, name: int, seq: int = seq) -> bool:
            return chronicle.was_resident((group, GPU), name, seq)

        bits: dict[int | None, int] = {
            g.number: sum(has(g.number, name) << at for at, name in enumerate(names)) for g in shape.groups
        }
        expected = hit(shape, len(prompt.tokens), names, has)
        seen.add(expected)

        assert predicted(rule, len(prompt.tokens), bits) == expected
    assert len(seen) > 4, "hits of many lengths, else this shows little"


def test_the_traffic_brings_copies_masked_spans_and_shared_eviction() -> None:
    """What makes engines hard to follow is there."""
    for shape in (WINDOWED, STATEFUL):
        cache = Cache(shape, Chronicle())
        copies = masked = removed = 0
        for seq in range(200):
            prompt = PROMPTS[seq * 7 % 24]
            cache.begin(seq)
            cache.serve(prompt.tokens, prompt.names(SCHEME))
            for event in cache.end():
                removed += event["type"] == "BlockRemoved"
                if event["type"] == "BlockStored":
                    masked += len(event["block_hashes"]) * event["block_size"] != len(event["token_ids"])
            copies += any(count > 1 for lane in cache.chronicle._copies.values() for count in lane.values())

        assert copies > 0
        assert masked > 50
        assert removed > 200


def test_a_chronicle_knows_every_moment() -> None:
    chronicle = Chronicle()
    lane = (0, GPU)
    for seq, what in enumerate(("stored", "stored", "removed", "removed", "stored")):
        getattr(chronicle, what)(lane, 5, seq)
    chronicle.cleared(7)

    assert [chronicle.was_resident(lane, 5, seq) for seq in range(-1, 9)] == [
        *(False, True, True, True, False, True, True, True, False, False)
    ]
    assert chronicle.held() == {}


def test_prompts_are_the_seeds() -> None:
    again, other = draw_prompts(1), draw_prompts(2)

    assert [prompt.tokens for prompt in PROMPTS] == [prompt.tokens for prompt in again]
    assert PROMPTS[0].tokens != other[0].tokens
    assert max(prompt.blocks for prompt in PROMPTS) * 3 < min(PLAIN.blocks, WINDOWED.blocks)
