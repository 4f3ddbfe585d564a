"""The soak: engines that are used, everything else that fails by a seeded schedule, and a reckoning when all is quiet.

    make soak MINUTES=20 SEED=7        soaking.py MINUTES SEED [CANARY]

Exit code 0: index, log and engines agree, no promise was broken. 1: something does not, named with the seed that brings
it back; the logs of all processes are kept. With a canary one claim is left out of what the index said: it must fail.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from actions import ACTIONS
from answers import Checker
from asker import drift
from bridgeworld import Block, LogReader
from fleet import LARGE, Engine, Odds
from schedule import Fault, draw
from verdict import Claim, Quiet, verdict
from world import PARTITIONS, Plan, World

from kvledger.stack import Stack
from kvledger_index.model import MEDIA
from kvledger_wire.accept import RankState
from kvledger_wire.records import Gap

logger = logging.getLogger("soak")

LIVE = frozenset({"exact", "at_least"})
"""Statuses of a rank that is followed."""

BATCHES_PER_SECOND = 3.0
"""Of each rank, on average."""

GAP_SECONDS = 2.0
"""From one fault to the next, on average."""

START_SECONDS_MAX = 120.0
QUIET_SECONDS_MAX = 120.0
"""From the end of the last fault until every rank is followed again."""

STEADY_SECONDS = 4.0
"""How long answers are watched once all is quiet."""

REST_SECONDS = 0.5
"""Between two empty batches of a rank that has nothing else to say."""

PROGRESS_SECONDS = 30.0
LIVE_SECONDS_MAX = 120.0
TURN_SECONDS = 0.1
SWITCH_SECONDS = 0.0005
"""Between threads of this process: its links forward what routers wait for, beside engines that hash."""


class Result(NamedTuple):
    """What came of it: ``broken`` is empty where all is well."""

    broken: list[str]
    totals: str


class Trial(NamedTuple):
    """What one fault did; ``heard`` counts the statuses of ranks in answers, from its begin until all is live."""

    kind: str
    seconds: float
    live_seconds: float
    heard: Counter[str]


class Soak:
    """One run over a started world."""

    def __init__(
        self,
        world: World,
        faults: Sequence[Fault],
        *,
        say: Callable[[str], None] = lambda _: None,
        canary: bool = False,
    ) -> None:
        self._world = world
        self._faults = list(faults)
        self._say = say
        self._canary = canary
        self._checker = Checker(world.asker.process.log, world.engines, world.prompts, say=say)
        self._reader = LogReader(world.bootstrap, world.prefix, PARTITIONS)
        self._reading = threading.Lock()
        self._over, self._stopped = threading.Event(), threading.Event()
        self._keeper = self._thread("keeper", self._keep)
        self._failed: list[str] = []
        self._done: Counter[str] = Counter()
        self._healed = 0.0

    def run(self, seconds: float) -> Result:
        """Use and break everything for so long, then let it rest and compare."""
        with self.used():
            self.suffer(seconds)
        return self.reckon()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Engines serve inside, once everything is up; answers are judged from here on, until the reckoning."""
        self._keeper.start()
        self._rest(START_SECONDS_MAX, "everything is up")
        users = self._thread("users", self._use)
        users.start()
        try:
            yield
        finally:
            self._over.set()
            users.join()

    def suffer(self, seconds: float) -> None:
        """Every fault at its time, undone before this returns."""
        start = time.monotonic()
        threads = []
        for fault in self._faults:
            self._over.wait(max(0.0, start + fault.at - time.monotonic()))
            self._say(str(fault))
            threads.append(self._thread(fault.kind, partial(self._break, fault)))
            threads[-1].start()
        self._over.wait(max(0.0, start + seconds - time.monotonic()))
        for thread in threads:
            thread.join()

    def trial(self, kind: str, target: str, seconds: float) -> Trial:
        """One fault by itself: how long after it every rank is exact again, and what routers heard until then."""
        before = Counter(self._checker.statuses)
        self._break(Fault(0.0, kind, target, seconds))
        over = time.monotonic()
        heads = {engine: engine.life.head for engine in self._world.ranks}
        while not all(self._is_live(engine, over, head) for engine, head in heads.items()):
            if time.monotonic() > over + LIVE_SECONDS_MAX:
                self._failed.append(f"{kind}: not live {LIVE_SECONDS_MAX:.0f} s after it")
                break
            self._over.wait(TURN_SECONDS)
        return Trial(kind, seconds, time.monotonic() - over, Counter(self._checker.statuses) - before)

    def reckon(self) -> Result:
        """Let everything rest, compare, and end what judges answers."""
        try:
            healing = time.monotonic()
            self._rest(QUIET_SECONDS_MAX, "everything is quiet")
            self._healed = time.monotonic() - healing
            self._rest(QUIET_SECONDS_MAX, "it stays so", seconds_min=STEADY_SECONDS)
            self._world.asker.stop()
            found = self.compare(canary=self._canary)
        finally:
            self._stopped.set()
            self._keeper.join()
            self._reader.close()
        crashed = [end for one in self._world.managed for end in one.ends if "Traceback" in end]
        return Result([*self._failed, *self._checker.broken, *found, *crashed], self._totals())

    # ---- what goes on meanwhile, each on a thread of its own

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """A thread whose failure is one of the run: without it the rest would prove nothing."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it was, the run is no proof
                self._failed.append(f"{name} failed: {error!r}")

        return threading.Thread(target=guarded, name=name, daemon=True)

    def _keep(self) -> None:
        """Processes that ended by themselves come back; the log is read, answers are judged."""
        shown = time.monotonic()
        while not self._stopped.wait(TURN_SECONDS):
            self._world.keep()
            self._checker.poll()
            with self._reading:
                self._reader.poll(0)
            if time.monotonic() > shown + PROGRESS_SECONDS:
                shown = time.monotonic()
                self._say(self._totals())
        self._checker.poll()

    def _use(self) -> None:
        """Every engine serves at its own pace."""
        rnd = Random(f"pace {self._world.seed}")
        due = dict.fromkeys(self._world.ranks, time.monotonic())
        while not self._over.is_set():
            engine = min(due, key=due.__getitem__)
            self._over.wait(max(0.0, due[engine] - time.monotonic()))
            engine.step(drift(time.monotonic()))
            due[engine] += rnd.expovariate(BATCHES_PER_SECOND)

    def _break(self, fault: Fault) -> None:
        with ACTIONS[fault.kind](self._world, fault.target):
            self._over.wait(fault.seconds)
        self._done[fault.kind] += 1

    def _is_live(self, engine: Engine, since: float, head: int) -> bool:
        """Whether a router heard, in answer to a question since then, of a batch behind ``head``."""
        at, held = self._checker.settled.get(engine.name, (0.0, None))
        return at >= since and held is not None and held.status in LIVE and held.as_of is not None and held.as_of > head

    # ---- the end

    def _rest(self, seconds: float, what: str, *, seconds_min: float = 0.0) -> None:
        """Until the log covers all that the engines said, every rank is followed, and routers hear so."""
        began = time.monotonic()
        for engine in self._world.ranks:
            engine.odds = Odds()
        while True:
            with self._reading:
                late = self._behind() + self._unheard(began)
            if not late and time.monotonic() > began + seconds_min:
                return
            if time.monotonic() > began + seconds:
                self._failed.append(f"not within {seconds:.0f} s: {what}: {'; '.join(late)}")
                return
            for engine in self._world.ranks:
                engine.rest()
            time.sleep(REST_SECONDS)

    def _behind(self) -> list[str]:
        """Ranks that the log does not cover to their last batch; the first look is never enough."""
        late = []
        for engine in self._world.ranks:
            rank = self._reader.ranks.get(engine.name)
            if rank is None:
                late.append(f"{engine.name} is not in the log")
            elif not rank.state.loaded or rank.state.suspended or rank.state.seq != engine.life.head:
                state = rank.state
                late.append(
                    f"{engine.name} is at {state.seq} of {engine.life.head}, loaded {state.loaded}, "
                    f"suspended {state.suspended}: {', '.join(rank.kinds()[-5:])}"
                )
        return late

    def _unheard(self, since: float) -> list[str]:
        """Ranks of which routers do not hear what the log says: the newest answer to a question since then."""
        late = []
        for engine in self._world.ranks:
            at, held = self._checker.settled.get(engine.name, (0.0, None))
            rank = self._reader.ranks.get(engine.name)
            due = best_status(rank.state) if rank else "exact"
            if held is None or at < since:
                late.append(f"{engine.name}: no answer")
            elif held.status != due:
                late.append(f"{engine.name}: {held.status} instead of {due} ({held.reason})")
        return late

    def compare(self, *, canary: bool = False) -> list[str]:
        """Engines, log and index; a canary leaves out one claim. Call it while the log is still read."""
        end = time.monotonic() + QUIET_SECONDS_MAX
        while True:
            time.sleep(2 * TURN_SECONDS)
            with self._reading:
                late = self._behind()  # a bridge may still have something to say
                found = late or self._differences(canary=canary)
            if not found or (canary and not late) or time.monotonic() > end:
                break
            time.sleep(REST_SECONDS)
        self._gaps = sum(len(rank.of(Gap)) for rank in self._reader.ranks.values())
        return found

    def _differences(self, *, canary: bool) -> list[str]:
        dumped = self._world.dump()
        if canary:
            dumped.discard(min(dumped, key=repr))
        self._claims = len(dumped)
        return [fault for rank in self._quiet(dumped) for fault in verdict(rank)]

    def _quiet(self, dumped: set[tuple[str, int | None, str, int]]) -> list[Quiet]:
        ranks = []
        for engine in self._world.ranks:
            rank = self._reader.ranks[engine.name]
            ranks.append(
                Quiet(
                    engine.name,
                    truth=frozenset(engine.claims()),
                    logged=claims_of(rank.blocks),
                    loose=claims_of(rank.loose),
                    hashes=frozenset(engine.hashes()),
                    dumped=frozenset(
                        (group, medium, key) for name, group, medium, key in dumped if name == engine.name
                    ),
                    partial=rank.state.partial,
                    lost=tuple(engine.life.lost),
                    records=rank.records,
                )
            )
        return ranks

    _claims = _gaps = 0

    def _totals(self) -> str:
        checker = self._checker
        statuses = ", ".join(f"{count} {status}" for status, count in checker.statuses.most_common())
        lives = sum(len(engine.lives) for engine in self._world.ranks)
        ends = sum(len(one.ends) for one in self._world.managed)
        batches = sum(engine.batches for engine in self._world.ranks)
        return (
            f"{batches} batches of {lives} lives, {self._done.total()} faults, {ends} processes ended by themselves; "
            f"{checker.questions} questions, {checker.no_opinion} without an opinion, "
            f"slowest {checker.slowest * 1e3:+.1f} ms of its deadline; ranks: {statuses}; "
            f"{len(checker.broken)} promises broken; {self._gaps} gaps, {self._claims} claims, "
            f"healed in {self._healed:.1f} s"
        )


def claims_of(blocks: Iterable[Block]) -> frozenset[Claim]:
    """What a reader of the log holds, as a verdict wants it."""
    return frozenset((group, MEDIA[code], int.from_bytes(key)) for group, code, key in blocks)


def best_status(state: RankState) -> str:
    """What a rank that is followed must be called: nothing of these engines lacks a name for long."""
    return "uncertain" if state.uncertain else "at_least" if state.partial else "exact"


def is_caught(broken: list[str]) -> bool:
    """Whether the claim that a canary left out was noticed, and nothing else."""
    return len(broken) == 1 and "1 claims are in the log and not in the index" in broken[0]


def main(words: list[str]) -> int:
    """From the command line."""
    minutes, seed = float(words[0]), int(words[1])
    canary = words[2:3] not in ([], [""], ["0"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    seconds = minutes * 60
    with (
        Stack(folder, local=True, progress=logger.info) as stack,
        World(stack, Plan(LARGE), seed, f"soak-{seed}") as world,
    ):
        faults = draw(seed, seconds, world.targets, gap_seconds=GAP_SECONDS)
        result = Soak(world, faults, say=logger.info, canary=canary).run(seconds)
    logger.info("%s", result.totals)
    if not result.broken:
        shutil.rmtree(folder)
        logger.info("soak: %s, seed %d", "the canary was NOT caught" if canary else "well", seed)
        return 0
    for what in result.broken:
        logger.error("%s", what)
    if canary and is_caught(result.broken):
        shutil.rmtree(folder)
        logger.info("soak: the canary was caught, and nothing else is wrong: with CANARY=1 this failure is the aim")
        return 1
    again = f"make soak MINUTES={minutes:g} SEED={seed}{' CANARY=1' if canary else ''}"
    logger.error("soak: FAILED; again with: %s; logs are in %s", again, folder)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
