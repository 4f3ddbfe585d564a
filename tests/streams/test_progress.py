"""Where a worker goes on reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger_index.units import Progress
from kvledger_streams.progress import Bounds, Plan, plan, rebuild

LOG = Bounds("id-1", 100, 200, 5)


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
def test_anything_else_drops_and_rebuilds_from_the_start(progress: Progress | None, word: str) -> None:
    made = plan(progress, LOG)

    assert (made.restart, made.target, made.drop) == (100, 200, True)
    assert word in made.why


def test_an_empty_log_is_caught_up_at_once() -> None:
    assert plan(None, Bounds("id-1", 0, 0, -1)) == Plan(0, 0, drop=True, why="nothing stored")


def test_a_rebuild_says_why() -> None:
    assert rebuild(LOG, "state unreadable").why == "state unreadable"


@given(
    st.none()
    | st.builds(Progress, st.sampled_from(["a", "b"]), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
    st.sampled_from(["a", "b"]),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_a_plan_never_leaves_the_log_and_never_skips(
    progress: Progress | None, topic: str, start: int, more: int
) -> None:
    made = plan(progress, Bounds(topic, start, start + more, 0))

    assert start <= made.restart <= made.target == start + more
    assert made.drop or (progress is not None and made.restart == progress.restart)
