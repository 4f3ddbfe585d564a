"""``kvledger dump``: every block that the index claims, sorted, as a table or JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvledger.absent import absent
from kvledger.errors import BadInput
from kvledger_index.keyspace import NAMESPACE_DEFAULT
from kvledger_index.reader import RedisReader
from kvledger_index.views import Claimed

TIMEOUT_SECONDS: Final = 10.0
"""Per reply; a reply holds at most the rows of one SCAN."""

HEADINGS: Final = ("REPLICA", "RANK", "GROUP", "MEDIUM", "BLOCK KEY")

EPILOG: Final = (
    "GROUP is the engine's KV-cache group, 'none' (JSON: null) for events without one; BLOCK KEY is the 8-byte name of "
    "the prefix that ends there, in hex, or the low 8 bytes of the engine's own hash for a block without a block key. "
    "What is claimed by ranks that are stale, suspended or gone is listed as well: 'kvledger match' says what can be "
    "trusted. Walks the whole index: not for every second on a busy Redis. Exit code 0, also where nothing is claimed; "
    "2 for a model or replica that the index does not know, 1 where it is seen to be rebuilt and may not know it yet."
)


class Line(NamedTuple):
    """One claim, in the order of the columns and of the sort."""

    replica: str
    rank: int
    group: int | None
    medium: str
    key: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to look, what to list, and how to print."""
    parser.epilog = EPILOG
    parser.add_argument("--redis", metavar="URL", help="redis:// URL (default: $KVLEDGER_REDIS)")
    parser.add_argument(
        "--namespace",
        metavar="NS",
        help=f"the index's namespace (default: $KVLEDGER_NAMESPACE, else {NAMESPACE_DEFAULT})",
    )
    parser.add_argument("--replica", metavar="R", help="list this replica only")
    parser.add_argument("--model", metavar="M", help="list this model only")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")


def run(args: argparse.Namespace) -> int:
    """List once. Raises BadInput, and the index's own errors."""
    url = args.redis or os.environ.get("KVLEDGER_REDIS")
    if not url:
        raise BadInput("no Redis to look at: give --redis redis://host:6379 or set KVLEDGER_REDIS")
    namespace = args.namespace or os.environ.get("KVLEDGER_NAMESPACE") or NAMESPACE_DEFAULT
    lines = asyncio.run(_collect(url, namespace, args.model, args.replica))
    for text in as_json(lines) if args.json else as_table(lines):
        sys.stdout.write(text + "\n")
    return 0


async def _collect(url: str, namespace: str, model: str | None, replica: str | None) -> list[Line]:
    async with RedisReader.from_url(url, namespace=namespace, deadline_seconds=TIMEOUT_SECONDS) as reader:
        await _check_names(reader, namespace, model, replica)
        lines = [line_of(claim) async for claim in reader.dump(model) if _is_of(claim, replica)]
        if reader.corrupt:
            sys.stderr.write(f"kvledger: {reader.corrupt} stored values could not be read and are left out\n")
        return sorted(lines, key=_order)


async def _check_names(reader: RedisReader, namespace: str, model: str | None, replica: str | None) -> None:
    """Raise BadInput or Unavailable, with the names that would do, for a name that the index does not know."""
    models = await reader.models()
    if not models and model is None and replica is None:
        where = f"the index at {reader.address}, namespace {namespace}"
        sys.stderr.write(f"kvledger: {where}, is empty; do a bridge and a stream worker run for it?\n")
    if model is not None and model not in models:
        raise await absent(reader, namespace, f"model {model!r}", models)
    if replica is not None:
        replicas: set[str] = set()
        for each in models if model is None else [model]:
            replicas |= {rank.rpartition("/")[0] for rank in (await reader.catalogue(each)).ranks}
        if replica not in replicas:
            raise await absent(reader, namespace, f"replica {replica!r}", sorted(replicas))


def _is_of(claim: Claimed, replica: str | None) -> bool:
    return replica is None or claim.rank.rpartition("/")[0] == replica


def line_of(claim: Claimed) -> Line:
    """A claim with its rank taken apart."""
    replica, _, rank = claim.rank.rpartition("/")
    return Line(replica, int(rank), claim.group, claim.medium, claim.key)


def _order(line: Line) -> tuple[str, int, bool, int, str, int]:
    """Groups by number, the group without one last."""
    return (line.replica, line.rank, line.group is None, line.group or 0, line.medium, line.key)


def as_json(lines: Sequence[Line]) -> Iterator[str]:
    """One JSON object per claim; the block key as 16 hex digits, since readers of JSON lose bits of big numbers."""
    for replica, rank, group, medium, key in lines:
        yield json.dumps(
            {"replica": replica, "rank": rank, "group": group, "medium": medium, "block_key": f"{key:016x}"},
            ensure_ascii=False,
        )


def as_table(lines: Sequence[Line]) -> Iterator[str]:
    """Aligned columns under headings, and a line of totals."""
    cells = [
        (
            line.replica,
            str(line.rank),
            "none" if line.group is None else str(line.group),
            line.medium,
            f"{line.key:016x}",
        )
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
    for row in (HEADINGS, *cells):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    ranks = {(line.replica, line.rank) for line in lines}
    yield f"{len(lines)} claims of {len(ranks)} ranks, {len({line.key for line in lines})} block keys"
