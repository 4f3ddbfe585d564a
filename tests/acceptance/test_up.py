"""``kvledger up`` as a user runs it: in the foreground, until told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvledger.stack.kafka import broker_answers
from kvledger.stack.redis import redis_answers
from kvledger_engine.standin import StandIn

Eventually = Callable[..., Any]
READY_SECONDS_MAX = 100.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Up:
    """A running ``kvledger up``."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvledger", "up", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def addresses(self) -> dict[str, str]:
        """What it prints once everything was started: ``kafka`` and ``redis``."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(2)]
        assert all(len(line) == 2 for line in lines), self.end()
        return dict(lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self, seconds: float = READY_SECONDS_MAX) -> tuple[int, str]:
        """Exit code and everything it said on stderr."""
        _, said = self.process.communicate(timeout=seconds)
        return self.process.returncode, said


@pytest.fixture
def up() -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def factory(*words: str, **environment: str) -> Up:
        started.append(Up(*words, environment=environment))
        return started[-1]

    yield factory
    for one in started:
        one.process.kill()
        one.process.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_a_kill_leaves_nothing_and_the_data_serves_the_next_run(
    up: Callable[..., Up], tmp_path: Path, eventually: Eventually
) -> None:
    """Killed hard, started again on the same folder, stopped by Ctrl-C."""
    first = up("--data", str(tmp_path), "--partitions", "2")
    addresses = first.addresses()
    children = first.children()
    assert len(children) == 3  # Kafka, Redis, the fold
    assert broker_answers(addresses["kafka"], 10)
    assert redis_answers(addresses["redis"])
    first.process.kill()
    eventually(lambda: gone(children))

    second = up("--data", str(tmp_path), "--partitions", "2")
    assert second.addresses() == addresses
    children = second.children()
    second.process.send_signal(signal.SIGINT)
    code, said = second.end()

    assert code == 0
    assert said.splitlines()[-1] == "kvledger up: stopped; nothing is left running"
    assert gone(children)


def test_given_services_are_used_and_a_childs_death_stops_all(
    up: Callable[..., Up], kafka: str, redis_url: str, topic_prefix: str, namespace: str
) -> None:
    words = ["--topic-prefix", topic_prefix, "--namespace", namespace]
    running = up(*words, KVLEDGER_KAFKA=kafka, KVLEDGER_REDIS=redis_url)
    assert running.addresses() == {"kafka": kafka, "redis": redis_url}
    (fold,) = running.children()
    fold.kill()
    code, said = running.end()

    assert code == 1
    assert "kvledger: kvledger streams ended with code -9" in said
    assert redis_answers(redis_url)


def test_an_engine_named_in_a_file_is_followed_into_the_index(
    up: Callable[..., Up],
    kafka: str,
    redis_url: str,
    topic_prefix: str,
    namespace: str,
    recordings: Path,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    """Engine, bridge, Kafka, fold, Redis: what the engine stored is claimed; SIGTERM ends bridge and fold in order."""
    wire = recordings / "wire" / "g12_v0.33"
    payload = (wire / "001_store_chain_int.bin").read_bytes()
    events = json.loads((wire / "index.json").read_text())["batches"][0]["batch"]["events"]
    stored = sum(len(event["fields"]["block_hashes"]) for event in events)
    words = ["--topic-prefix", topic_prefix, "--namespace", namespace]
    with StandIn() as engine:
        engine.publish(payload)
        replicas, models = tmp_path / "replicas.yaml", tmp_path / "models.yaml"
        replicas.write_text(f"replicas: [{{id: pod-a, model: m, data: '{engine.data}', replay: '{engine.replay}'}}]\n")
        models.write_text("models: [{model: m, groups: [{group: 0, kind: full_attention, block_size: 16}]}]\n")
        words += ["--replicas", str(replicas), "--models", str(models)]
        running = up(*words, KVLEDGER_KAFKA=kafka, KVLEDGER_REDIS=redis_url)
        running.addresses()
        children = running.children()
        assert len(children) == 2
        eventually(lambda: claims(redis_url, namespace), READY_SECONDS_MAX)
        listed = claims(redis_url, namespace)
        running.process.terminate()
        code, said = running.end()

    assert [line["replica"] for line in listed] == ["pod-a"] * stored
    assert code == 0, said
    assert gone(children)


def claims(redis_url: str, namespace: str) -> list[dict[str, Any]]:
    """What ``kvledger dump`` lists."""
    command = [sys.executable, "-m", "kvledger", "dump", "--json", "--redis", redis_url, "--namespace", namespace]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_topics_that_do_not_fit_are_refused(
    up: Callable[..., Up],
    create_topics: Callable[..., None],
    kafka: str,
    redis_url: str,
    topic_prefix: str,
) -> None:
    create_topics(topic_prefix, partitions=3)
    words = ["--topic-prefix", topic_prefix, "--partitions", "5"]

    code, said = up(*words, KVLEDGER_KAFKA=kafka, KVLEDGER_REDIS=redis_url).end()

    assert code == 1
    assert said.splitlines()[-1].startswith(
        f"kvledger: topic {topic_prefix}kvledger.events has 3 partitions and 5 are configured"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "r.yaml"], "a bridge needs both --replicas FILE and --models FILE"),
        (["--replicas", "absent.yaml", "--models", "absent.yaml"], "--replicas absent.yaml is not a file"),
        (["--partitions", "0"], "--partitions 0 is less than 1"),
    ],
)
def test_wrong_flags_are_named_before_anything_starts(up: Callable[..., Up], words: list[str], said: str) -> None:
    assert up(*words).end() == (2, f"kvledger: {said}\n")
