"""What a stream worker says: codes, one line each, and the same trouble not a thousand times."""

from __future__ import annotations

import io
import json
import logging
from typing import Any, get_args

import pytest

from kvledger_streams import telemetry as module
from kvledger_streams.progress import Plan
from kvledger_streams.tally import Note, Tally
from kvledger_streams.telemetry import REPEAT_SECONDS_MIN, REPEATS_KNOWN_MAX, Code, LibraryLog, Telemetry


class Said:
    """A telemetry whose lines can be read and whose clock can be moved."""

    def __init__(self) -> None:
        self.clock = 0.0
        self._out = io.StringIO()
        self.telemetry = Telemetry(self._out, now=lambda: self.clock)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.getvalue().splitlines()]


def test_a_line_starts_with_when_how_bad_and_what() -> None:
    said = Said()
    said.telemetry.started(topic="t")
    (line,) = said.lines

    assert list(line) == ["ts", "level", "event", "topic"]
    assert (line["level"], line["event"]) == ("info", "worker_started")


def test_every_code_is_explained_to_operators() -> None:
    explained = {line.split()[0] for line in (module.__doc__ or "").splitlines() if line.startswith("    ")}

    assert set(get_args(Code)) <= explained


def test_the_same_trouble_is_said_once_and_then_counted() -> None:
    said = Said()
    for _ in range(50):
        said.telemetry.blocked(3, "Redis does not answer", 0.1)
    said.telemetry.blocked(4, "Redis does not answer", 0.1)
    said.clock += REPEAT_SECONDS_MIN
    said.telemetry.blocked(3, "Redis does not answer", 0.1)

    assert [(line["partition"], line.get("left_out")) for line in said.lines] == [(3, None), (4, None), (3, 49)]
    assert said.telemetry.counters.blocked == 52


def test_troubles_told_apart_are_bounded() -> None:
    said = Said()
    for number in range(REPEATS_KNOWN_MAX + 5):
        said.telemetry.fetch_failed(f"kind {number}: x")

    assert len(said.telemetry._last) <= REPEATS_KNOWN_MAX


def test_a_defect_shows_where_it_is() -> None:
    said = Said()
    try:
        dict[int, int]()[1]
    except LookupError as error:
        said.telemetry.defect(1, error, 0.5)
    (line,) = said.lines

    assert (line["event"], line["level"], line["why"]) == ("partition_blocked", "error", "KeyError: 1")
    assert "test_app_telemetry" in line["trace"]


def test_notes_of_the_fold_become_lines_and_are_gone() -> None:
    said = Said()
    tally = Tally()
    tally.notes += [
        Note("opened", "a/0", 1, "first contact"),
        Note("unloaded", "a/0", 2, "gap: lost"),
        Note("unreadable_value", "a/0", 3, "record of 1 bytes"),
        Note("unreadable_key", "", 4, "no key"),
        Note("misplaced", "b/0", 5, "elsewhere"),
    ]
    said.telemetry.notes(7, tally)

    assert [line["event"] for line in said.lines] == [
        "rank_opened",
        "rank_unloaded",
        "record_unreadable",
        "record_unreadable",
        "record_misplaced",
    ]
    assert all(line["partition"] == 7 for line in said.lines)
    assert tally.notes == []


def test_the_canonical_line_carries_totals() -> None:
    said = Said()
    said.telemetry.placed(0, Plan(5, 9, drop=True, why="nothing stored"), 0)
    said.telemetry.progress(Tally(records=3, ops=2), lag=4)
    line = said.lines[-1]

    assert (line["event"], line["placed"], line["rebuilt"]) == ("fold_progress", 1, 1)
    assert (line["fold_records"], line["fold_ops"], line["lag"]) == (3, 2, 4)
    assert "fold_notes" not in line


@pytest.mark.parametrize("repeats", [1, 800])
def test_a_librarys_noise_is_one_line(repeats: int) -> None:
    said = Said()
    logger = logging.getLogger("some.library")
    handler = LibraryLog(said.telemetry)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        for number in range(repeats):
            logger.error("node %s is gone", number)
        logger.info("all is well")
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    (line,) = said.lines

    assert (line["event"], line["logger"], line["text"]) == ("library_log", "some.library", "node 0 is gone")


def test_a_library_that_cannot_format_its_own_line_is_heard_all_the_same() -> None:
    said = Said()
    record = logging.LogRecord(
        "x", logging.ERROR, "f", 1, "%d of %d", ("one",), (LookupError, LookupError("boom"), None)
    )
    LibraryLog(said.telemetry).emit(record)

    assert said.lines[0]["text"] == "%d of %d: LookupError('boom')"
