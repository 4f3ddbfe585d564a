"""``kvledger record`` against a server that caches and publishes like an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
from recordserver import BLOCK, MODEL, TOKENS_MAX, FakeServer

from kvledger.cli import main
from kvledger.verify.check import looking_ahead
from kvledger_engine.recording import Begin, Meta, Published, Request, Reset, Step, read


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def record(server: FakeServer, out: Path, *more: str) -> int:
    flags = ["--endpoint", server.url, "--data", server.engine.data, "--replay", str(server.engine.replay)]
    return main(["record", *flags, "--out", str(out), *more])


def requests_file(folder: Path, *lines: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


async def differences(path: Path) -> list[tuple[int, int | None, str]]:
    """(predicted, engine's own, status) of each request of a recording that is not predicted or not called exact."""
    engine: InProcess | None = None
    wrong: list[tuple[int, int | None, str]] = []
    for step in looking_ahead(read(path)):
        if isinstance(step, Meta):
            engine = InProcess(step)
            await engine.start()
        elif engine is None:
            pytest.fail("a recording starts with its meta line")
        elif isinstance(step, Published):
            await engine.publish(step.seq, step.payload)
        elif isinstance(step, Request):
            held = await engine.predict(step.tokens, lora=step.lora, salt=step.salt, mm=step.mm)
            if (held.hit_tokens, held.status) != (step.cached, "exact"):
                wrong.append((held.hit_tokens, step.cached, held.status))
    return wrong


async def test_a_recorded_session_is_predicted_request_by_request(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "session.jsonl.gz"

    assert record(server, out, "--count", "25") == 0
    assert await differences(out) == []
    steps = list(read(out))
    answers = [step.cached or 0 for step in steps if isinstance(step, Request)]
    assert len(answers) == 25
    assert sum(cached > 0 for cached in answers) > 5


def test_the_meta_line_holds_what_server_and_events_say(server: FakeServer, tmp_path: Path) -> None:
    record(server, tmp_path / "a.jsonl", "--count", "3")
    first = next(read(tmp_path / "a.jsonl"))

    assert isinstance(first, Meta)
    assert (first.model, first.vllm) == (MODEL, "0.32.0")
    assert [(group.group_idx, group.kind, group.block_size) for group in first.groups or ()] == [
        (0, "full_attention", BLOCK)
    ]


def test_lines_stand_in_the_order_of_events(server: FakeServer, tmp_path: Path) -> None:
    """begin, the messages that the request caused, the request; a reset before the begin of the next."""
    tokens = list(range(3, 3 + 2 * BLOCK))
    asked = requests_file(tmp_path, {"tokens": tokens, "max_tokens": 1}, {"t": "reset"}, {"tokens": tokens})

    assert record(server, tmp_path / "a.jsonl", "--requests", str(asked)) == 0
    kinds = [type(step) for step in read(tmp_path / "a.jsonl")]
    assert kinds == [Meta, Begin, Published, Request, Reset, Begin, Published, Request]
    assert server.resets == 1


def test_salts_adapters_and_prompts_in_words_are_passed_on(server: FakeServer, tmp_path: Path) -> None:
    asked = requests_file(
        tmp_path,
        {"tokens": [5, 6, 7], "salt": "s", "max_tokens": 2},
        {"prompt": "one three five", "lora": "adapter"},
    )

    assert record(server, tmp_path / "a.jsonl", "--requests", str(asked)) == 0
    first, second = server.asked
    assert (first["model"], first["cache_salt"], first["max_tokens"]) == (MODEL, "s", 2)
    assert (second["model"], second["prompt"]) == ("adapter", [3, 5, 4])
    recorded = [step for step in read(tmp_path / "a.jsonl") if isinstance(step, Request)]
    assert [(step.tokens, step.salt, step.lora) for step in recorded] == [
        ((5, 6, 7), "s", None),
        ((3, 5, 4), None, "adapter"),
    ]


def test_a_key_is_sent_and_not_shown(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-word")
    record(server, tmp_path / "a.jsonl", "--count", "1", "--key-env", "MY_KEY")

    assert server.headers[0]["Authorization"] == "Bearer secret-word"
    assert "secret-word" not in "".join(capsys.readouterr())
    assert b"secret-word" not in (tmp_path / "a.jsonl").read_bytes()


def test_a_server_without_the_flag_is_told_which_one(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a recording of before stays as it was."""
    (tmp_path / "a.jsonl").write_text("earlier")
    server.reports_cached = False

    assert record(server, tmp_path / "a.jsonl") == 1
    assert "--enable-prompt-tokens-details" in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_server_that_changes_prompts_is_refused(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.adds_tokens = 1

    assert record(server, tmp_path / "a.jsonl") == 2
    assert "changed the prompt" in capsys.readouterr().err


def test_an_engine_that_published_before_is_recorded_with_a_warning(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.faults.forget = lambda seq: seq == 0
    server.complete({"prompt": list(range(BLOCK)), "max_tokens": 1})

    server.complete({"prompt": list(range(100, 100 + BLOCK)), "max_tokens": 1})

    assert record(server, tmp_path / "a.jsonl", "--count", "2") == 0
    assert "starts at batch 1" in capsys.readouterr().err


def test_events_at_another_address_are_missed_aloud(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--endpoint", server.url, "--data", "ipc:///tmp/kvledger-nobody-publishes-here", "--quiet", "0"]

    assert main(["record", *flags, "--out", str(tmp_path / "a.jsonl"), "--count", "2"]) == 1
    assert "published nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "requests.jsonl:1"),
        (['{"tokens": [1], "prompt": "x"}'], 'either "tokens" or "prompt"'),
        (['{"tokens": [1]}', "{}"], "requests.jsonl:2"),
        (['{"tokens": []}'], "0 tokens"),
        ([json.dumps({"tokens": [1] * TOKENS_MAX})], f"{TOKENS_MAX} tokens"),
        (["", ""], "no requests"),
    ],
)
def test_a_wrong_line_is_named(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], words: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))

    assert record(server, tmp_path / "a.jsonl", "--requests", str(path)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--endpoint", "nowhere:80", "--data", "tcp://h:1"], 2, "http://HOST:PORT"),
        (["--endpoint", "http://127.0.0.1:1", "--data", "tcp://h:1"], 1, "does the server run"),
        (["--endpoint", "http://h", "--data", "tcp://*:5557"], 2, "no address to connect to"),
        (["--endpoint", "http://h", "--data", "tcp://h:1", "--requests", "/no/such"], 2, "is not a file"),
        (["--endpoint", "http://h", "--data", "tcp://h:1", "--count", "0"], 2, "less than 1"),
        (["--endpoint", "http://h", "--data", "tcp://h:1", "--quiet", "-1"], 2, "between 0 and 60"),
    ],
)
def test_wrong_flags_say_what_to_write(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *flags]) == code
    assert words in capsys.readouterr().err


def test_an_unknown_model_is_named(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(server, tmp_path / "a.jsonl", "--model", "other") == 2
    assert f"it serves {MODEL}" in capsys.readouterr().err


def test_a_models_file_describes_what_events_do_not(server: FakeServer, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        f"models:\n- model: {MODEL}\n  hash_block_size: 16\n  multimodal: false\n"
        "  groups:\n  - {group: 0, kind: full_attention, block_size: 16}\n"
        "  - {group: 1, kind: chunked_local_attention, block_size: 16, chunk: 64}\n"
    )

    assert record(server, tmp_path / "a.jsonl", "--count", "1", "--models", str(models)) == 0
    first = next(read(tmp_path / "a.jsonl"))
    assert isinstance(first, Meta)
    entry = first.entry()
    assert [(group.group, group.kind, group.chunk) for group in entry.groups] == [
        (0, "full_attention", None),
        (1, "chunked_local_attention", 64),
    ]
    assert (entry.hash_block_size, entry.multimodal) == (16, False)


def test_steps_are_all_kinds_that_verify_reads(server: FakeServer, tmp_path: Path) -> None:
    record(server, tmp_path / "a.jsonl", "--count", "2")
    steps: list[Step] = list(read(tmp_path / "a.jsonl"))

    assert {type(step) for step in steps} == {Meta, Begin, Published, Request}
