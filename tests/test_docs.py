"""What the documents promise is what the code has: settings, commands, links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvledger_bridge.settings as bridge
import kvledger_streams.settings as streams
from kvledger.cli import COMMANDS

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
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


def test_every_command_stands_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()

    assert [name for name in COMMANDS if not re.search(rf"`(kvledger )?{name}\b", readme)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())

    assert [target for target in targets if "://" not in target and not (document.parent / target).exists()] == []
