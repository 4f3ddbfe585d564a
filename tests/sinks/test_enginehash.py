"""The engine's own hashes, against vectors and recordings of real engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvledger_index.enginehash import _STEPS, Item, Namespace, Scheme, cbor, chain, low64
from kvledger_index.errors import InvalidInput

FIXTURES = Path(__file__).parents[1] / "fixtures"
VECTORS: list[dict[str, Any]] = json.loads((FIXTURES / "wire" / "hash_vectors.json").read_text())["vectors"]
MANAGER_TRACES = sorted((FIXTURES / "manager-traces").glob("*.jsonl.gz"))


def plain(value: Any) -> Any:
    """JSON's lists as tuples and its {"bytes": hex} as bytes."""
    if isinstance(value, list):
        return tuple(plain(each) for each in value)
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    return value


@pytest.mark.parametrize("vector", VECTORS, ids=[f"{v['algo']}-{v['era']}" for v in VECTORS])
def test_steps_equal_the_recorded_vectors(vector: dict[str, Any]) -> None:
    scheme = Scheme(vector["algo"], vector["none_hash_seed"])
    block = vector["hash_block_size"]
    digest, got = scheme.none_hash, []
    for i in range(len(vector["hashes"])):
        extras = plain(vector["extra_keys_per_block"].get(str(i)))
        digest = _STEPS[scheme.algorithm](digest, tuple(vector["tokens"][i * block : (i + 1) * block]), extras)
        got.append(digest)

    assert scheme.none_hash.hex() == vector["none_hash"]
    assert [digest.hex() for digest in got] == vector["hashes"]
    assert [str(low64(digest)) for digest in got] == vector["u64"]


@pytest.mark.parametrize("path", MANAGER_TRACES, ids=[path.name for path in MANAGER_TRACES])
def test_chains_of_prompts_equal_the_managers(path: Path) -> None:
    """Salts and multimodal items included, from the start of each prompt."""
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    meta = records[0]
    scheme = Scheme(meta["hash_algo"], meta["none_hash_seed"], "tagged")
    probes = [record for record in records if record["t"] == "probe"]
    for probe in probes:
        digests = chain(
            scheme,
            None,
            probe["tokens"],
            meta["hash_block_size"],
            namespace=Namespace(probe["lora"], probe["salt"], probe["lora_path"]),
            items=[Item(name, offset, length) for offset, length, name in probe["mm"] or ()],
        )

        assert [low64(digest) if meta["int_hashes"] else digest.hex() for digest in digests] == probe["hashes"]
    assert len(probes) > 400


def test_a_chain_can_go_on_from_any_parent() -> None:
    scheme = Scheme("sha256_cbor", "0", "tagged")
    tokens = list(range(64))
    whole = chain(scheme, None, tokens, 16, namespace=Namespace("a", "salt", "/p"), items=[Item("img", 20, 30)])
    rest = chain(
        scheme, whole[0], tokens[16:], 16, start=16, namespace=Namespace("a", "salt", "/p"), items=[Item("img", 20, 30)]
    )

    assert rest == whole[1:]


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65536, "1a00010000"),
        (2**32, "1b0000000100000000"),
        (-12, "2b"),
        (-25, "3818"),
        ("é", "62c3a9"),
        (b"\x00\xff", "4200ff"),
        (None, "f6"),
        ((1, "a", None), "830161 61f6".replace(" ", "")),
    ],
)
def test_cbor_is_the_shortest_form(value: object, encoded: str) -> None:
    assert cbor(value).hex() == encoded


def test_cbor_refuses_what_no_extra_key_is_made_of() -> None:
    with pytest.raises(InvalidInput, match="float"):
        cbor(1.5)
