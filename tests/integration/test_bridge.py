"""A bridge between real ZMQ sockets and a real Kafka: what it writes, and how it starts and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bridgeworld import Setup, play, recording, rewritten, status, truth
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from metricspage import START, Page
from proxy import Proxy

from kvledger_bridge.errors import Refused, Unavailable
from kvledger_bridge.lifelog import digest_of
from kvledger_bridge.sockets import Endpoints
from kvledger_engine.standin import StandIn
from kvledger_wire.partition import partition_of
from kvledger_wire.records import (
    LIVE,
    REPLAYED,
    Claim,
    Events,
    Fence,
    Opened,
    Pointer,
    Resumed,
    decode_dead_letter,
    decode_replica,
)
from kvledger_wire.topics import DEAD_LETTER, REPLICAS


@pytest.fixture
def setup(kafka: str, create_topics: Any, topic_prefix: str) -> Iterator[Setup]:
    create_topics(topic_prefix, 4)
    with Setup(kafka, topic_prefix) as setup:
        yield setup


def followed(setup: Setup, eventually: Any, **options: Any) -> Any:
    """A bridge that has opened a life for every rank, and is connected."""
    bridge = setup.bridge(**options)
    eventually(lambda: all(rank.phase == "following" for rank in bridge.status()))
    for engine in setup.engines.values():
        assert engine.wait_subscribers()
    return bridge


@pytest.mark.parametrize("name", ["llama_s11", "gemma3_s11", "gemma3_vllm0.20.2_s51", "gemma3_vllm0.17.1_s60"])
def test_a_recorded_engine_is_on_the_log_block_for_block(setup: Setup, eventually: Any, name: str) -> None:
    """Half is published before the bridge comes, half is seen live; the log's reader holds what the engine holds."""
    entry, batches = recording(name)
    engine = setup.engine(entry)
    half = len(batches) // 2
    play(engine, batches[:half])
    bridge = followed(setup, eventually)
    play(engine, batches[half : half + 1])
    eventually(lambda: status(bridge).last == half)  # the seam is closed: from here on it is live
    play(engine, batches[half + 1 :])
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert rank.blocks
    assert (rank.state.partial, rank.state.uncertain, rank.state.unplaced) == (False, (), ())
    assert rank.partitions == {partition_of("r", 0, 4)}
    origins = {change.seq: change.origin for record in rank.of(Events) for change in record.changes}
    assert {origins[seq] for seq in origins if seq < half} == {REPLAYED}
    assert {origins[seq] for seq in origins if seq > half} == {LIVE}
    assert rank.of(Events)[-1].digest == digest_of(batches[-1].payload)


def test_a_take_over_leaves_claim_pointer_fence_and_pointer(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    play(setup.engine(entry), batches[:10])
    bridge = followed(setup, eventually)
    rank = setup.reader().until("r/0", 9)
    messages = setup.messages(REPLICAS, 4)
    claim, first, fenced, second = (decode_replica(message.value()) for message in messages)

    assert isinstance(claim, Claim)
    assert (claim.bridge, messages[0].offset()) == (bridge.name, 0)
    assert first == Pointer(0, owner=0, fence=-1, offset=-1, partitions=4)
    assert fenced == Pointer(0, owner=0, fence=0, offset=-1, partitions=4)
    assert isinstance(second, Pointer)
    assert [message.key() for message in messages] == [b"r/0", b"r/0/0", b"r/0/0", b"r/0/0"]
    assert rank.kinds()[:2] == ["Fence", "Opened"]
    assert (second.fence, second.offset) == (0, 1)
    assert rank.of(Opened)[0].entry == entry


def test_ranks_of_one_replica_keep_apart(setup: Setup, eventually: Any) -> None:
    """Eight ranks publish the same topic; one says another rank than it was configured with, one says none."""
    entry, batches = recording("llama_s11")
    for rank in range(4):
        setup.engine(entry, "pod-a", rank)
    bridge = followed(setup, eventually)
    for (_, rank), engine in setup.engines.items():
        for batch in batches[: 20 + rank]:
            engine.publish(rewritten(batch, 0 if rank == 3 else rank), b"kv", batch.seq)
    reader = setup.reader()
    ranks = [reader.until(f"pod-a/{rank}", 19 + rank) for rank in range(4)]

    assert [rank.blocks for rank in ranks] == [truth(entry, batches[: 20 + n]) for n in range(4)]
    assert [bool(rank.state.uncertain) for rank in ranks] == [False, False, False, True]
    assert "rank 0" in ranks[3].state.uncertain[0]
    assert status(bridge, 3).counts.contradictions == 23


def test_a_restarted_engine_leaves_no_claim_behind(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = followed(setup, eventually)
    play(engine, batches[:40])
    reader = setup.reader()
    first = reader.until("r/0", 39).state.life
    engine.restart()
    play(engine, batches[:5])
    eventually(lambda: status(bridge).life != first and status(bridge).last == 4)
    reader.until("r/0", 4)

    def caught_up() -> bool:
        reader.poll(0.05)
        return reader.ranks["r/0"].state.life == status(bridge).life

    eventually(caught_up)
    rank = reader.until("r/0", 4)

    assert rank.blocks == truth(entry, batches[:5])
    assert rank.state.life == (first[0], 2)
    assert "Suspended" in rank.kinds()


def test_an_engine_that_restarts_while_only_its_live_link_is_cut_is_never_called_proven(
    setup: Setup, eventually: Any
) -> None:
    """The replay endpoint answers all the time, for the old life and then for the new one; SUB is away meanwhile."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    with Proxy(engine.data.removeprefix("tcp://")) as link:
        ranks = [each._replace(endpoints=Endpoints(f"tcp://{link.address}", engine.replay)) for each in setup.ranks()]
        bridge = setup.bridge(ranks=ranks)
        play(engine, batches[:20])
        eventually(lambda: (status(bridge).phase, status(bridge).last) == ("following", 19))
        link.blackhole()
        link.cut()
        eventually(lambda: status(bridge).phase == "suspect")
        eventually(lambda: setup.lines(bridge, "rank_suspended"))
        engine.restart()
        play(engine, batches[:5])
        link.resume()
        eventually(lambda: (status(bridge).phase, status(bridge).last) == ("following", 4), 20)
        reader = setup.reader()
        rank = reader.until("r/0", 4)
        while rank.state.life != status(bridge).life:
            reader.poll()
        rank = reader.until("r/0", 4)
    ended = max(i for i, kind in enumerate(rank.kinds()) if kind == "Opened")
    cut = max(i for i, kind in enumerate(rank.kinds()[:ended]) if kind == "Suspended")

    assert "Resumed" not in rank.kinds()[cut:ended]
    assert rank.kinds().count("Opened") == 2
    assert rank.blocks == truth(entry, batches[:5])


def test_a_lost_batch_is_brought_back(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = followed(setup, eventually)
    play(engine, batches[:1])
    eventually(lambda: status(bridge).last == 0)
    engine.faults.drop = lambda seq: seq % 7 == 3
    play(engine, batches[1:])
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert rank.kinds().count("Opened") == 1
    assert "Gap" not in rank.kinds()
    assert status(bridge).counts.live > 0


def test_an_unreadable_batch_is_told_without_its_bytes(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = followed(setup, eventually)
    play(engine, batches[:10])
    engine.publish(b"\xc1 secret prompt")
    engine.publish(batches[11].payload)
    rank = setup.reader().until("r/0", 11)
    letter = decode_dead_letter(setup.messages(DEAD_LETTER, 1)[0].value())

    assert rank.state.partial
    assert rank.kinds()[-3:] == ["Gap", "Opened", "Events"]
    assert (letter.seq, letter.size, letter.raw) == (10, 15, b"")
    assert letter.digest == digest_of(b"\xc1 secret prompt")
    assert setup.lines(bridge, "batch_unreadable")[0]["seq"] == 10
    assert "secret" not in setup.logs[bridge.name].getvalue()


def test_bytes_of_unreadable_batches_are_kept_where_opted_in_and_not_without_bound(
    setup: Setup, eventually: Any
) -> None:
    entry, _ = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = followed(setup, eventually, dead_letter_raw=True, dead_letters_per_second_max=1.0)
    for i in range(6):
        engine.publish(b"\xc1%d" % i)
    setup.reader().until("r/0", 5)
    letter = decode_dead_letter(setup.messages(DEAD_LETTER, 1)[0].value())

    assert letter.raw == b"\xc10"
    assert setup.lines(bridge, "dead_letters_dropped")


def test_two_bridges_of_one_rank_are_harmless(setup: Setup, eventually: Any) -> None:
    """The later claim wins; the earlier bridge stops writing and says so."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    first = followed(setup, eventually)
    play(engine, batches[:50])
    eventually(lambda: status(first).last == 49)
    second = followed(setup, eventually)
    eventually(lambda: status(first).phase == "closed")
    play(engine, batches[50:])
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert rank.state.owner == status(second).owner > status(first).owner
    assert len(rank.of(Fence)) == 2
    (line,) = setup.lines(first, "rank_superseded")
    assert f"bridge {second.name}," in line["why"]
    assert line["why"].endswith("claims again once that one is silent for 30 s")
    owners = [record.owner for record in rank.records[rank.kinds().index("Fence", 1) :]]
    assert set(owners) == {status(second).owner}


def test_a_restarted_bridge_goes_on_in_the_same_life(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    first = followed(setup, eventually)
    play(engine, batches[:60])
    eventually(lambda: status(first).last == 59)
    first.stop()
    assert first.join(10)
    play(engine, batches[60:])
    followed(setup, eventually)
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert len(rank.of(Opened)) == 1
    assert [resumed.how for resumed in rank.of(Resumed)][-1] == "replay"
    assert setup.lines(first)[-1]["event"] == "bridge_stopped"
    assert setup.lines(first)[-1]["clean"] is True


def test_a_rank_without_replay_follows_from_its_first_batch(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry, replay=None)
    bridge = setup.bridge()
    eventually(lambda: status(bridge).phase == "opening")
    assert engine.wait_subscribers()
    play(engine, batches)
    rank = setup.reader().until("r/0", batches[-1].seq)

    assert rank.blocks == truth(entry, batches)
    assert not rank.state.partial


def test_the_same_process_keeps_the_life_of_a_rank_without_replay(setup: Setup, eventually: Any) -> None:
    """Batches 0..19 | flap | 20..: the identity is read again after the connection came back, and is the same."""
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry, replay=None)
    with Page() as page:
        bridge = setup.bridge(ranks=setup.ranks(page.url))
        assert engine.wait_subscribers()
        play(engine, batches[:20])
        eventually(lambda: status(bridge).last == 19)
        engine.flap()
        eventually(lambda: status(bridge).counts.suspended == 1)
        assert engine.wait_subscribers()
        play(engine, batches[20:])
        rank = setup.reader().until("r/0", batches[-1].seq)

    assert len(page.asked) == 2
    assert rank.of(Opened)[0].process == START
    assert [resumed.how for resumed in rank.of(Resumed)] == ["process"]
    assert rank.blocks == truth(entry, batches)


def test_ranks_that_are_not_heard_are_named(setup: Setup, eventually: Any) -> None:
    """One publishes nothing, one is not there, one is heard by replay only; each gets its own code."""
    entry, batches = recording("llama_s11")
    quiet = setup.engine(entry, "quiet")
    setup.engine(entry, "gone").stop()
    deaf = setup.engine(entry, "deaf")
    deaf.faults.drop = lambda _seq: True
    bridge = setup.bridge(silent_seconds=2.0, idle_probe_seconds=0.1)
    assert quiet.wait_subscribers()

    def told() -> set[tuple[str, str]]:
        if deaf.head < len(batches) - 1:
            play(deaf, batches[deaf.head + 1 : deaf.head + 2])
        codes = ("rank_unreachable", "rank_never_heard", "rank_heard_by_replay")
        return {(line["rank"], line["event"]) for code in codes for line in setup.lines(bridge, code)}

    eventually(lambda: len(told()) == 3)

    assert told() == {
        ("quiet/0", "rank_never_heard"),
        ("gone/0", "rank_unreachable"),
        ("deaf/0", "rank_heard_by_replay"),
    }


def test_an_engine_that_was_heard_and_dies_is_named(setup: Setup, eventually: Any) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    bridge = setup.bridge(silent_seconds=1.0, idle_probe_seconds=0.1)
    assert engine.wait_subscribers()

    def heard_live() -> int:
        if status(bridge).last == engine.head < len(batches) - 1:  # the first ones may come by replay
            play(engine, batches[engine.head + 1 : engine.head + 2])
        return status(bridge).counts.live

    eventually(heard_live)
    engine.stop()
    eventually(lambda: setup.lines(bridge, "rank_unreachable"))

    assert [line["data"] for line in setup.lines(bridge, "rank_unreachable")] == [engine.data]


def test_missing_topics_are_refused_with_the_command_that_makes_them(kafka: str, topic_prefix: str) -> None:
    with Setup(kafka, topic_prefix) as setup, pytest.raises(Refused, match="kvledger admin topics --topic-prefix"):
        setup.bridge()


def test_another_partition_count_is_refused(setup: Setup) -> None:
    with pytest.raises(Refused, match="has 4 partitions and 12 are configured"):
        setup.bridge(partitions=12)


def test_a_topic_with_another_policy_is_refused(setup: Setup, eventually: Any) -> None:
    change = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, setup.prefix + "kvledger.events", incremental_configs=[change])
    admin = setup.admin()
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)

    def refusal() -> str:
        try:
            setup.bridge().abort()
        except Refused as error:
            return str(error)
        return ""  # the broker has not heard of its own change yet

    assert "cleanup.policy=compact: set it to delete" in eventually(refusal)


def test_a_kafka_that_is_not_there_is_named() -> None:
    with Setup("127.0.0.1:1", "x.", request_seconds=1.0) as setup, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        setup.bridge()


def files(folder: Path, engine: StandIn) -> list[str]:
    replica = {"id": "r", "model": "llama", "data": engine.data, "replay": engine.replay}
    (folder / "replicas.yaml").write_text(yaml.safe_dump({"replicas": [replica]}))
    (folder / "models.yaml").write_text("models:\n  - model: llama\n")
    return ["--replicas", str(folder / "replicas.yaml"), "--models", str(folder / "models.yaml")]


def test_the_command_follows_logs_json_and_stops_cleanly_on_sigterm(setup: Setup, tmp_path: Path) -> None:
    entry, batches = recording("llama_s11")
    engine = setup.engine(entry)
    play(engine, batches[:30])
    environment = os.environ | {"KVLEDGER_KAFKA": setup.kafka, "KVLEDGER_TOPIC_PREFIX": setup.prefix}
    command = [sys.executable, "-m", "kvledger", "bridge", *files(tmp_path, engine), "--bridge-id", "node-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            setup.reader().until("r/0", 29)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    lines = [json.loads(line) for line in out.splitlines()]

    assert process.returncode == 0
    assert [line["event"] for line in lines] == [
        "bridge_started",
        "rank_claimed",
        "rank_opened",
        "bridge_stopping",
        "bridge_stopped",
    ]
    assert lines[0]["bridge"].startswith("node-1/")
    assert (lines[-1]["clean"], lines[-1]["unsent"]) == (True, 0)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 2, "replicas is not set: use --replicas FILE or KVLEDGER_REPLICAS"),
        (["--replicas", "none.yaml", "--models", "none.yaml"], 2, "none.yaml: cannot be read"),
        (["--partitions", "9", "--replicas", "{r}", "--models", "{m}"], 1, "has 4 partitions and 9 are configured"),
    ],
)
def test_the_command_says_what_is_wrong(setup: Setup, tmp_path: Path, flags: list[str], code: int, words: str) -> None:
    entry, _ = recording("llama_s11")
    _, replicas, _, models = files(tmp_path, setup.engine(entry))
    command = [sys.executable, "-m", "kvledger", "bridge", "--kafka", setup.kafka, "--topic-prefix", setup.prefix]
    command += [flag.format(r=replicas, m=models) for flag in flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
