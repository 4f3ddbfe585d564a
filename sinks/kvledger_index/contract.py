"""The two ends of the index as protocols; ``tests/contracts`` runs one suite over every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvledger_index.units import Outcome, Scrubbed, ScrubBudget, Step, Stored
from kvledger_index.views import Catalogue, Claimed, PartitionView, Reading


class IndexWriter(Protocol):
    """What the fold needs. Every call is atomic; all raise Unavailable where Redis is silent or refuses writes for now.

    A call that raised Unavailable may have been carried out: load, then go on from what is stored.
    """

    async def check(self) -> None:
        """Raise Refused if the server would lose the index (eviction policy, version), load the function library."""

    async def load(self, partition: int) -> Stored:
        """Progress and every rank of a partition, as one consistent picture."""

    async def seek(self, partition: int, topic_id: str, restart: int, target: int, *, drop: bool) -> None:
        """Record a (re)seek: progress starts at ``restart``, ranks are stale until ``target`` is read.

        ``drop`` forgets the partition's ranks first (rebuild): their slots die and their catalogue entries go.
        Without it another topic id than the stored one is InvalidInput: offsets of two topics do not compare.
        """

    async def apply(self, step: Step) -> Outcome:
        """Apply a step, all or nothing. A step whose units are all duplicates still moves the progress.

        Raises InvalidInput for a step that breaks a bound of ``units.py``.
        """

    async def scrub(self, budget: ScrubBudget) -> Scrubbed:
        """Free what dead slots still occupy, as far as the budget goes; the next call, anyone's, goes on from there.

        Changes no answer, whatever else runs meanwhile. After a call that was ``idle``, without steps in between,
        nothing but living slots stands in the index. Raises InvalidInput for a budget out of bounds.
        """

    async def aclose(self) -> None:
        """Close connections; safe to call twice."""


class IndexReader(Protocol):
    """What the router needs. Reads only; one round trip per call except as said."""

    async def catalogue(self, model: str) -> Catalogue:
        """All ranks of a model (an unknown model has none, and the version ``b""``)."""

    async def models(self) -> list[str]:
        """Names of the models that have a catalogue, sorted."""

    async def partitions(self) -> dict[int, PartitionView]:
        """Progress of every partition that a worker ever placed; right after a loss not all are there yet."""

    async def read(self, catalogue: Catalogue, model: str, keys: Sequence[int], hashes: Sequence[int] = ()) -> Reading:
        """Holders of a prompt's keys. One round trip, a second one where the prompt leaves a row's path, or where
        something of the model changed while it was read.

        ``hashes`` are engine hashes (low 64 bits), each looked up as the only key of a row named by itself, in the
        first of these round trips: ``Reading.singles``. They stand there only while they are resident without a block
        key.
        The result's ``version`` differs from the catalogue's where that changed meanwhile: take both again, or trust
        only ranks that did not change (``Reading``).
        Holders may name slots that no catalogue knows: those are dead.
        """

    def dump(self, model: str | None = None, rank: str | None = None) -> AsyncIterator[Claimed]:
        """Every block claimed by a live slot. Walks the keyspace: for operators and tests, never for routing."""

    async def aclose(self) -> None:
        """Close connections; safe to call twice."""
