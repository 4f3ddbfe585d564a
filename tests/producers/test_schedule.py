"""When checkpoints are due."""

from __future__ import annotations

from kvledger_bridge.schedule import Rates, Schedule

RATES = Rates(bytes_min=1000, size_factor=4.0, seconds_max=100.0)


def due(schedule: Schedule, now: float = 0.0, *, record_bytes: float = 10.0, ranks: int = 1) -> bool:
    return schedule.due(now, record_bytes=record_bytes, ranks=lambda: ranks)


def test_nothing_is_due_before_anything_is_pointed_at() -> None:
    schedule = Schedule(RATES)
    schedule.grew(10_000)

    assert not due(schedule, 1000.0)


def test_one_is_due_once_the_partition_has_grown_by_so_much_whoever_wrote_it() -> None:
    schedule = Schedule(RATES)
    schedule.pointed(50, 0.0)
    schedule.grew(149)
    before = due(schedule)
    schedule.grew(150)

    assert (before, due(schedule)) == (False, True)


def test_an_idle_rank_writes_one_after_a_share_of_the_retention() -> None:
    schedule = Schedule(RATES)
    schedule.pointed(50, 7.0)

    assert (due(schedule, 106.0), due(schedule, 107.0)) == (False, True)


def test_the_age_of_what_another_bridge_wrote_counts() -> None:
    schedule = Schedule(RATES)
    schedule.pointed(50, 7.0, age=60.0, size=0)

    assert (due(schedule, 46.0), due(schedule, 47.0)) == (False, True)


def test_large_ledgers_wait_for_four_times_what_all_in_the_partition_take() -> None:
    """A part of 300 and one of 200 bytes, two ranks: 4 * 500 * 2."""
    schedule = Schedule(RATES)
    schedule.wrote(900, first=True)
    schedule.wrote(300, first=True)
    schedule.wrote(200, first=False)
    schedule.pointed(0, 0.0)
    schedule.grew(399)
    before = due(schedule, ranks=2)
    schedule.grew(400)

    assert (before, due(schedule, ranks=2), schedule.size) == (False, True, 500)


def test_checkpoints_alone_do_not_make_the_next_ones_due() -> None:
    """Canary of the factor: each of 50 ranks writes 100 bytes in 10 records; without it all would write again."""
    schedule = Schedule(RATES)
    schedule.wrote(100, first=True)
    schedule.pointed(0, 0.0)
    schedule.grew(50 * 10)

    assert not due(schedule, ranks=50)
    assert due(schedule, ranks=12)


def test_one_that_was_asked_for_and_given_up_is_asked_for_again() -> None:
    schedule = Schedule(RATES)
    schedule.pointed(0, 0.0)
    schedule.grew(1000)
    schedule.asked(10.0)

    assert (due(schedule, 14.9), due(schedule, 15.0)) == (False, True)
