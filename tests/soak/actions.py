"""How each kind of fault is done to a world and undone: a context, in which it is broken."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random

from fleet import Odds
from proxy import Proxy
from servers import KafkaControl
from world import World, number_of, rank_of

Act = Callable[[World, str], AbstractContextManager[None]]

SLOW_READ_SECONDS = 0.004
SLOW_WRITE_SECONDS = 0.05
STORM_PAUSE_SECONDS = 0.01
HOLES = 0.2
"""Of a replay's batches, where it has holes."""

REPLAY_BATCHES_MAX = 5

ACTIONS: dict[str, Act] = {}


def action(name: str) -> Callable[[Callable[[World, str], Iterator[None]]], Act]:
    """Register what a kind does."""

    def register(body: Callable[[World, str], Iterator[None]]) -> Act:
        ACTIONS[name] = contextmanager(body)
        return ACTIONS[name]

    return register


def instant(name: str) -> Callable[[Callable[[World, str], None]], Callable[[World, str], None]]:
    """Register a kind that is done in a moment."""

    def register(body: Callable[[World, str], None]) -> Callable[[World, str], None]:
        def act(world: World, target: str) -> Iterator[None]:
            body(world, target)
            yield

        ACTIONS[name] = contextmanager(act)
        return body

    return register


# ---- the engine


@instant("restart")
def _restart(world: World, target: str) -> None:
    rank_of(world, target)[0].restart()


@action("restart, contiguous")
def _restart_contiguous(world: World, target: str) -> Iterator[None]:
    """The new process is as far as the old one was when the links work again."""
    engine, links = rank_of(world, target)
    for link in links.all:
        link.pause()
    for link in links.all:
        link.cut()
    engine.restart(batches=engine.life.head + 1)
    yield
    for link in links.all:
        link.resume()


@action("restart, away")
def _away(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    engine.go()
    yield
    engine.come()


def _with_odds(name: str, odds: Odds) -> None:
    @action(name)
    def act(world: World, target: str) -> Iterator[None]:
        engine, _ = rank_of(world, target)
        engine.odds = odds
        yield
        engine.odds = Odds()


_with_odds("batches dropped", Odds(drop=0.3))
_with_odds("batches lost", Odds(lose=0.15))
_with_odds("batches twice", Odds(duplicate=0.5))
_with_odds("batches swapped", Odds(swap=0.4))
_with_odds("batches malformed", Odds(malformed=0.1))


@instant("sequence skipped")
def _skip(world: World, target: str) -> None:
    rank_of(world, target)[0].skip()


@action("replay silent")
def _silent(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    engine.standin.faults.replay_silent = True
    engine.odds = Odds(drop=0.2)
    yield
    engine.odds = Odds()
    engine.standin.faults.replay_silent = False


@action("replay truncated")
def _truncated(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    engine.standin.faults.replay_batches_max = REPLAY_BATCHES_MAX
    engine.odds = Odds(drop=0.2)
    yield
    engine.odds = Odds()
    engine.standin.faults.replay_batches_max = None


@action("replay with holes")
def _holes(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    rnd, usual = Random(target), engine.standin.faults.replay_drop
    engine.standin.faults.replay_drop = lambda _seq: rnd.random() < HOLES
    engine.odds = Odds(drop=0.2)
    yield
    engine.odds = Odds()
    engine.standin.faults.replay_drop = usual


@action("replay twice")
def _twice(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    engine.standin.faults.replay_twice = True
    engine.odds = Odds(drop=0.2)
    yield
    engine.odds = Odds()
    engine.standin.faults.replay_twice = False


@action("clear storm")
def _storm(world: World, target: str) -> Iterator[None]:
    engine, _ = rank_of(world, target)
    over = threading.Event()

    def blow() -> None:
        while not over.wait(STORM_PAUSE_SECONDS):
            engine.clear(0)

    thread = threading.Thread(target=blow, name="storm")
    thread.start()
    yield
    over.set()
    thread.join()


@instant("flap")
def _flap(world: World, target: str) -> None:
    engine, _ = rank_of(world, target)
    if not engine.away:
        engine.standin.flap()


# ---- links


def _resumed(links: list[Proxy], fault: Callable[[Proxy], None]) -> Iterator[None]:
    for link in links:
        fault(link)
    yield
    for link in links:
        link.resume()


@action("links paused")
def _paused(world: World, target: str) -> Iterator[None]:
    yield from _resumed(rank_of(world, target)[1].all, Proxy.pause)


@action("links swallow")
def _swallow(world: World, target: str) -> Iterator[None]:
    yield from _resumed(rank_of(world, target)[1].all, Proxy.blackhole)


@instant("links cut")
def _cut(world: World, target: str) -> None:
    for link in rank_of(world, target)[1].all:
        link.cut()


@instant("live link cut")
def _live_cut(world: World, target: str) -> None:
    rank_of(world, target)[1].data.cut()


# ---- our processes


@action("bridge killed")
def _bridge_killed(world: World, target: str) -> Iterator[None]:
    bridge = world.bridge(number_of(target))
    bridge.kill()
    yield
    bridge.start()


@action("bridge stopped")
def _bridge_stopped(world: World, target: str) -> Iterator[None]:
    bridge = world.bridge(number_of(target))
    bridge.stop()
    yield
    bridge.start()


@action("bridge frozen")
def _bridge_frozen(world: World, target: str) -> Iterator[None]:
    bridge = world.bridge(number_of(target))
    bridge.send(signal.SIGSTOP)
    yield
    bridge.send(signal.SIGCONT)


@action("bridges overlap")
def _overlap(world: World, target: str) -> Iterator[None]:
    """As in a rolling update: the new one is there before the old one goes."""
    former = world.bridge(number_of(target))
    world.twin(number_of(target))
    yield
    former.stop()


@action("worker killed")
def _worker_killed(world: World, target: str) -> Iterator[None]:
    worker = world.worker(number_of(target))
    worker.kill()
    yield
    worker.start()


@action("worker frozen")
def _worker_frozen(world: World, target: str) -> Iterator[None]:
    """Longer than Kafka's session it is a zombie: another one has its partitions when it wakes."""
    worker = world.worker(number_of(target))
    worker.send(signal.SIGSTOP)
    yield
    worker.send(signal.SIGCONT)


@action("worker away")
def _worker_away(world: World, target: str) -> Iterator[None]:
    worker = world.worker(number_of(target))
    worker.stop()
    yield
    worker.start()


# ---- Redis


@action("redis killed")
def _redis_killed(world: World, target: str) -> Iterator[None]:
    world.redis.kill()
    yield
    world.redis.start()


@action("redis frozen")
def _redis_frozen(world: World, target: str) -> Iterator[None]:
    world.redis.freeze()
    yield
    world.redis.thaw()


@instant("redis flushed")
def _redis_flushed(world: World, target: str) -> None:
    world.redis.flushall()


@instant("redis functions flushed")
def _redis_functions(world: World, target: str) -> None:
    world.redis.flush_functions()


@action("redis older")
def _redis_older(world: World, target: str) -> Iterator[None]:
    snapshot = world.redis.snapshot()
    yield
    world.redis.restart_from(snapshot)


@instant("redis empty")
def _redis_empty(world: World, target: str) -> None:
    world.redis.restart_empty()


@action("redis failover")
def _redis_failover(world: World, target: str) -> Iterator[None]:
    """Writers are refused by the old primary and must find the new one; readers that stay read a replica."""
    world.replicate()
    yield
    world.fail_over()


@action("redis slow")
def _redis_slow(world: World, target: str) -> Iterator[None]:
    world.redis_read.latency(SLOW_READ_SECONDS)
    world.redis_write.latency(SLOW_WRITE_SECONDS)
    yield
    world.redis_read.latency(0)
    world.redis_write.latency(0)


@action("redis links swallow")
def _redis_swallow(world: World, target: str) -> Iterator[None]:
    yield from _resumed([world.redis_read, world.redis_write], Proxy.blackhole)


@instant("redis links cut")
def _redis_cut(world: World, target: str) -> None:
    world.redis_read.cut()
    world.redis_write.cut()


# ---- Kafka


def _broker(world: World) -> KafkaControl:
    assert world.kafka is not None, "this broker is not to be harmed"
    return world.kafka


@action("kafka frozen")
def _kafka_frozen(world: World, target: str) -> Iterator[None]:
    _broker(world).freeze()
    yield
    _broker(world).thaw()


@action("kafka killed")
def _kafka_killed(world: World, target: str) -> Iterator[None]:
    _broker(world).kill()
    yield
    _broker(world).start()


@action("kafka link paused")
def _kafka_paused(world: World, target: str) -> Iterator[None]:
    yield from _resumed([world.kafka_link], Proxy.pause)


@action("kafka link swallows")
def _kafka_swallows(world: World, target: str) -> Iterator[None]:
    yield from _resumed([world.kafka_link], Proxy.blackhole)


@instant("kafka link cut")
def _kafka_cut(world: World, target: str) -> None:
    world.kafka_link.cut()
