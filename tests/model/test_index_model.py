"""Every implementation of the index against a dict, under anything that a log and a Redis can do to it.

The dict says which (rank, medium, lane) holds which key. Random trees of prompts share first keys, so rows, branches
and stubs come and go; steps are repeated, refused, rolled back and caught up again.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from index_pairs import MODEL, Fold, Opener, Pair, RedisPair, Where, claims, look, pairs, put, redis_pair

from kvledger_index.model import MEDIA
from kvledger_index.rows import parse_side, split_row
from kvledger_index.units import SCRUB_SECONDS_MAX, Bind, Clear, Drop, Op, Put, ScrubBudget, Stamp, Step
from kvledger_index.writer import Library, library

RANKS = ("a/0", "a/1", "b/0")
LANES = (0, 255)
SETTINGS = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    report_multiple_bugs=False,
)


class Truth:
    """The dict: what each holder holds, by medium, and which ranks have a life."""

    def __init__(self) -> None:
        self.held: set[tuple[Where, int]] = set()
        self.bound: set[str] = set()

    def copy(self) -> Truth:
        other = Truth()
        other.held, other.bound = set(self.held), set(self.bound)
        return other

    def do(self, rank: str, op: Op) -> None:
        match op:
            case Bind():
                self._forget(rank)
                self.bound.add(rank)
            case Drop():
                self._forget(rank)
                self.bound.discard(rank)
            case Clear():
                self._forget(rank, op.medium)
            case Put() if rank in self.bound:
                for j, key in enumerate(op.keys):
                    if op.mask >> j & 1:
                        (self.held.add if op.add else self.held.discard)(((rank, op.medium, op.lane), key))

    def _forget(self, rank: str, medium: str | None = None) -> None:
        self.held = {h for h in self.held if h[0][0] != rank or medium not in {None, h[0][1]}}


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Paths of one segment each, most of them branches of others."""
    keys = st.integers(0, 2**64 - 1)
    paths = [draw(st.lists(keys, min_size=1, max_size=16)) for _ in range(2)]
    for _ in range(4):
        base = draw(st.sampled_from(paths))
        cut = draw(st.integers(1, len(base)))
        paths.append(base[:cut] + draw(st.lists(keys, min_size=0, max_size=16 - cut)))
    # a key names its whole prefix, so it stands at one place of one path
    places: dict[int, tuple[int, ...]] = {}
    return [
        path
        for path in paths
        if all(places.setdefault(key, tuple(path[:at])) == tuple(path[:at]) for at, key in enumerate(path))
    ] or [[1]]


class IndexMachine(RuleBasedStateMachine):
    opener: Opener
    url: Any
    namespace: str
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        type(self).examples += 1
        opener = type(self).opener
        self.pair: Pair = self.run(
            self.stack.enter_async_context(opener(type(self).url, f"{type(self).namespace}-{type(self).examples}"))
        )
        self.fold = Fold(self.pair.writer)
        self.run(self.fold.seek())
        self.truth = Truth()
        self.log: list[Step] = []
        self.truths = [self.truth.copy()]
        self.snapshots: list[tuple[Any, int]] = []
        self.paths: list[list[int]] = [[1]]

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def teardown(self) -> None:
        try:
            self.run(self.drain())
        finally:
            self.run(self.stack.aclose())
            self.runner.close()

    @initialize(paths=forests())
    def plant(self, paths: list[list[int]]) -> None:
        self.paths = paths
        self._send(self.fold.step(*(self.fold.unit(rank, Bind()) for rank in RANKS)))

    @rule(data=st.data(), rank=st.sampled_from(RANKS))
    def store_and_remove(self, data: st.DataObject, rank: str) -> None:
        self._send(self.fold.step(self.fold.unit(rank, *data.draw(st.lists(self._puts(), min_size=1, max_size=6)))))

    @rule(data=st.data(), rank=st.sampled_from(RANKS))
    def change_slots(self, data: st.DataObject, rank: str) -> None:
        """A step of two units of one rank, with puts around a new life, a clear or an unloading."""
        around = st.lists(self._puts(), max_size=2)
        changes: tuple[Op, ...] = (Bind(), Clear("gpu"), Clear("cpu"), Drop())
        change = data.draw(st.sampled_from(changes))
        first = self.fold.unit(rank, *data.draw(around), change, *data.draw(around))
        second = self.fold.unit(
            rank, *data.draw(around), before=first.after, after=first.after._replace(n=first.after.n + 1)
        )
        self._send(self.fold.step(first, second))

    @rule(data=st.data(), rank=st.sampled_from(RANKS))
    def change_in_pieces(self, data: st.DataObject, rank: str) -> None:
        """Perhaps begun by a worker that is lost, and whose next piece comes late, by another from the start."""
        changes: tuple[Op, ...] = (Bind(), Clear("gpu"), Clear("cpu"), Drop())
        mixed: st.SearchStrategy[Op] = self._puts() | self._puts() | st.sampled_from(changes)
        unit = self.fold.unit(rank, *data.draw(st.lists(mixed, min_size=2, max_size=8)))
        sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)
        lost, steps = (self.fold.pieces(unit, *data.draw(sizes)) for _ in range(2))
        begun = data.draw(st.integers(0, len(lost) - 1))
        late = data.draw(st.integers(0, len(steps) - 1))
        for step in lost[:begun]:
            assert self.run(self.fold.send(step)).verdict == "applied"
            self._under_way(rank)
        for number, step in enumerate(steps[:-1]):
            assert self.run(self.fold.send(step)).verdict == "applied"
            self._under_way(rank)
            if begun and number == late:
                assert self.run(self.fold.send(lost[begun])).verdict == "refused"
        self._send(self.fold.step(unit), steps[-1])

    def _under_way(self, rank: str) -> None:
        catalogue = self.run(self.pair.reader.catalogue(MODEL))
        assert self.run(self.pair.reader.read(catalogue, MODEL, [])).pulses[rank].now.underway

    def _puts(self) -> st.SearchStrategy[Put]:
        return st.builds(
            self._put,
            st.sampled_from(self.paths),
            st.integers(0, 15),
            st.integers(1, 16),
            st.just(2**16 - 1) | st.integers(1, 2**16 - 1),
            st.tuples(st.sampled_from((True, True, False)), st.sampled_from(MEDIA[:2]), st.sampled_from(LANES)),
        )

    def _put(self, path: list[int], start: int, count: int, mask: int, who: tuple[bool, Any, int]) -> Put:
        add, medium, lane = who
        start %= len(path)
        stop = min(len(path), start + count)
        return put(path, start, stop, mask=mask & ((1 << stop - start) - 1), add=add, medium=medium, lane=lane)

    @rule(rank=st.sampled_from(RANKS))
    def open_a_life(self, rank: str) -> None:
        unit = self.fold.unit(rank, Bind())
        self._send(self.fold.step(unit))

    def _send(self, step: Step, last: Step | None = None) -> None:
        """``last``: what is left to be sent of it, the last piece."""
        outcome = self.run(self.fold.send(last or step))
        assert outcome.verdict == "applied", outcome
        assert outcome.applied == len(step.units)
        for unit in step.units:
            for op in unit.ops:
                self.truth.do(unit.rank, op)
        self.log.append(step)
        self.truths.append(self.truth.copy())

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        """An old step, as a zombie sends it: refused; with the stored restart offset: all duplicates."""
        step = data.draw(st.sampled_from(self.log))
        assert self.run(self.pair.writer.apply(step)).verdict == "refused"
        again = self.fold.step(*step.units, restart=self.fold.restart, read=self.fold.restart)
        assert self.run(self.fold.send(again))[:3] == ("applied", 0, len(step.units))

    @rule(rank=st.sampled_from(RANKS), ahead=st.integers(1, 3))
    def skip_a_record(self, rank: str, ahead: int) -> None:
        """A unit that does not follow refuses the step, also behind one that does."""
        unit = self.fold.unit(rank, Bind())
        last = unit.before.n
        late = self.fold.unit(rank, before=Stamp(7, 7, 1, last + ahead + 1), after=Stamp(7, 7, 1, last + ahead + 2))
        assert self.run(self.pair.writer.apply(self.fold.step(unit, late))).verdict == "refused"

    @rule(keys=st.sampled_from((1, 3, 1000)), seconds=st.sampled_from((1e-6, SCRUB_SECONDS_MAX)))
    def scrub(self, keys: int, seconds: float) -> None:
        """A piece of a pass; whatever comes between two pieces, no answer changes."""
        self.run(self.pair.writer.scrub(ScrubBudget(keys, seconds)))

    @rule()
    def photograph(self) -> None:
        self.snapshots.append((self.run(self.pair.snapshot()), len(self.log)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def roll_back_and_catch_up(self, data: st.DataObject) -> None:
        """The next step is refused; from what is stored the log leads to the same end."""
        snapshot, count = data.draw(st.sampled_from(self.snapshots))
        self.run(self.pair.restore(snapshot))
        self.truth = self.truths[count].copy()
        self.agrees()
        if count < len(self.log):
            assert self.run(self.pair.writer.apply(self.fold.step())).verdict == "refused"
        self.run(self.fold.reload())
        assert self.fold.restart == count
        rest, self.log, self.truths = self.log[count:], self.log[:count], self.truths[: count + 1]
        self.snapshots = [each for each in self.snapshots if each[1] <= count]
        for step in rest:
            self._send(step)

    @invariant()
    def agrees(self) -> None:
        """Dump and every prompt say what the dict says."""
        assert self.run(claims(self.pair.reader)) == self.truth.held
        self.run(self._prompts())

    async def _prompts(self) -> None:
        catalogue = await self.pair.reader.catalogue(MODEL)
        by_key: dict[int, set[Where]] = {}
        for where, key in self.truth.held:
            by_key.setdefault(key, set()).add(where)
        for path in self.paths:
            holders, _ = await look(self.pair.reader, path, catalogue=catalogue)
            assert [by_key.get(key, set()) for key in path] == holders

    @invariant()
    def one_place_per_block_and_holder(self) -> None:
        if isinstance(self.pair, RedisPair):
            self.run(one_place(self.pair))

    async def drain(self) -> None:
        """All removed and the dead scrubbed: no row is left; all ranks dropped: nothing that a rank had."""
        if not isinstance(self.pair, RedisPair):
            return
        for (rank, medium, lane), key in sorted(self.truth.held):
            path = next(path for path in self.paths if key in path)
            at = path.index(key)
            await self.fold.do(rank, put(path, at, at + 1, add=False, medium=medium, lane=lane))  # type: ignore[arg-type]  # medium is one of MEDIA
        await self.scrub_all()
        assert not [key for key in await self.pair.keys() if key.startswith(self.pair.keyspace.row_prefix)]
        await self.fold.seek(drop=True)
        await self.scrub_all()
        assert set(await self.pair.keys()) <= {self.pair.keyspace.partitions, self.pair.keyspace.slot}

    async def scrub_all(self) -> None:
        for _ in range(10_000):
            if (await self.pair.writer.scrub(ScrubBudget())).idle:
                return
        pytest.fail("the scrubber does not come to an end")


async def one_place(pair: RedisPair) -> None:
    """What must hold of the raw keys: a block of a holder stands in the row or in its side, never in both."""
    length = len(pair.keyspace.row_prefix) + 8
    keys = [key for key in await pair.keys() if key.startswith(pair.keyspace.row_prefix)]
    names, sides = [key for key in keys if len(key) == length], {key for key in keys if len(key) > length}
    for name, raw in zip(names, await pair.raw.mget(names) if names else (), strict=True):
        nodes, side, entries = split_row(raw)
        assert len(nodes) == len(set(nodes))
        assert side == (name + b"/" in sides)
        assert nodes or raw == b"\x80", "a row without a path is a stub"
        assert len(entries) == len({entry[:2] for entry in entries})
        assert all(0 < mask < 1 << len(nodes) for _, _, mask in entries)
        if side:
            fields = await pair.raw.hgetall(name + b"/")
            assert not {key.to_bytes(8, "big") for key in nodes} & set(fields)
            assert all(len(parse_side(value)) == len(set(parse_side(value))) for value in fields.values())
            sides.remove(name + b"/")
    assert not sides, "a side belongs to a row"


def run_machine(name: str, request: pytest.FixtureRequest, namespace: str, how: settings = SETTINGS) -> None:
    machine = type(
        "Machine",
        (IndexMachine,),
        {
            "opener": staticmethod(pairs()[name]),
            "url": staticmethod(lambda: request.getfixturevalue("redis_url")),
            "namespace": namespace,
        },
    )
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.timeout(300)  # under 15 s alone; a round trip costs ten times as much on a machine that does other things
@pytest.mark.parametrize("name", sorted(pairs()))
def test_the_index_agrees_with_a_dict_after_every_step(
    name: str, request: pytest.FixtureRequest, namespace: str
) -> None:
    run_machine(name, request, namespace)


@pytest.mark.services
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("if have[k] then upto = i + k - 1 break end", ""),
        ("if side ~= was then changed = true end", ""),
        ("dead = call('SISMEMBER', scrub_slots, slot) == 1", "dead = true"),
        ("side = call('EXISTS', name .. '/') == 1", ""),
        ("elseif below(stamp, args[i + 3]) then", "elseif false then"),
        ("and call('GET', unit) ~= sub(piece, 1, 20) then", "and false then"),
    ],
)
def test_a_broken_function_is_found_out(
    line: str, instead: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of the machine: it fails for functions that lack one of their rules."""
    body = library().body
    assert line in body
    broken = Library(body.replace(line, instead))
    monkeypatch.setattr("kvledger_index.writer.library", lambda: broken)
    name = next(name for name, opener in pairs().items() if opener is redis_pair)
    # the order of SCAN differs from run to run, so what a scrub broke may not break again when it is shrunk
    with pytest.raises((AssertionError, ExceptionGroup, Flaky)):
        run_machine(
            name,
            request,
            namespace,
            settings(
                SETTINGS,
                phases=[Phase.generate],
                max_examples=100,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,  # it would go on to look for others
            ),
        )
