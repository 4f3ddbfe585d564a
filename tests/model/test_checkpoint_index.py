"""What bridges write into checkpoints, read by the fold: recorded engines, the log's head cut off at a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ranklife import Life
from test_ledger_recorded import ENGINE, MANAGER, entry_of, lines, name
from test_recall import batches

from kvledger_bridge import snapshot
from kvledger_bridge.lanes import Lane
from kvledger_index.memory import MemoryIndex
from kvledger_index.units import Card, Now
from kvledger_streams.fold import fold, fresh
from kvledger_streams.tally import Tally
from kvledger_wire.partition import record_key
from kvledger_wire.records import encode

Claims = set[tuple[int | None, str, int]]


class Folded:
    """An index built from a life's log, from some offset on."""

    def __init__(self) -> None:
        self.claims: Claims = set()
        self.now: Now | None = None
        self.card: Card | None = None
        self.loaded = False

    async def read(self, life: Life, start: int) -> Folded:
        index, end = MemoryIndex(), len(life.log)
        state = fresh(0, partitions=1, topic_id="t", restart=start, broker_ms=0)
        await index.seek(0, "t", start, end, drop=True)
        rows = [
            (at, at, record_key("r", 0, life.log[at][0]), encode(life.log[at][1]), None) for at in range(start, end)
        ]
        for step in fold(state, rows, end=end, nonce=lambda: bytes(16), tally=Tally()):
            assert (await index.apply(step)).verdict == "applied"
            for unit in step.units:
                self.now, self.card = unit.now, unit.card or self.card
        self.claims = {(claim.group, claim.medium, claim.key) async for claim in index.dump()}
        self.loaded = state.ranks["r/0"].loaded
        return self


def counts(now: Now | None) -> list[Any]:
    assert now is not None
    return [*map(sorted, (now.unplaced, now.opaque, now.veiled)), now.seq, now.n]


def facts(card: Card | None) -> Any:
    assert card is not None
    ordered = sorted(card.heard, key=str)
    return msgspec.structs.replace(card, heard=tuple(ordered))


async def whole_and_cut(path: Path, *, entries_max: int = 64) -> tuple[Folded, list[Folded]]:
    """A recording folded from its beginning, and from each of three checkpoints: two inside, one at the end."""
    steps = list(batches(path))
    life = Life(entry_of(lines(path)[0]))
    places = {len(steps) // 3, 2 * len(steps) // 3, len(steps) - 1}
    starts = []
    for number, step in enumerate(steps):
        life.take(*step)
        if number in places:
            starts.append(life.checkpoint(entries_max=entries_max))
    return await Folded().read(life, 0), [await Folded().read(life, start) for start in starts]


KINDS = [
    "a_full",
    "c_full_2swa",
    "d_full_mamba",
    "d2_full_mamba_partial",
    "f_full_chunked",
    "gemma3_s11",
    "mistral_s11",
]
RECORDINGS = [path for path in [*MANAGER, *ENGINE] if name(path) in KINDS]
"""All kinds of groups, and the two that leave hashes without a key."""


@pytest.mark.parametrize("path", RECORDINGS, ids=name)
async def test_an_index_from_a_checkpoint_equals_the_one_from_the_beginning(path: Path) -> None:
    """Claims, hashes without a key, counts, and what the card says of groups and scheme."""
    whole, cuts = await whole_and_cut(path)

    for cut in cuts:
        assert cut.loaded
        assert (cut.claims, counts(cut.now), facts(cut.card)) == (whole.claims, counts(whole.now), facts(whole.card))
    assert whole.claims


@pytest.mark.parametrize(("what", "recording"), [("copies", "gemma3_s11"), ("unplaced", "mistral_s11")])
async def test_canary_a_snapshot_that_leaves_something_out_is_caught(
    what: str, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_lane = snapshot._held

    def less(lane: Lane, *args: Any, **options: Any) -> Any:
        short = copy.copy(lane)
        setattr(short, what, {})
        return whole_lane(short, *args, **options)

    monkeypatch.setattr(snapshot, "_held", less)
    (path,) = (each for each in RECORDINGS if name(each) == recording)
    whole, cuts = await whole_and_cut(path)

    assert any(cut.claims < whole.claims for cut in cuts)
