"""Names of the index's keys in Redis, schema v0; ``docs/redis-schema.md`` says what each holds.

    <namespace>0:{0}:models         SET     models that have a catalogue
    <namespace>0:{0}:cat:<model>    HASH    v -> version, <rank> -> partition, slots, card
    <namespace>0:{0}:now:<model>    HASH    v -> the same version, <rank> -> log time, stamp and what moves with it
    <namespace>0:{0}:parts          HASH    <partition> -> progress, times, topic id
    <namespace>0:{0}:ranks:<p>      HASH    <rank> -> stamp, slots, model, the fold's state
    <namespace>0:{0}:unit:<p>       STRING  which piece of a unit that is being applied is due
    <namespace>0:{0}:r:<8 bytes>    STRING  row: a path of up to 16 keys and their holders
    <namespace>0:{0}:r:<8 bytes>/   HASH    side of that row: key -> holders
    <namespace>0:{0}:slot           STRING  the last slot given
    <namespace>0:{0}:dead           LIST    slots that died, for the scrubber
    <namespace>0:{0}:scrub          HASH    how far a pass of the scrubber is
    <namespace>0:{0}:scrub:slots    SET     slots that it frees
    <namespace>0:{0}:scrub:rows     LIST    rows that it was about to look at

``0`` after the namespace is the schema version, ``{0}`` the hash tag of the shard: all keys of a shard in one slot of
a Redis Cluster.
"""

from __future__ import annotations

import re

from kvledger_index.errors import InvalidInput

SCHEMA = 0
NAMESPACE_DEFAULT = "kvl"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Keyspace:
    """Keys of one namespace, as bytes; ``prefix`` is what the functions take as their only key."""

    def __init__(self, namespace: str = NAMESPACE_DEFAULT) -> None:
        if not _NAMESPACE.match(namespace):
            raise InvalidInput(
                f"namespace {namespace!r} is not 1..64 of letters, digits and ._- after a letter or digit"
            )
        self.namespace = namespace
        self.prefix = f"{namespace}{SCHEMA}:{{0}}:".encode()
        self.models = self.prefix + b"models"
        self.partitions = self.prefix + b"parts"
        self.slot = self.prefix + b"slot"
        self.dead = self.prefix + b"dead"
        self.scrub = self.prefix + b"scrub"
        self.scrub_slots = self.prefix + b"scrub:slots"
        self.scrub_rows = self.prefix + b"scrub:rows"
        self.row_prefix = self.prefix + b"r:"
        self.row_pattern = self.row_prefix + b"*"

    def catalogue(self, model: str) -> bytes:
        """The catalogue of a model."""
        return self.prefix + b"cat:" + model.encode()

    def now(self, model: str) -> bytes:
        """What moves with every batch of a model's ranks."""
        return self.prefix + b"now:" + model.encode()

    def ranks(self, partition: int) -> bytes:
        """The ranks of a partition."""
        return self.prefix + b"ranks:%d" % partition

    def row(self, first: bytes) -> bytes:
        """The row of the segment whose first key is ``first`` (8 bytes)."""
        return self.row_prefix + first

    def side(self, first: bytes) -> bytes:
        """The side of that row: keys on other branches."""
        return self.row_prefix + first + b"/"
