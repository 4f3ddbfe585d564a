"""Schedules from seeds, played, shortened and hunted for.

By hand: ``python tests/model/protocol/protocol_schedules.py run 1000 --length 300`` plays schedules with all rules, and
``… holes --only seam,fence --seconds 120`` looks for counterexamples without each. ``make model`` does the first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from protocol_model import Model
from protocol_parts import Parts, Setup
from protocol_rules import NAMES, WHY, without
from protocol_world import Violation, World

Schedule = tuple[tuple[str, int], ...]

Make = Callable[[], Parts]
"""A schedule is played with parts of its own."""

LENGTH = 120

WEIGHTS = {
    "step": 10.0,
    "clear": 1.0,
    "restart": 1.2,
    "down": 0.4,
    "come_up": 1.0,
    "announce": 0.7,
    "start": 2.0,
    "deliver": 8.0,
    "turn": 14.0,
    "land": 5.0,
    "ack": 4.0,
    "pump": 3.0,
    "sync": 4.0,
    "resend": 0.5,
    "duplicate": 0.4,
    "restore": 3.0,
    "beat": 1.5,
    "checkpoint": 2.0,
    "land_late": 1.5,
    "kill": 1.2,
    "close": 0.25,
    "flap": 0.8,
    "supersede": 0.7,
    "fold": 12.0,
    "reassign": 0.7,
    "stage_late": 1.0,
    "commit_late": 1.0,
    "snapshot": 1.0,
    "rollback": 0.8,
    "flush": 0.3,
    "truncate": 0.6,
    "damage": 0.3,
    "ask": 1.0,
    "hear": 1.0,
}
"""Action -> how often, where a schedule has no taste of its own."""

SETUPS = (Setup(), Setup(), Setup(), Setup(partitions=2), Setup(shards=2), Setup(calm=True), Setup(shards=2, calm=True))


def setup_of(seed: int) -> Setup:
    return SETUPS[seed % len(SETUPS)]


def schedule(seed: int, length: int = LENGTH) -> Schedule:
    """Half of the seeds have a taste, so that rare orders come up: some actions are left out, some come often, and most
    are about one rank and bridge, which the lowest bits of a number name.
    """
    rnd = random.Random(seed)
    weights, about = dict(WEIGHTS), tuple(range(16))
    if seed // len(SETUPS) % 2:
        weights = {name: weight * rnd.choice((0.0, 0.3, 1.0, 1.0, 5.0)) for name, weight in WEIGHTS.items()}
        weights["step"] += 3.0
        weights["sync"] += 2.0
        about = tuple(rnd.sample(about, rnd.choice((1, 2, 16))))
    names = rnd.choices(list(weights), list(weights.values()), k=rnd.randint(10, length))
    numbers = (rnd.randrange(1 << 12) << 4 | rnd.choice(about) for _ in names)
    return (("configure", rnd.randrange(4)), ("start", 2), *zip(names, numbers, strict=True))


def play(parts: Parts, setup: Setup, steps: Schedule) -> str | None:
    """The text of what did not hold; None: everything held."""
    world = World(parts, setup)
    try:
        for name, x in steps:
            world.act(name, x)
        world.finish()
    except Violation as violation:
        return str(violation)
    return None


def shortened(make: Make, setup: Setup, steps: Schedule, *, kind: str) -> Schedule:
    """Without the steps that the same kind of violation does not need."""
    size = max(len(steps) // 2, 1)
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if (play(make(), setup, fewer) or "").startswith(kind):
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def kind_of(text: str) -> str:
    """``I1 served`` of ``I1 served: exact rank …``."""
    return text.split(":", maxsplit=1)[0]


def hunt(make: Make, seeds: Iterator[int], length: int, *, seconds: float = 1e9) -> tuple[int, str] | None:
    """The first seed whose schedule violates something, and what."""
    end = time.monotonic() + seconds
    for seed in seeds:
        text = play(make(), setup_of(seed), schedule(seed, length))
        if text:
            return seed, text
        if time.monotonic() > end:
            return None
    return None


def show(make: Make, seed: int, length: int, text: str) -> str:
    """A finding as a literal that can be kept."""
    setup, steps = setup_of(seed), schedule(seed, length)
    few = shortened(make, setup, steps, kind=kind_of(text))
    return f"seed {seed}: {play(make(), setup, few)}\n  {setup}\n  {few}"


def run(arguments: argparse.Namespace) -> int:
    """Schedules with all rules in force, or without those named."""
    off = [name for name in arguments.off.split(",") if name]
    make = partial(Model, without(*off))
    seeds = iter(range(arguments.seed, arguments.seed + arguments.schedules))
    found = hunt(make, seeds, arguments.length, seconds=arguments.seconds)
    if found:
        print(show(make, found[0], arguments.length, found[1]))  # noqa: T201  a command line prints
        return 1
    print(f"schedules {arguments.seed}..{next(seeds, arguments.seed + arguments.schedules) - 1} hold")  # noqa: T201
    return 0


def holes(arguments: argparse.Namespace) -> int:
    """For each rule a schedule that violates something without it."""
    missing = 0
    for name in arguments.only.split(",") if arguments.only else NAMES:
        make = partial(Model, without(name))
        seeds = iter(range(arguments.seed, sys.maxsize))
        found = hunt(make, seeds, arguments.length, seconds=arguments.seconds)
        missing += found is None
        text = show(make, found[0], arguments.length, found[1]) if found else "no counterexample"
        print(f"== {name} ({WHY[name]})\n{text}", flush=True)  # noqa: T201
    return int(missing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("schedules", type=int)
    one.add_argument("--off", default="")
    one.set_defaults(command=run)
    two = commands.add_parser("holes")
    two.add_argument("--only", default="")
    two.set_defaults(command=holes)
    for each in (one, two):
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--length", type=int, default=LENGTH)
        each.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    status: int = arguments.command(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
