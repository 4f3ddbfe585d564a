"""The ledger against recorded engines: copies, keys, placement, and what the log says of it."""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from struct import unpack
from typing import Any

import pytest

from kvledger_bridge.decode import decode_batch
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_index.blockkeys import SEGMENT_STRIDES, prompt_keys
from kvledger_index.model import MEDIA, GroupSpec, ModelEntry
from kvledger_wire.records import ATTACHED, CLEARED, REMOVED, REPLAYED, STORED, Run

FIXTURES = Path(__file__).parents[1] / "fixtures"
MANAGER = sorted((FIXTURES / "manager-traces").glob("*.jsonl.gz"))
ENGINE = sorted((FIXTURES / "engine-traces").glob("*.jsonl.gz"))

FULL_REPORTS = {"h_report_full"}
"""Clients asked for full reports: the engine announces blocks that got no copy, so no count can be right."""

NOT_PLACED_IN_FULL = {
    # tokens between the last whole block and a piece of one are never published
    "d2_full_mamba_partial",
    # masked spans from token 0 that do not announce block 0 hide the prompt's salt
    "mistral_s11",
}


def name(path: Path) -> str:
    return path.name.removesuffix(".jsonl.gz")


@cache
def lines(path: Path) -> tuple[dict[str, Any], ...]:
    with gzip.open(path, "rt") as file:
        return tuple(json.loads(line) for line in file)


def entry_of(meta: dict[str, Any]) -> ModelEntry:
    groups = tuple(
        GroupSpec(each["group_idx"], each["kind"], each["block_size"], each["sliding_window"])
        for each in meta["groups"]
    )
    text_only = not meta.get("trace")  # the engines' architectures take no images
    return ModelEntry(
        model="recorded",
        groups=groups,
        hash_block_size=meta.get("hash_block_size"),
        multimodal=False if text_only else None,
    )


def engine_hash(value: str | int) -> int:
    text = str(value)
    return int.from_bytes(bytes.fromhex(text)[-8:], "big") if len(text) >= 32 else int(text)


class Reader:
    """Reads pieces as the log's readers do: set semantics, effective bits only; checks what every run promises."""

    def __init__(self) -> None:
        self.held: dict[tuple[int | str | None, int], set[int]] = defaultdict(set)
        self.unplaced: dict[tuple[int | str | None, int], int] = {}
        self.loose: dict[tuple[int | str | None, int], set[int]] = defaultdict(set)
        self.specs: dict[int | str | None, GroupSpec] = {}
        self.paths: dict[int, tuple[int, int, int, int]] = {}
        self.digests = 0
        self.uncertain: list[str] = []
        self.attached = 0

    def read(self, pieces: list[Piece], seq: int) -> None:
        for piece in pieces:
            self.uncertain += piece.uncertain
            if piece.spec is not None:
                assert piece.spec.group == piece.group
                self.specs[piece.group] = piece.spec
            for change in piece.changes:
                assert change.seq == seq
                self.attached += change.origin == ATTACHED
                if change.op == CLEARED:
                    assert piece.group == "*"
                    assert change.medium != MEDIA.index("storage")
                    self.clear(change.medium)
                    continue
                assert change.runs or change.unplaced
                loose = self.loose[piece.group, change.medium]
                for run in change.runs:
                    self.run(run, change.op, self.held[piece.group, change.medium])
                    if change.origin == ATTACHED:
                        moved = unpack(f">{len(run.hashes) // 8}Q", run.hashes)
                        (loose.difference_update if change.op == STORED else loose.update)(moved)
                names = unpack(f">{len(change.unplaced) // 8}Q", change.unplaced)
                assert len(change.unplaced_effective) == -(-len(names) // 8)
                for i, each in enumerate(names):
                    if change.unplaced_effective[i // 8] >> i % 8 & 1:
                        assert (each in loose) == (change.op == REMOVED)
                        (loose.remove if change.op == REMOVED else loose.add)(each)
            for lane in [each for each in self.unplaced if each[0] == piece.group]:
                del self.unplaced[lane]
            for medium, count in piece.unplaced:
                assert count > 0
                self.unplaced[piece.group, medium] = count

    def clear(self, medium: int) -> None:
        for lane in [each for each in self.held if each[1] == medium]:
            self.held[lane].clear()
            self.loose[lane].clear()
        for lane in [each for each in self.unplaced if each[1] == medium]:
            del self.unplaced[lane]

    def run(self, run: Run, op: int, held: set[int]) -> None:
        count = len(run.keys) // 8
        keys = unpack(f">{count}Q", run.keys)
        assert count >= 1
        assert run.position + count <= SEGMENT_STRIDES
        assert len(run.row) == len(run.parent) == 8
        if run.position == 0:
            assert run.row == run.keys[:8]
            assert run.parent == bytes(8)
        assert run.blocks.bit_length() <= count
        assert run.effective & ~run.blocks == 0
        assert len(run.hashes) == 8 * run.blocks.bit_count()
        assert run.blocks >> (count - 1) == 1, "the last key of a run is the end of a block"
        assert run.segment >= 0
        self.whole(run)
        before = unpack(">Q", run.parent)[0]
        for i, key in enumerate(keys):
            place = (unpack(">Q", run.row)[0], run.position + i, before if run.position + i else 0, run.segment)
            assert self.paths.setdefault(key, place) == place
            before = key
            if run.effective >> i & 1:
                assert (key in held) == (op == REMOVED)
                (held.remove if op == REMOVED else held.add)(key)
        assert op in (STORED, REMOVED)

    def whole(self, run: Run) -> None:
        """Whole digests end in the hashes that they stand beside."""
        if not run.digests:
            return
        size = len(run.digests) // run.blocks.bit_count()
        assert size * run.blocks.bit_count() == len(run.digests)
        for i in range(run.blocks.bit_count()):
            digest = run.digests[i * size : (i + 1) * size]
            self.digests += any(digest)
            assert not any(digest) or digest[-8:] == run.hashes[8 * i : 8 * i + 8]


def play(path: Path) -> Iterator[tuple[dict[str, Any], Ledger, Reader]]:
    """Every line of a recording, with ledger and reader as they stand after it."""
    steps = iter(lines(path))
    ledger = Ledger(entry_of(next(steps)))
    reader = Reader()
    for step in steps:
        payload = step.get("payload") or step.get("p")
        if payload:
            batch = decode_batch(base64.b64decode(payload))
            assert not batch.failures
            reader.read(ledger.apply(step["seq"], batch), step["seq"])
        yield step, ledger, reader


@pytest.mark.parametrize("path", [each for each in MANAGER if name(each) not in FULL_REPORTS], ids=name)
def test_copies_equal_the_engines_own_at_every_snapshot(path: Path) -> None:
    snapshots = 0
    for step, ledger, _ in play(path):
        if step["t"] == "snapshot":
            snapshots += 1
            for group, resident in step["resident"].items():
                truth = {engine_hash(each): copies for each, copies in resident.items()}

                assert truth == ledger.resident(int(group))

    assert snapshots >= 10


@pytest.mark.parametrize("path", MANAGER, ids=name)
def test_keys_equal_those_that_a_router_computes_from_the_prompt(path: Path) -> None:
    """Tokens, adapter, salt and media of a probe meet the engine's own hashes of that prompt."""
    meta = lines(path)[0]
    entry = entry_of(meta)
    per = meta["hash_block_size"] // entry.stride
    compared = 0
    for step, ledger, reader in play(path):
        if step["t"] != "probe":
            continue
        media = [(offset, identifier) for offset, _, identifier in step["mm"]]
        keys = prompt_keys("recorded", step["tokens"], entry.stride, lora=step["lora"], salt=step["salt"], media=media)
        names = [engine_hash(each) for each in step["hashes"]]
        for group in ledger.groups:
            placed = ledger.placed(group)
            for i, each in enumerate(names):
                if each in placed:
                    at = (i + 1) * per - 1
                    row = keys[at - at % SEGMENT_STRIDES]
                    compared += 1

                    assert keys[at] == placed[each]
                    assert (row, at % SEGMENT_STRIDES) == reader.paths[keys[at]][:2]
                    assert at // SEGMENT_STRIDES == reader.paths[keys[at]][3]

    assert compared > 500


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_every_hash_is_placed_but_where_the_wire_does_not_tell_its_tokens(path: Path) -> None:
    most = 0
    for step, ledger, _ in play(path):
        if step["t"] in ("batch", "ev"):
            most = max(most, sum(len(ledger.resident(group)) - len(ledger.placed(group)) for group in ledger.groups))

    assert (most > 0) == (name(path) in NOT_PLACED_IN_FULL)


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_the_log_tells_a_reader_exactly_what_the_ledger_holds(path: Path) -> None:
    for step, ledger, reader in play(path):
        if step["t"] not in ("batch", "ev"):
            continue
        for group in ledger.groups:
            placed = set(ledger.placed(group).values())

            assert placed == reader.held[group, 0]
            assert set(ledger.resident(group)) - set(ledger.placed(group)) == reader.loose[group, 0]
            assert len(reader.loose[group, 0]) == reader.unplaced.get((group, 0), 0)

    assert len(reader.uncertain) == (name(path) in FULL_REPORTS)
    assert ledger.counts.removals_unknown == 0


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_group_facts_are_learned_from_the_wire(path: Path) -> None:
    meta = lines(path)[0]
    *_, (_, _, reader) = play(path)
    named = tuple(int(part) for part in meta["vllm"].split("."))
    for spec in entry_of(meta).groups:
        assert spec.group in reader.specs
        heard = reader.specs[spec.group]
        if named >= (0, 22):
            assert (spec.kind, spec.block_size, spec.window) == (heard.kind, heard.block_size, heard.window)
        else:  # kinds are on the wire since 0.22
            assert (None, spec.block_size, None) == (heard.kind, heard.block_size, heard.window)


def test_a_replayed_recording_says_so_in_every_change() -> None:
    path = FIXTURES / "manager-traces" / "b_full_swa.jsonl.gz"
    steps = iter(lines(path))
    ledger = Ledger(entry_of(next(steps)))
    for step in steps:
        if step["t"] == "batch":
            for piece in ledger.apply(step["seq"], decode_batch(base64.b64decode(step["payload"])), REPLAYED):
                assert {change.origin for change in piece.changes} <= {REPLAYED, ATTACHED}


def test_masked_hashes_that_a_later_event_names_are_attached() -> None:
    *_, (_, ledger, reader) = play(FIXTURES / "manager-traces" / "d2_full_mamba_partial.jsonl.gz")

    assert ledger.counts.attached > 0
    assert reader.attached > 0


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_the_log_keeps_whole_digests_where_chains_need_them_and_the_wire_has_their_ends(path: Path) -> None:
    *_, (_, ledger, reader) = play(path)

    assert ledger.lineage.chains.recorded == (reader.digests > 0)
