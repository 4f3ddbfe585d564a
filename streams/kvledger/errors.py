"""What can go wrong in the command itself, by what its user does next.

CommandError            exit code
├── BadInput      2     flags, files or environment are wrong: the text says which and what to write instead
└── Unavailable   1     a service is not there, cannot be started or is set up wrongly: the text says what to do

Errors of the other packages keep their own trees; ``exit_code`` places them by name.
"""

from __future__ import annotations

from typing import Final

EXIT_SERVICE: Final = 1
"""A service is not there or not as it must be; the same command may work later."""

EXIT_INPUT: Final = 2
"""What the user gave is wrong; the same command fails again. argparse uses the same number."""

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, what a shell reports for Ctrl-C."""

PACKAGES: Final = frozenset(
    {
        "kvledger",
        "kvledger_bridge",
        "kvledger_engine",
        "kvledger_index",
        "kvledger_router",
        "kvledger_streams",
        "kvledger_wire",
    }
)
"""The packages whose errors are written for operators: they are shown as one line."""

SERVICE_WORDS: Final = frozenset({"Unavailable", "Retryable", "Refused", "WrongTopic"})
"""Names of error classes, in any of our packages, that speak of a service and not of the user's input."""


class CommandError(Exception):
    """Any failure of the command that its user can do something about; never raised itself."""


class BadInput(CommandError):
    """Flags, files or environment are wrong."""


class Unavailable(CommandError):
    """A service is not there, cannot be started or is set up wrongly."""


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error that one of our packages defines; None for every other error and for a ``Bug``.

    A class may carry ``exit_code`` itself; else the names in its ancestry decide.
    """
    ours = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in PACKAGES]
    if not ours or any(kind.__name__ == "Bug" for kind in ours):
        return None
    declared = getattr(error, "exit_code", None)
    if isinstance(declared, int):
        return declared
    return EXIT_SERVICE if any(kind.__name__ in SERVICE_WORDS for kind in ours) else EXIT_INPUT
