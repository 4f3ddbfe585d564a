"""Folders that one process at a time may use, and the lock that says so."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvledger.errors import BadInput

TEMP_PREFIX: Final = "kvledger-stack-"
LOCK_NAME: Final = "in-use.lock"
ABANDONED_SECONDS_MIN: Final = 60.0
"""A temporary folder younger than this may be between its creation and its lock."""


class FileLock:
    """An exclusive flock. It ends with ``release``, or when every process that holds the descriptor is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it."""
        return self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire(self) -> None:
        """Wait for the lock, however long its holder needs."""
        self._flock(fcntl.LOCK_EX)

    def _flock(self, how: int) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, how)
        except OSError as error:
            os.close(descriptor)
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        self.descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class DataFolder:
    """Where services keep data and logs: a given folder that stays, or a temporary one that ``close`` deletes."""

    def __init__(self, given: Path | None = None) -> None:
        """Make and lock the folder. Raises BadInput if another process uses it or it cannot be made."""
        self.temporary = given is None
        if given is None:
            sweep_abandoned()
            self.path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
        else:
            self.path = given.absolute()
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                msg = f"data folder {self.path} cannot be made: {error.strerror}; give another one"
                raise BadInput(msg) from error
        self._lock = FileLock(self.path / LOCK_NAME)
        if not self._lock.try_acquire():
            msg = f"data folder {self.path} is in use by another process; stop that one or give another folder"
            raise BadInput(msg)

    @property
    def descriptor(self) -> int:
        """The lock's descriptor: children that inherit it keep the folder locked until they are gone."""
        return self._lock.descriptor

    def close(self) -> None:
        """Unlock, and delete a temporary folder; call it only once the services in it are gone."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def sweep_abandoned(root: Path | None = None) -> int:
    """Delete our temporary folders whose processes were killed. Returns how many; never touches a locked one."""
    swept = 0
    now = time.time()
    for folder in (root or Path(tempfile.gettempdir())).glob(TEMP_PREFIX + "*"):
        with contextlib.suppress(OSError):
            path = folder / LOCK_NAME
            if folder.stat().st_uid != os.getuid() or now - path.stat().st_mtime < ABANDONED_SECONDS_MIN:
                continue
            lock = FileLock(path)
            if lock.try_acquire():
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
                swept += 1
    return swept
