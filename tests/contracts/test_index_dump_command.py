"""``kvledger dump`` lists what the index claims."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from index_pairs import Fold, card, put, redis_pair

from kvledger.cli import main
from kvledger_index.units import Bind

PATH = (0xFFFF_FFFF_FFFF_FFFF, 2, 3)


@pytest.fixture
def filled(redis_url: str, namespace: str) -> Iterator[list[str]]:
    """Flags that name an index with three ranks of two models."""
    with asyncio.Runner() as runner:
        context = redis_pair(lambda: redis_url, namespace)
        pair = runner.run(context.__aenter__())
        fold = Fold(pair.writer)

        async def fill() -> None:
            await fold.seek()
            await fold.apply(
                fold.unit("pod-b/10", Bind(), put(PATH, 0, 1, lane=3), put(PATH, 0, 1, lane=255), put(PATH, 0, 2)),
                fold.unit("pod-b/2", Bind(), put(PATH, 1, 2, medium="cpu")),
                fold.unit("pod-a/0", Bind(), put(PATH, 2, 3), model="other", card=card("other")),
                fold.unit("pod-c/0", Bind(), model="other", card=card("other")),
            )

        runner.run(fill())
        yield ["dump", "--redis", redis_url, "--namespace", namespace]
        runner.run(context.__aexit__(None, None, None))


def test_claims_are_sorted_json_lines(filled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filled, "--json"]) == 0

    lines = [tuple(json.loads(line).values()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ("pod-a", 0, 0, "gpu", "0000000000000003"),
        ("pod-b", 2, 0, "cpu", "0000000000000002"),
        ("pod-b", 10, 0, "gpu", "0000000000000002"),
        ("pod-b", 10, 0, "gpu", "ffffffffffffffff"),
        ("pod-b", 10, 3, "gpu", "ffffffffffffffff"),
        ("pod-b", 10, None, "gpu", "ffffffffffffffff"),
    ]


def test_the_fields_have_names(filled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filled, "--json", "--replica", "pod-a"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "replica": "pod-a",
        "rank": 0,
        "group": 0,
        "medium": "gpu",
        "block_key": "0000000000000003",
    }


def test_the_table_has_headings_and_totals(filled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filled, "--model", "gemma-3-1b-it", "--replica", "pod-b"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "REPLICA  RANK  GROUP  MEDIUM  BLOCK KEY"
    assert lines[1] == "pod-b    2     0      cpu     0000000000000002"
    assert lines[5] == "pod-b    10    none   gpu     ffffffffffffffff"
    assert lines[6:] == ["5 claims of 2 ranks, 2 block keys"]


def test_a_replica_that_holds_nothing_is_an_empty_list(filled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filled, "--replica", "pod-c", "--json"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*filled, "--replica", "pod-c"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 claims of 0 ranks, 0 block keys"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gemma"], "it knows gemma-3-1b-it, other"),
        (["--replica", "pod-d"], "it knows pod-a, pod-b, pod-c"),
        (["--model", "other", "--replica", "pod-b"], "it knows pod-a, pod-c"),
    ],
)
def test_an_unknown_name_is_told_with_those_that_are_known(
    filled: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main([*filled, *flags]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_empty_index_says_so(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "--redis", redis_url, "--namespace", namespace, "--json"]) == 0

    out, err = capsys.readouterr()
    assert out == ""
    assert f"namespace {namespace}, is empty" in err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 2, "--redis"),
        (["--redis", "cache:6379"], 2, "redis://host:port/db"),
        (["--redis", "redis://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["--redis", "redis://127.0.0.1:1", "--namespace", "a b"], 2, "namespace"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    assert main(["dump", *flags]) == code

    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1
