"""Let the model tests drive the implementations that are under contract (``tests/contracts/index_pairs.py``)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
sys.path.insert(0, str(Path(__file__).parent))
