"""Make or renew ``.venv`` with everything that demo, tests and lint need; quick where nothing changed.

``environment.py`` sets up; ``environment.py pins`` prints new exact versions for ``constraints.txt``. It runs on
whatever ``python3`` a machine has, before anything is installed, so: the standard library only, and a syntax that
Python 3.6 still reads, because an old release is to say that it is too old.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvledger.stamp"
LOG = VENV / "setup.log"
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"

OLDEST = (3, 11)
NEWEST = (3, 13)
"""Constraints are tried up to this release; a newer one is used only where there is no other."""

LOG_LINES = 25
"""How much of a failed pip's output is shown."""

PROGRESS_STEP = 20
"""Without a terminal, one line per so many packages."""


def say(text: str) -> None:
    """Tell the person at the terminal what is going on."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


def give_up(text: str) -> None:
    """Say what to do, and fail."""
    sys.stderr.write(f"setup: {text}\n")
    sys.exit(1)


def version_of(python: str) -> "tuple[int, int] | None":
    """(major, minor) of an interpreter; None if it does not run (a shim may stand there without its release)."""
    command = [python, "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False)
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def words(version: "tuple[int, int] | None") -> str:
    """``3.12``."""
    return ".".join(map(str, version or ()))


def choose_python() -> str:
    """This interpreter if its release was tried, else one on PATH that was, else a newer one, else give up."""
    own = (sys.version_info[0], sys.version_info[1])
    if OLDEST <= own <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and version_of(found) == (3, minor):
            say(f"python3 is {words(own)}; using {found} instead")
            return found
    if own < OLDEST:
        give_up(
            f"kvledger needs Python {words(OLDEST)} or newer; this is {words(own)} ({sys.executable}) and PATH has no "
            "newer one. Install one (Debian, Ubuntu: apt-get install python3 python3-venv; Fedora: dnf install "
            "python3.12; macOS: brew install python@3.12) or name it: make setup PYTHON=/path/to/python3.12"
        )
    say(f"Python {words(own)} is newer than what is tried here ({words(NEWEST)}); trying it")
    return sys.executable


def can_make_environments(python: str) -> bool:
    """Whether the interpreter has the modules for it; Debian packages them separately."""
    check = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode == 0


def need_environments(python: str) -> None:
    """Install those modules where we may, else say which package to install."""
    if can_make_environments(python):
        return
    package = f"python{words(version_of(python))}-venv"
    apt = shutil.which("apt-get")
    if apt and os.getuid() == 0:
        say(f"installing {package} with apt-get")
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for step in (["update"], ["install", "-y", "--no-install-recommends", package]):
            command = [apt, "-q", "-o", "Dpkg::Use-Pty=0", *step]
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if not can_make_environments(python):
        give_up(
            f"{python} lacks the modules venv and ensurepip. Install them (Debian, Ubuntu, as root: apt-get install "
            f"{package}) or name another interpreter: make setup PYTHON=/path/to/python3.12"
        )


def fingerprint(python: str) -> str:
    """What the environment depends on: declared and pinned versions, this script, Python's release, our place."""
    digest = hashlib.sha256()
    for path in (PROJECT, CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{version_of(python)} {ROOT}".encode())
    return digest.hexdigest()


def is_current(wanted: str) -> bool:
    """Whether a former run finished with the same ingredients and its environment still runs."""
    return STAMP.exists() and STAMP.read_text() == wanted and version_of(str(PYTHON)) is not None


def follow(command: "list[str]", total: int) -> None:
    """Run pip, add what it says to the log, and show how far it is. Raises CalledProcessError."""
    terminal = sys.stdout.isatty()
    wipe = "\r\033[K" if terminal else ""
    seen = 0
    with subprocess.Popen(
        command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    ) as child, LOG.open("a") as log:
        for line in child.stdout or ():
            log.write(line)
            log.flush()
            collected = re.match(r"Collecting ([A-Za-z0-9._-]+)", line)
            seen += bool(collected)
            if collected and terminal:
                sys.stdout.write(f"{wipe}setup: {seen} of about {total} packages: {collected.group(1)}")
                sys.stdout.flush()
            elif collected and seen % PROGRESS_STEP == 0:
                say(f"{seen} of about {total} packages")
            elif line.startswith("Installing collected packages"):
                sys.stdout.write(wipe)
                count = line.count(",") + 1
                say(f"installing {count} package{'s' if count > 1 else ''}")
    sys.stdout.write(wipe)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command)


def pip(*arguments: str) -> "list[str]":
    """An install command of the environment's own pip."""
    return [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]


def install(python: str) -> None:
    """Make the environment and install everything into it; what an interrupted run left is used again."""
    if version_of(str(PYTHON)) != version_of(python):
        say(f"making .venv with Python {words(version_of(python))}")
        shutil.rmtree(str(VENV), ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(VENV)], check=True)
    LOG.write_text("")
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line]
    follow(pip("--upgrade", *[line for line in pins if line.startswith("pip==")]), 1)
    bounds = ["-c", str(CONSTRAINTS), "--build-constraint", str(CONSTRAINTS)]
    follow(pip("--progress-bar", "off", *bounds, "-e", ".[all]", "--group", "dev"), len(pins))


def set_up() -> None:
    """The whole set-up; one line where there is nothing to do."""
    started = time.monotonic()
    python = choose_python()
    with PROJECT.open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # two at once would install into each other's half-made environment
        wanted = fingerprint(python)
        if is_current(wanted):
            say(".venv is up to date")
            return
        need_environments(python)
        try:
            install(python)
        except subprocess.CalledProcessError as error:
            if LOG.exists():
                sys.stderr.write("\n".join(LOG.read_text().splitlines()[-LOG_LINES:]) + "\n")
            give_up(
                f"'{' '.join(error.cmd[1:4])}' failed with code {error.returncode}; the whole log is {LOG}. Does pip "
                "reach its package index? A second try continues where this one stopped"
            )
        STAMP.write_text(wanted)
    say(f"done in {time.monotonic() - started:.0f} s; try: .venv/bin/kvledger --help")


def print_pins() -> None:
    """The constraints with the versions that the environment has now; what only builds the wheel stays as it is."""
    command = [str(PYTHON), "-m", "pip", "freeze", "--all", "--exclude-editable", "--exclude", "setuptools"]
    frozen = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    present = CONSTRAINTS.read_text().splitlines()
    versions = {line.partition("==")[0].lower().replace("_", "-"): line for line in present + frozen if "==" in line}
    header = [line for line in present if line.startswith("#")]
    sys.stdout.write("\n".join(header + [versions[name] for name in sorted(versions)]) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["pins"]:
        print_pins()
    else:
        set_up()
