"""One large batch in pieces: nothing of it is long, and what comes out is what comes out in one go."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import msgspec
import pytest
from chain_engine import HashingEngine, Prompt
from chain_engine import text as prompt_text
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule
from ledger_rank import cleared, removed, stored, text
from test_ledger_model import STARTS, LedgerMachine
from test_ledger_recorded import ENGINE, MANAGER, entry_of, lines, name

import kvledger_bridge.decode as decode_module
from kvledger_bridge.commands import Command, Counts, Rank, Write
from kvledger_bridge.decode import Batch, Event, decode_batch, decoding
from kvledger_bridge.errors import Undecodable
from kvledger_bridge.ledger import Ledger
from kvledger_bridge.lifelog import LifeLog, digest_of
from kvledger_bridge.snapshot import parts
from kvledger_bridge.unit import record_unit
from kvledger_index.enginehash import Item, Scheme
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.records import LIVE

WHOLE = sys.maxsize
PIECE = 8
WINDOW = ModelEntry(model="m", groups=(GroupSpec(0, "sliding_window", 16, 96),))
PLAIN = ModelEntry(model="m")


class PiecesMachine(LedgerMachine):
    """The ledger's model test on two ledgers: one that pauses all the time, and one that never does."""

    @initialize(**STARTS)
    def start(self, parents_max: int, orphans_max: int, copies: Any) -> None:
        super().start(parents_max, orphans_max, copies)
        entry = ModelEntry(model="m", copies=copies)
        piece = {0: 1, 8: 2, 1000: 5}[orphans_max]
        self.ledger, self.whole = (
            Ledger(entry, parents_max=parents_max, orphans_max=orphans_max, piece_blocks=blocks)
            for blocks in (piece, WHOLE)
        )

    @rule()
    def flush(self) -> None:
        events = tuple(self.events)
        super().flush()
        expected = self.whole.apply(self.seq, Batch(0.0, 0, events))

        assert expected == self.pieces
        assert list(parts(self.whole, self.seq)) == list(parts(self.ledger, self.seq))
        assert counts(self.whole) == counts(self.ledger)


TestPieces = PiecesMachine.TestCase
TestPieces.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def counts(ledger: Ledger) -> dict[str, int]:
    return {each: getattr(ledger.counts, each) for each in ledger.counts.__slots__}


@pytest.mark.parametrize("path", [*MANAGER, *ENGINE], ids=name)
def test_a_recorded_engine_reads_the_same_in_pieces(path: Any) -> None:
    """Masked events, chains, media, adapters: whatever an engine sends."""
    meta, *steps = lines(path)
    pieced, whole = (Ledger(entry_of(meta), piece_blocks=piece) for piece in (1, WHOLE))
    for step in steps:
        payload = step.get("payload") or step.get("p")
        if payload:
            batch = decode_batch(base64.b64decode(payload))
            assert whole.apply(step["seq"], batch) == pieced.apply(step["seq"], batch)

    assert list(parts(whole, 0)) == list(parts(pieced, 0))


# -- nothing is long ------------------------------------------------------------------------------------------------


def dense(blocks: int, **more: Any) -> Event:
    return stored(range(1, blocks + 1), text(blocks), **more)


def in_order(blocks: int) -> list[Event]:
    """The same, in an event per four blocks."""
    tokens, some = text(blocks), range(0, blocks, 4)
    return [stored(range(i + 1, i + 5), tokens[i * 16 : i * 16 + 64], i or None) for i in some]


def chained(blocks: int, kept: Callable[[int], Any], *, media: bool = False) -> list[Event]:
    """What has to be recomputed: a window's events, of which ``kept`` are announced."""
    items = tuple(Item(f"m{i}", i * 64 + 3, 20) for i in range(blocks // 8)) if media else ()
    engine = HashingEngine(Scheme("sha256_cbor", extras="tagged"))
    window: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 96}
    return [engine.stored(Prompt(prompt_text(blocks), items=items), 0, blocks, kept(blocks), **window)]


Made = Callable[[int], list[list[Event]]]

LARGE: dict[str, tuple[ModelEntry, Made]] = {
    "stored": (PLAIN, lambda n: [[dense(n)]]),
    "stored behind a parent": (PLAIN, lambda n: [[stored([9000], text(1, 5))], [dense(n, parent=9000)]]),
    "stored again": (PLAIN, lambda n: [[dense(n)], [dense(n)]]),
    "stored under two hashes": (PLAIN, lambda n: [[dense(n)], [stored(range(5000, 5000 + n), text(n))]]),
    "in two groups": (PLAIN, lambda n: [[dense(n), dense(n, group_idx=1)]]),
    "in a lower tier": (PLAIN, lambda n: [[dense(n, medium="CPU")], [dense(n)], [dense(n, medium="STORAGE")]]),
    "in many events": (PLAIN, lambda n: [in_order(n)]),
    "removed": (PLAIN, lambda n: [[dense(n)], [removed(*range(1, n + 1))]]),
    "removed one by one": (PLAIN, lambda n: [[dense(n)], [removed(each) for each in range(n, 0, -1)]]),
    "removed and unknown": (PLAIN, lambda n: [[removed(*range(1, n + 1))]]),
    "cleared": (PLAIN, lambda n: [[dense(n)], [cleared()]]),
    "orphaned": (PLAIN, lambda n: [[dense(n, parent=77)], [stored([77], text(1, 5))], [cleared()]]),
    "without tokens": (PLAIN, lambda n: [[stored(range(1, n + 1), (), size=0)], [dense(n)], [cleared()]]),
    "of an adapter": (
        PLAIN,
        lambda n: [[dense(n, lora_id=1, lora_name="a", extra_keys=(("a",),) * n)], [dense(n, group_idx=1)]],
    ),
    "with media": (PLAIN, lambda n: [[dense(n, extra_keys=tuple((f"m{i}", 0) for i in range(n)))]]),
    "recomputed": (WINDOW, lambda n: [chained(n, range)]),
    "recomputed with media": (WINDOW, lambda n: [chained(n, range, media=True)]),
    "masked": (WINDOW, lambda n: [chained(n, lambda n: range(n - 6, n))]),
    "masked at random": (WINDOW, lambda n: [chained(n, lambda n: range(0, n, 3))]),
}


def operations(step: Callable[[], object]) -> int:
    """Byte codes of the bridge that ``step`` executes: work as a number that no busy machine changes."""
    done = 0

    def count(frame: Any, event: str, _arg: object) -> Any:
        nonlocal done
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        done += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        step()
    finally:
        sys.settrace(before)
    return done


def longest(entry: ModelEntry, batches: list[list[Event]], piece: int) -> int:
    """The most byte codes between two pauses."""
    ledger = Ledger(entry, parents_max=64, orphans_max=64, piece_blocks=piece)
    most = 0
    for seq, events in enumerate(batches):
        work = ledger.work(seq, Batch(0.0, 0, tuple(events)))
        while getgeneratorstate(work) != GEN_CLOSED:
            most = max(most, operations(lambda work=work: next(work, None)))  # type: ignore[misc]
    return most


@pytest.mark.parametrize("kind", LARGE)
def test_nothing_in_a_large_batch_takes_long(kind: str) -> None:
    """Four times the blocks take more pieces, not longer ones."""
    entry, made = LARGE[kind]
    small, large = (longest(entry, made(blocks), PIECE) for blocks in (160, 640))

    assert large < 1.35 * small


def test_the_measure_of_long_work_can_fail() -> None:
    entry, made = LARGE["stored"]
    small, large = (longest(entry, made(blocks), WHOLE) for blocks in (160, 640))

    assert large > 3 * small


# -- what is written --------------------------------------------------------------------------------------------------


def written(payloads: list[bytes], piece: int, *, between: Callable[[LifeLog], None] = lambda _log: None) -> list[Any]:
    """What a life writes of these batches; ``between`` is called at each pause."""
    out: list[Command] = []
    rank = Rank("r", 0, PLAIN, replay=True)
    log = LifeLog(rank, out, Counts(), decode=decoding, ledger=lambda e: Ledger(e, piece_blocks=piece), snapshot=parts)
    log.own(3)
    log.open(-1, b"", partial=False, why="", process=None)
    for seq, payload in enumerate(payloads):
        log.cover(seq, payload, digest_of(payload), LIVE)
        while log.covering:
            between(log)
            log.go_on()
    return [(each.group, each.record) for each in out if isinstance(each, Write)]


def payload_of(*events: Event) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def test_a_large_batch_is_written_as_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record by record, also where its unit is cut."""
    monkeypatch.setattr("kvledger_bridge.lifelog.record_unit", partial(record_unit, bytes_max=4096))
    payloads = [payload_of(*events) for events in ([dense(900), cleared(), dense(400)], [removed(*range(1, 300))])]
    pauses = 0

    def count(_log: LifeLog) -> None:
        nonlocal pauses
        pauses += 1

    whole = written(payloads, WHOLE)

    assert whole == written(payloads, PIECE, between=count)
    assert len(whole) > 10
    assert pauses > 300


def test_what_is_said_at_once_is_numbered_before_the_batch_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended at any pause: it stands before the whole unit, and numbers have no hole."""
    monkeypatch.setattr("kvledger_bridge.lifelog.record_unit", partial(record_unit, bytes_max=4096))
    payloads = [payload_of(dense(200))]
    whole = [record for _, record in written(payloads, WHOLE)]
    pauses: list[LifeLog] = []
    written(payloads, PIECE, between=pauses.append)
    assert len(pauses) > 50
    for at in range(len(pauses)):
        seen = 0

        def say(log: LifeLog, at: int = at) -> None:
            nonlocal seen
            if seen == at:
                log.suspend("disconnected")
            seen += 1

        records = [record for _, record in written(payloads, PIECE, between=say)]
        assert [record.n for record in records] == list(range(len(whole) + 1))
        assert type(records[1]).__name__ == "Suspended"
        rest = [msgspec.structs.replace(record, n=record.n - 1) for record in records[2:]]
        assert rest == whole[1:]


# -- decoding -------------------------------------------------------------------------------------------------------


def read_in_pieces(raw: bytes) -> Iterator[Any]:
    """None for each pause, then the batch."""
    yield (yield from decoding(raw))


def with_tuples(batch: Batch) -> Batch:
    """Long tokens are an array."""
    events = [
        msgspec.structs.replace(event, token_ids=tuple(event.token_ids)) if hasattr(event, "token_ids") else event
        for event in batch.events
    ]
    return msgspec.structs.replace(batch, events=tuple(events))


TOKENS = [each % 2**32 for i in range(50_000) for each in (i, i * 77_777, 2**32 - 1 - i, i % 100)]
ROW: list[Any] = ["BlockStored", [1, 2, 3], None, TOKENS, 16, None, "GPU", None, None, 0, "full_attention"]
MAP: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [b"h" * 32, 7],
    "parent_block_hash": 5,
    "token_ids": TOKENS,
    "block_size": 16,
    "lora_id": None,
}
SMALL: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "group_idx": 0}
STRANGE = {"type": "Else"}


@pytest.mark.parametrize(
    "events",
    [
        [ROW],
        [MAP],
        [SMALL, MAP, SMALL, ROW, STRANGE, {**MAP, "more": 1}, {**SMALL, "block_hashes": "x"}],
        [{**MAP, "token_ids": [*TOKENS, -1]}],
        [{**MAP, "token_ids": [*TOKENS, 2**32]}],
        [{**MAP, "token_ids": [1.5, *TOKENS]}],
        [{**MAP, "token_ids": [*TOKENS, 1.5]}],
        [{**MAP, "token_ids": [*TOKENS, "text"]}],
        [{**MAP, "token_ids": {str(each): each for each in TOKENS}}],
        [{**MAP, "block_size": -1}],
        [{key: value for key, value in MAP.items() if key != "token_ids"} | {"session_id": "s" * 2**20}],
        [["BlockStored", [1], "p" * 2**20]],
        [SMALL] * 30_000,
        ["no event", *[SMALL] * 30_000],
    ],
    ids=[
        "row",
        "map",
        "mixed",
        "negative",
        "too large",
        "fraction first",
        "fraction last",
        "text",
        "no array",
        "bad size",
        "without tokens",
        "cut short",
        "many",
        "many and none",
    ],
)
def test_a_large_batch_decodes_as_in_one_go(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = msgspec.msgpack.encode([1.0, events, 0])
    *pauses, pieced = read_in_pieces(raw)
    monkeypatch.setattr(decode_module, "PIECE_BYTES", WHOLE)

    assert len(raw) > 2**19
    assert len(pauses) > 1
    assert decode_batch(raw) == with_tuples(pieced)


def test_no_piece_of_a_long_event_makes_many_objects() -> None:
    """A pause for each PIECE_TOKENS of it."""
    raw = msgspec.msgpack.encode([1.0, [MAP, ROW], 0])
    *pauses, _ = read_in_pieces(raw)

    assert len(pauses) >= 2 * (len(TOKENS) // decode_module.PIECE_TOKENS)


@pytest.mark.parametrize("raw", [b"\x93" + b"\xc1" * 2**20, msgspec.msgpack.encode([1.0, [MAP], 0])[:-3]])
def test_large_bytes_that_are_no_batch_are_refused(raw: bytes) -> None:
    with pytest.raises(Undecodable):
        decode_batch(raw)
