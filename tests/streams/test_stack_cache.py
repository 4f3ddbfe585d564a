"""The download cache: only listed bytes, one download for many processes, words that help where a tool is missing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvledger.errors import Unavailable
from kvledger.stack import cache as cache_module
from kvledger.stack.cache import cache_folder, differing_jars, expected_jars, find_java, java_major, kafka_jars

GOOD = b"as listed"
LISTED = {"a.jar": hashlib.sha256(GOOD).hexdigest(), "b.jar": hashlib.sha256(GOOD).hexdigest()}


def program(folder: Path, name: str, text: str) -> Path:
    """An executable script that stands in for a tool of the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def fake_java(folder: Path, version: str) -> Path:
    return program(folder, "java", f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")


def fake_maven(folder: Path, content: bytes = GOOD) -> Path:
    """Writes the listed jars into the output folder and one line into ``calls``."""
    return program(
        folder,
        "mvn",
        f"echo called >> {folder}/calls\n"
        'for word in "$@"; do case $word in -DoutputDirectory=*) out=${word#*=};; esac; done\n'
        f"for jar in a b; do printf '%s' '{content.decode()}' > $out/$jar.jar; done\n",
    )


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a Java and the shell's own tools only, and a list of two jars."""
    folder = tmp_path / "bin"
    fake_java(folder, "17.0.9")
    jars = tmp_path / "list.sha256"
    jars.write_text("".join(f"{digest}  {name}\n" for name, digest in LISTED.items()))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(cache_module, "JAR_LIST", jars)
    return folder


def test_the_committed_list_names_every_jar_once_with_a_digest() -> None:
    listed = expected_jars()

    assert "kafka_2.13-4.4.0.jar" in listed
    assert len(listed) == 45
    assert {len(digest) for digest in listed.values()} == {64}


def test_jars_that_are_missing_changed_or_strange_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.jar").write_bytes(GOOD)
    (tmp_path / "b.jar").write_bytes(b"other")
    (tmp_path / "c.jar").write_bytes(GOOD)

    assert differing_jars(tmp_path, LISTED) == ["b.jar", "c.jar"]
    assert differing_jars(tmp_path / "absent", LISTED) == ["a.jar", "b.jar"]


def test_jars_are_downloaded_once_and_mended_when_damaged(tools: Path, tmp_path: Path) -> None:
    fake_maven(tools)
    cache = tmp_path / "cache"
    cache.mkdir()
    said: list[str] = []

    first = kafka_jars(cache, said.append)
    second = kafka_jars(cache, said.append)
    (first / "b.jar").write_bytes(b"damaged")
    third = kafka_jars(cache, said.append)

    assert first == second == third
    assert (third / "b.jar").read_bytes() == GOOD
    assert said == ["downloading Kafka's 2 jars with Maven (45 MB, once)…"] * 2
    assert (tools / "calls").read_text().splitlines() == ["called"] * 2


def test_other_bytes_than_listed_are_refused_and_not_kept(tools: Path, tmp_path: Path) -> None:
    fake_maven(tools, content=b"tampered")
    cache = tmp_path / "cache"
    cache.mkdir()

    with pytest.raises(Unavailable, match=r"Maven brought other bytes .* for: a\.jar, b\.jar"):
        kafka_jars(cache)
    assert [path.name for path in cache.iterdir()] == ["kafka.lock"]


def test_a_failing_maven_is_quoted(tools: Path, tmp_path: Path) -> None:
    program(tools, "mvn", "echo 'Could not resolve: no route'; exit 1")

    with pytest.raises(Unavailable, match=r"(?s)Maven failed with code 1.*no route"):
        kafka_jars(tmp_path)


def test_without_maven_the_text_says_what_to_install(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(os, "getuid", lambda: 1000)

    with pytest.raises(Unavailable, match=r"install Maven .*apt-get install maven.*KVLEDGER_KAFKA"):
        kafka_jars(tmp_path)


def test_as_root_on_debian_maven_is_installed(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven = fake_maven(tmp_path / "elsewhere")
    program(tools, "apt-get", f'echo "$@" >> {tools}/asked; [ "$1" != install ] || cp {maven} {tools}/mvn')
    monkeypatch.setenv("PATH", f"{tools}:{_coreutils(tmp_path)}")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    said: list[str] = []

    kafka_jars(tmp_path, said.append)

    assert said[0] == "installing Maven with apt-get (once)…"
    assert (tools / "asked").read_text().splitlines() == [
        "update -q",
        "install -y -q --no-install-recommends maven",
    ]


def _coreutils(tmp_path: Path) -> Path:
    """A folder with ``cp`` and nothing else: the machine's own Maven must not be found."""
    folder = tmp_path / "coreutils"
    folder.mkdir()
    for place in ("/bin/cp", "/usr/bin/cp"):
        if Path(place).exists():
            (folder / "cp").symlink_to(place)
            break
    return folder


def test_many_processes_download_once(tools: Path, tmp_path: Path) -> None:
    """All find the whole cache; a half-filled folder under its final name would fail some."""
    fake_maven(tools)
    code = (
        "import sys; from pathlib import Path; from kvledger.stack import cache\n"
        f"cache.JAR_LIST = Path({str(tmp_path / 'list.sha256')!r})\n"
        f"print(sorted(path.name for path in cache.kafka_jars(Path({str(tmp_path)!r})).glob('*.jar')))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(5)]
    printed = [child.communicate(timeout=60)[0].strip() for child in children]

    assert printed == ["['a.jar', 'b.jar']"] * 5
    assert (tools / "calls").read_text().splitlines() == ["called"]


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("25", 25), ("1.8.0_412", 8), ("21-ea", 21), ("nonsense", 0)]
)
def test_java_tells_its_major_version(tmp_path: Path, version: str, major: int) -> None:
    assert java_major(fake_java(tmp_path, version)) == major


def test_a_java_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    assert java_major(tmp_path / "absent") == 0
    assert java_major(program(tmp_path, "java", "exit 1")) == 0


def test_java_home_comes_before_the_path_and_old_ones_are_passed_over(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "old" / "bin", "11.0.2")
    new = fake_java(tmp_path / "new" / "bin", "21.0.1")

    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert find_java(tmp_path).binary == tools / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "new"))
    assert find_java(tmp_path).binary == new


def test_the_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "xdg"

    assert cache_folder({"KVLEDGER_CACHE": str(own), "XDG_CACHE_HOME": str(shared)}) == own
    assert cache_folder({"XDG_CACHE_HOME": str(shared)}) == shared / "kvledger"
    assert own.is_dir()


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(Unavailable, match="set KVLEDGER_CACHE to one that can be written"):
        cache_folder({"KVLEDGER_CACHE": str(tmp_path / "file" / "cache")})
