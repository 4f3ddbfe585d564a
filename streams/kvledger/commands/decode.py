"""``kvledger decode``: engine payloads as JSON, for people who look at what an engine said."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvledger.errors import EXIT_INPUT
from kvledger_bridge.decode import Batch, Event, decode_batch, layouts
from kvledger_bridge.errors import Undecodable

INTEGER_MAX: Final = 2**53
"""Largest absolute value that every JSON reader keeps exact; integers beyond it are written as decimal strings."""

DESCRIPTION: Final = (
    "Decodes the payload frame of vLLM KV-event messages, of every release since 0.9.0, and prints one JSON object per "
    "file, in argument order: file, ts, rank, events (type, fields), unknown (how many events were skipped), error. "
    "Fields have vLLM's names and the values on the wire: bytes as lower-case hex, integers above 2^53 as decimal "
    "strings, null for what a map leaves out; an array has the fields that its length reaches."
)
EPILOG: Final = (
    "A payload that cannot be decoded has its reason in 'error' and does not change the exit code, which is 0; "
    "it is 2 where a file could not be read."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files only."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that holds one payload")


def run(args: argparse.Namespace) -> int:
    """One line per file, each flushed as it is done; 2 where a file could not be read, else 0."""
    status = 0
    for path in args.files:
        try:
            raw = path.read_bytes()
        except OSError as error:
            status = EXIT_INPUT
            report = _report(path, error=f"cannot read the file: {error.strerror or error}")
        else:
            report = describe(path, raw)
        sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
        sys.stdout.flush()
    return status


def describe(path: Path, raw: bytes) -> dict[str, Any]:
    """What one payload says, as the object that is printed for it."""
    try:
        batch = decode_batch(raw)
        names = layouts(raw)
    except Undecodable as error:
        return _report(path, error=str(error))
    failures = "; ".join(f"event {failure.index}: {failure.reason}" for failure in batch.failures)
    return _report(path, batch, list(_events(batch.events, names)), failures or None)


def _report(
    path: Path, batch: Batch | None = None, events: list[dict[str, Any]] | None = None, error: str | None = None
) -> dict[str, Any]:
    return {
        "file": str(path),
        "ts": batch.ts if batch is not None and math.isfinite(batch.ts) else None,
        "rank": None if batch is None else _plain(batch.rank),
        "events": events or [],
        "unknown": 0 if batch is None else len(batch.unknown),
        "error": error,
    }


def _events(events: tuple[Event, ...], names: tuple[tuple[str, ...], ...]) -> Iterator[dict[str, Any]]:
    for event, fields in zip(events, names, strict=True):
        yield {"type": type(event).__name__, "fields": {name: _plain(getattr(event, name)) for name in fields}}


def _plain(value: Any) -> Any:
    """A wire value as JSON has it."""
    match value:
        case bytes():
            return value.hex()
        case int() if abs(value) > INTEGER_MAX:
            return str(value)
        case tuple():
            return [_plain(each) for each in value]
        case _:
            return value
