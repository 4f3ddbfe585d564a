"""Recordings are read as typed values; a bad line names itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvledger_engine.errors import BadRecording
from kvledger_engine.recording import (
    Action,
    Ask,
    Begin,
    Meta,
    Other,
    Probe,
    Published,
    ReplaySummary,
    Request,
    Reset,
    Snapshot,
    parse,
    parse_lines,
    read,
)
from kvledger_index.model import GroupSpec

KINDS = {
    "meta": Meta,
    "ev": Published,
    "batch": Published,
    "begin": Begin,
    "req": Request,
    "probe": Probe,
    "snapshot": Snapshot,
    "action": Action,
    "reset": Reset,
    "replay_summary": ReplaySummary,
}


def test_every_line_of_every_recording_has_its_type(recordings: Path) -> None:
    files = sorted([*recordings.glob("engine-traces/*.gz"), *recordings.glob("manager-traces/*.gz")])
    for path in files:
        raw = [json.loads(line)["t"] for line in gzip.decompress(path.read_bytes()).splitlines()]

        assert [type(step) for step in read(path)] == [KINDS[kind] for kind in raw]
    assert len(files) >= 10


def test_sequences_and_payloads_are_those_of_the_file(recordings: Path) -> None:
    batches = [s for s in read(recordings / "engine-traces" / "llama_s11.jsonl.gz") if isinstance(s, Published)]

    assert [b.seq for b in batches] == list(range(332))
    assert {b.topic for b in batches} == {b"kv@replica-a@llama"}
    assert all(b.payload[0] == 0x93 for b in batches)


def test_the_model_entry_is_what_the_recording_says(recordings: Path) -> None:
    meta = next(iter(read(recordings / "engine-traces" / "gemma3_s11.jsonl.gz")))

    assert isinstance(meta, Meta)
    entry = meta.entry()
    assert entry.model == "gemma3"
    assert entry.groups[0] == GroupSpec(0, "sliding_window", 32, window=96)
    assert entry.groups[5] == GroupSpec(5, "full_attention", 32)
    assert entry.stride == 32
    assert entry.multimodal is False


def test_eagle_and_chunks_reach_the_entry(recordings: Path) -> None:
    folder = recordings / "manager-traces"
    eagle, chunked = (next(iter(read(folder / f"{n}.jsonl.gz"))) for n in ("e_full_eagle", "f_full_chunked"))

    assert isinstance(eagle, Meta)
    assert isinstance(chunked, Meta)
    assert eagle.entry("m").groups[0].eagle
    assert chunked.entry("m").groups[1].chunk == 128
    assert chunked.entry("m").multimodal is None


def test_extra_fields_are_ignored_and_unknown_kinds_are_kept_apart() -> None:
    assert parse(b'{"t":"begin","later":[1]}', where="x:1") == Begin()
    assert parse(b'{"t":"weather","sun":true}', where="x:1") == Other("weather")


def test_an_ask_keeps_any_id() -> None:
    lines = [b'{"t":"ask","id":{"n":1},"tokens":[1,2]}', b"", b'{"t":"ask","id":"a","tokens":[],"mm":[[0,4,"i"]]}']

    first, second = parse_lines(lines, name="stdin")

    assert isinstance(first, Ask)
    assert first.id == {"n": 1}
    assert isinstance(second, Ask)
    assert second.mm == ((0, 4, "i"),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"seq":1}', "not a JSON object with a text field"),
        (b'{"t":"ev","seq":1}', "'ev' does not fit"),
        (b'{"t":"ev","seq":-1,"p":""}', "'ev' does not fit"),
        (b'{"t":"req","tokens":[4294967296]}', "'req' does not fit"),
        (b'{"t":"ev","seq":1,"p":"***"}', "'ev' does not fit"),
        (b"\xff\xfe", "not a JSON object"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"t":"begin"}\n\n' + line + b"\n")

    with pytest.raises(BadRecording, match=words) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}:3: ")


def test_errors_name_no_tokens() -> None:
    with pytest.raises(BadRecording) as caught:
        parse(b'{"t":"req","tokens":[77,"secret-token"],"salt":"secret-salt"}', where="x:1")

    assert "secret" not in str(caught.value)


def test_a_truncated_gzip_says_after_which_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    noise = b"".join(b'{"t":"begin","x":"%d"}\n' % (i * i * 7919) for i in range(5000))
    path.write_bytes(gzip.compress(noise)[:-100])

    with pytest.raises(BadRecording, match=r"cannot be read after line \d+"):
        list(read(path))


def test_a_missing_file_is_a_bad_recording(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="cannot be read"):
        list(read(tmp_path / "none"))
