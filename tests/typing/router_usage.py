"""How a router uses the library; must type-check under ``mypy --strict`` (it is not run)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from kvledger_index.memory import MemoryIndex
from kvledger_router import Explanation, Holder, Index, InvalidInput, Match, Media, Status


async def route(token_ids: list[int]) -> str | None:
    """The whole of it: one client for the life of the router, one question per request."""
    async with Index.from_url(
        "redis://localhost:6379/0",
        model="gemma-3-1b-it",
        namespace="kvl",
        deadline_seconds=0.020,
        fresh_seconds_max=3.0,
        lease_seconds=15.0,
    ) as index:
        assert_type(index, Index)
        match = await index.match(token_ids, lora=None, salt=None, media=(), replicas=None)
        assert_type(match, Match)
        best = match.best()
        assert_type(best, Holder | None)
        if best is None or not match.opinion:
            return None
        index.expect(match, best.replica, rank=best.rank, seconds=2)
        return best.replica


def tell(match: Match) -> list[tuple[str, int | None, int, int, Status, int | None, float | None, str]]:
    """Every holder, best first."""
    return [
        (h.replica, h.rank, h.hit_tokens, h.extended_tokens, h.status, h.as_of, h.age_seconds, h.reason) for h in match
    ]


async def ask_about_images(index: Index, tokens: Sequence[int], candidates: set[str]) -> Holder | None:
    """Any sequence of token ids, multimodal items by position, some replicas only, also those that may be over."""
    match = await index.match(tokens, media=[Media("sha256:…", 4, length=256)], replicas=candidates)
    assert_type(match.holders, tuple[Holder, ...])
    return match.best(include_uncertain=True)


async def ask_why(tokens: tuple[int, ...]) -> Explanation:
    """An index in memory stands in for Redis in a router's own tests."""
    index = Index(MemoryIndex(), model="gemma-3-1b-it")
    try:
        return await index.explain(tokens, lora="adapter", salt="tenant")
    except InvalidInput as error:
        raise ValueError(str(error)) from error
    finally:
        await index.aclose()


async def misuse(index: Index) -> None:
    """What the types must refuse: an unused ignore is an error, so each of these lines is a test."""
    await index.match("text")  # type: ignore[arg-type]  # tokens are integers
    await index.match([1], None)  # type: ignore[call-arg]  # everything but the tokens is named
    Index.from_url("redis://localhost")  # type: ignore[call-arg]  # a question is about one model
