"""A router of its own process, that asks at a steady rate and writes what it was told, one JSON array per line.

    asker.py URL NAMESPACE SEED PER_SECOND MODEL…

It asks whether or not earlier questions are answered, and measures beside each how far its own loop was late meanwhile.
Times are of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import sys
import time

from fleet import POPULAR, Prompt, draw_prompts

from kvledger_router import Index

TICK_SECONDS = 0.001
DEADLINES_SECONDS = (0.020, 0.5)
"""What routers wait by default, and what leaves an answer also where the machine is busy; each with a breaker."""

UNDER_WAY_MAX = 200
"""Questions at once; a loop that falls so far behind asks no more until it has caught up."""


class Asker:
    """Two indexes per model; ``lag`` is by how much all ticks of the loop so far came late, in sum."""

    def __init__(self, url: str, namespace: str, prompts: list[Prompt], models: list[str], rnd: random.Random) -> None:
        self._indexes = [
            (deadline, Index.from_url(url, model=model, namespace=namespace, deadline_seconds=deadline))
            for model in models
            for deadline in DEADLINES_SECONDS
        ]
        self._prompts = prompts
        self._rnd = rnd
        self._late = 0.0
        self._under_way = 0

    async def run(self, per_second: float) -> None:
        """Until cancelled."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            for number in itertools.count():
                await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
                if self._under_way < UNDER_WAY_MAX:
                    group.create_task(self._ask(*self._indexes[number % len(self._indexes)]))

    async def _ask(self, deadline: float, index: Index) -> None:
        self._under_way += 1
        # mostly what is popular at the moment, which the engines hold; like them, it moves on with time
        number = self._rnd.randrange(len(self._prompts))
        if self._rnd.random() < 0.8:
            number = (drift(time.monotonic()) + self._rnd.randrange(POPULAR)) % len(self._prompts)
        at, late = time.monotonic(), self._late
        match = await index.match(self._prompts[number].tokens)
        took = time.monotonic() - at
        await asyncio.sleep(TICK_SECONDS)  # a tick that is late because of us is counted before we look
        holders = [(h.replica, h.rank, h.hit_tokens, h.status, h.as_of, h.reason) for h in match]
        line = (at, took, deadline, self._late - late, index.model, number, match.opinion, match.reason, holders)
        sys.stdout.write(json.dumps(line) + "\n")
        self._under_way -= 1

    async def _tick(self) -> None:
        at = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._late += max(0.0, now - at - TICK_SECONDS)
            at = now  # what passes behind this line is the next tick's


def drift(now: float) -> int:
    """The first of the prompts that are popular at this time; engines and routers agree on it."""
    return int(now / 10)


def main(words: list[str]) -> int:
    """Ask until killed: each line is one write, and half a line is not read."""
    url, namespace, seed, per_second, *models = words
    logging.getLogger().addHandler(logging.NullHandler())  # a breaker that opens is not what this is about
    prompts, rnd = draw_prompts(int(seed)), random.Random(f"asker {seed}")

    async def ask() -> None:
        await Asker(url, namespace, prompts, models, rnd).run(float(per_second))

    asyncio.run(ask())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
