"""Hashes without a block key in the fold (ADR 5): each stands under itself in its lane, while it has no key."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from ranklog import NO_PARENT, Claim, RankLog, prompt

from kvledger_index.memory import MemoryIndex
from kvledger_index.model import MEDIA
from kvledger_index.units import Drop, Put
from kvledger_streams.fold import fold, fresh
from kvledger_streams.tally import Tally
from kvledger_wire import records as wire

KEYS = prompt("p", 40)
GROUPS = (None, 0, 3)


def packed(*names: int) -> bytes:
    return b"".join(name.to_bytes(8, "big") for name in names)


def bitmap(*bits: bool) -> bytes:
    return sum(1 << j for j, bit in enumerate(bits) if bit).to_bytes(-(-len(bits) // 8), "little")


def run_of(stride: int, *hashes: int, effective: bool = True) -> wire.Run:
    """One key of the path, named by one engine hash."""
    at = stride % 16
    parent = packed(KEYS[stride - 1]) if at else NO_PARENT
    return wire.Run(packed(KEYS[stride - at]), at, parent, packed(KEYS[stride]), 1, int(effective), packed(*hashes))


def ops_of(*changes: wire.Change, group: int | None = 3) -> tuple[Any, ...]:
    """What changes of one group become, behind the Bind of the life."""
    log: list[tuple[bytes | None, bytes | None]] = []
    rank = RankLog(log)
    rank.open()
    rank.events(*changes, group=group)
    records = [(i, 1000 + i, key, value, None) for i, (key, value) in enumerate(log)]
    state = fresh(0, partitions=1, topic_id="t", restart=0, broker_ms=0)
    (step,) = fold(state, records, end=len(log), nonce=lambda: bytes(16), tally=Tally())
    return step.units[0].ops[1:] or step.units[0].ops


def single(name: int, *, add: bool) -> Put:
    return Put(add=add, medium="gpu", lane=3, row=name, position=0, parent=0, keys=(name,), mask=1)


@pytest.mark.parametrize(("op", "came"), [(wire.STORED, False), (wire.REMOVED, True)])
@pytest.mark.parametrize("effective", [True, False])
def test_an_attached_run_moves_its_hashes_between_key_and_themselves(op: int, came: bool, effective: bool) -> None:
    """Also where the key had, or keeps, another copy under another hash, so that only the hash moves."""
    change = wire.Change(op, 0, 1, 0.0, (run_of(2, 77, effective=effective),), b"", wire.ATTACHED)
    ops = ops_of(change)

    assert ops[-1] == single(77, add=came)
    assert len(ops) == 1 + effective


def test_an_older_bridge_lists_nothing_that_came_and_takes_all_that_went() -> None:
    stored, removed = (wire.Change(op, 0, 1, 0.0, (), packed(5, 6)) for op in (wire.STORED, wire.REMOVED))

    assert ops_of(stored, removed) == (single(5, add=False), single(6, add=False))


def test_hashes_cut_in_the_middle_are_a_hole() -> None:
    assert ops_of(wire.Change(wire.REMOVED, 0, 1, 0.0, (), bytes(12))) == (Drop(),)


class Engine:
    """Hashes that get and lose keys at random; ``held`` is what the index must claim, a hash without key as itself."""

    def __init__(self, rank: RankLog, rng: random.Random) -> None:
        self.rank, self.rng = rank, rng
        self.names = {1000 + i: i for i in range(len(KEYS))}
        self.keyed: set[tuple[int | None, int, int]] = set()
        self.bare: set[tuple[int | None, int, int]] = set()

    @property
    def held(self) -> set[Claim]:
        claims = {(group, MEDIA[medium], KEYS[self.names[name]]) for group, medium, name in self.keyed}
        return claims | {(group, MEDIA[medium], name) for group, medium, name in self.bare}

    def act(self) -> None:
        lane = self.rng.choice(GROUPS), self.rng.choice([0, 0, 1, 2])
        names = self.rng.sample(sorted(self.names), self.rng.randint(1, 12))
        roll = self.rng.random()
        if roll < 0.45:
            self._bare(lane, wire.STORED, [(name, (*lane, name) not in self.keyed | self.bare) for name in names])
        elif roll < 0.70:
            self._bare(lane, wire.REMOVED, [(name, (*lane, name) in self.bare) for name in names])
        elif roll < 0.97:
            came = roll < 0.85
            source, target = (self.bare, self.keyed) if came else (self.keyed, self.bare)
            moved = [name for name in names if (*lane, name) in source]
            source.difference_update((*lane, name) for name in moved)
            target.update((*lane, name) for name in moved)
            runs = tuple(run_of(self.names[name], name) for name in moved)
            op = wire.STORED if came else wire.REMOVED
            self.rank.events(wire.Change(op, lane[1], 1, 0.0, runs, b"", wire.ATTACHED), group=lane[0])
        else:
            self.keyed = {each for each in self.keyed if each[1] != lane[1]}
            self.bare = {each for each in self.bare if each[1] != lane[1]}
            self.rank.clear(MEDIA[lane[1]])

    def _bare(self, lane: tuple[int | None, int], op: int, names: list[tuple[int, bool]]) -> None:
        effective = {(*lane, name) for name, changes in names if changes}
        self.bare = self.bare | effective if op == wire.STORED else self.bare - effective
        bits = bitmap(*(changes for _, changes in names))
        hashes = packed(*(name for name, _ in names))
        self.rank.events(wire.Change(op, lane[1], 1, 0.0, (), hashes, wire.LIVE, bits), group=lane[0])


@pytest.mark.parametrize("seed", range(12))
async def test_the_index_claims_each_resident_hash_exactly_once(seed: int) -> None:
    """Under its key where it has one, else under itself; whatever moves, comes, goes or is cleared."""
    log: list[tuple[bytes | None, bytes | None]] = []
    rank = RankLog(log)
    rank.open()
    engine = Engine(rank, random.Random(seed))
    index, nonces = MemoryIndex(), itertools.count(1)
    await index.seek(0, "t", 0, 0, drop=True)
    state = fresh(0, partitions=1, topic_id="t", restart=0, broker_ms=0)
    for _ in range(60):
        engine.act()
        records = [(i, 1000 + i, *log[i], None) for i in range(state.read, len(log))]
        for step in fold(state, records, end=len(log), nonce=lambda: next(nonces).to_bytes(16, "big"), tally=Tally()):
            assert (await index.apply(step)).verdict == "applied"
        claims = [(claim.group, claim.medium, claim.key) async for claim in index.dump()]

        assert sorted(claims, key=repr) == sorted(engine.held, key=repr)
    assert any(engine.bare)
