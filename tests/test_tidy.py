"""House rules as tests, each with a canary that proves that the rule can fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("producers", "streams", "sinks")
CODE_ROOTS = (*SOURCE_ROOTS, "tests", ".make")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
UNFINISHED = re.compile(r"\b(?:FIXME|XXX)\b|\bTODO\b(?!\s*\(#\d+\))")
"""``TODO (#12)`` names an issue; nothing else is allowed to wait."""

REGISTRIES = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("repo", "maven", "apache", "org"),
        ("repo1", "maven", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
        ("docker", "io"),
    )
)
"""In parts, so that this file passes its own rule. Which registry or mirror a client asks is the user's choice."""

LUA_HEADER = ("KEYS", "ARGV", "returns", "cost")

Rule = Callable[[Path], Iterator[str]]


def tracked(*roots: str, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Files of the repository, present or about to be added, without recordings."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *roots]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = (ROOT / name for name in names if not name.startswith("tests/fixtures/"))
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines"


def long_files(path: Path) -> Iterator[str]:
    lines = len(path.read_text().splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{path} has {lines} lines"


def unfinished(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{path}:{number} {line.strip()}"


def vague_names(path: Path) -> Iterator[str]:
    if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES:
        yield f"{path} says nothing about what is in it"


def registry_hosts(path: Path) -> Iterator[str]:
    text = path.read_bytes().decode(errors="replace")
    for host in REGISTRIES:
        if re.search(rf"(?<![\w-]){re.escape(host)}\b", text):
            yield f"{path} names {host}"


def lua_without_header(path: Path) -> Iterator[str]:
    comments = "\n".join(line for line in path.read_text().splitlines() if line.lstrip().startswith("--"))
    missing = [word for word in LUA_HEADER if not re.search(rf"\b{word}\b", comments, re.IGNORECASE)]
    if missing:
        yield f"{path} does not tell its {', '.join(missing)}"


def untyped_packages(path: Path) -> Iterator[str]:
    if path.parent.parent.name in SOURCE_ROOTS and not (path.parent / "py.typed").is_file():
        yield f"{path.parent} has no py.typed"


RULES: dict[str, tuple[Rule, Callable[[], list[Path]], str, str]] = {
    "functions are short": (
        long_functions,
        lambda: tracked(*CODE_ROOTS, suffixes=(".py",)),
        "one.py",
        "def one():\n" + "    x = 1\n" * FUNCTION_LINES_MAX,
    ),
    "files are short": (
        long_files,
        lambda: tracked(*CODE_ROOTS, suffixes=(".py", ".lua")),
        "one.py",
        "x = 1\n" * (FILE_LINES_MAX + 1),
    ),
    "nothing is left unfinished without an issue": (
        unfinished,
        lambda: [path for path in tracked(*CODE_ROOTS, "Makefile", ".ci") if path != Path(__file__)],
        "one.py",
        "# TODO: later\n",
    ),
    "names say what is inside": (
        vague_names,
        lambda: tracked(*CODE_ROOTS, suffixes=(".py", ".lua")),
        "utils.py",
        "",
    ),
    "no registry is named": (registry_hosts, tracked, "pom.xml", f"<url>https://{REGISTRIES[2]}/maven2</url>"),
    "scripts tell their contract": (
        lua_without_header,
        lambda: tracked(*SOURCE_ROOTS, suffixes=(".lua",)),
        "one.lua",
        "-- KEYS: one. ARGV: none. Returns nothing.\nreturn 1\n",
    ),
    "packages are typed": (
        untyped_packages,
        lambda: [path for path in tracked(*SOURCE_ROOTS) if path.name == "__init__.py"],
        "sinks/one/__init__.py",
        "",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_repository_keeps(name: str) -> None:
    rule, files, _, _ = RULES[name]
    paths = files()

    assert paths, "the rule looks at nothing"
    assert [finding for path in paths for finding in rule(path)] == []


@pytest.mark.parametrize("name", RULES)
def test_a_canary_breaks(name: str, tmp_path: Path) -> None:
    rule, _, file_name, text = RULES[name]
    canary = tmp_path / file_name
    canary.parent.mkdir(parents=True, exist_ok=True)
    canary.write_text(text)

    assert len(list(rule(canary))) == 1


def test_a_todo_with_an_issue_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("# TODO (#12): when engines send it\n")

    assert list(unfinished(path)) == []


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the packages of ``tree``, by the contracts of ``tree/pyproject.toml``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / root) for root in SOURCE_ROOTS)}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_rooms_import_each_other_only_as_agreed() -> None:
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_import_breaks_each_contract(tmp_path: Path) -> None:
    """One forbidden import per contract; each contract must notice."""
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = {
        "producers/kvledger_bridge/canary.py": "import kvledger_router\nimport kvledger.cli\nimport faust\n",
        "sinks/kvledger_router/hits.py": "import zmq\n",
        "streams/kvledger_streams/fold.py": "import socket\n",
    }
    for name, text in planted.items():
        path = tmp_path / name
        before = path.read_text() if path.exists() else '"""Planted."""\n'
        path.write_text(before + text)

    done = lint_imports(tmp_path)

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert done.returncode != 0
    assert [one["name"] for one in contracts if f"{one['name']} BROKEN" not in done.stdout] == []


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_everything_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]

    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert len(pins) > 50


def test_every_package_is_in_the_wheel_and_under_the_import_rules() -> None:
    """A package that is forgotten there works in the tree and fails for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    present = sorted(f"{path.parent.parent.name}/{path.parent.name}" for path in ROOT.glob("[ps]*/*/py.typed"))

    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == present
    assert sorted(project["tool"]["importlinter"]["root_packages"]) == sorted(name.split("/")[1] for name in present)
