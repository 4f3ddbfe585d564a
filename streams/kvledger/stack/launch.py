"""Become another program that the kernel kills when our parent dies: ``launch.py PARENT_PID PROGRAM ARGUMENT…``.

Run as a script by a bare interpreter, so it imports nothing of ours. It exists because ``preexec_fn`` may deadlock in a
process with threads. On systems without ``prctl`` the program simply runs.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NOT_FOUND = 127


def main() -> int:
    """Ask for the signal, check that the parent has not died meanwhile, and exec. Returns only on failure."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return 1
    try:
        os.execvp(command[0], command)  # noqa: S606 - the caller resolved the program
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        return EXIT_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
