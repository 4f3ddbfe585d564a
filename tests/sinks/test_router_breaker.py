"""The circuit breaker's table, row by row, and what holds over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger_router.breaker import Breaker, Outcome


def opened(*, failures_max: int = 3, now: float = 0.0) -> Breaker:
    breaker = Breaker(failures_max=failures_max, open_seconds=1.0, open_seconds_max=4.0)
    for _ in range(failures_max):
        tell(breaker, "failed", now)
    assert breaker.state == "open"
    return breaker


def tell(breaker: Breaker, outcome: Outcome, now: float) -> None:
    permit = breaker.enter(now)
    assert permit is not None
    breaker.leave(permit, outcome, now)


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3)
    for outcome in ("failed", "failed", "answered", "failed", "failed", "abandoned"):
        tell(breaker, outcome, 0.0)
    before = breaker.state
    tell(breaker, "failed", 0.0)

    assert (before, breaker.state) == ("closed", "open")


def test_while_open_it_refuses_until_its_pause_is_over() -> None:
    breaker = opened()

    assert breaker.enter(0.99) is None
    assert breaker.enter(1.0) is not None


def test_half_open_lets_one_probe_through() -> None:
    breaker = opened()
    probe = breaker.enter(1.0)

    assert probe is not None
    assert breaker.state == "half_open"
    assert breaker.enter(1.0) is None
    assert breaker.enter(100.0) is None


def test_an_answered_probe_closes_it() -> None:
    breaker = opened()
    tell(breaker, "answered", 1.0)

    assert breaker.state == "closed"
    assert breaker.enter(1.0) is not None


def test_failed_probes_double_the_pause_up_to_the_bound() -> None:
    """Pauses of 1, 2, 4, 4 seconds, and 1 again after it was closed."""
    breaker = opened()
    now, pauses = 0.0, []
    for outcome in ("failed", "failed", "failed", "answered"):
        probes = ((pause, breaker.enter(now + pause)) for pause in (1.0, 2.0, 4.0, 8.0))
        pause, permit = next((pause, permit) for pause, permit in probes if permit is not None)
        pauses.append(pause)
        now += pause
        breaker.leave(permit, outcome, now)
    for _ in range(3):
        tell(breaker, "failed", now)

    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert breaker.enter(now + 0.99) is None
    assert breaker.enter(now + 1.0) is not None


def test_failures_of_calls_under_way_together_count_once() -> None:
    """Twenty questions in flight while the router's own loop stands still are one failure, not twenty.

    t=0    |--- 20 calls ---|              all fail at t=1: one failure
    t=1                     |- 2 calls -|  both fail at t=2: the second
    """
    breaker = Breaker(failures_max=3)
    for now, count in ((0.0, 20), (1.0, 2)):
        for permit in [breaker.enter(now) for _ in range(count)]:
            assert permit is not None
            breaker.leave(permit, "failed", now + 1.0)
    before = breaker.state
    tell(breaker, "failed", 2.0)

    assert (before, breaker.state) == ("closed", "open")


def test_a_probe_whose_caller_left_is_taken_over_at_once() -> None:
    breaker = opened()
    tell(breaker, "abandoned", 1.0)

    assert breaker.state == "open"
    assert breaker.enter(1.0) is not None


def test_late_outcomes_of_an_earlier_state_change_nothing() -> None:
    """Slow calls that began before it opened.

    closed  --slow call in----------------------.
    open    after three others failed            |
    open    the slow call fails or succeeds  <---'  ignored
    """
    breaker = Breaker(failures_max=3, open_seconds=1.0)
    slow = [breaker.enter(0.0) for _ in range(3)]
    for _ in range(3):
        tell(breaker, "failed", 0.0)
    for permit, outcome in zip(slow, ("answered", "failed", "abandoned"), strict=True):
        assert permit is not None
        breaker.leave(permit, outcome, 0.5)  # type: ignore[arg-type]  # literals of Outcome, widened by zip

    assert breaker.state == "open"
    assert breaker.enter(0.99) is None
    assert breaker.enter(1.0) is not None


@pytest.mark.parametrize("wrong", [{"failures_max": 0}, {"open_seconds": 0.0}, {"open_seconds_max": 0.1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="open_seconds"):
        Breaker(**wrong)  # type: ignore[arg-type]  # one keyword at a time


@given(st.lists(st.tuples(st.sampled_from(["answered", "failed", "abandoned"]), st.floats(0, 3)), max_size=60))
def test_whatever_happened_it_closes_once_redis_answers(history: list[tuple[Outcome, float]]) -> None:
    """No history locks it: after its longest pause a probe passes, and an answer closes it."""
    breaker, now = Breaker(failures_max=2, open_seconds=1.0, open_seconds_max=4.0), 0.0
    for outcome, seconds in history:
        now += seconds
        permit = breaker.enter(now)
        if permit is not None:
            breaker.leave(permit, outcome, now)
    tell(breaker, "answered", now + 4.0)

    assert breaker.state == "closed"
