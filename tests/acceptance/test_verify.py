"""Recorded engines through real processes: sockets, bridge, Kafka, fold, Redis, router."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXACT = (
    "engine-traces/llama_s11",
    "engine-traces/gemma3_s11",
    "engine-traces/gemma3_vllm0.20.2_s51",
    "engine-traces/gemma3_vllm0.17.1_s60",
    "manager-traces/a_full",
    "manager-traces/b_full_swa",
    "manager-traces/b2_full_swa_swa_same",
    "manager-traces/c_full_2swa",
)
"""Full attention, and sliding windows beside it, by engines of 0.17 to 0.32, with salts and multimodal prompts."""


@pytest.fixture
def verify(kafka: str, redis_url: str) -> Iterator[Any]:
    """Run ``kvledger verify`` on the test run's services; the factory's children are gone afterwards."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvledger", "verify", *arguments, "--kafka", kafka, "--redis", redis_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(child)
        return child

    yield start
    for child in running:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_prediction_equals_the_engines_answer_and_is_called_exact(verify: Any) -> None:
    """All recordings in one run; but for the one request right after an idle reset, which nothing announces."""
    child = verify("--json", *(str(FIXTURES / f"{name}.jsonl.gz") for name in EXACT))
    out, err = child.communicate(timeout=280)
    reports = [json.loads(line) for line in out.splitlines()]

    assert child.returncode == 0, err
    assert len(reports) == len(EXACT)
    for report in reports:
        assert report["exact"] == report["answered"] == report["predictions"], report["file"]
        assert report["called_exact"] == report["predictions"], report["file"]
        assert report["unplaced"] == 0, report["file"]
    assert sum(report["predictions"] for report in reports) == 148 + 148 + 60 + 40 + 4 * 412


def test_an_index_without_groups_is_wrong_where_groups_differ(verify: Any) -> None:
    """The comparison can tell the difference: on the hybrid model a group-blind index is often wrong."""
    child = verify("--json", "--group-blind", str(FIXTURES / "engine-traces/gemma3_vllm0.20.2_s51.jsonl.gz"))
    out, err = child.communicate(timeout=100)
    report = json.loads(out)

    assert child.returncode == 0, err
    assert report["exact"] == 60
    assert report["blind_exact"] < 48


def test_the_filter_answers_each_question_before_it_reads_on(verify: Any) -> None:
    """Two engines in one stream; the second starts from nothing. Each answer comes while the input is still open."""
    child = verify("-")
    assert child.stdin
    assert child.stdout

    def ask(lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            child.stdin.write(json.dumps(line) + "\n")
        child.stdin.flush()
        answer: dict[str, Any] = json.loads(child.stdout.readline())
        return answer

    recorded = _lines(FIXTURES / "engine-traces/llama_s11.jsonl.gz", 60)
    hit = next(line for line in recorded if line["t"] == "req" and line["cached"])
    before = recorded[1 : recorded.index(hit)]
    begun = max(i for i, line in enumerate(before) if line["t"] == "begin")
    events = [line for line in before[:begun] if line["t"] == "ev"]
    question = {"t": "ask", "id": "q", "tokens": hit["tokens"], "salt": hit["salt"], "lora": None, "mm": None}

    empty = ask([recorded[0], question])
    warm = ask([*events, question])
    other = ask([recorded[0], {**question, "id": 7}])
    child.stdin.close()

    assert empty == {"id": "q", "predicted": 0, "status": "exact", "as_of": -1}
    assert warm == {"id": "q", "predicted": hit["cached"], "status": "exact", "as_of": events[-1]["seq"]}
    assert other == {"id": 7, "predicted": 0, "status": "exact", "as_of": -1}
    assert child.wait(60) == 0


def test_the_filter_names_bad_lines_and_goes_on(verify: Any) -> None:
    child = verify("-")
    lines = [
        '{"t":"ask","id":0,"tokens":[1]}',
        "not json",
        '{"t":"meta","model":"m","groups":[{"group_idx":0,"kind":"full_attention","block_size":16}]}',
        '{"t":"ev","seq":"x"}',
        '{"t":"ask","id":1,"tokens":[1,2,3]}',
        '{"t":"ask","id":2,"tokens":[1,2,3],"mm":[[-1,5,"x"]]}',
        '{"t":"ask","id":3,"tokens":[1,2,3],"salt":""}',
        '{"t":"meta","model":"m","groups":[{"group_idx":-1,"kind":"full_attention","block_size":16}]}',
        '{"t":"ask","id":4,"tokens":[1,2,3]}',
        '{"t":"meta","model":"m","groups":"x"}',
        '{"t":"ask","id":5,"tokens":[1,2,3]}',
    ]
    out, err = child.communicate("\n".join(lines) + "\n", timeout=60)

    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": 0, "predicted": 0, "status": "unknown", "as_of": -1},
        {"id": 1, "predicted": 0, "status": "exact", "as_of": -1},
        {"id": 2, "predicted": 0, "status": "unknown", "as_of": -1},
        {"id": 3, "predicted": 0, "status": "exact", "as_of": -1},
        {"id": 4, "predicted": 0, "status": "unknown", "as_of": -1},
        {"id": 5, "predicted": 0, "status": "unknown", "as_of": -1},
    ]
    assert child.returncode == 2
    for number in (1, 2, 4, 6, 8, 9, 10, 11):
        assert f"line {number}:" in err, number
    assert "group -1 is outside" in err


def test_a_restarted_engine_is_never_answered_from_its_old_life(verify: Any) -> None:
    """The new life's first batch has the number that the old life's picture stands at.

    old life  seq 0: prompt A          ask A -> 16
    restart   seq 0: prompt B          ask A ->  0, ask B -> 16
    """
    tokens = {"a": list(range(100, 117)), "b": list(range(500, 517))}
    meta = {"t": "meta", "model": "m", "groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}]}

    def batch(name: str, digest: int) -> dict[str, Any]:
        event = {
            "type": "BlockStored", "block_hashes": [digest], "parent_block_hash": None, "token_ids": tokens[name][:16],
            "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        }  # fmt: skip
        payload = msgspec.msgpack.encode([1.0, [event], 0])
        return {"t": "ev", "seq": 0, "p": base64.b64encode(payload).decode()}

    asks = [{"t": "ask", "id": name, "tokens": tokens[name]} for name in ("a", "b")]
    child = verify("-")
    lines = [meta, batch("a", 1), asks[0], batch("b", 2), *asks]
    out, err = child.communicate("".join(json.dumps(line) + "\n" for line in lines), timeout=90)

    assert [(reply["id"], reply["predicted"], reply["status"]) for reply in map(json.loads, out.splitlines())] == [
        ("a", 16, "exact"), ("a", 0, "exact"), ("b", 16, "exact"),
    ], err  # fmt: skip


def test_an_unreadable_payload_costs_exactness_not_the_run(verify: Any) -> None:
    """A batch that cannot be decoded may have stored or removed anything: never called exact again until a clear."""
    recorded = _lines(FIXTURES / "engine-traces/llama_s11.jsonl.gz", 12)
    meta, events = recorded[0], [line for line in recorded if line["t"] == "ev"]
    broken = {"t": "ev", "seq": 1, "p": "wQ==", "topic": None}
    question = {"t": "ask", "id": 1, "tokens": [1, 2, 3], "salt": None}
    child = verify("-")
    out, err = child.communicate(
        "\n".join(json.dumps(line) for line in (meta, events[0], broken, question)) + "\n", timeout=60
    )

    assert json.loads(out) == {"id": 1, "predicted": 0, "status": "at_least", "as_of": 1}, err
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such.jsonl"], "no such file"),
        (["-", "a.jsonl"], "stands alone"),
        (["-", "--json"], "recordings in files"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(verify: Any, arguments: list[str], words: str) -> None:
    child = verify(*arguments)
    _, err = child.communicate(timeout=30)

    assert child.returncode == 2
    assert words in err


def _lines(path: Path, count: int) -> list[dict[str, Any]]:
    import gzip
    import itertools

    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in itertools.islice(file, count)]
