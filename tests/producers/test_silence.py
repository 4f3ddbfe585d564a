"""Who is not heard is named: once per outage, whatever was heard before."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger_bridge.silence import LATE_BATCHES, Silence, Trouble

HERE: dict[str, Any] = {"owned": True, "attached": True, "heard": True, "live": 5, "late": 0}
AWAY = HERE | {"attached": False}
MUTE = HERE | {"heard": False, "live": 0}
GONE = MUTE | {"attached": False}
LATE = HERE | {"live": 0, "late": LATE_BATCHES}
LOST = AWAY | {"owned": False}


def told(*spans: tuple[int, dict[str, Any]]) -> list[tuple[int, Trouble]]:
    """What is told, and in which second, of a rank that is looked at each second; each span ends at its second."""
    silence, begin, found = Silence(0.0, 30.0), 0, []
    for end, facts in spans:
        for now in range(begin, end):
            trouble = silence.look(float(now), **facts)
            if trouble is not None:
                found.append((now, trouble))
        begin = end
    return found


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(100, HERE)], []),
        ([(100, GONE)], [(30, "unreachable")]),
        ([(100, MUTE)], [(30, "never_heard")]),
        ([(100, LATE)], [(30, "heard_by_replay")]),
        ([(100, LATE | {"late": LATE_BATCHES - 1})], []),
        # heard, then dead: named; back and dead again: named again
        ([(50, HERE), (200, AWAY)], [(80, "unreachable")]),
        ([(50, HERE), (90, AWAY), (100, HERE), (200, AWAY)], [(80, "unreachable"), (130, "unreachable")]),
        # short absences are none, however many
        ([(50, HERE), (79, AWAY), (80, HERE), (109, AWAY), (110, HERE)], []),
        # a late engine has its own time to be heard in
        ([(40, GONE), (60, MUTE), (100, HERE)], [(30, "unreachable")]),
        ([(40, GONE), (100, MUTE)], [(30, "unreachable"), (70, "never_heard")]),
        # another bridge has it: no socket here, and nothing expected; claimed again, the time begins anew
        ([(50, HERE), (200, LOST)], []),
        ([(50, HERE), (200, LOST), (229, AWAY), (240, HERE)], []),
        ([(50, HERE), (200, LOST), (300, AWAY)], [(230, "unreachable")]),
    ],
)
def test_each_trouble_is_told_once_and_each_outage(
    spans: list[tuple[int, dict[str, Any]]], expected: list[tuple[int, Trouble]]
) -> None:
    assert told(*spans) == expected
