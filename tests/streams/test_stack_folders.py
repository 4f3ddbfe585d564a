"""Data folders: one process at a time, temporary ones leave nothing, also after a kill."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvledger.errors import BadInput
from kvledger.stack.folders import ABANDONED_SECONDS_MIN, LOCK_NAME, TEMP_PREFIX, DataFolder, FileLock, sweep_abandoned


def abandoned(root: Path, name: str, seconds: float = 10 * ABANDONED_SECONDS_MIN) -> Path:
    """A folder as a killed process leaves it."""
    folder = root / (TEMP_PREFIX + name)
    (folder / "kafka").mkdir(parents=True)
    (folder / LOCK_NAME).touch()
    then = time.time() - seconds
    os.utime(folder / LOCK_NAME, (then, then))
    return folder


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = DataFolder(tmp_path / "data")

    with pytest.raises(BadInput, match="is in use by another process"):
        DataFolder(tmp_path / "data")
    first.close()
    DataFolder(tmp_path / "data").close()


def test_a_given_folder_stays_and_a_temporary_one_goes(tmp_path: Path) -> None:
    given, temporary = DataFolder(tmp_path / "data"), DataFolder()
    (temporary.path / "kafka").mkdir()
    given.close()
    temporary.close()

    assert given.path.is_dir()
    assert not temporary.path.exists()


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BadInput, match="cannot be made: Not a directory"):
        DataFolder(tmp_path / "file" / "data")


def test_folders_of_killed_processes_are_swept(tmp_path: Path) -> None:
    old = abandoned(tmp_path, "old")
    young = abandoned(tmp_path, "young", seconds=0)
    used = abandoned(tmp_path, "used")
    foreign = tmp_path / "somebody-elses"
    foreign.mkdir()

    with FileLock(used / LOCK_NAME):
        swept = sweep_abandoned(tmp_path)

    assert swept == 1
    assert not old.exists()
    assert young.exists()
    assert used.exists()
    assert foreign.exists()
