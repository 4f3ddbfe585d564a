"""The engines of a soak: what they serve, what they publish, and what each held after every batch it ever sent.

A prompt is one of a pool that a seed draws, so that whoever asks the index about it needs the seed alone.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import msgspec
from cache import FULL, GPU, HASH_BLOCK, STATE, WINDOW, Cache, Chronicle, Event, Group, Lane, Shape, hit

from kvledger_engine.standin import StandIn
from kvledger_index.blockkeys import prompt_keys
from kvledger_index.enginehash import Scheme, chain, low64

PLAIN = Shape("plain", (Group(0, FULL),), blocks=160, cpu_blocks=120)
WINDOWED = Shape("windowed", (Group(0, FULL), Group(1, WINDOW, window=64), Group(2, WINDOW, window=40)), blocks=260)
STATEFUL = Shape("stateful", (Group(0, FULL), Group(1, STATE, block=2 * HASH_BLOCK)), blocks=220)
SHAPES = {shape.model: shape for shape in (PLAIN, WINDOWED, STATEFUL)}

PROMPTS = 96
POPULAR = 24
"""Prompts that are asked for at a time; which ones they are moves on."""

BLOCKS_MAX = 26
CLEAR_EVERY = 150
"""Batches between two clears, on average: what was partial becomes complete again."""

LAYOUTS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields of events that are arrays (vLLM 0.22 and 0.23)."""


class Prompt:
    """A text; its tokens, and its names by hashing scheme."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    @cache  # noqa: B019 - the pool lives as long as the soak
    def names(self, scheme: Scheme) -> tuple[int, ...]:
        """The hashes of its hash blocks, as integers of 64 bits."""
        return tuple(low64(digest) for digest in chain(scheme, None, self.tokens, HASH_BLOCK))

    @cache  # noqa: B019 - the same
    def keys(self, model: str) -> tuple[int, ...]:
        """Its block keys."""
        return tuple(prompt_keys(model, self.tokens, HASH_BLOCK))

    @cached_property
    def blocks(self) -> int:
        """Whole hash blocks."""
        return len(self.tokens) // HASH_BLOCK


def draw_prompts(seed: int) -> list[Prompt]:
    """A tree of texts: few beginnings, many branches, of every length; every fourth ends with its block."""
    rnd = random.Random(f"prompts {seed}")
    texts: list[tuple[int, ...]] = [_words(rnd, rnd.randint(2, 8) * HASH_BLOCK) for _ in range(6)]
    prompts = []
    for number in range(PROMPTS):
        stem = rnd.choice(texts)
        cut = rnd.randint(1, len(stem) // HASH_BLOCK) * HASH_BLOCK
        room = max(1, BLOCKS_MAX - cut // HASH_BLOCK)
        tail = rnd.randint(1, room) * HASH_BLOCK + (0 if number % 4 == 0 else rnd.randint(1, HASH_BLOCK - 1))
        text = stem[:cut] + _words(rnd, tail)
        texts.append(text[: len(text) // HASH_BLOCK * HASH_BLOCK])
        prompts.append(Prompt(text))
    return prompts


def _words(rnd: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rnd.randrange(1 << 17) for _ in range(count))


class Life:
    """One process of an engine: from an empty cache to its end."""

    def __init__(self, shape: Shape, scheme: Scheme, started: float) -> None:
        self.scheme = scheme
        self.chronicle = Chronicle()
        self.cache = Cache(shape, self.chronicle)
        self.started = started
        self.ended: float | None = None
        self.head = -1
        self.lost: list[int] = []
        """Sequences that reach nobody, neither live nor by replay, since the last clear."""


class Odds(msgspec.Struct):
    """How likely a batch is to meet with something."""

    drop: float = 0.0
    """Not sent live; replay has it."""
    lose: float = 0.0
    """Neither sent live nor kept."""
    duplicate: float = 0.0
    swap: float = 0.0
    """Sent live after the one that follows it."""
    malformed: float = 0.0


class Engine:
    """One rank: a stand-in's sockets, a cache behind them, and its lives. Methods may be called from any thread."""

    def __init__(
        self, name: str, shape: Shape, prompts: Sequence[Prompt], seed: int, *, replay: bool, arrays: bool, found: bool
    ) -> None:
        """``found``: it hashes with the usual seed, so that a bridge finds its scheme; else with one of its own."""
        self.name, self.shape = name, shape
        self.rank = int(name.rpartition("/")[2])
        self.odds = Odds()
        self.lives: list[Life] = []
        self.batches = 0
        self.away = False
        self._prompts = prompts
        self._rnd = random.Random(f"{name} {seed}")
        self._arrays, self._found = arrays, found
        self._lock = threading.RLock()
        self._late: tuple[bytes, bytes] | None = None
        self._kept_back: set[int] = set()
        self._forgotten: set[int] = set()
        self._twice: set[int] = set()
        self.standin = StandIn(replay="tcp://127.0.0.1:0" if replay else None, buffer_steps=4_000)
        faults = self.standin.faults
        faults.drop = self._kept_back.__contains__
        faults.forget = self._forgotten.__contains__
        faults.duplicate = self._twice.__contains__

    def start(self) -> None:
        """Open the sockets and begin the first life."""
        self.standin.start()
        self._begin()

    def stop(self) -> None:
        """Close the sockets."""
        self.standin.stop()

    def restart(self, *, batches: int = 0) -> None:
        """Another process at the same addresses, which at once publishes so many batches without a change."""
        with self._lock:
            self.go()
            self.come()
            for _ in range(batches):
                self._publish([], certain=True)

    def go(self) -> None:
        """The process ends; until another comes nothing is served."""
        with self._lock:
            self.life.ended = time.monotonic()
            self.away = True
            self.standin.down()

    def come(self) -> None:
        """Another process starts, with an empty cache."""
        with self._lock:
            self._begin()
            self.standin.up()
            self.away = False

    @property
    def life(self) -> Life:
        """The present one."""
        return self.lives[-1]

    def step(self, drift: int) -> None:
        """Serve one to three requests of those that are popular now, and rarely clear before; nothing while away."""
        with self._lock:
            if self.away:
                return
            cache = self.life.cache
            cache.begin(self.life.head + 1)
            if self._rnd.random() < 1 / CLEAR_EVERY:
                cache.clear()
            for _ in range(self._rnd.randint(1, 3)):
                self._serve(drift)
            self._publish(cache.end())

    def clear(self, drift: int) -> None:
        """Serve one request and clear, as one batch; nothing while away."""
        with self._lock:
            if self.away:
                return
            self.life.cache.begin(self.life.head + 1)
            self._serve(drift)
            self.life.cache.clear()
            self._publish(self.life.cache.end(), certain=True)

    def rest(self) -> None:
        """One last batch, certainly sent, so that whoever listens knows of all before it."""
        with self._lock:
            self.odds = Odds()
            self._publish([], certain=True)

    def skip(self) -> None:
        """Consume a sequence without a batch, as engines do that cannot encode one."""
        with self._lock:
            if not self.away:
                self.life.head += 1
                self.life.lost.append(self.life.head)
                self.standin.skip()

    def hit(self, prompt: Prompt, seq: int, life: Life) -> int:
        """What this engine would have reused of a prompt right after batch ``seq`` of that life."""
        if seq < 0:
            return 0
        was = life.chronicle.was_resident
        with self._lock:
            return hit(
                self.shape,
                len(prompt.tokens),
                prompt.names(life.scheme),
                lambda group, name: was((group, GPU), name, seq),
            )

    def claims(self) -> set[tuple[int, str, int]]:
        """(group, medium, block key) of all that is resident now."""
        keys: dict[int, int] = {}
        for prompt in self._prompts:
            keys |= zip(prompt.names(self.life.scheme), prompt.keys(self.shape.model), strict=True)
        return {(group, medium, keys[name]) for group, medium, name in self.hashes()}

    def hashes(self) -> set[tuple[int, str, int]]:
        """(group, medium, engine hash) of the same."""
        with self._lock:
            held: dict[Lane, set[int]] = self.life.chronicle.held()
        return {(group, medium.lower(), name) for (group, medium), names in held.items() for name in names}

    def _begin(self) -> None:
        none = "" if self._found else self._rnd.randbytes(32).hex()
        self.lives.append(Life(self.shape, Scheme(none=none), time.monotonic()))
        for numbers in (self._kept_back, self._forgotten, self._twice):
            numbers.clear()
        self._late = None

    def _serve(self, drift: int) -> None:
        number = (drift + int(POPULAR * self._rnd.random() ** 2)) % len(self._prompts)
        prompt = self._prompts[number]
        self.life.cache.serve(prompt.tokens, prompt.names(self.life.scheme))

    def _publish(self, events: list[Event], *, certain: bool = False) -> None:
        """Send one batch, or what became of it. The truth is written down before anybody can hear of it."""
        life = self.life
        life.head += 1
        seq, odds = life.head, Odds() if certain else self.odds
        if any(event["type"] == "AllBlocksCleared" for event in events):
            life.lost.clear()
        payload = msgspec.msgpack.encode([time.time(), list(self._encoded(events)), self.rank])
        if self._rnd.random() < odds.malformed:
            payload = payload[:-3]
            life.lost.append(seq)
        elif self._rnd.random() < odds.lose:
            self._kept_back.add(seq)
            self._forgotten.add(seq)
            life.lost.append(seq)
        elif self._rnd.random() < odds.drop:
            self._kept_back.add(seq)
        elif self._rnd.random() < odds.duplicate:
            self._twice.add(seq)
        elif self._late is None and self._rnd.random() < odds.swap:
            self._kept_back.add(seq)
            self._late = seq.to_bytes(8, "big"), payload
            self.standin.publish(payload, seq=seq)
            self.batches += 1
            return
        self.standin.publish(payload, seq=seq)
        self.batches += 1
        if self._late is not None:
            number, late = self._late
            self._late = None
            self.standin.send_raw(b"", number, late)

    def _encoded(self, events: list[Event]) -> Iterator[Any]:
        for event in events:
            if self._arrays:
                yield [event["type"], *(event.get(name) for name in LAYOUTS[event["type"]])]
            else:
                yield event


class Seat(NamedTuple):
    """Which engine sits where."""

    replica: str
    shape: Shape
    replay: bool = True
    arrays: bool = False
    found: bool = True


LARGE = (
    Seat("calm", PLAIN),
    Seat("old", PLAIN, arrays=True, found=False),
    Seat("gemma", WINDOWED),
    Seat("lfm", STATEFUL, found=False),
)
SMALL = (Seat("old", PLAIN, arrays=True, found=False), Seat("gemma", WINDOWED))
RANKS = 2


def build(seats: Sequence[Seat], prompts: Sequence[Prompt], seed: int) -> dict[str, Engine]:
    """Engines by rank; the last rank of the first seat has no replay endpoint where there are many."""
    engines = {}
    for seat in seats:
        for rank in range(RANKS):
            name = f"{seat.replica}/{rank}"
            engines[name] = Engine(
                name,
                seat.shape,
                prompts,
                seed,
                replay=len(seats) < len(LARGE) or name != "calm/1",
                arrays=seat.arrays,
                found=seat.found,
            )
    return engines
