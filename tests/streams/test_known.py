"""A log's time as a process can know it, and the header that says up to when a picture is whole."""

from __future__ import annotations

import random

import pytest

from kvledger_wire.known import HEADER, UNKNOWN, LogClock, header, known_of


def test_nothing_is_known_before_a_record_was_appended() -> None:
    assert LogClock().at(5.0) is None


def test_the_narrowest_bound_is_kept() -> None:
    """The log is 1 000 s ahead; acknowledgements take 0.5, 0.01 and 9 s."""
    clock = LogClock()
    clock.appended(1_010_000, after=9.9, before=10.5)
    assert clock.at(10.5) == 1_010_000
    clock.appended(1_011_000, after=10.9, before=11.01)
    assert clock.at(11.01) == 1_011_000
    clock.appended(1_012_000, after=11.5, before=21.0)
    assert 1_020_950 <= (clock.at(21.0) or 0) <= 1_021_000, "what was late says nothing new"


@pytest.mark.parametrize("step_ms", [-60_000, 60_000], ids=["back", "forth"])
def test_a_log_clock_that_was_set_is_followed(step_ms: int) -> None:
    clock = LogClock()
    clock.appended(1_010_000, after=9.99, before=10.01)
    clock.appended(1_011_000 + step_ms, after=10.99, before=11.01)
    assert clock.at(11.01) == 1_011_000 + step_ms


def test_a_guess_is_corrected_in_either_direction() -> None:
    for guess_ms in (1_000_000, 1_020_000):
        clock = LogClock(guess_ms=guess_ms, moment=10.0)
        assert clock.at(10.0) == guess_ms
        clock.appended(1_010_500, after=10.4, before=10.6)
        assert clock.at(10.6) == 1_010_500


def test_a_record_of_which_only_the_arrival_is_known_never_sets_a_clock_back() -> None:
    """It may have stood in the log for an hour."""
    clock = LogClock(guess_ms=3_600_000, moment=10.0)
    clock.appended(5_000, after=None, before=10.0)
    assert clock.at(10.0) == 3_600_000


@pytest.mark.parametrize("seed", range(20))
def test_a_moment_is_dated_rather_too_old_than_too_new(seed: int) -> None:
    """Clocks that drift, links that are slow or away, clocks that are set: never too new but before the first record
    after a clock was set back.
    """
    rnd = random.Random(seed)
    clock, moment, ahead_ms = LogClock(), 100.0, rnd.uniform(-1e9, 1e12)
    rate = rnd.uniform(-2e-4, 2e-4)
    for _ in range(300):
        moment += rnd.expovariate(1.0)
        true_ms = ahead_ms + moment * 1000 * (1 + rate)
        if rnd.random() < 0.02:
            ahead_ms += rnd.uniform(-1e5, 1e5)
            true_ms = ahead_ms + moment * 1000 * (1 + rate)
        early, late = rnd.expovariate(100), rnd.choice((rnd.expovariate(100), 9.0))
        clock.appended(int(true_ms), after=moment - early, before=moment + late)
        assert (clock.at(moment) or 0) <= true_ms + early * 1000 + 1


def test_what_a_bridge_says_is_what_a_fold_reads() -> None:
    for said, read in ((1_764_000_000_123, 1_764_000_000_123), (0, 0), (None, UNKNOWN), (-5, UNKNOWN)):
        assert known_of([("trace", b"x"), header(said)]) == read


@pytest.mark.parametrize("headers", [None, (), [("trace", b"1")]])
def test_a_record_of_an_older_bridge_says_nothing(headers: list[tuple[str, bytes | None]] | None) -> None:
    assert known_of(headers) is None


@pytest.mark.parametrize("value", [None, b"", b"12.5", b"soon", b"\xff", b"9" * 400, b"-12", "²".encode()])
def test_a_header_that_cannot_be_read_proves_nothing(value: bytes | None) -> None:
    assert known_of([(HEADER, value)]) == UNKNOWN
