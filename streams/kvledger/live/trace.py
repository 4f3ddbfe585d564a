"""Write a recording: the engine traces that ``kvledger verify`` reads.

Lines are kept in a file beside (``.part``) and put behind the first line, ``meta``, at the end, because the groups of
an engine may be known only from what it published.
"""

from __future__ import annotations

import base64
import gzip
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from kvledger_bridge.decode import BlockStored, decode_batch
from kvledger_bridge.errors import Undecodable
from kvledger_engine.recording import Published
from kvledger_index.model import medium_of


class Trace:
    """One recording on its way to ``path`` (gzip where the name ends so). Use it as a context.

    Leaving the context writes the file, also after an error: what was recorded up to then is a valid recording.
    Without any request nothing is written.
    ``meta`` may be filled until then; groups that it lacks are those that the engine's events named.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self.meta = dict(meta)
        self.requests = 0
        self.batches = 0
        self._groups = HeardGroups()
        self._part = path.with_name(path.name + ".part")

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = self._part.open("w+b")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lines:
            if self.requests:
                self._finish()
        self._part.unlink()

    def published(self, batches: Iterable[Published]) -> None:
        """What the engine sent since the last line."""
        for batch in batches:
            self.batches += 1
            self._groups.hear(batch.payload)
            self._write(t="ev", topic=_text(batch.topic), seq=batch.seq, p=_text(batch.payload))

    def begin(self) -> None:
        """A request is about to be sent; everything before it was received."""
        self._write(t="begin")

    def request(  # what a line of this kind holds
        self, tokens: Iterable[int], *, salt: str | None, lora: str | None, cached: int, out: Iterable[int]
    ) -> None:
        """That request, with the engine's own answer."""
        self.requests += 1
        self._write(t="req", tokens=list(tokens), salt=salt, lora=lora, cached=cached, out=list(out))

    def reset(self) -> None:
        """The prefix cache was reset while nothing ran."""
        self._write(t="reset")

    def _write(self, **fields: Any) -> None:
        self._lines.write(msgspec.json.encode(fields) + b"\n")

    def _finish(self) -> None:
        self._lines.flush()
        self._lines.seek(0)
        first = {"t": "meta", **self.meta}
        first["groups"] = self.meta.get("groups") or self._groups.known()
        first.setdefault("hash", self._groups.form)
        whole = self.path.with_name(self.path.name + ".whole")
        with gzip.open(whole, "wb") if self.path.suffix == ".gz" else whole.open("wb") as out:
            out.write(msgspec.json.encode(first) + b"\n")
            shutil.copyfileobj(self._lines, out)
        whole.replace(self.path)


class HeardGroups:
    """The groups that GPU events named, as far as they describe themselves; and the form of hashes."""

    def __init__(self) -> None:
        self.form: str | None = None
        self._groups: dict[int | None, dict[str, Any]] = {}

    def hear(self, payload: bytes) -> None:
        """One batch; what cannot be decoded says nothing."""
        try:
            batch = decode_batch(payload)
        except Undecodable:
            return
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)

    def known(self) -> list[dict[str, Any]]:
        """In order of number; kinds and windows only where the wire has them (vLLM 0.22 and later)."""
        return [self._groups[number] for number in sorted(self._groups, key=lambda n: -1 if n is None else n)]

    def _stored(self, event: BlockStored) -> None:
        if medium_of(event.medium) != "gpu":
            return
        if event.block_hashes and self.form is None:
            self.form = "int" if isinstance(event.block_hashes[0], int) else "bytes"
        group = self._groups.setdefault(event.group_idx, {"group_idx": event.group_idx, "kind": None, "block_size": 0})
        # a partial block is announced with the smaller size of a hash block
        group["block_size"] = max(group["block_size"], event.block_size)
        group["kind"] = event.kv_cache_spec_kind or group["kind"]
        group["sliding_window"] = event.kv_cache_spec_sliding_window or group.get("sliding_window")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
