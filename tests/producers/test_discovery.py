"""The replicas file and the models file: what is right is read, what is wrong is named with line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger_bridge.discovery import RankConfig, read_config, read_models
from kvledger_bridge.errors import InvalidConfig
from kvledger_bridge.sockets import Endpoints
from kvledger_index.model import GroupSpec, ModelEntry

MODELS = """\
models:
  - model: llama
  - model: gemma
    aliases: [gemma-3, g3]
    hash_block_size: 16
    loss: keep
    harmless_tags: [BlockInactive]
    groups:
      - {group: 0, kind: sliding_window, block_size: 16, window: 512}
      - {group: 1, kind: full_attention, block_size: 32, eagle: true}
  - model: old
    groups:
      - {group: null, kind: full_attention}
"""

REPLICAS = """\
replicas:
  - id: pod-a
    model: llama
    data: tcp://10.0.0.7:5557
    replay: tcp://10.0.0.7:5657
  - id: pod-a
    rank: 1
    model: gemma-3
    data: tcp://10.0.0.7:5558
    topic: kv@
    metrics: http://10.0.0.7:8001/metrics
  - {id: "fd00::12", model: old, data: "tcp://[fd00::12]:5557"}
  - {id: pod-b, model: llama, data: "tcp://*:6000", mode: bind, replay: "tcp://pod-b.svc:6001"}
  - {id: pod-c, model: llama, data: "ipc:///run/kv", replay: null}
"""


def read(folder: Path, replicas: str = REPLICAS, models: str = MODELS) -> list[RankConfig]:
    (folder / "replicas.yaml").write_text(replicas)
    (folder / "models.yaml").write_text(models)
    return read_config(folder / "replicas.yaml", folder / "models.yaml")


def refusal(folder: Path, replicas: str = REPLICAS, models: str = MODELS) -> str:
    """The text of the refusal, with the folder cut away."""
    with pytest.raises(InvalidConfig) as caught:
        read(folder, replicas, models)
    return str(caught.value).replace(f"{folder}/", "")


def test_every_field_arrives(tmp_path: Path) -> None:
    llama, gemma, old = (
        ModelEntry(model="llama"),
        ModelEntry(
            model="gemma",
            aliases=("gemma-3", "g3"),
            hash_block_size=16,
            loss="keep",
            harmless_tags=("BlockInactive",),
            groups=(
                GroupSpec(0, "sliding_window", 16, window=512),
                GroupSpec(1, "full_attention", 32, eagle=True),
            ),
        ),
        ModelEntry(model="old", groups=(GroupSpec(None, "full_attention"),)),
    )

    page = "http://10.0.0.7:8001/metrics"

    assert [tuple(each) for each in read(tmp_path)] == [
        ("pod-a", 0, llama, Endpoints("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657"), None),
        ("pod-a", 1, gemma, Endpoints("tcp://10.0.0.7:5558", None, "connect", "kv@"), page),
        ("fd00::12", 0, old, Endpoints("tcp://[fd00::12]:5557"), None),
        ("pod-b", 0, llama, Endpoints("tcp://*:6000", "tcp://pod-b.svc:6001", "bind"), None),
        ("pod-c", 0, llama, Endpoints("ipc:///run/kv"), None),
    ]


def test_models_are_known_by_name_and_alias(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MODELS)
    entries = read_models(tmp_path / "m.yaml")

    assert sorted(entries) == ["g3", "gemma", "gemma-3", "llama", "old"]
    assert entries["g3"].stride == 16


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        (
            "    model: llama\n    data",
            "    model: lama\n    data",
            "replicas.yaml:3: model 'lama' is not in",
        ),
        ("    model: llama\n    data", "    model: lama\n    data", "known: g3, gemma, gemma-3, llama, old"),
        ("id: pod-a\n    model", "id: pod/a\n    model", "replicas.yaml:2: replica id 'pod/a' may hold letters"),
        ("rank: 1", "rank: -1", "replicas.yaml:7: rank -1 is outside 0..65535"),
        ("rank: 1", "rank: one", "replicas.yaml:7: Expected `int`"),
        ("rank: 1", "rank: 0", "replicas.yaml:6: replica 'pod-a' rank 0 stands already at"),
        ("topic: kv@", "topics: kv@", "replicas.yaml:10: Object contains unknown field `topics` (known: id, model"),
        ("topic: kv@", "mode: listen", "replicas.yaml:10: Invalid enum value 'listen'"),
        ("    data: tcp://10.0.0.7:5558\n", "", "missing required field `data`"),
        ("tcp://10.0.0.7:5558", "10.0.0.7:5558", "write tcp://HOST:PORT"),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7", "write tcp://HOST:PORT"),
        ("tcp://10.0.0.7:5558", "tcp://fd00::7:5558", "write tcp://HOST:PORT"),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:70000", "replicas.yaml:9: port 70000 of data is outside 1..65535"),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:0", "port 0 of data is outside"),
        ("tcp://10.0.0.7:5558", "tcp://0.0.0.0:5558", "names no host to connect to"),
        ("tcp://10.0.0.7:5558", "tcp://*:5558", "the bridge must bind: mode: bind"),
        (
            "tcp://10.0.0.7:5558",
            "tcp://10.0.0.7:5657",
            "replicas.yaml:9: data tcp://10.0.0.7:5657 is already",
        ),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5557", "leave at least as many ports between them"),
        ("metrics: http:", "metrics: ftp:", "replicas.yaml:11: metrics names no page; write http://HOST:PORT/metrics"),
        ("http://10.0.0.7:8001/metrics", "10.0.0.7:8001/metrics", "replicas.yaml:11: metrics names no page"),
        ("http://10.0.0.7", "http://me:secret@10.0.0.7", "without user or password"),
        ("http://10.0.0.7:8001/metrics", "http://10.0.0.7:8001", "replicas.yaml:11: metrics names no page"),
        ("http://10.0.0.7", "http://0.0.0.0", "replicas.yaml:11: metrics names no page"),
        ("7:8001", "7:80010", "replicas.yaml:11: port 80010 of metrics is outside 1..65535"),
        ("replicas:\n", "replica:\n", "must be a mapping with the key 'replicas:'"),
        ("replicas:\n", "version: 1\nreplicas:\n", "replicas.yaml:1: unknown key 'version'"),
        ("    topic: kv@", "    topic: kv@\n    topic: b", "replicas.yaml:11: the key 'topic' stands twice"),
        ("    topic: kv@", "    topic: [", "not YAML"),
        ("    topic: kv@", "\ttopic: x", "replicas.yaml:10: not YAML"),
    ],
)
def test_a_wrong_line_of_the_replicas_file_is_named(tmp_path: Path, line: str, instead: str, words: str) -> None:
    assert line in REPLICAS

    assert words in refusal(tmp_path, replicas=REPLICAS.replace(line, instead, 1))


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("  - model: llama", "  - name: llama", "models.yaml:2: unknown key 'name' in a model entry (known: model"),
        ("aliases: [gemma-3, g3]", "aliases: [llama]", "the name 'llama' is already that of another model entry"),
        ("loss: keep", "loss: maybe", "models.yaml:6: Invalid enum value 'maybe'"),
        ("window: 512", "windows: 512", "unknown field `windows`"),
        ("window: 512", "window: 0", "models.yaml:9: window 0 must be at least 1 token"),
        ("kind: sliding_window", "kind: sliding", "models.yaml:9: kind 'sliding' has no hit rule"),
        ("group: 1", "group: 0", "models.yaml:10: group 0 is listed twice"),
        ("group: 1", "group: 300", "group 300 is outside 0..254"),
        ("group: 1, ", "", "missing required field `group`"),
        ("block_size: 32", "block_size: 24", "is no multiple of hash_block_size 16"),
        ("hash_block_size: 16", "hash_block_size: -1", "models.yaml:5: hash_block_size -1 must be at least 1 token"),
        ("models:\n", "", "must be a mapping with the key 'models:'"),
    ],
)
def test_a_wrong_line_of_the_models_file_is_named(tmp_path: Path, line: str, instead: str, words: str) -> None:
    assert line in MODELS

    assert words in refusal(tmp_path, models=MODELS.replace(line, instead, 1))


def test_files_that_are_not_there_or_empty_are_named(tmp_path: Path) -> None:
    assert "must be a mapping" in refusal(tmp_path, replicas="")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_config(tmp_path / "none", tmp_path / "models.yaml")


def test_what_refers_to_itself_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, replicas="replicas: &a\n  - *a\n")
