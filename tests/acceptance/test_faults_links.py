"""Each of the three links fails under real parts: no answer that a router trusts is ever over, and it heals.

engine ──(proxy)── bridge ── Kafka (SIGSTOP) ── fold ── Redis ──(proxy)── router
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import pytest
from load import LoopLag

from kvledger.stack import Stack
from kvledger.verify.pipeline import Followed, Pipeline
from kvledger_engine.recording import Begin, Meta, Published, Request, Reset, read
from kvledger_engine.standin import StandIn
from kvledger_engine.truth import Truth
from kvledger_router import Holder, Index
from kvledger_router.standing import Status

if TYPE_CHECKING:
    from proxy import Proxy

RECORDING = Path(__file__).parents[1] / "fixtures/engine-traces/llama_s11.jsonl.gz"
BLOCK = 32
FIRST = 100
"""Batches before the fault."""

AFTER = 160
"""Batches at the end, where the engine lived through the fault."""

ASK_SECONDS = 0.005
TOLD_SECONDS_MAX = 2.0
"""From a broken connection to answers that are not exact: bridge, Kafka, fold and Redis, on a busy machine."""

GONE_SECONDS_MAX = 5.0
"""From the moment that the bridge can see the new engine until nothing of the old one is claimed."""

HEALED_SECONDS_MAX = 30.0
TRICKLE_SECONDS = 0.15
"""Between batches until the bridge is back: a stand-in without replay is heard from the next one on."""

LAG_TICK_SECONDS = 0.05
"""Coarse: what every short sleep takes longer than it should would add up."""

NOWHERE = "127.0.0.1:9"
"""Where a link leads until it is aimed."""

TRUSTED = frozenset({"exact", "at_least"})


class Oracle(NamedTuple):
    """What an engine of one full-attention group reuses of each prompt, after each batch; -1 before the first."""

    prompts: tuple[tuple[int, ...], ...]
    hits: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, batches: Sequence[Published], prompts: Sequence[tuple[int, ...]]) -> Self:
        """By the stand-in's own count of copies, and names read from the raw events: nothing of the bridge's."""
        truth, hits = Truth(), {-1: (0,) * len(prompts)}
        names: dict[tuple[Any, ...], int] = {}
        for batch in batches:
            truth.apply(batch.seq, batch.payload)
            for event in msgspec.msgpack.decode(batch.payload)[1]:
                if event["type"] == "BlockStored":
                    names.update(named(event))
            held = truth.held().resident.get("0", {})
            hits[batch.seq] = tuple(reused(prompt, names, held) for prompt in prompts)
        return cls(tuple(prompts), hits)


def named(event: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """(parent, tokens, extra keys) of each block of a store, and its hash."""
    parent, tokens = event["parent_block_hash"], event["token_ids"]
    extras = event["extra_keys"] or [None] * len(event["block_hashes"])
    for number, (block, extra) in enumerate(zip(event["block_hashes"], extras, strict=True)):
        yield (parent, tuple(tokens[number * BLOCK : (number + 1) * BLOCK]), extra and tuple(extra)), block
        parent = block


def reused(prompt: tuple[int, ...], names: dict[tuple[Any, ...], int], held: dict[str, int]) -> int:
    """Tokens of a plain prompt's resident blocks from its start on, but never its last token."""
    parent, count = None, 0
    while (count + 1) * BLOCK < len(prompt):
        parent = names.get((parent, prompt[count * BLOCK : (count + 1) * BLOCK], None))
        if parent is None or str(parent) not in held:
            break
        count += 1
    return count * BLOCK


class Recorded(NamedTuple):
    """A recorded engine, and the prompts that are asked for."""

    meta: Meta
    batches: list[Published]
    oracle: Oracle


def recorded() -> Recorded:
    """Prompts that the engine held much of before the fault came."""
    meta, *steps = read(RECORDING)
    assert isinstance(meta, Meta)
    batches: list[Published] = []
    plain: list[Request] = []
    for step in steps:
        match step:
            case Published() if step.seq < AFTER:
                batches.append(step)
            case Request(salt=None, lora=None, cached=int(), mm=None) if len(batches) < FIRST:
                plain.append(step)
            case _:
                pass
    chosen = sorted(plain, key=lambda request: request.cached or 0)[-6:]
    return Recorded(meta, batches, Oracle.of(batches, [request.tokens for request in chosen]))


class Engine:
    """A stand-in whose two sockets are reached through links that can fail, and the bridge that follows it."""

    def __init__(self, pipeline: Pipeline, meta: Meta, make: Callable[[str], Proxy], *, replay: bool) -> None:
        self.standin = StandIn(replay="tcp://127.0.0.1:0" if replay else None).start()
        self.data = make(self.standin.data)
        self.replay = make(self.standin.replay) if self.standin.replay else None
        self.links = [link for link in (self.data, self.replay) if link is not None]
        self.followed: Followed = pipeline.follow(
            "r",
            meta.entry(),
            data=f"tcp://{self.data.address}",
            replay=f"tcp://{self.replay.address}" if self.replay else None,
        )

    def publish(self, batches: Sequence[Published]) -> None:
        for batch in batches:
            self.standin.publish(batch.payload, batch.topic, batch.seq)

    async def told(self, batches: Sequence[Published]) -> None:
        """Publish, and wait until the index covers it."""
        self.publish(batches)
        for batch in batches:
            self.followed.heard(batch.seq)
        await self.followed.settle()

    @property
    def log(self) -> str:
        """What the bridge said."""
        return self.followed.bridge.log.read_text()


class Seen(NamedTuple):
    """One answer: when it was asked for, about which prompt, and what it said."""

    at: float
    prompt: int
    holder: Holder


class Watch:
    """Asks for every prompt, one after the other, as long as it runs, and keeps each answer."""

    def __init__(self, index: Index, prompts: Sequence[tuple[int, ...]]) -> None:
        self._index = index
        self._prompts = prompts
        self._lag = LoopLag(LAG_TICK_SECONDS)
        self.seen: list[Seen] = []

    async def __aenter__(self) -> Self:
        await self._lag.__aenter__()
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lag.__aexit__()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._index.aclose()
        if not self._task.cancelled():
            self._task.result()

    async def _ask(self) -> None:
        for number in itertools.cycle(range(len(self._prompts))):
            at = time.monotonic()
            match = await self._index.match(self._prompts[number], replicas=["r"])
            if match.opinion:
                self.seen.append(Seen(at, number, match.holders[0]))
            await asyncio.sleep(ASK_SECONDS)

    async def until(self, condition: Callable[[Holder], bool], what: str, seconds: float = HEALED_SECONDS_MAX) -> Seen:
        """The first answer asked for from now on that is so, within ``seconds`` and what this loop itself was late."""
        start, looked, late = time.monotonic(), len(self.seen), self._lag.seconds
        while True:
            for one in itertools.islice(self.seen, looked, None):
                looked += 1
                if one.at >= start and condition(one.holder):
                    return one
            if time.monotonic() > start + seconds + self._lag.seconds - late:
                told = {
                    (one.holder.status, one.holder.as_of, one.holder.hit_tokens): one
                    for one in self.seen
                    if one.at >= start
                }
                answers = "; ".join(f"+{one.at - start:.1f} s {one.holder}" for one in list(told.values())[-8:])
                pytest.fail(f"not within {seconds} s: {what}; answers were {answers}")
            await asyncio.sleep(ASK_SECONDS)

    def trusted(self, since: float = 0.0) -> list[Seen]:
        """What a router would have believed."""
        return [one for one in self.seen if one.at >= since and one.holder.status in TRUSTED]


def wrong(answers: Sequence[Seen], oracle: Oracle) -> list[Seen]:
    """Answers that are not what their status promises of the batch that they name."""

    def kept(one: Seen) -> bool:
        assert one.holder.as_of is not None
        true = oracle.hits[one.holder.as_of][one.prompt]
        return one.holder.hit_tokens == true if one.holder.status == "exact" else one.holder.hit_tokens <= true

    return [one for one in answers if not kept(one)]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Proxy]]:
    """A factory of links to ``tcp://host:port`` or ``host:port``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "faults"))
    from proxy import Proxy

    made: list[Proxy] = []

    def factory(target: str) -> Proxy:
        made.append(Proxy(target.removeprefix("tcp://")).start())
        return made[-1]

    yield factory
    for one in made:
        one.stop()


@pytest.fixture
def pipeline(stack: Stack) -> Iterator[Pipeline]:
    """A pipeline of its own on the run's services."""
    _ = stack.kafka, stack.redis
    with Pipeline(stack) as running:
        yield running


@asynccontextmanager
async def following(pipeline: Pipeline, engine: Engine, oracle: Oracle) -> AsyncIterator[Watch]:
    """A watch over an engine that is followed; all that belongs to it ends."""
    try:
        async with Watch(pipeline.index(engine.followed.entry.model), oracle.prompts) as watch:
            yield watch
    finally:
        await engine.followed.close()
        await asyncio.to_thread(engine.standin.stop)


def test_the_oracle_agrees_with_the_recorded_engine() -> None:
    """Else the tests below would compare with a mistake."""
    batches: list[Published] = []
    asked: list[tuple[int, Request]] = []
    begun, after_reset = -1, False
    for step in read(RECORDING):
        match step:
            case Published():
                batches.append(step)
            case Begin():
                begun = len(batches) - 1
            case Reset():
                after_reset = True  # the engine tells of it only with the next request
            case Request(salt=None, lora=None) if not after_reset:
                asked.append((begun, step))
            case Request():
                after_reset = False
            case _:
                pass
    oracle = Oracle.of(batches, [request.tokens for _, request in asked])

    assert [oracle.hits[seq][number] for number, (seq, _) in enumerate(asked)] == [one.cached for _, one in asked]
    assert len(asked) > 100


@pytest.mark.parametrize(
    ("status", "tokens", "faulty"),
    [("exact", 64, False), ("exact", 32, True), ("exact", 96, True), ("at_least", 32, False), ("at_least", 96, True)],
)
def test_an_answer_that_breaks_its_promise_is_noticed(status: Status, tokens: int, *, faulty: bool) -> None:
    oracle = Oracle(((),), {-1: (0,), 0: (64,)})
    answer = Seen(0.0, 0, Holder("r", 0, tokens, 0, status, 0, 0.0))

    assert bool(wrong([answer], oracle)) is faulty


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
async def test_an_engine_that_restarts_behind_a_cut_and_looks_contiguous_is_another_life(
    pipeline: Pipeline, link: Callable[[str], Proxy], *, replay: bool
) -> None:
    await restart_behind_a_cut(pipeline, link, replay=replay)


SABOTAGE = """
import kvledger_bridge.engine as engine
engine.Session.disconnected = lambda session: None
engine.Session._part = lambda session, why: None
engine.judge = lambda known, answer: True
"""
"""Read by every Python that starts under it: a bridge that believes that whoever answers is the engine it knew."""


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_bridge_without_its_proofs_is_noticed(
    stack: Stack, link: Callable[[str], Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stack.start()
    with Pipeline(stack) as pipeline, pytest.raises(pytest.fail.Exception, match=r"doubted|gone"):
        await restart_behind_a_cut(pipeline, link, replay=True)


async def restart_behind_a_cut(pipeline: Pipeline, link: Callable[[str], Proxy], *, replay: bool) -> None:
    """The new engine holds nothing; its sequence goes on where the old one's ended.

    old engine   0 ... 99 |
    link                  X cut, and nothing passes ........ | passes
    new engine              0 ... 99 (no events)             | 100 101 102
    answers      exact    | not exact, whatever they say     | <= 5 s: exact (or at least) nothing
    """
    meta, batches, oracle = recorded()
    engine = Engine(pipeline, meta, link, replay=replay)
    empty = msgspec.msgpack.encode([0.0, [], 0])
    async with following(pipeline, engine, oracle) as watch:
        await engine.told([]) if replay else await first_contact(engine, batches[0])
        await engine.told(batches[0 if replay else 1 : FIRST])
        await watch.until(
            lambda holder: holder.status == "exact" and holder.hit_tokens > 0,
            "the old life is exact",
        )
        for one in engine.links:
            one.pause()  # both before either is cut: an engine that still answers for itself would be proven alive
        for one in engine.links:
            one.cut()
        cut = time.monotonic()
        await asyncio.to_thread(engine.standin.restart)
        for _ in range(FIRST):
            engine.standin.publish(empty)
        noticed = await watch.until(lambda holder: holder.status not in TRUSTED, "it is doubted", TOLD_SECONDS_MAX)
        for one in engine.links:
            one.resume()
        resumed = time.monotonic()
        assert await asyncio.to_thread(engine.standin.wait_subscribers)
        for _ in range(3):
            engine.standin.publish(empty)
        gone = await watch.until(
            lambda holder: holder.status in TRUSTED and holder.hit_tokens == 0 and (holder.as_of or 0) >= FIRST,
            "the old life is gone",
            GONE_SECONDS_MAX - (time.monotonic() - resumed),
        )
        await watch.until(lambda holder: holder.as_of == FIRST + 2, "the new life is followed")

    assert wrong([one for one in watch.trusted() if one.at < cut], oracle) == []
    assert [one for one in watch.trusted(noticed.at) if one.holder.hit_tokens > 0] == []
    assert gone.holder.status == ("exact" if replay else "at_least")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
async def test_an_engine_that_restarts_in_place_is_another_life(
    pipeline: Pipeline, link: Callable[[str], Proxy], *, replay: bool
) -> None:
    """Nothing hides it: its connections break, and its sequence starts anew.

    old engine   0 ... 99 X
    new engine              0 1 2 (no events)
    answers      exact    | never again what the old one held; <= 5 s: exact nothing
    """
    meta, batches, oracle = recorded()
    engine = Engine(pipeline, meta, link, replay=replay)
    empty = msgspec.msgpack.encode([0.0, [], 0])
    async with following(pipeline, engine, oracle) as watch:
        await engine.told([]) if replay else await first_contact(engine, batches[0])
        await engine.told(batches[0 if replay else 1 : FIRST])
        await watch.until(lambda holder: holder.status == "exact" and holder.hit_tokens > 0, "the old life is exact")
        await asyncio.to_thread(engine.standin.restart)
        restarted = time.monotonic()
        noticed = await watch.until(
            lambda holder: holder.status not in TRUSTED or holder.hit_tokens == 0, "it is doubted", TOLD_SECONDS_MAX
        )
        assert await asyncio.to_thread(engine.standin.wait_subscribers)
        for _ in range(3):
            engine.standin.publish(empty)
        await watch.until(
            lambda holder: holder.status == "exact" and holder.as_of == 2 and holder.hit_tokens == 0,
            "the old life is gone",
            GONE_SECONDS_MAX - (time.monotonic() - restarted),
        )

    assert wrong([one for one in watch.trusted() if one.at < restarted], oracle) == []
    assert [one for one in watch.trusted(noticed.at) if one.holder.hit_tokens > 0] == []


async def first_contact(engine: Engine, batch: Published) -> None:
    """Without a replay endpoint a life opens with the first live batch, so the bridge must be there before it."""
    assert await asyncio.to_thread(engine.standin.wait_subscribers, 1, HEALED_SECONDS_MAX)
    await engine.told([batch])


@pytest.mark.timeout(120)
async def test_an_engine_behind_a_black_hole_is_suspended_and_exact_again(
    pipeline: Pipeline, link: Callable[[str], Proxy]
) -> None:
    """Nobody is told that packets vanish; the engine goes on storing and evicting meanwhile.

    engine    0 ... 99 | 100 ........................... 159 |
    links              X swallow                             | resume (what lost bytes is reset)
    answers   exact    | as of 99, then suspended            | exact as of 159, same life
    """
    meta, batches, oracle = recorded()
    engine = Engine(pipeline, meta, link, replay=True)
    async with following(pipeline, engine, oracle) as watch:
        await engine.told([])
        await engine.told(batches[:FIRST])
        for one in engine.links:
            one.blackhole()
        engine.publish(batches[FIRST:AFTER])
        await watch.until(lambda holder: "suspended" in holder.reason, "the bridge doubts the engine")
        doubted = time.monotonic()
        await watch.until(lambda holder: (holder.age_seconds or 0) > 1, "it stays so")
        resumed = time.monotonic()
        for one in engine.links:
            one.resume()
        await watch.until(lambda holder: holder.status == "exact" and holder.as_of == AFTER - 1, "exact again")

    # once the same life is proven, "exact as of 99" is true again for the moment until 100 is applied
    assert wrong(watch.trusted(), oracle) == []
    assert [one for one in watch.trusted(doubted) if one.at < resumed] == []
    assert engine.log.count('"rank_opened"') == 1, "the life goes on: nothing was lost"


@pytest.mark.timeout(120)
async def test_an_engine_without_replay_behind_a_black_hole_is_never_exact_over_what_it_lost(
    pipeline: Pipeline, link: Callable[[str], Proxy]
) -> None:
    """What the link swallowed cannot be asked for: a partial life, whose answers are lower bounds."""
    meta, batches, oracle = recorded()
    engine = Engine(pipeline, meta, link, replay=False)
    lost, back = AFTER - 30, AFTER - 1  # behind the recorded clear, which would make the life complete
    async with following(pipeline, engine, oracle) as watch:
        await first_contact(engine, batches[0])
        await engine.told(batches[1:FIRST])
        engine.data.blackhole()
        engine.publish(batches[FIRST:lost])
        await watch.until(lambda holder: holder.status not in TRUSTED, "it is stale")
        engine.data.resume()
        for batch in batches[lost:AFTER]:  # the first of them may come before the bridge is back
            engine.publish([batch])
            if (watch.seen[-1].holder.as_of or 0) < lost:
                await asyncio.sleep(TRICKLE_SECONDS)
        await watch.until(lambda holder: holder.status == "at_least" and holder.as_of == back, "it is followed")

    assert wrong(watch.trusted(), oracle) == []
    assert [one for one in watch.trusted() if one.holder.status == "exact" and (one.holder.as_of or 0) >= FIRST] == []


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_kafka_that_stands_still_loses_nothing_and_no_stale_answer_is_trusted(
    kafka_broker: Any, redis_url: str, link: Callable[[str], Proxy]
) -> None:
    """SIGSTOP for 10 s while the engine goes on: answers age and stop being exact; live again within 30 s."""
    meta, batches, oracle = recorded()
    broker = kafka_broker()
    environment = dict(os.environ) | {"KVLEDGER_KAFKA": broker.bootstrap, "KVLEDGER_REDIS": redis_url}
    with Stack(environment=environment) as stack:
        stack.start()
        with Pipeline(stack) as pipeline:
            engine = Engine(pipeline, meta, link, replay=True)
            async with following(pipeline, engine, oracle) as watch:
                await engine.told([])
                await engine.told(batches[:FIRST])
                os.kill(broker.process.pid, signal.SIGSTOP)
                stopped = time.monotonic()
                try:
                    engine.publish(batches[FIRST:AFTER])
                    while time.monotonic() < stopped + 10:
                        await watch.until(lambda _: True, "questions are answered")
                finally:
                    os.kill(broker.process.pid, signal.SIGCONT)
                await watch.until(lambda holder: holder.status == "exact" and holder.as_of == AFTER - 1, "live")
            log = engine.log

    aged = [one for one in watch.trusted(stopped + 5) if one.at < stopped + 10]
    assert wrong(watch.trusted(), oracle) == []
    assert aged == [], "nothing is fresh that nobody has heard of for 3 s"
    assert log.count('"rank_gap"') == 0
    assert log.count('"rank_opened"') == 1, "the life goes on: nothing was lost"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_what_waited_for_kafka_is_not_taken_for_news(
    kafka_broker: Any, redis_url: str, link: Callable[[str], Proxy]
) -> None:
    """An engine restarts while its bridge cannot say so, and what the bridge sent before arrives first.

    engine    0 ... 99 | 100 ... 119, one every 0.15 s | new process: 0 1 2
    bridge    ........ | in its queue                  | doubts, opens: in its queue, too | arrives, 0.4 s each way
    answers   exact    | stale                                                            | never what the old one held
    """
    near = link(NOWHERE)
    broker = kafka_broker(advertised=near.address)
    near.aim(broker.bootstrap)
    environment = dict(os.environ) | {"KVLEDGER_KAFKA": near.address, "KVLEDGER_REDIS": redis_url}
    with Stack(environment=environment) as stack:
        stack.start()
        with Pipeline(stack) as pipeline:
            await restart_while_kafka_is_away(pipeline, near, link)


async def restart_while_kafka_is_away(pipeline: Pipeline, near: Proxy, link: Callable[[str], Proxy]) -> None:
    meta, batches, oracle = recorded()
    engine = Engine(pipeline, meta, link, replay=True)
    empty = msgspec.msgpack.encode([0.0, [], 0])
    async with following(pipeline, engine, oracle) as watch:
        await engine.told([])
        await engine.told(batches[:FIRST])
        await watch.until(lambda holder: holder.status == "exact" and holder.hit_tokens > 0, "the old life is exact")
        near.pause()
        for batch in batches[FIRST : FIRST + 20]:
            engine.publish([batch])
            await asyncio.sleep(TRICKLE_SECONDS)
        await asyncio.to_thread(engine.standin.restart)
        restarted = time.monotonic()
        for _ in range(3):
            engine.standin.publish(empty)
        await watch.until(lambda _: time.monotonic() > restarted + 5.0, "nothing of it arrives for 5 s")
        near.latency(0.4)
        near.resume()
        await watch.until(lambda holder: holder.as_of == 2 and holder.hit_tokens == 0, "the new life is there")
        near.latency(0.0)
        await watch.until(lambda holder: holder.status == "exact" and holder.hit_tokens == 0, "and exact")

    assert wrong([one for one in watch.trusted() if one.at < restarted], oracle) == []
    assert [one for one in watch.trusted(restarted + 2.0) if one.holder.hit_tokens > 0] == []
