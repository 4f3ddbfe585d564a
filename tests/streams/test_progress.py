"""Where a worker goes on reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger_index.units import Progress
from kvledger_streams.progress import Bounds, Plan, Starts, plan, rebuild

LOG = Bounds("id-1", 100, 200, 5)
NOWHERE = Starts({}, "nobody points")


def stored(restart: int, read: int | None = None, topic_id: str = "id-1") -> Progress:
    return Progress(topic_id, restart, restart if read is None else read, 0)


@pytest.mark.parametrize("restart", [100, 150, 200])
def test_a_stored_offset_within_the_log_is_where_to_go_on(restart: int) -> None:
    assert plan(stored(restart), LOG) == Plan(restart, 200, drop=False, why="stored")


@pytest.mark.parametrize(
    ("progress", "word"),
    [
        (None, "nothing stored"),
        (stored(150, topic_id="id-0"), "topic id id-0"),
        (stored(99), "below the log's start 100"),
        (stored(201), "beyond the log's end 200"),
        (stored(150, read=201), "beyond the log's end 200"),
    ],
    ids=["nothing", "another topic", "below", "beyond", "read beyond"],
)
def test_anything_else_must_be_rebuilt(progress: Progress | None, word: str) -> None:
    made = plan(progress, LOG)

    assert isinstance(made, str)
    assert word in made


def test_an_empty_log_is_caught_up_at_once() -> None:
    made = rebuild(Bounds("id-1", 0, 0, -1), "nothing stored", NOWHERE)

    assert (made.restart, made.target, made.drop) == (0, 0, True)


def test_a_rebuild_without_pointers_reads_the_whole_log_and_says_why() -> None:
    made = rebuild(LOG, "state unreadable", NOWHERE)

    assert (made.restart, made.target, made.drop, made.starts) == (100, 200, True, {})
    assert made.why == "state unreadable; from the log's start: nobody points"


def test_a_rebuild_starts_at_the_lowest_pointer() -> None:
    made = rebuild(LOG, "nothing stored", Starts({"a/0": 180, "b/0": 120}, ""))

    assert (made.restart, made.target, made.starts) == (120, 200, {"a/0": 180, "b/0": 120})
    assert made.why == "nothing stored; from the lowest of 2 pointers"


@pytest.mark.parametrize("offset", [99, 200, 201])
def test_a_pointer_outside_the_log_costs_all_of_them(offset: int) -> None:
    """Its rank may have begun anywhere; the log's start is where it is looked for."""
    made = rebuild(LOG, "nothing stored", Starts({"a/0": 180, "b/0": offset}, ""))

    assert (made.restart, made.starts) == (100, {})
    assert "b/0 points outside 100..200" in made.why


def test_owners_that_were_ended_before_reading_begins_are_told() -> None:
    """A Fence at the start or behind it is read."""
    fences = {"a/0": {90: 5, 119: 7, 120: 8}, "b/0": {150: 3}}
    below = rebuild(LOG, "nothing stored", Starts({"a/0": 180, "b/0": 120}, "", fences))
    above = rebuild(LOG, "nothing stored", Starts({}, "no pointer", fences))

    assert below.owners == {"a/0": 7}
    assert (above.restart, above.owners) == (100, {"a/0": 5})


@given(
    st.none()
    | st.builds(Progress, st.sampled_from(["a", "b"]), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
    st.sampled_from(["a", "b"]),
    st.integers(0, 50),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from(["x/0", "y/0", "z/0"]), st.integers(0, 100)),
)
def test_a_plan_never_leaves_the_log_and_never_skips(
    progress: Progress | None, topic: str, start: int, more: int, ranks: dict[str, int]
) -> None:
    bounds = Bounds(topic, start, start + more, 0)
    made = plan(progress, bounds)
    if isinstance(made, str):
        made = rebuild(bounds, made, Starts(ranks, "none"))

    assert start <= made.restart <= made.target == start + more
    assert made.drop or (progress is not None and made.restart == progress.restart)
    assert all(made.restart <= offset for offset in made.starts.values())
