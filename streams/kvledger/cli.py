"""``kvledger``: one table of commands, each in a module of its own that is imported only when it is asked for.

A command module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). Errors that our packages define
become one line on stderr; everything else is a defect and shows its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple

from kvledger.errors import EXIT_INPUT, EXIT_INTERRUPTED, BadInput, exit_code

EXIT_BROKEN_PIPE: Final = 141
"""128 + SIGPIPE: whoever read our output has left."""

DEBUG: Final = "KVLEDGER_DEBUG"
"""Set to 1, errors show their traceback."""


class Command(NamedTuple):
    """One line of ``kvledger --help``; ``extra`` is what to install where an import fails."""

    summary: str
    extra: str


COMMANDS: Final[dict[str, Command]] = {
    "up": Command("run Kafka, Redis, the fold and (with --replicas) the bridge here, in the foreground", "all"),
    "bridge": Command("run the bridge of a node: engine events to Kafka", "bridge"),
    "streams": Command("run a stream worker: the log to Redis", "streams"),
    "admin": Command("create or check what operators own: topics", "streams"),
    "engine": Command("play a recording as a stand-in engine", "bridge"),
    "match": Command("ask the index who holds how much of a prompt", "all"),
    "dump": Command("list what the index claims", "all"),
    "decode": Command("decode engine payloads to JSON", "bridge"),
    "verify": Command("compare predictions with a recorded engine's own answers", "all"),
    "record": Command("record a session of a vLLM server, for verify", "all"),
    "demo": Command("replay three recorded engines through everything and compare", "all"),
}


class _Parser(argparse.ArgumentParser):
    """Says what it does not know with its own usage; argparse leaves that to the parser above it, down to the first."""

    def parse_known_args(  # type: ignore[override]  # one of several overloads: argparse itself calls it with both
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; an error of ours becomes its text on stderr, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in arguments if not word.startswith("-")), "")
    debug = os.environ.get(DEBUG) == "1"
    try:
        try:
            return _run(arguments, name)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        if debug or _is_ours(error):
            raise
        return _say(_missing(error, name), EXIT_INPUT)
    except Exception as error:
        code = exit_code(error)
        if debug or code is None:
            raise
        return _say(str(error), code)


def _run(arguments: list[str], name: str) -> int:
    parsed, module = _parse(arguments, name)
    if module is None:
        return EXIT_INPUT
    status: int = module.run(parsed)
    return status


def _parse(arguments: list[str], name: str) -> tuple[argparse.Namespace, ModuleType | None]:
    """Build the parser, importing the named command only; prints the help where none is named."""
    parser = _Parser(
        prog="kvledger",
        description="A durable, replayable ledger of vLLM's KV-cache blocks, and the prefix index that routers read.",
        epilog=f"'kvledger COMMAND --help' tells more. {DEBUG}=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"kvledger {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    module = None
    for word, command in COMMANDS.items():
        sub = commands.add_parser(
            word,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
        )
        if word == name:
            module = _load(word)
            module.add_arguments(sub)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
    return parsed, module


def _load(name: str) -> ModuleType:
    """The module of a command; a command that this installation lacks is bad input, not a traceback."""
    path = f"kvledger.commands.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == path:
            msg = f"'kvledger {name}' is not part of this installation"
            raise BadInput(msg) from error
        raise


def _is_ours(error: ModuleNotFoundError) -> bool:
    """Whether the missing module should have come with us: then it is a defect, not a missing extra."""
    return error.name is None or error.name.partition(".")[0].startswith("kvledger")


def _missing(error: ModuleNotFoundError, name: str) -> str:
    """What to install where a command's libraries are absent."""
    return (
        f"'kvledger {name}' needs the Python package that provides '{error.name}'; "
        f"install it with: pip install 'kvledger[{COMMANDS[name].extra}]'"
    )


def _say(text: str, code: int) -> int:
    """The error on stderr, usually one line; more only where a service's last words are quoted. Returns ``code``."""
    print(f"kvledger: {text}", file=sys.stderr)
    return code


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush fails on no closed pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def _version() -> str:
    """The installed version; a source tree that nobody installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvledger")
    except PackageNotFoundError:
        return "(not installed)"
