"""``kvledger match``: ask the index, as a router would, who holds how much of a prompt."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvledger.absent import absent
from kvledger.errors import EXIT_SERVICE, BadInput
from kvledger_index.keyspace import NAMESPACE_DEFAULT
from kvledger_index.reader import RedisReader
from kvledger_router import Explanation, Holder, Index, Match, Media, RankReport

DEADLINE_SECONDS_DEFAULT: Final = 1.0
"""People wait longer than requests: a router's default is 20 ms."""

HEADINGS: Final = ("REPLICA", "RANK", "HIT", "EXTENDED", "STATUS", "AS OF", "AGE", "REASON")

EPILOG: Final = (
    "HIT is what the engine would reuse on GPU, EXTENDED what lower tiers continue behind it. STATUS: exact = the "
    "engine's own number right after its batch AS OF; at_least = never over; uncertain and stale may be over; unknown "
    "says nothing. Exit code 0 with an answer, 1 where the index gave none in time or is seen to be rebuilt and does "
    "not know the model yet, 2 for wrong input, also for a model that the index does not know."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, where to ask, and how to print."""
    parser.epilog = EPILOG
    parser.add_argument("--model", required=True, metavar="M", help="the model's logical name, as in the models file")
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="FILE",
        help="the prompt's token ids: a JSON array, or numbers between blanks or commas; - reads stdin",
    )
    parser.add_argument("--redis", metavar="URL", help="redis:// URL (default: $KVLEDGER_REDIS)")
    parser.add_argument(
        "--namespace",
        metavar="NS",
        help=f"the index's namespace (default: $KVLEDGER_NAMESPACE, else {NAMESPACE_DEFAULT})",
    )
    parser.add_argument("--lora", metavar="NAME", help="the adapter's name (default: none)")
    parser.add_argument("--salt", metavar="SALT", help="the request's cache salt (default: none)")
    parser.add_argument(
        "--media",
        metavar="JSON",
        help='multimodal items: [{"identifier": "…", "offset": 4, "length": 256}, …], offset = position of the first '
        "placeholder, length = how many there are; without it, what needs engine hashes gets a lower bound only",
    )
    parser.add_argument(
        "--replica", action="append", metavar="R", help="ask for this replica; may be repeated (default: all)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_SECONDS_DEFAULT,
        metavar="SECONDS",
        help=f"no opinion after this time (default: {DEADLINE_SECONDS_DEFAULT:g})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--explain", action="store_true", help="also say, per rank and group, what ended the hit")


def run(args: argparse.Namespace) -> int:
    """Ask once and print. Raises BadInput."""
    url = args.redis or os.environ.get("KVLEDGER_REDIS")
    if not url:
        raise BadInput("no Redis to ask: give --redis redis://host:6379 or set KVLEDGER_REDIS")
    if not args.deadline > 0:
        raise BadInput(f"--deadline {args.deadline:g} is not above 0 seconds")
    namespace = args.namespace or os.environ.get("KVLEDGER_NAMESPACE") or NAMESPACE_DEFAULT
    tokens, media = read_tokens(args.tokens), read_media(args.media)
    found = asyncio.run(_ask(args, url, namespace, tokens, media))
    text = _as_json(found) if args.json else "\n".join(_as_lines(found)) + "\n"
    sys.stdout.write(text)
    return 0 if found.match.opinion else EXIT_SERVICE


async def _ask(
    args: argparse.Namespace, url: str, namespace: str, tokens: Sequence[int], media: Sequence[Media]
) -> Explanation:
    """The answer; one from a known model, or none at all."""
    reader = RedisReader.from_url(url, namespace=namespace, deadline_seconds=args.deadline)
    async with Index(reader, model=args.model, deadline_seconds=args.deadline) as index:
        if args.explain:
            found = await index.explain(tokens, lora=args.lora, salt=args.salt, media=media, replicas=args.replica)
        else:
            match = await index.match(tokens, lora=args.lora, salt=args.salt, media=media, replicas=args.replica)
            found = Explanation(match, ())
        if found.match.opinion and all(holder.rank is None for holder in found.match):
            await _check_model(reader, args.model, namespace)
        return found


async def _check_model(reader: RedisReader, model: str, namespace: str) -> None:
    """Raise BadInput or Unavailable, with the names that would do, where the index does not know a model."""
    known = await reader.models()
    if model not in known:
        raise await absent(reader, namespace, f"model {model!r}", known)


def read_tokens(name: str) -> list[int]:
    """Token ids from a file or (``-``) stdin. Raises BadInput, which says where but never repeats a token."""
    place = "stdin" if name == "-" else name
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--tokens: cannot read {place}: {getattr(error, 'strerror', None) or 'not text'}") from error
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[int])
        except msgspec.DecodeError as error:
            raise BadInput(f"--tokens: {place} is no JSON array of token ids: {error}") from error
    tokens: list[int] = []
    for number, word in enumerate(text.replace(",", " ").split(), start=1):
        try:
            tokens.append(int(word))
        except ValueError as error:
            raise BadInput(f"--tokens: item {number} of {place} is no number") from error
    if not tokens:
        raise BadInput(f"--tokens: {place} holds no token ids: a JSON array, or numbers between blanks or commas")
    return tokens


def read_media(text: str | None) -> list[Media]:
    """Multimodal items from the flag's JSON. Raises BadInput."""
    if text is None:
        return []
    try:
        return msgspec.json.decode(text, type=list[Media])
    except msgspec.DecodeError as error:
        raise BadInput(f'--media is no [{{"identifier": "…", "offset": 4, "length": 256}}, …]: {error}') from error


def _as_json(found: Explanation) -> str:
    match = found.match
    report: dict[str, Any] = {
        "model": match.model,
        "tokens": match.tokens,
        "opinion": match.opinion,
        "reason": match.reason,
        "best": match.best(),
        "holders": match.holders,
    }
    if found.ranks:
        report["ranks"] = [_report(each) for each in found.ranks]
    return msgspec.json.encode(report).decode() + "\n"


def _report(rank: RankReport) -> dict[str, Any]:
    return {
        "replica": rank.holder.replica,
        "rank": rank.holder.rank,
        "stride": rank.stride,
        "alignment": rank.alignment,
        "unplaced": rank.unplaced,
        "hit_tokens_max": rank.hit_tokens_max,
        "engine_hashes": rank.engine_hashes,
        "notes": [note._asdict() for note in rank.notes],
        "groups": [ending._asdict() for ending in rank.endings],
    }


def _as_lines(found: Explanation) -> Iterator[str]:
    match = found.match
    yield _headline(match)
    if match.holders:
        rows = [HEADINGS, *(_row(holder) for holder in match)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        numbers = {HEADINGS.index(word) for word in ("RANK", "HIT", "EXTENDED", "AS OF", "AGE")}
        for row in rows:
            cells = [
                c.rjust(w) if at in numbers else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  ".join(cells).rstrip()
    for rank in found.ranks:
        yield from _explained(rank)


def _headline(match: Match) -> str:
    prompt = f"{match.model}: prompt of {match.tokens} tokens"
    if not match.opinion:
        return f"{prompt}; no opinion: {match.reason}"
    best = match.best()
    if best is None:
        doubted = "" if match.best(include_uncertain=True) is None else "that can be trusted "
        return f"{prompt}; nobody {doubted}is known to hold any of it"
    return f"{prompt}; best: {best.replica}/{best.rank} with {best.hit_tokens} ({best.status})"


def _row(holder: Holder) -> tuple[str, ...]:
    return (
        holder.replica,
        "-" if holder.rank is None else str(holder.rank),
        str(holder.hit_tokens),
        str(holder.extended_tokens),
        holder.status,
        "-" if holder.as_of is None else str(holder.as_of),
        "-" if holder.age_seconds is None else f"{holder.age_seconds:.1f} s",
        holder.reason,
    )


def _explained(rank: RankReport) -> Iterator[str]:
    yield ""
    yield (
        f"{rank.holder.replica}/{rank.holder.rank}: stride {rank.stride}, hits in steps of {rank.alignment}, "
        f"{rank.unplaced} unplaced hashes"
    )
    yield f"  {rank.engine_hashes}"
    for note in rank.notes:
        yield f"  {note.status}: {note.why}"
    for ending in rank.endings:
        name = "without a number" if ending.group is None else str(ending.group)
        yield f"  group {name} ({ending.kind}) {'ends the hit' if ending.limits else 'goes on'}: {ending.why}"
