"""``kvledger decode`` against the recorded truth of every wire generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.cli import main
from kvledger_bridge.decode import AllBlocksCleared, BlockRemoved, BlockStored

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
GENERATIONS = sorted(path.parent for path in WIRE.glob("g*/index.json"))
ENVELOPE = ["file", "ts", "rank", "events", "unknown", "error"]


def decoded(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    status = main(["decode", *map(str, paths)])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def plain(value: Any) -> Any:
    """The notation of index.json, as the command writes it."""
    match value:
        case {"int": number}:
            return number if abs(int(number)) > 2**53 else int(number)
        case {"bytes": text}:
            return text
        case list():
            return [plain(each) for each in value]
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case int() if abs(value) > 2**53:
            return str(value)
        case _:
            return value


@pytest.mark.parametrize("folder", GENERATIONS, ids=lambda folder: folder.name)
def test_every_generation_decodes_to_its_recorded_truth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = json.loads((folder / "index.json").read_text())
    paths = [folder / each["file"] for each in index["batches"]]

    status, reports = decoded(capsys, *paths)

    assert status == 0
    for path, truth, report in zip(paths, index["batches"], reports, strict=True):
        assert list(report) == ENVELOPE
        assert report["file"] == str(path)
        assert report["error"] is None
        assert report["unknown"] == 0
        assert report["ts"] == truth["batch"]["ts"]
        assert report["rank"] == truth["batch"]["data_parallel_rank"]
        assert len(report["events"]) == len(truth["batch"]["events"])
        for event, expected in zip(report["events"], truth["batch"]["events"], strict=True):
            assert event["type"] == expected["type"]
            fields = plain(expected["fields"])
            if index["event_encoding"].startswith("array"):
                assert event["fields"] == fields
            else:
                # a map does not tell its release: fields of later ones are there, as null
                assert fields == {name: event["fields"][name] for name in fields}
                assert {None} >= {value for name, value in event["fields"].items() if name not in fields}


FORWARD = {
    "001_unknown_event_tag.bin": (["BlockStored"], 1),
    "002_unknown_map_fields.bin": (["BlockStored"], 0),
    "003_remaining_copy_counts.bin": (["BlockRemoved"], 0),
    "004_array_extra_trailing.bin": (["BlockStored"], 0),
    "005_batch_extra_element.bin": (["BlockStored"], 0),
    "006_mixed_array_and_map.bin": (["BlockStored", "BlockStored"], 0),
    "009_u64_max_hash.bin": (["BlockStored"], 0),
    "010_map16_header.bin": (["BlockStored"], 0),
}


@pytest.mark.parametrize("name", sorted(FORWARD))
def test_what_no_release_wrote_yet_does_not_cost_the_batch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    types, unknown = FORWARD[name]

    status, [report] = decoded(capsys, WIRE / "zz_forward_compat" / name)

    assert status == 0
    assert report["error"] is None
    assert [event["type"] for event in report["events"]] == types
    assert report["unknown"] == unknown


def test_an_undecodable_payload_gives_its_reason_and_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    folder = WIRE / "zz_forward_compat"
    paths = [folder / "007_truncated.bin", folder / "009_u64_max_hash.bin", folder / "008_not_msgpack.bin"]

    status, reports = decoded(capsys, *paths)

    assert status == 0
    assert [report["error"] is None for report in reports] == [False, True, False]
    assert reports[0] == {
        "file": str(paths[0]),
        "ts": None,
        "rank": None,
        "events": [],
        "unknown": 0,
        "error": reports[0]["error"],
    }
    assert reports[1]["events"][0]["fields"]["block_hashes"] == [str(2**64 - 1)]


def test_an_unreadable_path_has_an_object_too_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = WIRE / "zz_forward_compat" / "009_u64_max_hash.bin"

    status, reports = decoded(capsys, tmp_path / "absent.bin", good, tmp_path)

    assert status == 2
    assert [report["file"] for report in reports] == [str(tmp_path / "absent.bin"), str(good), str(tmp_path)]
    assert "No such file" in reports[0]["error"]
    assert reports[1]["error"] is None
    assert "directory" in reports[2]["error"]


def test_an_event_that_cannot_be_read_is_named_and_the_others_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(msgspec.msgpack.encode([float("nan"), [["BlockRemoved", "secret"], ["AllBlocksCleared"]], 2**60]))

    status, [report] = decoded(capsys, path)

    assert status == 0
    assert report["events"] == [{"type": "AllBlocksCleared", "fields": {}}]
    assert report["error"].startswith("event 0: BlockRemoved.block_hashes")
    assert "secret" not in report["error"]
    assert report["ts"] is None
    assert report["rank"] == str(2**60)


def test_integers_up_to_2_53_are_numbers_and_larger_ones_strings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "numbers.bin"
    numbers = [2**53, 2**53 + 1, -(2**53), -(2**53) - 1, 0, b"\x00\xff"]
    path.write_bytes(msgspec.msgpack.encode([1.0, [["BlockRemoved", numbers]], None]))

    _, [report] = decoded(capsys, path)

    expected = [2**53, str(2**53 + 1), -(2**53), str(-(2**53) - 1), 0, "00ff"]
    assert expected == report["events"][0]["fields"]["block_hashes"]


def test_help_says_what_the_exit_code_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["decode", "--help"])

    assert leave.value.code == 0
    assert "exit code" in " ".join(capsys.readouterr().out.split())


def test_field_names_are_those_of_vllm() -> None:
    newest = json.loads((WIRE / "g12_v0.33" / "index.json").read_text())

    assert tuple(newest["block_stored_fields"]) == BlockStored.__struct_fields__
    assert tuple(newest["block_removed_fields"]) == BlockRemoved.__struct_fields__
    assert AllBlocksCleared.__struct_fields__ == ()
