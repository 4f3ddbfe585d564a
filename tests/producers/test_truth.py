"""The stand-in's truth is a plain count, held to what the recorded managers had themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import Meta, Published, Snapshot, read
from kvledger_engine.truth import Truth

encode = msgspec.msgpack.encode


def stored(*hashes: int | bytes, group: int | None = 0, medium: str | None = "GPU") -> list[Any]:
    return ["BlockStored", list(hashes), None, [], 4, None, medium, None, None, group]


def removed(*hashes: int | bytes, group: int | None = 0, medium: str | None = "GPU") -> list[Any]:
    return ["BlockRemoved", list(hashes), medium, group]


def held(*events: Any) -> dict[str, dict[str, int]]:
    truth = Truth()
    truth.apply(0, encode([0.0, list(events), 0]))
    return truth.held().resident


def test_the_count_equals_the_managers_own_at_every_snapshot(recordings: Path) -> None:
    """Full reports announce blocks again that are there already: no count of events is the truth then."""
    compared = 0
    for path in sorted(recordings.glob("manager-traces/*.gz")):
        meta, *steps = read(path)
        assert isinstance(meta, Meta)
        if meta.report_mode == "full":
            continue
        truth = Truth()
        for step in steps:
            match step:
                case Published():
                    truth.apply(step.seq, step.payload)
                case Snapshot():
                    wanted = {group: copies for group, copies in step.resident.items() if copies}
                    compared += 1

                    assert (truth.seq, truth.held().resident) == (step.after_seq, wanted), path.name
                case _:
                    pass
    assert compared > 30


def test_copies_are_counted_and_never_below_none() -> None:
    assert held(stored(1, 2), stored(1), removed(1), removed(2), removed(2, 3)) == {"0": {"1": 1}}


def test_lanes_keep_apart() -> None:
    lanes = held(stored(1), stored(1, group=None), stored(1, group=1, medium="CPU"), stored(b"\xab", medium=None))

    assert lanes == {"-": {"1": 1}, "0": {"1": 1, "ab": 1}, "1@cpu": {"1": 1}}


def test_a_clear_leaves_storage() -> None:
    events = [stored(1), stored(2, medium="CPU"), stored(3, medium="STORAGE"), ["AllBlocksCleared"], stored(4)]

    assert held(*events) == {"0": {"4": 1}, "0@storage": {"3": 1}}


def test_both_encodings_count_the_same_and_other_events_do_not() -> None:
    fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [], "block_size": 4, "group_idx": 2}

    assert held({"type": "BlockStored", **fields}, {"type": "Novelty", "block_hashes": [9]}) == {"2": {"1": 1}}


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", encode([]), encode([0.0, [[]]]), encode([0.0, [["BlockRemoved", 7]]])]
)
def test_what_cannot_be_counted_is_told_without_its_content(payload: bytes) -> None:
    with pytest.raises(BadRecording, match=r"^batch 7 cannot be counted: [A-Za-z]+$"):
        Truth().apply(7, payload)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_writes_the_truth_every_so_often_and_at_the_end(recordings: Path, tmp_path: Path) -> None:
    trace, out = recordings / "engine-traces" / "llama_s11.jsonl.gz", tmp_path / "truth.jsonl"
    flags = ["--truth", str(out), "--truth-every", "100", "--replay", "none", "--exit"]
    command = [sys.executable, "-m", "kvledger", "engine", "play", str(trace), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = lines(out)

    assert done.returncode == 0, done.stderr
    assert [(line["life"], line["rank"], line["seq"]) for line in said] == [(1, 0, s) for s in (99, 199, 299, 331)]
    assert all(line["resident"]["0"] for line in said)


def test_each_life_of_a_loop_has_its_own_truth(recordings: Path, tmp_path: Path) -> None:
    """The lives follow each other until the signal; a life that was cut short tells how far it came."""
    trace, out = recordings / "engine-traces" / "llama_s11.jsonl.gz", tmp_path / "truth.jsonl"
    command = [sys.executable, "-m", "kvledger", "engine", "play", str(trace), "--loop", "--truth", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            played = [process.stdout.readline() for _ in range(3)][1:]
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            code = process.wait(20)
        finally:
            process.kill()
    said = lines(out)

    assert code == 0
    assert all('"head":331' in line for line in played)
    assert [line["life"] for line in said] == list(range(1, len(said) + 1))
    assert said[0]["resident"] == said[1]["resident"]


def test_a_file_that_cannot_be_written_is_named(recordings: Path, tmp_path: Path) -> None:
    trace, out = recordings / "engine-traces" / "llama_s11.jsonl.gz", tmp_path / "nowhere" / "truth.jsonl"
    command = [sys.executable, "-m", "kvledger", "engine", "play", str(trace), "--truth", str(out), "--exit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert str(out) in done.stderr
    assert done.stdout == ""
