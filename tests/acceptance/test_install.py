"""What users install: the built wheel, in an environment of its own, far from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("confluent_kafka", "zmq", "faust", "aiokafka", "yaml", "structlog")
"""What a router's process must not need."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("wheel")]  # it is built once


def run(*command: str | Path, folder: Path, code: int = 0) -> str:
    """Run a command away from the sources and from this environment; returns what it printed, both streams."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    constraints = ROOT / "constraints.txt"
    words = ["wheel", "--quiet", "--no-deps", "--build-constraint", str(constraints), "--wheel-dir", str(folder)]
    run(sys.executable, "-m", "pip", *words, ROOT, folder=folder)
    (built,) = folder.glob("kvledger-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the base install in it."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=True)
    binary = folder / "bin" / "python"
    words = ["install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    run(binary, "-m", "pip", *words, folder=folder)
    return binary


def test_the_wheel_carries_everything_that_runs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if "dist-info" not in name}

    assert {
        "kvledger/stack/pom.xml",
        "kvledger/stack/kafka-jars.sha256",
        "kvledger/stack/launch.py",
        "kvledger_router/py.typed",
    } <= set(names)
    for source in (path for root in ("producers", "streams", "sinks") for path in (ROOT / root).rglob("*.lua")):
        assert "/".join(source.relative_to(ROOT).parts[1:]) in names
    assert packages == {path.parent.name for path in ROOT.glob("[ps]*/*/py.typed")}


def test_a_router_needs_no_kafka_zmq_or_faust(python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, kvledger_router\n"
        f"print([name for name in {ABSENT!r} if importlib.util.find_spec(name)])\n"
        "print(kvledger_router.__file__)\n"
        "print(kvledger_router.Index.__name__)"
    )
    absent, place, name = run(python, "-c", code, folder=tmp_path).splitlines()

    assert absent == "[]"
    assert not Path(place).is_relative_to(ROOT)
    assert name == "Index"


def test_the_command_says_which_extra_is_missing(python: Path, tmp_path: Path) -> None:
    command = python.with_name("kvledger")

    words = ["--kafka", "127.0.0.1:1", "--replicas", "r.yaml", "--models", "m.yaml"]

    assert "usage: kvledger" in run(command, "--help", folder=tmp_path)
    said = run(command, "bridge", *words, folder=tmp_path, code=2)
    assert said.startswith("kvledger: 'kvledger bridge' needs")
    assert said.endswith("install it with: pip install 'kvledger[bridge]'\n")
    assert len(said.splitlines()) == 1
