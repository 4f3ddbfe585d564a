"""Which process an engine is: its page tells once and clearly, or nothing is known."""

from __future__ import annotations

import socket
from urllib.request import build_opener

import pytest
from metricspage import START, VLLM, Page

from kvledger_bridge import process
from kvledger_bridge.bridge import Bridge
from kvledger_bridge.discovery import RankConfig
from kvledger_bridge.process import process_start, read_process
from kvledger_bridge.settings import Settings
from kvledger_bridge.sockets import Endpoints, Sockets
from kvledger_index.model import ModelEntry

LINE = f"process_start_time_seconds {START}\n"


def test_the_page_of_an_engine_tells_its_process() -> None:
    with Page() as page:
        assert read_process(page.url) == START
        page.text = VLLM.replace(START, "1.8e+09")
        assert read_process(page.url) == "1.8e+09"
        assert page.asked == ["/metrics"] * 2


@pytest.mark.parametrize(
    ("page", "identity"),
    [
        (LINE, START),
        (LINE.rstrip(), START),
        (f'process_start_time_seconds{{pod="a b"}} {START} 1764587621360\n', START),
        ("", None),
        (f"# HELP {LINE}", None),
        (f"other_{LINE}", None),
        (LINE + LINE, None),
        ("process_start_time_seconds NaN\n", None),
        ("process_start_time_seconds +Inf\n", None),
        ("process_start_time_seconds 0.0\n", None),
        ("process_start_time_seconds soon\n", None),
        ("process_start_time_seconds \xff\n", None),
    ],
)
def test_only_one_start_time_is_an_identity(page: str, identity: str | None) -> None:
    assert process_start(page.encode("latin-1")) == identity


def test_a_redirect_is_not_followed() -> None:
    """The page it leads to would tell an identity, but perhaps that of another engine."""
    with Page() as other, Page(status=307, location=other.url) as page:
        assert read_process(page.url) is None
        assert (len(page.asked), other.asked) == (1, [])


def test_canary_an_ordinary_opener_would_take_the_word_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with Page(LINE.replace("1.", "9.")) as other, Page(status=307, location=other.url) as page:
        monkeypatch.setattr(process, "_OPENER", build_opener())
        assert read_process(page.url) == START.replace("1.", "9.")
        monkeypatch.setenv("http_proxy", other.url)
        monkeypatch.setattr(process, "_OPENER", build_opener())
        assert read_process("http://engine/metrics") == START.replace("1.", "9.")


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with Page(LINE.replace("1.", "9.")) as proxy, Page() as page:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setattr(process, "_OPENER", build_opener(*process.HANDLERS))
        assert read_process(page.url) == START
        assert proxy.asked == []


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_is_no_identity(status: int) -> None:
    with Page(status=status) as page:
        assert read_process(page.url) is None


def test_nobody_there_is_no_identity() -> None:
    with Page() as page:
        url = page.url

    assert read_process(url) is None


def test_a_server_that_does_not_answer_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert read_process(f"http://127.0.0.1:{mute.getsockname()[1]}/metrics") is None


@pytest.mark.parametrize("limit", ["PAGE_SECONDS", "PAGE_BYTES_MAX"])
def test_a_page_above_a_limit_is_unread(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same page is read where the limit is the usual one."""
    with Page() as page:
        usual = read_process(page.url)
        monkeypatch.setattr(process, limit, 0)
        assert (usual, read_process(page.url)) == (START, None)


def test_only_ranks_without_replay_are_proven_by_their_process() -> None:
    where, page = "tcp://127.0.0.1:1", "http://127.0.0.1:1/metrics"
    entry = ModelEntry(model="m")
    ranks = [
        RankConfig("plain", 0, entry, Endpoints(where)),
        RankConfig("told", 0, entry, Endpoints(where), page),
        RankConfig("replay", 0, entry, Endpoints(where, where), page),
    ]
    bridge = Bridge(Settings(kafka="none:1"), ranks)
    with Sockets() as sockets:
        bridge._take_seats(sockets, 60.0)
        proven = {seat.config.replica: seat.session.rank.process for seat in bridge._seats}

    assert proven == {"plain": False, "told": True, "replay": False}
