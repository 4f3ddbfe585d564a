"""What a session is told about its rank, and what it asks its caller to do. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from kvledger_bridge.pace import Work
from kvledger_bridge.unit import Piece
from kvledger_index.model import ModelEntry
from kvledger_wire.records import EventRecord, ReplicaRecord


class Rank(NamedTuple):
    """Who a session is about."""

    replica: str
    rank: int
    entry: ModelEntry
    replay: bool
    """Whether there is a replay endpoint."""
    process: bool = False
    """Whether the caller can read the identity of the engine's process."""


class Ledger(Protocol):
    """One rank's knowledge within one life."""

    def work(self, seq: int, batch: Any, origin: int) -> Work[Sequence[Piece]]:
        """The effective changes of one batch, grouped; empty where nothing changed. Pauses where it is long, and is
        worth nothing if it is left then.
        """

    def take_uncertain(self) -> tuple[str, ...]:
        """Reasons that no piece could carry."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one session; seconds are monotonic."""

    idle_probe_seconds: float = 1.0
    """A rank without a live batch for so long is asked for its last one: well below the 3 s of ``exact`` answers."""
    replay_seconds_max: float = 2.0
    """Silence after which a replay request counts as unanswered; an idle engine answers within 0.1 s."""
    retry_seconds_min: float = 0.1
    retry_seconds_max: float = 2.0
    """Back-off between requests that did not help; the upper end bounds how late a restart is noticed."""
    alive_seconds: float = 5.0
    """An idle engine without a replay endpoint is asked so often whether it is still the same process: a rank that is
    silent for 15 s counts as gone."""
    hole_tries_max: int = 3
    """Replays without progress before a hole counts as lost."""
    step_bytes_max: int = 2**18
    """Bytes of batches after which a step applies no further one: about 20 ms. 64 batches of 2000 blocks in one step
    would take half a second from the other ranks."""
    live_batches_max: int = 10_000
    live_bytes_max: int = 64 * 2**20
    replay_batches_max: int = 20_000
    replay_bytes_max: int = 64 * 2**20
    """Above these the caller stops reading; what the engine then drops is a hole, which replay fills."""
    open_known_max: int = 16_384
    """Digests kept while the seam is open: more than the 10 000 batches of a default replay buffer."""
    sewn_known_max: int = 256
    """Digests kept once it is closed: enough to tell a duplicate from another life."""


class Write(NamedTuple):
    """Produce ``record`` to the rank's partition of the events topic, with the key of ``group``.

    ``known``: the moment up to which all that the engine sent is in the rank's log with this record; None: never yet.
    """

    group: int | str | None
    record: EventRecord
    known: float | None = None


class Announce(NamedTuple):
    """Produce to the replicas topic: a claim under the rank's key, a pointer under (rank, owner)."""

    record: ReplicaRecord


class Forget(NamedTuple):
    """Take back the pointers of owners below ``owner``: an own one stands."""

    owner: int


class Restore(NamedTuple):
    """Read the rank's log from ``start`` (-1: its beginning) up to the Fence at ``end``; answer with ``restored`` or
    ``unrestorable``, and ``owner``.
    """

    owner: int
    start: int
    end: int


class OpenData(NamedTuple):
    """Close the live socket, if there is one, and open a new one: nothing queued before may be seen again."""


class AskReplay(NamedTuple):
    """Send one replay request."""

    start: int


class DropReplay(NamedTuple):
    """Throw the replay socket away: whatever still comes on it is stale."""


class AskProcess(NamedTuple):
    """Read the identity of the engine's process from the engine itself; answer with ``identified``."""


class CloseAll(NamedTuple):
    """Close both sockets: another bridge owns the rank."""


class DeadLetter(NamedTuple):
    """A batch, or an event of it, that could not be read. ``raw`` is for operators who opted in, for nothing else."""

    seq: int
    reason: str
    digest: bytes
    raw: bytes


class Note(NamedTuple):
    """Something an operator should see that no record says."""

    code: str
    text: str


Command = (
    Write | Announce | Forget | Restore | OpenData | AskReplay | DropReplay | AskProcess | CloseAll | DeadLetter | Note
)


class Counts(msgspec.Struct):
    """Plain totals since the session began; the caller logs them."""

    live: int = 0
    replayed: int = 0
    late: int = 0
    """Of these, first seen when a quiet rank was asked: they should have come live."""
    overlaps: int = 0
    holes: int = 0
    lost: int = 0
    undecodable: int = 0
    failed_events: int = 0
    unknown_events: int = 0
    malformed: int = 0
    contradictions: int = 0
    seam_mismatches: int = 0
    unanswered: int = 0
    probes: int = 0
    lives: int = 0
    suspended: int = 0
    claims: int = 0
    restored: int = 0
    """Lives that were taken up from the log."""
    checkpoints: int = 0
