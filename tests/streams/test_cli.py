"""The ``kvledger`` command itself: what it imports, what it says when something is wrong, how it ends."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from kvledger import cli
from kvledger.errors import BadInput, Unavailable, exit_code
from kvledger_index.errors import Corrupt, InvalidInput, Refused
from kvledger_index.errors import Unavailable as IndexUnavailable
from kvledger_wire.errors import Poison, WrongTopic

Install = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make ``kvledger demo`` run a given function."""

    def put(run: Callable[[argparse.Namespace], int]) -> None:
        module = ModuleType("kvledger.commands.demo")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


def test_a_command_gets_its_arguments_and_returns_its_code(install: Install) -> None:
    install(lambda args: int(args.number) + 4)

    assert cli.main(["demo", "--number", "3"]) == 7


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["dump", "--foo"], "usage: kvledger dump "),
        (["admin", "topics", "--foo"], "usage: kvledger admin topics "),
        (["--foo"], "usage: kvledger "),
    ],
)
def test_an_unknown_flag_is_told_with_the_usage_of_its_command(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    err = capsys.readouterr().err

    assert err.startswith(usage)
    assert err.endswith("error: unrecognized arguments: --foo\n")


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; from kvledger.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith(('kvledger.commands.', 'confluent', 'zmq', 'faust'))])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert printed.splitlines()[-1] == "[]"
    assert [name for name in cli.COMMANDS if f"\n    {name} " not in printed] == []


def test_without_a_command_the_help_is_shown_and_it_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvledger 0.")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("x"), 2),
        (Unavailable("x"), 1),
        (InvalidInput("x"), 2),
        (Corrupt("x"), 2),
        (Poison("x"), 2),
        (IndexUnavailable("x"), 1),
        (Refused("x"), 1),
        (WrongTopic("x"), 1),
    ],
)
def test_errors_of_our_packages_become_one_line_and_a_code(
    install: Install, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    install(raising(error))

    assert cli.main(["demo"]) == code
    assert capsys.readouterr() == ("", "kvledger: x\n")


def test_an_error_may_carry_its_own_code() -> None:
    class Special(BadInput):
        exit_code = 5

    class Bug(BadInput):
        __module__ = "kvledger_streams.errors"

    assert exit_code(Special("x")) == 5
    assert exit_code(Bug("x")) is None
    assert exit_code(ValueError("x")) is None


def test_defects_show_their_traceback(install: Install) -> None:
    install(raising(ZeroDivisionError()))

    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_debug_shows_the_traceback_of_ours_too(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(raising(BadInput("x")))
    monkeypatch.setenv("KVLEDGER_DEBUG", "1")

    with pytest.raises(BadInput):
        cli.main(["demo"])


def test_a_missing_extra_says_what_to_install(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(ModuleNotFoundError("No module named 'zmq'", name="zmq")))

    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err.endswith("provides 'zmq'; install it with: pip install 'kvledger[all]'\n")


def test_a_missing_module_of_ours_is_a_defect(install: Install) -> None:
    install(raising(ModuleNotFoundError("No module named 'kvledger_wire.x'", name="kvledger_wire.x")))

    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


def test_a_command_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command("later", "audit"))

    assert cli.main(["audit"]) == 2
    assert capsys.readouterr().err == "kvledger: 'kvledger audit' is not part of this installation\n"


def test_ctrl_c_is_quiet(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(KeyboardInterrupt()))

    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["--help"], ["admin", "topics", "--help"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    """``kvledger … | true``: no traceback, no complaint of the interpreter at its exit."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvledger", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        said = child.stderr.read()

    assert said == ""
    assert child.returncode in {0, 141}
