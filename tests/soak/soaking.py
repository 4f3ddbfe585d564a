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
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from actions import ACTIONS
from answers import Checker
from asker import drift
from bridgeworld import LogReader
from fleet import LARGE, Odds
from schedule import KINDS, Fault, Kind, draw
from verdict import Quiet, verdict
from world import PARTITIONS, Plan, World

from kvledger.stack import Stack
from kvledger_index.model import MEDIA
from kvledger_wire.records import Gap

logger = logging.getLogger("soak")

USABLE = frozenset({"exact", "at_least", "uncertain"})
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
TURN_SECONDS = 0.1
SWITCH_SECONDS = 0.0005
"""Between threads of this process: its links forward what routers wait for, beside engines that hash."""


class Result(NamedTuple):
    """What came of it: ``broken`` is empty where all is well."""

    broken: list[str]
    totals: str


class Soak:
    """One run over a started world."""

    def __init__(self, world: World, faults: Sequence[Fault], *, say: Callable[[str], None], canary: bool) -> None:
        self._world = world
        self._faults = list(faults)
        self._say = say
        self._canary = canary
        self._checker = Checker(world.asker.process.log, world.engines, world.prompts)
        self._over = threading.Event()
        self._failed: list[str] = []
        self._done: Counter[str] = Counter()
        self._healed = 0.0

    def run(self, seconds: float) -> Result:
        """Use and break everything for so long, then let it rest and compare."""
        world = self._world
        keeper = threading.Thread(target=self._keep, name="keeper")
        keeper.start()
        try:
            self._rest(START_SECONDS_MAX, "everything is up")
            users = threading.Thread(target=self._use, name="users")
            users.start()
            self._break(seconds)
            self._over.set()
            users.join()
            healing = time.monotonic()
            self._rest(QUIET_SECONDS_MAX, "everything is quiet")
            self._healed = time.monotonic() - healing
            self._rest(QUIET_SECONDS_MAX, "it stays so", seconds_min=STEADY_SECONDS)
            world.asker.stop()
            found = self._compare()
        finally:
            self._over.set()
            self._stopped = True
            keeper.join()
        self._checker.poll()
        crashed = [end for one in world.managed for end in one.ends if "Traceback" in end]
        return Result([*self._failed, *self._checker.broken, *found, *crashed], self._totals())

    # ---- what goes on meanwhile, each on a thread of its own

    _stopped = False

    def _keep(self) -> None:
        """Processes that ended by themselves come back; answers are judged."""
        shown = time.monotonic()
        while not self._stopped:
            self._world.keep()
            self._checker.poll()
            if time.monotonic() > shown + PROGRESS_SECONDS:
                shown = time.monotonic()
                self._say(self._totals())
            time.sleep(TURN_SECONDS)

    def _use(self) -> None:
        """Every engine serves at its own pace."""
        rnd = Random(f"pace {self._world.seed}")
        due = dict.fromkeys(self._world.ranks, time.monotonic())
        while not self._over.is_set():
            engine = min(due, key=due.__getitem__)
            self._over.wait(max(0.0, due[engine] - time.monotonic()))
            engine.step(drift(time.monotonic()))
            due[engine] += rnd.expovariate(BATCHES_PER_SECOND)

    def _break(self, seconds: float) -> None:
        """Every fault at its time, undone before this returns."""
        start = time.monotonic()
        threads = []
        for fault in self._faults:
            self._over.wait(max(0.0, start + fault.at - time.monotonic()))
            self._say(str(fault))
            thread = threading.Thread(target=self._suffer, args=(fault,), name=fault.kind)
            thread.start()
            threads.append(thread)
        self._over.wait(max(0.0, start + seconds - time.monotonic()))
        for thread in threads:
            thread.join()

    def _suffer(self, fault: Fault) -> None:
        try:
            with ACTIONS[fault.kind](self._world, fault.target):
                self._over.wait(fault.seconds)
        except Exception as error:  # noqa: BLE001 - whatever it was, the run is no proof
            self._failed.append(f"the fault {fault.kind} ({fault.target}) could not be done: {error!r}")
        self._done[fault.kind] += 1

    # ---- the end

    def _rest(self, seconds: float, what: str, *, seconds_min: float = 0.0) -> None:
        """Until the log covers all that the engines said, every rank is followed, and routers hear so."""
        began = time.monotonic()
        self._quieten()
        reader = LogReader(self._world.bootstrap, self._world.prefix, PARTITIONS)
        try:
            while (late := self._behind(reader) + self._unheard(began)) or time.monotonic() < began + seconds_min:
                if time.monotonic() > began + seconds:
                    self._failed.append(f"not within {seconds:.0f} s: {what}: {'; '.join(late)}")
                    return
                for engine in self._world.ranks:
                    engine.rest()
                self._drain(reader, REST_SECONDS)
        finally:
            reader.close()

    def _quieten(self) -> None:
        for engine in self._world.ranks:
            engine.odds = Odds()

    def _drain(self, reader: LogReader, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reader.poll(TURN_SECONDS)

    def _behind(self, reader: LogReader) -> list[str]:
        """Ranks that the log does not cover to their last batch; the first look is never enough."""
        late = []
        for engine in self._world.ranks:
            rank = reader.ranks.get(engine.name)
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
        """Ranks of which routers hear nothing that they could use: the newest answer to a question since then."""
        late = []
        for engine in self._world.ranks:
            at, held = self._checker.settled.get(engine.name, (0.0, None))
            if held is None or at < since:
                late.append(f"{engine.name}: no answer")
            elif held.status not in USABLE:
                late.append(f"{engine.name}: {held.status} ({held.reason})")
        return late

    def _compare(self) -> list[str]:
        """Engines, log and index; a canary leaves out one claim."""
        world = self._world
        reader = LogReader(world.bootstrap, world.prefix, PARTITIONS)
        try:
            end = time.monotonic() + QUIET_SECONDS_MAX
            while True:
                self._drain(reader, 1.0)
                dumped = world.dump()
                if self._canary:
                    dumped.discard(min(dumped, key=repr))
                found = [fault for rank in self._quiet(reader, dumped) for fault in verdict(rank)]
                found += self._behind(reader)  # a bridge may still have had something to say
                if not found or self._canary or time.monotonic() > end:
                    break
        finally:
            reader.close()
        self._claims = len(dumped)
        self._gaps = sum(len(rank.of(Gap)) for rank in reader.ranks.values())
        return found

    def _quiet(self, reader: LogReader, dumped: set[tuple[str, int | None, str, int]]) -> list[Quiet]:
        ranks = []
        for engine in self._world.ranks:
            rank = reader.ranks[engine.name]
            ranks.append(
                Quiet(
                    engine.name,
                    truth=frozenset(engine.claims()),
                    logged=frozenset((group, MEDIA[code], int.from_bytes(key)) for group, code, key in rank.blocks),
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
            f"slowest {checker.slowest * 1e3:.1f} ms; ranks: {statuses}; {len(checker.broken)} promises broken; "
            f"{self._gaps} gaps, {self._claims} claims, healed in {self._healed:.1f} s"
        )


def soak(
    stack: Stack,
    plan: Plan,
    *,
    seconds: float,
    seed: int,
    gap_seconds: float = GAP_SECONDS,
    kinds: Sequence[Kind] = KINDS,
    canary: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """One run on servers of the stack."""
    with World(stack, plan, seed, f"soak-{seed}") as world:
        faults = draw(seed, seconds, world.targets, gap_seconds=gap_seconds, kinds=kinds)
        return Soak(world, faults, say=say, canary=canary).run(seconds)


def main(words: list[str]) -> int:
    """From the command line."""
    minutes, seed = float(words[0]), int(words[1])
    canary = words[2:3] not in ([], [""], ["0"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    with Stack(folder, local=True, progress=logger.info) as stack:
        result = soak(stack, Plan(LARGE), seconds=minutes * 60, seed=seed, canary=canary, say=logger.info)
    logger.info("%s", result.totals)
    if not result.broken:
        shutil.rmtree(folder)
        logger.info("soak: well, seed %d", seed)
        return 0
    for what in result.broken:
        logger.error("%s", what)
    logger.error("soak: FAILED; again with: make soak MINUTES=%g SEED=%d; logs are in %s", minutes, seed, folder)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
