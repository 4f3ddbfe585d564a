"""Kills, freezes and doubles the stream worker at random moments, while ranks write; the index must hold what they say.

    records  .. . ..... .. ....... .. ... . ..... .. .....
    kill     ######X#########                                  SIGKILL, and the next one at once
    zombie   ####Z...........Z#X                               SIGSTOP until another has its partitions, then SIGCONT
    join     ##########X                                       two for a while, then the older one is asked to leave
                  ########

Each moment is a random time after records came, with polls of a few records: before, within and after a write. Ranks
know what single delivery would have left. ``python tests/integration/workerkills.py KILLS SEED`` is the heavy form.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, NamedTuple

from streamsworld import PARTITIONS, Installation, WorkerProcess

from kvledger.admin import connect, create_topics
from kvledger.stack import Stack
from kvledger_wire.topics import topic_specs

Act = Literal["kill", "zombie", "join"]
ACTS: tuple[Act, ...] = ("kill", "kill", "kill", "zombie", "join")

RANKS = 6
ACTIONS = 30
"""Things that happen to ranks before each moment, and again after it."""

MOMENT_SECONDS_MAX = 0.3
CHECK_EVERY = 5
"""Moments between two looks at the index."""

SETTLED_SECONDS_MAX = 60.0
POLL_SECONDS = 0.05
SETTINGS = {"KVLEDGER_STREAMS_SESSION_SECONDS": "1", "KVLEDGER_STREAMS_POLL_RECORDS_MAX": "5"}
"""A dead worker's partitions move after a second; each write is of a few records."""


class Report(NamedTuple):
    """What happened, and how long the index took to be right again each time it was looked at."""

    acts: Counter[str]
    settled_seconds: list[float]


class Killing:
    """One installation and the worker that serves it now."""

    def __init__(self, world: Installation, seed: int) -> None:
        self.acts: Counter[str] = Counter()
        self._world = world
        self._rnd = random.Random(seed)
        self._worker = self._start()

    async def moment(self, act: Act) -> None:
        """Records, a random time, the act, records."""
        self._write()
        await asyncio.sleep(self._rnd.random() * MOMENT_SECONDS_MAX)
        await {"kill": self._kill, "zombie": self._zombie, "join": self._join}[act]()
        self._write()
        self.acts[act] += 1

    async def settled(self) -> float:
        """Wait until the index holds what the ranks hold; seconds that took. Raises TimeoutError."""
        start = time.monotonic()
        await until(self._world.is_true, "the index is what the ranks say")
        return time.monotonic() - start

    async def _kill(self) -> None:
        self._worker.kill()
        self._worker = self._start()

    async def _zombie(self) -> None:
        """It wakes up with records in hand that another has applied since."""
        late, self._worker = self._worker, self._start()
        await self._placed(late)
        late.send(signal.SIGSTOP)
        self._write()
        await self.settled()
        self._write()
        late.send(signal.SIGCONT)
        await asyncio.sleep(self._rnd.random() * MOMENT_SECONDS_MAX)
        late.kill()

    async def _join(self) -> None:
        leaving, self._worker = self._worker, self._start()
        await self._placed(self._worker)
        self._write()
        await asyncio.to_thread(leaving.stop)

    def _start(self) -> WorkerProcess:
        return self._world.worker(**SETTINGS)

    def _write(self) -> None:
        self._world.act(self._rnd, ACTIONS)
        self._world.push()

    async def _placed(self, worker: WorkerProcess) -> None:
        """Until it has partitions."""

        async def has_some() -> bool:
            return bool(worker.lines("partition_placed"))

        await until(has_some, "the worker has partitions")


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll; raises TimeoutError."""
    deadline = time.monotonic() + SETTLED_SECONDS_MAX
    while not await condition():
        if time.monotonic() > deadline:
            message = f"not within {SETTLED_SECONDS_MAX:.0f} s: {what}"
            raise TimeoutError(message)
        await asyncio.sleep(POLL_SECONDS)


async def kill_workers(world: Installation, acts: list[Act], seed: int) -> Report:
    """Each act at a random moment; the index is looked at now and then, and at the end. Raises TimeoutError."""
    world.ranks(RANKS)
    killing = Killing(world, seed)
    settled = []
    for number, act in enumerate(acts, 1):
        await killing.moment(act)
        if number % CHECK_EVERY == 0 or number == len(acts):
            settled.append(await killing.settled())
    return Report(killing.acts, settled)


def main(words: list[str]) -> int:
    """So many acts by a seed; non-zero where the index is not what the ranks say."""
    count, seed = (int(word) for word in words)
    rnd = random.Random(seed)
    acts: list[Act] = [rnd.choice(ACTS) for _ in range(count)]
    with Stack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.start()
        name = f"kills-{time.time_ns():x}"
        create_topics(connect(stack.kafka), topic_specs(partitions=PARTITIONS, prefix=f"{name}."))
        with Installation(stack.kafka, stack.redis, f"{name}.", name, Path(folder)) as world:
            try:
                report = asyncio.run(kill_workers(world, acts, seed))
            except TimeoutError as error:
                sys.stderr.write(f"worker-kills: {error}; bring it back with KILLS={count} SEED={seed}\n")
                return 1
    done = ", ".join(f"{number} {act}" for act, number in sorted(report.acts.items()))
    slowest = max(report.settled_seconds)
    sys.stdout.write(f"{done}: equal to single delivery; settled within {slowest:.1f} s each time\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
