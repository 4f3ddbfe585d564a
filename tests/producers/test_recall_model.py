"""The ledger's model test once more, on a ledger that is recalled from its log again and again."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from ranklife import Life
from test_ledger_model import STARTS, LedgerMachine

from kvledger_bridge.decode import Batch
from kvledger_bridge.ledger import Ledger, Piece
from kvledger_index.model import ModelEntry


class Logged(Ledger):
    """A ledger whose every batch is written to its life's log."""

    life: Life

    def apply(self, seq: int, batch: Batch, origin: int = 0) -> list[Piece]:
        life = self.life
        life.ledger = _Plain(super().apply)  # type: ignore[assignment]  # all that ``Life.take`` asks of it
        pieces = life.take(seq, batch, origin)
        life.ledger = self
        return pieces


class _Plain:
    def __init__(self, apply: Any) -> None:
        self.apply = apply


class RecalledMachine(LedgerMachine):
    """``recall`` throws the ledger away and goes on with the one that its log, or a checkpoint in it, gives."""

    @initialize(**STARTS)
    def start(self, parents_max: int, orphans_max: int, copies: Any) -> None:
        super().start(parents_max, orphans_max, copies)
        entry = ModelEntry(model="m", copies=copies)
        self.life = Life(entry, parents_max=parents_max, orphans_max=orphans_max)
        self.life.new_ledger = self.logged  # type: ignore[method-assign]  # recalls make one, too
        self.ledger = self.logged(entry)
        self.since = 0

    def logged(self, entry: ModelEntry) -> Ledger:
        ledger = Logged(entry, **self.life.limits)
        ledger.life = self.life
        return ledger

    @rule(entries_max=st.integers(1, 5))
    @precondition(lambda self: self.seq >= 0)
    def write_checkpoint(self, entries_max: int) -> None:
        self.life.ledger = self.ledger
        self.since = self.life.checkpoint(entries_max)

    @rule(whole=st.booleans())
    @precondition(lambda self: self.seq >= 0)
    def recall(self, whole: bool) -> None:
        """From the newest checkpoint, or from the start; tokens of orphans are gone."""
        self.ledger = self.life.recall(0 if whole else self.since).ledger
        self.complete = False
        for orphan in list(self.orphans):
            self.forget(orphan)


TestRecalled = RecalledMachine.TestCase
TestRecalled.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
