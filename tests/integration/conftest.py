"""Let the router's suites here use ``tests/sinks/router_fleet.py``: test folders are no packages, found by path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sinks"))
