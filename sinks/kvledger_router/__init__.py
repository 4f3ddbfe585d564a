"""What routers import: who already holds how much of a prompt (DESIGN §8).

    async with Index.from_url("redis://…", model="gemma-3-1b-it") as index:
        match = await index.match(token_ids)
        best = match.best()

Needs Redis' client and nothing of Kafka, ZMQ or Faust.
"""

from __future__ import annotations

from kvledger_index.errors import IndexFailure, InvalidInput
from kvledger_router.breaker import Breaker
from kvledger_router.client import Index
from kvledger_router.match import Explanation, Holder, Match, RankReport
from kvledger_router.prompt import Media
from kvledger_router.standing import Note, Status

__all__ = [
    "Breaker",
    "Explanation",
    "Holder",
    "Index",
    "IndexFailure",
    "InvalidInput",
    "Match",
    "Media",
    "Note",
    "RankReport",
    "Status",
]
