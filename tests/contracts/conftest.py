"""What every contract test of the index starts from: both ends of each implementation, and a worker's memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from index_pairs import Fold, Pair, pairs


@pytest.fixture(params=sorted(pairs()))
async def pair(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Pair]:
    """Each implementation in turn, empty."""
    async with pairs()[request.param](lambda: request.getfixturevalue("redis_url"), namespace) as opened:
        yield opened


@pytest.fixture
async def fold(pair: Pair) -> Fold:
    """A partition that is placed, and nothing in it."""
    fold = Fold(pair.writer)
    await fold.seek()
    return fold
