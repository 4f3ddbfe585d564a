"""Let the suites of this folder share ``index_pairs``: test folders are no packages, so it is found by path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
