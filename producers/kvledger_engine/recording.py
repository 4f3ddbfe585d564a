"""Recordings of real engines, line by line, as typed values.

JSON lines, plain or gzip. Two dialects: *engine* traces (``ev``, ``begin``, ``req``, ``reset``, ``replay_summary``)
hold the messages of a running engine between its requests; *manager* traces (``batch``, ``probe``, ``snapshot``,
``action``) hold what a scheduler's cache manager emitted and answered. ``ask`` belongs to the filter ``verify -``.
Extra fields are ignored; a kind that is not known is an :class:`Other`. Order of lines is the order of events.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from kvledger_engine.errors import BadRecording
from kvledger_index.enginehash import ALGORITHMS, SEED_DEFAULT, ExtraForm, Scheme
from kvledger_index.model import SLIDING_KINDS, GroupSpec, ModelEntry

Seq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Media = tuple[int, int, str]
"""(offset, length, identifier) of one multimodal item of a prompt, in tokens."""

_GZIP_MAGIC = b"\x1f\x8b"
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})")
_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}\Z")
_CHUNKED = "chunked_local_attention"


class Group(msgspec.Struct, frozen=True):
    """One KV-cache group as the recorded engine had it; sizes in tokens."""

    group_idx: int | None = None
    kind: str | None = None
    block_size: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    is_eagle: bool | None = None


class Meta(msgspec.Struct, frozen=True, tag_field="t", tag="meta"):
    """What was recorded. A new one starts another engine.

    ``hash_algo``, ``none_hash_seed``, ``none_hash`` and ``loras`` (name to path) say how it hashed, where recorded.
    """

    model: Any = None
    trace: Any = None
    vllm: Any = None
    groups: tuple[Group, ...] | None = None
    config: dict[str, Any] | None = None
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    partial_hash_hits: bool | None = None
    eagle_groups: tuple[int, ...] | None = None
    report_mode: Any = None
    hash_algo: Any = None
    none_hash_seed: Any = None
    none_hash: Any = None
    loras: Any = None

    @property
    def name(self) -> str:
        """The logical model name: ``model``, else the trace's name."""
        return str(self.model or self.trace or "recording")

    @property
    def engine(self) -> str | None:
        """The release that was recorded, as text."""
        return None if self.vllm is None else str(self.vllm)

    def entry(self, model: str | None = None) -> ModelEntry:
        """What an operator would write in the models file for this engine, under ``model`` or the own name."""
        config = self.config or {}
        inner = config.get("text_config")
        chunk = config.get("attention_chunk_size") or (isinstance(inner, dict) and inner.get("attention_chunk_size"))
        eagle = set(self.eagle_groups or ())
        groups = tuple(
            GroupSpec(
                group=g.group_idx,
                kind=g.kind,
                block_size=g.block_size,
                window=g.sliding_window if g.kind in SLIDING_KINDS else None,
                chunk=g.attention_chunk_size or (chunk or None if g.kind == _CHUNKED else None),
                eagle=bool(g.is_eagle) or g.group_idx in eagle,
            )
            for g in self.groups or ()
        )
        return ModelEntry(
            model=model or self.name,
            groups=groups,
            hash_block_size=self.hash_block_size,
            alignment=self.cache_hit_alignment_tokens,
            partial_hash_hits=bool(self.partial_hash_hits),
            full_reports=self.report_mode == "full",
            # only text models were recorded with their configuration: bare strings of old engines are then salts
            multimodal=False if self.config is not None and "vision_config" not in self.config else None,
            hash_scheme=self.scheme(),
        )

    def scheme(self) -> Scheme | None:
        """How the engine hashed, where the recording says so; else the bridge finds out."""
        if self.hash_algo not in ALGORITHMS:
            return None
        seed = self.none_hash_seed if isinstance(self.none_hash_seed, str) else SEED_DEFAULT
        paths = self.loras if isinstance(self.loras, dict) else {}
        known = Scheme(
            self.hash_algo,
            seed,
            _extra_form(self.engine),
            tuple((str(name), str(path)) for name, path in paths.items()),
        )
        told = self.none_hash if isinstance(self.none_hash, str) and _HEX.match(self.none_hash) else ""
        return known if not told or known.none_hash.hex() == told else msgspec.structs.replace(known, none=told)


def _extra_form(release: str | None) -> ExtraForm | None:
    """The form of extra keys of a release (ENGINE.md §4)."""
    found = _RELEASE.match(release or "")
    if found is None:
        return None
    number = (int(found[1]), int(found[2]))
    return "tagged" if number >= (0, 31) else "offsets" if number >= (0, 19) else "bare"


class Published(msgspec.Struct, frozen=True):
    """One batch as the engine published it; ``ev`` or ``batch`` in the file."""

    seq: Seq
    payload: bytes
    topic: bytes = b""


class Begin(msgspec.Struct, frozen=True, tag_field="t", tag="begin"):
    """A request is about to be sent; everything published before it stands above."""


class Request(msgspec.Struct, frozen=True, tag_field="t", tag="req"):
    """The request that ``Begin`` announced. ``cached`` is the engine's own ``num_cached_tokens``, where recorded."""

    tokens: tuple[Token, ...]
    salt: str | None = None
    lora: str | None = None
    mm: tuple[Media, ...] | None = None
    cached: int | None = None


class Probe(msgspec.Struct, frozen=True, tag_field="t", tag="probe"):
    """A question to the manager after ``after_seq``; ``hit`` is its answer, where recorded.

    ``hashes`` are the engine's hashes of the prompt at ``hash_block_size``: hexadecimal text or integers.
    """

    after_seq: int
    tokens: tuple[Token, ...]
    salt: str | None = None
    lora: str | None = None
    mm: tuple[Media, ...] | None = None
    hashes: tuple[str | int, ...] = ()
    hit: int | None = None


class Snapshot(msgspec.Struct, frozen=True, tag_field="t", tag="snapshot"):
    """The manager's whole truth after ``after_seq``: group (``-`` or a number) to hash to copies."""

    after_seq: int
    resident: dict[str, dict[str, int]]


class Action(msgspec.Struct, frozen=True, tag_field="t", tag="action"):
    """Something was done to the manager, such as a reset; its events come with the next batch."""

    op: str | None = None
    ok: bool | None = None
    queued_before_seq: int | None = None


class Reset(msgspec.Struct, frozen=True, tag_field="t", tag="reset"):
    """The prefix cache was reset while idle: the engine publishes the clear only with its next step."""


class ReplaySummary(msgspec.Struct, frozen=True, tag_field="t", tag="replay_summary"):
    """What a full replay returned at the end of the recording."""

    n: int | None = None


class Ask(msgspec.Struct, frozen=True, tag_field="t", tag="ask"):
    """A question of ``verify -``: predict this prompt once everything above is visible."""

    id: Any
    tokens: tuple[Token, ...]
    salt: str | None = None
    lora: str | None = None
    mm: tuple[Media, ...] | None = None


class Other(msgspec.Struct, frozen=True):
    """A line of a kind that this version does not know."""

    kind: str


class _Ev(msgspec.Struct, frozen=True, tag_field="t", tag="ev"):
    seq: Seq
    p: bytes
    topic: bytes | None = None


class _Batch(msgspec.Struct, frozen=True, tag_field="t", tag="batch"):
    seq: Seq
    payload: bytes
    topic: bytes | None = None


class _Kind(msgspec.Struct, frozen=True):
    t: str


Step = Meta | Published | Begin | Request | Probe | Snapshot | Action | Reset | ReplaySummary | Ask | Other
_Line = _Ev | _Batch | Meta | Begin | Request | Probe | Snapshot | Action | Reset | ReplaySummary | Ask
_KINDS = frozenset(
    {"ev", "batch", "meta", "begin", "req", "probe", "snapshot", "action", "reset", "replay_summary", "ask"}
)
_line = msgspec.json.Decoder(_Line)
_kind = msgspec.json.Decoder(_Kind)


def parse(line: bytes, *, where: str) -> Step:
    """One line as a value; raises BadRecording, whose text starts with ``where``.

    The text names the field that is wrong and its type, never its content.
    """
    try:
        value: Any = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kind = _kind_of(line, where)
        if kind not in _KINDS:
            return Other(kind)
        msg = f"{where}: a line of kind {kind!r} does not fit: {error}"
        raise BadRecording(msg) from error
    match value:
        case _Ev(seq=seq, p=payload, topic=topic) | _Batch(seq=seq, payload=payload, topic=topic):
            return Published(seq, payload, topic or b"")
        case _:
            return cast("Step", value)


def _kind_of(line: bytes, where: str) -> str:
    try:
        return _kind.decode(line).t
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f'{where}: not a JSON object with a text field "t": {error}'
        raise BadRecording(msg) from error


def parse_lines(lines: Iterable[bytes], *, name: str) -> Iterator[Step]:
    """Every line that is not blank, lazily; ``name`` and the line's number stand in errors."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse(line, where=f"{name}:{number}")


def read(path: Path) -> Iterator[Step]:
    """A recording, lazily, plain or gzip by content; raises BadRecording, also where the file is not there."""
    line = 0
    try:
        with ExitStack() as open_files:
            raw = open_files.enter_context(path.open("rb"))
            source: BinaryIO = raw
            if raw.peek(2)[:2] == _GZIP_MAGIC:
                source = cast("BinaryIO", open_files.enter_context(gzip.GzipFile(fileobj=raw)))
            for line, content in enumerate(source, 1):
                if content.strip():
                    yield parse(content, where=f"{path}:{line}")
    except (OSError, EOFError, zlib.error) as error:
        msg = f"{path}: cannot be read after line {line}: {error}"
        raise BadRecording(msg) from error
