"""Pieces become records of one unit; what is too large is cut without a reader noticing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rankworld import Piece, Reader

from kvledger_bridge.unit import Covered, records
from kvledger_index.model import GroupSpec, ModelEntry
from kvledger_wire.records import REMOVED, STORED, Change, Fence, Opened, Run, encode

COVERED = Covered(3, (3, 1), 9, b"d" * 16)
SPEC = GroupSpec(0, "full_attention", 16)


def run(key: int, blocks: int = 16) -> Run:
    keys = b"".join((key + i).to_bytes(8, "big") for i in range(blocks))
    return Run(keys[:8], 0, bytes(8), keys, 2**blocks - 1, 2**blocks - 1, keys)


def test_records_are_numbered_and_only_the_last_one_ends() -> None:
    pieces = [Piece(0, (Change(STORED, 0, 9, 1.0),)), Piece("*", (Change(3, 0, 9, 1.0),)), Piece(None, ())]

    unit = records(COVERED, 5, pieces, ("why",))

    assert [group for group, _ in unit] == [0, "*", None]
    assert [(r.n, r.end, r.uncertain) for _, r in unit] == [(5, False, ()), (6, False, ()), (7, True, ("why",))]
    assert {(r.owner, r.life, r.seq, r.digest) for _, r in unit} == {(3, (3, 1), 9, b"d" * 16)}


def test_what_belongs_to_a_piece_stands_on_its_last_part() -> None:
    changes = tuple(Change(STORED, 0, 9, 1.0, (run(i << 8),)) for i in range(10))
    piece = Piece(0, changes, ((0, 2),), SPEC, ("doubt",))

    unit = records(COVERED, 0, [piece, Piece(1, ())], (), bytes_max=1000)
    first = [r for group, r in unit if group == 0]

    assert len(first) > 2
    assert [(r.unplaced, r.spec, r.uncertain) for r in first[:-1]] == [((), None, ())] * (len(first) - 1)
    assert (first[-1].unplaced, first[-1].spec, first[-1].uncertain) == (((0, 2),), SPEC, ("doubt",))
    assert tuple(c for r in first for c in r.changes) == changes


def test_a_batch_of_200_000_blocks_fits_kafka_in_order() -> None:
    """One event with very many hashes: records stay below the broker's limit and a reader sees one whole unit."""
    many = tuple(run(i << 8) for i in range(12_500))
    unit = records(COVERED, 1, [Piece(0, (Change(STORED, 0, 9, 1.0, many, b"u" * 80_000),))], ())

    assert max(len(encode(r)) for _, r in unit) < 1_000_000
    assert [run for _, r in unit for c in r.changes for run in c.runs] == list(many)
    assert sum(len(c.unplaced) for _, r in unit for c in r.changes) == 80_000

    reader = Reader()
    reader.read("*", Fence(0, 3, "b", "", ""))
    reader.read("*", Opened(0, 3, (3, 1), 0, ModelEntry(model="m"), 16, 8, b"", False, ""))
    for group, record in unit[:-1]:
        reader.read(group, record)
    assert reader.state.seq == 8
    reader.read(*unit[-1])
    assert (reader.state.seq, reader.state.n) == (9, len(unit))


def test_the_bitmap_of_unplaced_hashes_is_cut_with_them() -> None:
    hashes = b"".join(i.to_bytes(8, "big") for i in range(1000))
    bits = bytes(i % 251 for i in range(125))
    change = Change(STORED, 0, 9, 1.0, (), hashes, unplaced_effective=bits)

    parts = [c for _, r in records(COVERED, 0, [Piece(0, (change,))], (), bytes_max=1000) for c in r.changes]

    assert len(parts) > 10
    assert b"".join(c.unplaced for c in parts) == hashes
    assert b"".join(c.unplaced_effective for c in parts) == bits
    assert all(len(c.unplaced_effective) == -(-len(c.unplaced) // 64) for c in parts)


@given(
    st.lists(
        st.tuples(st.sampled_from([STORED, REMOVED]), st.lists(st.integers(1, 16), max_size=6), st.integers(0, 40)),
        max_size=6,
    ),
    st.integers(200, 3000),
)
def test_cutting_keeps_kind_order_and_content(shape: list[tuple[int, list[int], int]], bytes_max: int) -> None:
    changes = tuple(
        Change(op, 1, 9, 2.0, tuple(run((i << 16) + (j << 8), n) for j, n in enumerate(sizes)), b"x" * 8 * loose)
        for i, (op, sizes, loose) in enumerate(shape)
    )

    parts = [c for _, r in records(COVERED, 0, [Piece(0, changes)], (), bytes_max=bytes_max) for c in r.changes]

    for op in (STORED, REMOVED):
        assert [r for c in parts if c.op == op for r in c.runs] == [r for c in changes if c.op == op for r in c.runs]
        assert sum(len(c.unplaced) for c in parts if c.op == op) == sum(len(c.unplaced) for c in changes if c.op == op)
    assert all((c.medium, c.seq, c.ts) == (1, 9, 2.0) for c in parts)
