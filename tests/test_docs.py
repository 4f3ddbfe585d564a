"""What the documents promise is what the code has: settings, commands, links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import kvledger_bridge.settings as bridge
import kvledger_streams.settings as streams
from kvledger.cli import COMMANDS
from kvledger_bridge.telemetry import Code as BridgeCode
from kvledger_streams.telemetry import Code as WorkerCode

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
FAILURES = (ROOT / "docs/failures.md").read_text()
FAILURE_KINDS = {
    "ENG": "01 02 03 04 05 06 07 08 10 11 13 14 15 16 18 20",
    "BRG": "01 02 04 05 06 09 10 11 13 14",
    "KAF": "01 02 04 05 07 08 09 10 11",
    "FAU": "01 02 03 04 06 07 08 09 10 11 12 14 15 16",
    "RED": "01 02 03 04 05 06 08 09 10 11 13 16 17",
    "QRY": "01 02 04 05 07 09",
    "DEP": "01 02 04 05 06 07 08 09",
    "AUD": "01 02 05 06 07 08",
}
"""The kinds of failure that the list must answer for; gaps in the numbers are kinds that were merged or dropped."""

TEST_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def row(variable: str, default: Any) -> str:
    """How a setting stands in its table: the start of its line."""
    shown = "required" if default is msgspec.NODEFAULT else "none" if default == "" else f"`{default}`"
    return f"| `{variable}` | {shown} |"


@pytest.mark.parametrize("module", [bridge, streams], ids=["bridge", "streams"])
def test_every_setting_stands_in_the_document_with_its_default(module: Any) -> None:
    missing = [
        line
        for field in msgspec.structs.fields(module.Settings)
        if (line := row(module.variable_of(field.name), field.default)) not in CONFIGURATION
    ]

    assert missing == []


def test_the_document_names_no_setting_that_does_not_exist() -> None:
    known = {m.variable_of(f.name) for m in (bridge, streams) for f in msgspec.structs.fields(m.Settings)}

    assert set(re.findall(r"^\| `(KVLEDGER_\w+)` \|", CONFIGURATION, re.MULTILINE)) == known


def listed(page: str, section: str) -> list[str]:
    """Event codes that have a row with a text in a section of the operator's page, in its order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)` \| (?:info|warning|error) \| \S.* \|$", text, re.MULTILINE)


@pytest.mark.parametrize(("section", "codes"), [("Bridge", BridgeCode), ("Stream worker", WorkerCode)])
def test_every_event_of_the_logs_stands_on_the_operators_page(section: str, codes: Any) -> None:
    assert listed(OPERATIONS, section) == list(get_args(codes))


def test_an_event_that_is_not_on_the_operators_page_is_noticed() -> None:
    gone = re.sub(r"^\| `rank_gap` .*\n", "", OPERATIONS, flags=re.MULTILINE)

    assert set(listed(OPERATIONS, "Bridge")) - set(listed(gone, "Bridge")) == {"rank_gap"}


def test_every_command_stands_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()

    assert [name for name in COMMANDS if not re.search(rf"`(kvledger )?{name}\b", readme)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())

    assert [target for target in targets if "://" not in target and not (document.parent / target).exists()] == []


def failures() -> dict[str, list[str]]:
    """Rows of the list of failures by id: the cells behind it."""
    rows = re.findall(r"^\| ([A-Z]{3}-\d\d) \|(.*)\|$", FAILURES, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows), "an id stands twice"
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in rows}


def absent(named: list[tuple[str, str]], root: Path = ROOT) -> list[str]:
    """Those of the named tests that are not there."""
    found = []
    for path, name in named:
        text = (root / path).read_text() if (root / path).is_file() else ""
        if not re.search(rf"^(?:async def {name}\(|def {name}\(|{name} = )", text, re.MULTILINE):
            found.append(f"{path}::{name}")
    return found


def test_every_kind_of_failure_has_its_row() -> None:
    assert list(failures()) == [f"{part}-{number}" for part, all_ in FAILURE_KINDS.items() for number in all_.split()]


def test_every_row_names_a_test_or_says_what_is_missing() -> None:
    silent = [
        name
        for name, cells in failures().items()
        if len(cells) != 3 or not re.search(rf"{TEST_NAMED.pattern}|not yet: \w|cannot occur: \w", cells[2])
    ]

    assert silent == []


def test_every_test_that_the_list_of_failures_names_is_there() -> None:
    assert absent(TEST_NAMED.findall(FAILURES)) == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    gone = [("tests/test_docs.py", "test_that_nobody_wrote"), ("tests/test_nowhere.py", "test_links")]

    assert absent([*gone, ("tests/test_docs.py", "test_a_test_that_is_not_there_is_noticed")]) == [
        "tests/test_docs.py::test_that_nobody_wrote",
        "tests/test_nowhere.py::test_links",
    ]
