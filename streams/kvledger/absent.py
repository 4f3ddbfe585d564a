"""What to say of a name that the index does not know: a mistyped one, or an index that does not know all yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvledger.errors import BadInput, Unavailable
from kvledger_index.reader import RedisReader
from kvledger_index.views import PartitionView

NAMES_SHOWN_MAX: Final = 20


async def absent(reader: RedisReader, namespace: str, what: str, known: Sequence[str]) -> BadInput | Unavailable:
    """The error for ``what`` ("model 'x'"), with the names that would do. One round trip.

    Unavailable (try again) where partitions are seen to be behind the log, else BadInput.
    """
    where = f"the index at {reader.address}, namespace {namespace}"
    parts = await reader.partitions()
    late = behind(parts)
    if late:
        return Unavailable(
            f"{what} is not in {where}, or not yet: {len(late)} of its {max(parts) + 1} partitions are behind the "
            f"log's end, so it is being rebuilt or catching up; try again. So far {knows(known)}"
        )
    if not known:
        return BadInput(f"{what}: {where}, holds nothing yet; do a bridge and a stream worker run for it?")
    return BadInput(
        f"{what} is not in {where}; {knows(known)}. An index that was emptied a moment ago does not know all yet"
    )


def behind(parts: Mapping[int, PartitionView]) -> list[int]:
    """Partitions not read up to their target; also those below the highest one of which nothing is stored yet."""
    numbers = range(max(parts, default=-1) + 1)
    return [number for number in numbers if number not in parts or parts[number].read < parts[number].target]


def knows(names: Sequence[str]) -> str:
    """The names that would do, a bounded number of them."""
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return f"it knows {', '.join(names[:NAMES_SHOWN_MAX])}{more}" if names else "it knows none"
