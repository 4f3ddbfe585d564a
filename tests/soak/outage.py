"""Each fault of a server by itself, on the soak's world: how long until all is live again, and what routers heard.

    make outage SECONDS=300        outage.py SECONDS [SEED]

``SECONDS`` is how long Kafka is away; Redis is set back by a minute. A table, sorted by time to live; exit code 1 where
a promise was broken or engines, log and index do not agree at the end.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from fleet import LARGE
from soaking import LIVE, SWITCH_SECONDS, Soak, Trial, logger
from world import Plan, World

from kvledger.stack import Stack

SET_BACK_SECONDS = 60.0
TRIALS = (
    ("redis flushed", "redis", 0.0),
    ("redis functions flushed", "redis", 0.0),
    ("redis empty", "redis", 0.0),
    ("redis killed", "redis", 2.0),
    ("redis older", "redis", SET_BACK_SECONDS),
    ("redis failover", "redis", 1.0),
    ("worker killed", "worker 0", 0.0),
    ("bridge killed", "bridge 0", 0.0),
    ("kafka frozen", "kafka", 10.0),
)


def main(words: list[str]) -> int:
    """Every trial, one after the other."""
    seconds, seed = float(words[0]), int(words[1]) if words[1:] else 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    sys.setswitchinterval(SWITCH_SECONDS)
    trials: list[Trial] = []
    with (
        tempfile.TemporaryDirectory(prefix="outage-") as folder,
        Stack(Path(folder), local=True, progress=logger.info) as stack,
        World(stack, Plan(LARGE), seed, f"outage-{seed}") as world,
    ):
        soak = Soak(world, [])
        with soak.used():
            for kind, target, lasts in (*TRIALS, ("kafka killed", "kafka", seconds)):
                logger.info("%s for %g s", kind, lasts)
                trials.append(soak.trial(kind, target, lasts))
        result = soak.reckon()
    sys.stdout.write(table(trials) + result.totals + "\n")
    for what in result.broken:
        logger.error("%s", what)
    return 1 if result.broken else 0


def table(trials: list[Trial]) -> str:
    """Slowest first."""
    lines = ["live again after   fault                     lasted   of the answers meanwhile, exact or at least\n"]
    for trial in sorted(trials, key=lambda trial: -trial.live_seconds):
        trusted = sum(trial.heard[status] for status in LIVE) / max(1, trial.heard.total())
        lines.append(f"{trial.live_seconds:14.1f} s   {trial.kind:24}  {trial.seconds:5.0f} s   {trusted:.0%}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
