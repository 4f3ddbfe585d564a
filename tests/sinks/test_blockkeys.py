"""Block keys against golden vectors and a second implementation, written from ``docs/block-keys.md`` alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger_index.blockkeys import KEY_VERSION, Extra, extend, prompt_keys, root_key, token_bytes
from kvledger_index.errors import InvalidInput

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "fixtures" / "golden" / "block_keys.json").read_text())
VECTORS: list[dict[str, Any]] = GOLDEN["vectors"]
by_name = {vector["name"]: vector for vector in VECTORS}


# -- the second implementation: slow, and nothing shared but XXH3 ---------------------------------------------------


def reference_text(word: str | None) -> bytes:
    if word is None:
        return bytes.fromhex("ffffffff")
    return len(word.encode()).to_bytes(4, "little") + word.encode()


def reference_bytes(
    names: Sequence[str | None], tokens: Sequence[int], stride: int, media: Sequence[Extra]
) -> list[bytes]:
    """What is hashed: the namespace, then each full stride."""
    model, lora, salt = names
    out = [reference_text(model) + reference_text(lora) + reference_text(salt)]
    for first in range(0, len(tokens) - stride + 1, stride):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[first : first + stride])
        inside = sorted((p - first, i.encode()) for p, i in media if first <= p < first + stride)
        for offset, identifier in inside:
            data += offset.to_bytes(4, "little") + len(identifier).to_bytes(4, "little") + identifier
        out.append(data)
    return out


def reference_keys(hashed: Sequence[bytes]) -> list[int]:
    """Root first."""
    keys = [1]  # the key version is the seed of the root
    for data in hashed:
        keys.append(xxhash.xxh3_64_intdigest(data, seed=keys[-1]))
    return keys[1:]


def arguments(vector: dict[str, Any]) -> dict[str, Any]:
    media = [(position, identifier) for position, identifier in vector["media"]]
    return {"lora": vector["lora"], "salt": vector["salt"], "media": media}


# -- golden vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=by_name)
def test_golden_vectors_hold(vector: dict[str, Any]) -> None:
    root = root_key(vector["model"], vector["lora"], vector["salt"])
    keys = prompt_keys(vector["model"], vector["tokens"], vector["stride"], **arguments(vector))

    assert vector["root"] == f"{root:016x}"
    assert vector["keys"] == [f"{key:016x}" for key in keys]


@pytest.mark.parametrize("vector", VECTORS, ids=by_name)
def test_a_reader_of_the_page_comes_to_the_same_keys(vector: dict[str, Any]) -> None:
    hashed = reference_bytes(
        (vector["model"], vector["lora"], vector["salt"]),
        vector["tokens"],
        vector["stride"],
        arguments(vector)["media"],
    )

    assert vector["hashed"] == [data.hex() for data in hashed[: len(vector["hashed"])]]
    assert [vector["root"], *vector["keys"]] == [f"{key:016x}" for key in reference_keys(hashed)]


def test_golden_vectors_are_of_this_key_version() -> None:
    assert GOLDEN["key_version"] == KEY_VERSION


def test_golden_vectors_cover_what_tells_prompts_apart() -> None:
    """A file that lost its cases would pass everything else."""
    assert {vector["stride"] for vector in VECTORS} >= {1, 8, 16, 32, 64}
    assert any(vector["lora"] and vector["salt"] for vector in VECTORS)
    assert any(vector["media"] for vector in VECTORS)
    assert any(len(vector["keys"]) > 16 for vector in VECTORS)
    assert len({vector["root"] for vector in VECTORS}) > 5


def test_the_page_shows_the_golden_values() -> None:
    page = (ROOT / "docs" / "block-keys.md").read_text()
    shown = set(re.findall(r"`([0-9a-f]{16})`", page))

    for name in re.findall(r"vector `([a-z0-9-]+)`", page):
        vector = by_name[name]
        assert {vector["root"], *vector["keys"][:2]} & shown, name
    assert shown <= {key for vector in VECTORS for key in (vector["root"], *vector["keys"])}
    assert shown


def test_the_hash_is_the_published_xxh3() -> None:
    """Values of the reference implementation, so that another XXH3 with our seeds cannot pass."""
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2
    assert xxhash.xxh3_64_intdigest(b"", seed=0x9E3779B185EBCA8D) == 0xA8A6B918B2F0364A


# -- properties -----------------------------------------------------------------------------------------------------

words = st.text(alphabet="abé中\x00", max_size=4)
optional = st.none() | words
token = st.integers(0, 2**32 - 1)
strides = st.sampled_from([1, 4, 16])
media = st.lists(st.tuples(st.integers(0, 90), words), max_size=4, unique=True)
few = settings(deadline=None)


@few
@given(st.tuples(words, optional, optional), st.lists(token, max_size=80), strides, media)
def test_both_implementations_agree(
    names: tuple[str, str | None, str | None], tokens: list[int], stride: int, items: list[Extra]
) -> None:
    want = reference_keys(reference_bytes(names, tokens, stride, items))
    model, lora, salt = names

    assert want[0] == root_key(model, lora, salt)
    assert want[1:] == prompt_keys(model, tokens, stride, lora=lora, salt=salt, media=items)


@few
@given(st.lists(token, max_size=80), strides, media, st.data())
def test_a_prompt_may_be_extended_from_any_stride(
    tokens: list[int], stride: int, items: list[Extra], data: st.DataObject
) -> None:
    """What the bridge does, block by block, is what the router does at once."""
    whole = prompt_keys("m", tokens, stride, media=items)
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else root_key("m")
    start = cut * stride

    assert whole[cut:] == extend(parent, token_bytes(tokens[start:]), stride, start=start, extras=items)


@few
@given(st.lists(token, min_size=1, max_size=40), st.data())
def test_a_key_depends_on_every_token_before_its_end_and_none_after(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[at] ^= 1
    one, two = prompt_keys("m", tokens, 4), prompt_keys("m", other, 4)

    assert one[: at // 4] == two[: at // 4]
    assert not set(one[at // 4 :]) & set(two[at // 4 :])


@few
@given(
    st.lists(
        st.tuples(words, optional, optional), min_size=2, max_size=2, unique_by=lambda each: (each[0], each[1], each[2])
    )
)
def test_namespaces_have_distinct_roots(pair: list[tuple[str, str | None, str | None]]) -> None:
    assert root_key(*pair[0]) != root_key(*pair[1])


def test_the_order_in_which_media_are_given_does_not_matter() -> None:
    items = [(3, "b"), (3, "aa"), (20, "c"), (0, "z")]
    keys = prompt_keys("m", range(32), 16, media=items)

    assert keys == prompt_keys("m", range(32), 16, media=items[::-1])


def test_media_that_start_before_the_tokens_or_after_their_last_full_stride_add_nothing() -> None:
    raw = token_bytes(range(40))

    assert extend(5, raw, 16, start=64) == extend(5, raw, 16, start=64, extras=[(63, "before"), (96, "after")])


def test_a_lone_surrogate_has_a_key() -> None:
    """JSON lets one through; a request must not fail for it."""
    assert root_key("m", salt="\ud800") != root_key("m", salt="\ud801")


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"], [None]])
def test_tokens_outside_u32_are_the_callers_fault(bad: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        token_bytes(bad)


def test_tokens_are_u32_little_endian() -> None:
    assert token_bytes([1, 2**32 - 1, 0x01020304]).hex() == "01000000ffffffff04030201"
