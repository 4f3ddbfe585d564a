"""The real code under the schedules of the protocol's model, held to the same promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from protocol_counterexamples import Counterexample
from protocol_parts import Setup
from protocol_schedules import LENGTH, hunt, play, show
from real_model import RealCode

import kvledger_bridge.engine as engine_module
import kvledger_streams.progress as progress_module
from kvledger_bridge.continuity import Move, Phase
from kvledger_bridge.engine import Session
from kvledger_bridge.lifelog import LifeLog
from kvledger_bridge.recall import Recall
from kvledger_bridge.tenure import Tenure
from kvledger_index.memory import MemoryIndex
from kvledger_wire.accept import RankState

SCHEDULES = 10
LONG_SCHEDULES, LONG = 2, 300

TAKEN_OVER_TWICE = Counterexample(
    "L1 stuck",
    "configure:0 start:2 start:28702 sync:35037 step:51609 sync:35393 step:59803 pump:59811 resend:49380 sync:36772",
)
"""Of two claims the higher one fences first, so that the lower one reads that Fence as it restores."""


OLD_OWNER_AFTER_RETENTION = Counterexample(
    "I2 old life",
    "configure:3 start:2 pump:0 pump:0 pump:0 pump:0 deliver:32 deliver:33 step:50480 turn:0 turn:0 "
    "turn:0 turn:1 turn:1 restart:0 step:55120 start:0 pump:2 pump:2 pump:2 deliver:34 deliver:34 turn:2 "
    "turn:2 turn:2 turn:2 pump:2 turn:2 pump:2 pump:2 fold:32 fold:32 fold:32 fold:32 start:1 pump:5 "
    "pump:5 pump:5 pump:5 pump:5 deliver:37 turn:5 turn:5 turn:5 pump:5 turn:5 pump:5 pump:5 fold:32 "
    "fold:32 fold:32 fold:32 truncate:0 pump:0 flush:0 fold:32 fold:32 fold:32 fold:32 fold:32 fold:32",
)
"""Retention takes all of a rank but what an owner that was fenced long ago sends now; then Redis is empty."""

DEAD_BEFORE_ITS_POINTER = Counterexample(
    "I2 old life",
    "configure:3 start:2 pump:0 pump:0 pump:0 pump:0 deliver:32 deliver:33 step:50480 turn:0 turn:0 "
    "turn:0 turn:1 turn:1 restart:0 step:55120 start:0 pump:2 pump:2 pump:2 pump:2 deliver:34 deliver:34 "
    "restore:2 turn:2 turn:2 turn:2 land:34 fold:32 fold:32 fold:32 fold:32 start:1 pump:5 pump:5 pump:5 "
    "pump:5 pump:5 deliver:37 turn:5 turn:5 turn:5 pump:5 turn:5 pump:5 pump:5 fold:32 fold:32 fold:32 "
    "fold:32 truncate:0 pump:0 flush:0 fold:32 fold:32 fold:32 fold:32 fold:32 fold:32",
)
"""The same, where the newer owner's life was folded but never pointed at: only its restated pointer names its Fence."""


class Sabotage(NamedTuple):
    """A rule of the real code, taken out, and a schedule that shows it."""

    where: Any
    what: str
    instead: Callable[..., Any]
    example: Counterexample


_open, _due = LifeLog.open, MemoryIndex._due


def _never_partial(log: LifeLog, seq: int, digest: bytes, *, partial: bool, why: str, process: str | None) -> None:
    _open(log, seq, digest, partial=False, why=why, process=process)


def _heedless(tenure: Tenure, owner: int, state: RankState, ledger: Any) -> None:
    if owner == tenure.owner and tenure.phase is Phase.RESTORING:
        tenure._log.take_up(state, ledger)
        tenure._move(Move.RESTORED)


def _whatever_is_stored(index: MemoryIndex, step: Any) -> tuple[list[Any], str]:
    due, why = _due(index, step)
    return (due, why) if step.partition not in index._store.partitions else (list(step.units), "")


SABOTAGES: dict[str, Sabotage] = {
    "any bytes prove the same life": Sabotage(
        engine_module,
        "judge",
        lambda _known, _answer: True,
        Counterexample("I1", "start:2 step:22912 sync:6133 down:17104 come_up:5400 step:21476 step:47396"),
    ),
    "disconnects are ignored": Sabotage(
        Session,
        "disconnected",
        lambda _session: None,
        Counterexample("I1", "configure:0 start:2 deliver:40954 step:61612 restart:65450 step:64472", Setup(calm=True)),
    ),
    "no life is partial": Sabotage(
        LifeLog, "open", _never_partial, Counterexample("I1", "configure:1 step:15201", Setup())
    ),
    "suspicion is not written": Sabotage(
        LifeLog,
        "suspend",
        lambda _log, _why: None,
        Counterexample("I2", "configure:3 start:0 sync:0 sync:0 step:64 sync:0 step:8256 sync:0 sync:0 down:0 sync:0"),
    ),
    "a rebuilt producer goes on": Sabotage(
        Session,
        "release",
        lambda _session, _why: None,
        Counterexample("L1", "start:2 resend:54418", Setup(partitions=2)),
    ),
    "silence is no reason for doubt": Sabotage(
        Session,
        "_watch_answer",
        lambda _session: None,
        Counterexample(
            "I1",
            "configure:3 start:0 sync:0 sync:0 step:5664 sync:0 turn:15808 turn:26144 turn:51568 turn:45504 "
            "turn:37920 turn:19424 turn:34208 turn:14112 turn:34128 turn:53984 turn:42896 turn:35104 turn:14096 "
            "turn:42656",
        ),
    ),
    "a restored ledger knows the last checkpoint only": Sabotage(
        Recall,
        "_follow",
        lambda _recall, _group, _changes: None,
        Counterexample("I1", "start:2 sync:56040 step:18508 start:56727 pump:47503"),
    ),
    "a higher owner in the log is no reason to stop": Sabotage(Tenure, "restored", _heedless, TAKEN_OVER_TWICE),
    "a restored ledger knows nothing of its checkpoint": Sabotage(
        Recall,
        "_restate",
        lambda _recall, _part: None,
        Counterexample(
            "I1",
            "configure:3 start:0 sync:0 sync:0 step:50480 sync:0 sync:0 step:55120 sync:0 step:5296 sync:0 sync:0 "
            "checkpoint:0 turn:0 turn:0 turn:0 turn:0 turn:0 turn:0 pump:0 pump:0 kill:0 start:0 sync:0 sync:0 sync:0 "
            "step:33936 sync:0 step:63680 sync:0 step:53072 sync:0 sync:0",
        ),
    ),
    "nobody knows who was ended before reading began": Sabotage(
        progress_module, "_ended_before", lambda _restart, _fences: {}, OLD_OWNER_AFTER_RETENTION
    ),
    "nobody knows who was ended by an owner that never opened a pointer of its own": Sabotage(
        progress_module, "_ended_before", lambda _restart, _fences: {}, DEAD_BEFORE_ITS_POINTER
    ),
    "Redis takes whatever comes": Sabotage(
        MemoryIndex,
        "_due",
        _whatever_is_stored,
        Counterexample(
            "I1",
            "configure:3 start:0 sync:0 sync:0 step:50480 sync:0 sync:0 snapshot:0 step:55120 sync:0 sync:0 rollback:0 "
            "step:5296 sync:0 sync:0 reassign:0 fold:32 fold:32 fold:32",
        ),
    ),
}


@pytest.mark.parametrize(("schedules", "length"), [(SCHEDULES, LENGTH), (LONG_SCHEDULES, LONG)])
def test_the_real_code_keeps_the_promises_of_the_model(schedules: int, length: int) -> None:
    found = hunt(RealCode, iter(range(schedules)), length)
    if found:
        pytest.fail(show(RealCode, found[0], length, found[1]))


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_missing_rule_of_the_real_code_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries: the same schedule fails without the rule and passes with it."""
    where, what, instead, example = SABOTAGES[name]

    assert play(RealCode(), example.setup, example.schedule) is None

    monkeypatch.setattr(where, what, instead)
    broken = play(RealCode(), example.setup, example.schedule)

    assert (broken or "").startswith(example.breaks)
