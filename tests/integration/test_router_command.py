"""``kvledger match`` against a real Redis: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from router_fleet import FULL, MODEL, PROMPT, WINDOW, Fleet

from kvledger.cli import main
from kvledger_index.writer import RedisWriter

Match = Callable[..., tuple[int, str, str]]


@pytest.fixture
def index(redis_url: str, namespace: str) -> None:
    """Two replicas: pod-a holds five blocks of two groups, pod-b two of one."""

    async def write() -> None:
        async with RedisWriter.from_url(redis_url, namespace=namespace) as writer:
            await writer.check()
            fleet = Fleet(writer)
            await fleet.start()
            await fleet.open("pod-a/0", groups=(FULL, WINDOW))
            await fleet.open("pod-b/0", partial=True)
            await fleet.store("pod-a/0", PROMPT)
            await fleet.store("pod-a/0", PROMPT, [3, 4], group=1, seq=17)
            await fleet.store("pod-b/0", PROMPT, range(2))
            await fleet.store("pod-b/0", PROMPT, salt="tenant", media=[(4, "image")])

    asyncio.run(write())


@pytest.fixture
def match(redis_url: str, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Match:
    """Run the command on a file of tokens: exit code, stdout, stderr."""

    def run(*words: str, tokens: str | None = None) -> tuple[int, str, str]:
        file = tmp_path / "tokens"
        file.write_text(json.dumps(PROMPT) if tokens is None else tokens)
        words = ("--redis", redis_url, "--namespace", namespace, "--model", MODEL, "--tokens", str(file), *words)
        code = main(["match", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_table_lists_holders_best_first(index: None, match: Match) -> None:
    code, out, _ = match()
    lines = [line.split() for line in out.splitlines()]

    assert code == 0
    assert out.splitlines()[0] == f"{MODEL}: prompt of 161 tokens; best: pod-a/0 with 80 (exact)"
    assert lines[1][:5] == ["REPLICA", "RANK", "HIT", "EXTENDED", "STATUS"]
    assert lines[2][:6] == ["pod-a", "0", "80", "0", "exact", "17"]
    assert lines[3][:5] == ["pod-b", "0", "32", "0", "at_least"]
    assert "partial" in lines[3][-10:] or "partial:" in lines[3]


def test_json_holds_the_same_for_machines(index: None, match: Match) -> None:
    code, out, _ = match("--json", "--replica", "pod-b", "--replica", "pod-z")
    report = json.loads(out)

    assert code == 0
    assert report["opinion"] is True
    assert report["best"]["replica"] == "pod-b"
    assert [(h["replica"], h["rank"], h["hit_tokens"], h["status"]) for h in report["holders"]] == [
        ("pod-b", 0, 32, "at_least"),
        ("pod-z", None, 0, "unknown"),
    ]


def test_explain_names_the_block_that_ended_the_hit(index: None, match: Match) -> None:
    _, table, _ = match("--explain", "--replica", "pod-a")
    _, raw, _ = match("--explain", "--replica", "pod-a", "--json")
    groups = json.loads(raw)["ranks"][0]["groups"]

    assert "group 1 (sliding_window) ends the hit: a hit of 160 needs tokens 128..143" in table
    assert "group 0 (full_attention) goes on" in table
    assert [(g["group"], g["serves"], g["missing"]) for g in groups] == [(0, 160, None), (1, 80, [128, 144])]


@pytest.mark.parametrize(
    "tokens", [" ".join(map(str, PROMPT)), ",".join(map(str, PROMPT)), ",\n".join(map(str, PROMPT)) + "\n"]
)
def test_tokens_may_stand_between_blanks_and_commas(index: None, match: Match, tokens: str) -> None:
    assert match(tokens=tokens)[1].startswith(f"{MODEL}: prompt of 161 tokens; best: pod-a/0 with 80")


def test_tokens_may_come_from_stdin(
    index: None, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the addresses from the environment."""
    monkeypatch.setenv("KVLEDGER_REDIS", redis_url)
    monkeypatch.setenv("KVLEDGER_NAMESPACE", namespace)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(PROMPT)))
    code = main(["match", "--model", MODEL, "--tokens", "-"])

    assert code == 0
    assert "best: pod-a/0 with 80" in capsys.readouterr().out


def test_salt_and_media_are_part_of_the_prompt(index: None, match: Match) -> None:
    media = json.dumps([{"identifier": "image", "offset": 4, "length": 12}])
    _, out, _ = match("--json", "--salt", "tenant", "--media", media)
    _, other, _ = match("--json", "--salt", "tenant", "--lora", "adapter", "--media", media)

    assert json.loads(out)["best"]["hit_tokens"] == 160
    assert json.loads(other)["best"] is None


def test_an_unknown_model_names_those_that_are_known(index: None, match: Match) -> None:
    code, out, err = match("--model", "gemma-4")

    assert (code, out) == (2, "")
    assert "'gemma-4' is not in the index" in err
    assert f"it knows {MODEL}" in err
    assert "emptied a moment ago" in err


def test_a_model_that_an_index_behind_its_log_does_not_know_may_come(
    index: None, match: Match, redis_url: str, namespace: str
) -> None:
    """A partition behind its target, and two below it that nobody has placed yet: try again, which is exit code 1."""

    async def place() -> None:
        async with RedisWriter.from_url(redis_url, namespace=namespace) as writer:
            await writer.seek(3, "topic", 0, 7, drop=True)

    asyncio.run(place())
    code, out, err = match("--model", "gemma-4")

    assert (code, out) == (1, "")
    assert "or not yet: 3 of its 4 partitions are behind the log's end" in err
    assert f"it knows {MODEL}" in err


def test_a_hit_that_is_only_stale_is_not_called_no_hit(
    index: None, match: Match, redis_url: str, namespace: str
) -> None:
    async def fall_behind() -> None:
        async with RedisWriter.from_url(redis_url, namespace=namespace) as writer:
            await writer.seek(0, "topic", 1, 1_000, drop=False)

    before, other = match(tokens="[1, 2]")[1], match()[1]
    asyncio.run(fall_behind())
    after = match()[1]

    assert "nobody is known to hold any of it" in before
    assert "best: pod-a/0" in other
    assert "nobody that can be trusted is known to hold any of it" in after
    assert after.splitlines()[2].split()[:5] == ["pod-a", "0", "80", "0", "stale"]


def test_an_empty_index_says_what_is_missing(match: Match) -> None:
    code, _, err = match()

    assert code == 2
    assert "holds nothing yet" in err
    assert "bridge" in err


def test_no_redis_is_no_opinion(match: Match) -> None:
    code, out, _ = match("--redis", "redis://:hush@127.0.0.1:1", "--json", "--replica", "pod-a")
    report: dict[str, Any] = json.loads(out)

    assert code == 1
    assert report["opinion"] is False
    assert "127.0.0.1:1" in report["reason"]
    assert "hush" not in out
    assert report["holders"][0]["status"] == "unknown"


def test_no_opinion_is_said_in_the_table_too(match: Match) -> None:
    code, out, _ = match("--redis", "redis://127.0.0.1:1")

    assert code == 1
    assert "no opinion" in out


@pytest.mark.parametrize(
    ("words", "tokens", "wanted"),
    [
        ((), "1 2 x", "item 3 of"),
        ((), "[1, 2, 3", "no JSON array"),
        ((), '["secret-text"]', "no JSON array"),
        ((), "", "no token ids"),
        ((), "4294967296", "0..4294967295"),
        ((), "-5", "0..4294967295"),
        (("--media", "[[1, 2]]"), None, "--media"),
        (("--media", '[{"identifier": "i", "offset": -4}]'), None, "offset -4"),
        (("--media", '[{"identifier": "i", "offset": 4, "length": 0}]'), None, "length 0"),
        (("--deadline", "0"), None, "--deadline 0"),
        (("--redis", "kafka://host"), None, "not a Redis URL"),
        (("--namespace", "a b"), None, "namespace"),
        (("--tokens", "/nowhere/tokens"), None, "/nowhere/tokens"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    match: Match, words: tuple[str, ...], tokens: str | None, wanted: str
) -> None:
    """It says which flag or item is wrong, and never repeats a token."""
    code, out, err = match(*words, tokens=tokens)

    assert (code, out) == (2, "")
    assert wanted in err
    assert err.count("\n") == 1
    assert "secret-text" not in err


def test_without_any_redis_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("1")
    code = main(["match", "--model", MODEL, "--tokens", str(file)])

    assert code == 2
    assert "KVLEDGER_REDIS" in capsys.readouterr().err
