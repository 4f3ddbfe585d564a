"""The protocol holds under random schedules with all its rules, and each rule is needed."""

from __future__ import annotations

from functools import partial

import pytest
from protocol_counterexamples import COUNTEREXAMPLES
from protocol_model import Model
from protocol_rules import NAMES, WHY, Rules, without
from protocol_schedules import LENGTH, hunt, kind_of, play, schedule, setup_of, shortened, show

SCHEDULES = 60
LONG_SCHEDULES, LONG = 8, 300

ALL_RULES = partial(Model, Rules())


def test_every_rule_says_why_and_has_a_counterexample() -> None:
    assert list(COUNTEREXAMPLES) == list(NAMES) == list(WHY)


@pytest.mark.parametrize(("schedules", "length"), [(SCHEDULES, LENGTH), (LONG_SCHEDULES, LONG)])
def test_the_protocol_holds(schedules: int, length: int) -> None:
    found = hunt(ALL_RULES, iter(range(schedules)), length)
    if found:
        pytest.fail(show(ALL_RULES, found[0], length, found[1]))


def test_what_is_applied_before_an_unreadable_batch_stands_at_the_batch_before_it() -> None:
    """Read with it in one go, it said that it covered what could not be read."""
    assert hunt(ALL_RULES, iter((753,)), LONG) is None


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_without_a_rule_its_counterexample_breaks_a_promise(name: str) -> None:
    """The canary of each rule: the same schedule fails without it and passes with it."""
    example = COUNTEREXAMPLES[name]

    broken = play(Model(without(name, *example.also)), example.setup, example.schedule)

    assert (broken or "").startswith(example.breaks)
    assert play(Model(without(*example.also)), example.setup, example.schedule) is None


def test_a_search_finds_and_shortens() -> None:
    """The canary of the search: a missing rule shows in a few of the seeds that pass with all rules."""
    make = partial(Model, without("idle_probe"))
    found = hunt(make, iter(range(SCHEDULES)), LENGTH)
    assert found is not None

    seed, text = found
    few = shortened(make, setup_of(seed), schedule(seed), kind=kind_of(text))

    assert len(few) < len(schedule(seed)) / 3
    assert (play(make(), setup_of(seed), few) or "").startswith(kind_of(text))
