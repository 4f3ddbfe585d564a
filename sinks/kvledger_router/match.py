"""What a router gets: holders of a prompt, best first, and for people the reasons behind each number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from kvledger_router.hits import Ending
from kvledger_router.standing import TRUSTED, Note, Status


class Holder(msgspec.Struct, frozen=True):
    """What one rank holds of the prompt.

    ``hit_tokens`` is what the engine would reuse on GPU (``num_cached_tokens`` without a connector), to be read with
    ``status``; ``extended_tokens`` more may come from lower tiers right behind it, and are never exact.
    ``expected_tokens`` is the prefix that this router announced with :meth:`Index.expect` a moment ago: a local hint.
    ``as_of`` is the engine's batch sequence that the answer covers (-1: before the first), ``age_seconds`` the time
    since the index heard of the rank; both None where nothing is known. ``rank`` is None where a replica was asked for
    and no rank of it was ever seen. ``reason`` says why the status is not exact.
    """

    replica: str
    rank: int | None
    hit_tokens: int
    extended_tokens: int
    status: Status
    as_of: int | None = None
    age_seconds: float | None = None
    reason: str = ""
    expected_tokens: int = 0

    @property
    def trusted(self) -> bool:
        """Whether ``hit_tokens`` is never over: exact or at least."""
        return self.status in TRUSTED


class RankReport(msgspec.Struct, frozen=True):
    """Behind one holder: every note in order of precedence, and per group which block ended the hit.

    ``unplaced`` counts GPU hashes without a block key; ``hit_tokens_max`` is the longest hit that they could still make
    (None: the rule cannot be applied). ``engine_hashes`` says whether the prompt's own engine hashes were asked for.
    """

    holder: Holder
    notes: tuple[Note, ...]
    endings: tuple[Ending, ...]
    stride: int
    alignment: int
    unplaced: int
    hit_tokens_max: int | None
    engine_hashes: str = ""


class Match:
    """An answer; iterates over its holders, best first. ``opinion`` False: the index did not answer, ``reason`` why;
    with an opinion ``reason`` is empty, or says that the index knows no rank of the model.

    Best first: trusted ranks by max(hit, expected) tokens, then by what lower tiers add; then stale and uncertain ones
    by the same numbers; then unknown ones. Equal ones come in order of (replica, rank): spread ties yourself.
    """

    __slots__ = ("holders", "keys", "model", "opinion", "reason", "tokens")

    def __init__(
        self,
        model: str,
        tokens: int,
        holders: Iterable[Holder],
        *,
        opinion: bool = True,
        reason: str = "",
        keys: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """``keys`` are the prompt's block keys per stride, for :meth:`Index.expect`."""
        self.model = model
        self.tokens = tokens
        self.holders = tuple(sorted(holders, key=_order))
        self.opinion = opinion
        self.reason = reason
        self.keys = dict(keys or {})

    def best(self, *, include_uncertain: bool = False) -> Holder | None:
        """The holder to prefer, or None where nobody is known to hold, or to be about to hold, anything.

        ``include_uncertain`` also takes stale and uncertain ranks into account, whose numbers may be over; where they
        promise no more, a trusted one is preferred.
        """
        if include_uncertain:
            able = [h for h in self.holders if h.status != "unknown"]
            able.sort(key=lambda h: (-_promise(h), not h.trusted))  # stable: ties keep the order of the match
        else:
            able = [h for h in self.holders if h.trusted]
        first = next(iter(able), None)
        return first if first is not None and (_promise(first) or first.extended_tokens) else None

    def of(self, replica: str, rank: int | None = None) -> Holder | None:
        """The holder of one rank (None: the replica's best one), or None where it was not asked for."""
        return next((h for h in self.holders if h.replica == replica and rank in {None, h.rank}), None)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.holders)

    def __len__(self) -> int:
        return len(self.holders)

    def __repr__(self) -> str:
        return f"Match(model={self.model!r}, tokens={self.tokens}, opinion={self.opinion}, best={self.best()!r})"


class Explanation(NamedTuple):
    """A match and the report of every rank that the index knows, in the order of the match."""

    match: Match
    ranks: tuple[RankReport, ...]


def _promise(holder: Holder) -> int:
    return max(holder.hit_tokens, holder.expected_tokens)


def _order(holder: Holder) -> tuple[int, int, int, str, int]:
    group = 0 if holder.trusted else 2 if holder.status == "unknown" else 1
    rank = -1 if holder.rank is None else holder.rank
    return (group, -_promise(holder), -holder.extended_tokens, holder.replica, rank)
