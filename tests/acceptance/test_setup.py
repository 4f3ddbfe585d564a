"""The set-up script on machines that lack something; what it does on a good one is shown by every CI run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on a copy of what it reads, and on an environment that is not there yet."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".make" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, path in {"PROJECT": "pyproject.toml", "CONSTRAINTS": "constraints.txt"}.items():
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
        monkeypatch.setattr(module, name, tmp_path / path)
    for name, path in {"VENV": "venv", "STAMP": "venv/stamp", "LOG": "venv/log"}.items():
        monkeypatch.setattr(module, name, tmp_path / path)
    (tmp_path / "venv").mkdir()
    return module


def fake_python(folder: Path, name: str, printed: str, code: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {printed}\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_without_a_newer_one_says_what_to_install(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SystemExit) as ended:
        script.choose_python()

    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("setup: kvledger needs Python 3.11 or newer; this is 3.9")
    assert "make setup PYTHON=" in said


def test_a_newer_python_on_the_path_is_used_if_it_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shim may stand there without its release."""
    fake_python(tmp_path / "bin", "python3.13", "no such release", code=127)
    working = fake_python(tmp_path / "bin", "python3.12", "3 12")
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    assert script.choose_python() == str(working)


def test_a_python_without_venv_names_the_package(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = fake_python(tmp_path / "bin", "python3.12", "3 12", code=1)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    with pytest.raises(SystemExit):
        script.need_environments(str(python))
    assert "apt-get install python3.12-venv" in capsys.readouterr().err


def test_only_a_change_of_the_ingredients_makes_work(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = script.fingerprint(sys.executable)
    script.STAMP.write_text(before)
    monkeypatch.setattr(script, "PYTHON", Path(sys.executable))

    assert script.is_current(script.fingerprint(sys.executable))
    script.CONSTRAINTS.write_text("pip==1.0\n")
    assert not script.is_current(script.fingerprint(sys.executable))


def test_an_environment_that_does_not_run_is_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade of the machine's Python, which leaves a dead link."""
    wanted = script.fingerprint(sys.executable)
    script.STAMP.write_text(wanted)
    monkeypatch.setattr(script, "PYTHON", tmp_path / "gone")

    assert not script.is_current(wanted)


def test_every_target_of_the_makefile_is_described() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    described = set(re.findall(r"^([a-z]+):.*## \S", text, re.MULTILINE))

    assert targets == described
    assert {"setup", "demo", "test", "lint", "clean"} <= targets
