"""The rules of the protocol: each with the reason why it is there, each one switchable."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, get_type_hints


@dataclass(frozen=True, slots=True)
class Rules:
    """True: in force. A field's annotation says what the rule is; its counterexample says what happens without it."""

    # ---- engine and bridge
    monitor_first: Annotated[bool, "the socket monitor is drained after receiving and before applying"] = True
    fresh_sockets: Annotated[bool, "a disconnect, or a new life, throws away what SUB had queued"] = True
    replay_overlaps: Annotated[bool, "a replay starts at the last applied batch, whose bytes must be equal"] = True
    seam: Annotated[bool, "per connection, live batches count once one equals a replayed or the last one"] = True
    idle_probe: Annotated[bool, "a quiet rank is asked for its last batch: the last one may be the lost one"] = True
    suspect: Annotated[bool, "a disconnect or a probe without answer is written to the log"] = True
    restore_suspended: Annotated[bool, "a restoring bridge takes over that the rank is suspended"] = True
    restore_digest: Annotated[bool, "a restored life is proven by the digest of its last whole batch"] = True
    identity_after_connect: Annotated[bool, "process identity counts only if read after the connection stood"] = True
    identity_from_engine: Annotated[bool, "process identity is read from the engine, not from what may lag"] = True
    identity_on_log: Annotated[bool, "Opened and checkpoints carry the process identity"] = True
    open_with_first_batch: Annotated[bool, "without replay a life opens with its first live batch"] = True
    # ---- owners and pointers
    claim_offset: Annotated[bool, "the owner number is the offset of the own Claim"] = True
    fence: Annotated[bool, "a new owner fences and restores up to its own Fence, no further"] = True
    owners_fenced: Annotated[bool, "after a Fence the records of lower owners do not count"] = True
    fence_suspends: Annotated[bool, "a Fence suspends the rank until its owner proves the life or opens one"] = True
    inherit: Annotated[bool, "before its Fence a new owner writes the pointer that it inherits"] = True
    inherit_nothing: Annotated[bool, "with nothing to inherit it writes: log start"] = True
    pointer_per_owner: Annotated[bool, "pointers are kept per owner, the highest owner's counts"] = True
    pointer_after_ack: Annotated[bool, "a pointer follows the acknowledgement of all that it names"] = True
    pointer_to_opened: Annotated[bool, "an Opened gets a pointer; a rank without one is read from the log's start"] = (
        True
    )
    pointer_names_fence: Annotated[bool, "who starts at or above an owner's Fence knows whom it ended"] = True
    pointer_restated: Annotated[bool, "an inherited pointer is written again once the own Fence stands"] = True
    # ---- records
    idempotent: Annotated[bool, "no duplicates within an owner; a rebuilt producer claims anew"] = True
    whole_units: Annotated[bool, "readers apply whole batches"] = True
    fence_drops_tail: Annotated[bool, "a Fence ends an unfinished batch"] = True
    next_n: Annotated[bool, "a record applies only if its n is the next; a higher one unloads the rank"] = True
    cut_at_clear: Annotated[bool, "records of all groups before a clear, the clear, records of all after it"] = True
    gap_unloads: Annotated[bool, "a Gap unloads at once, not first at the Opened after it"] = True
    opened_restates_partial: Annotated[bool, "Opened says that a life is partial"] = True
    clear_ends_partial: Annotated[bool, "an emptied GPU cache has no unknown past"] = True
    parts_consecutive: Annotated[bool, "no record of a rank comes between the parts of its checkpoint"] = True
    checkpoint_restates_opened: Annotated[bool, "a checkpoint can create the rank"] = True
    checkpoint_restates_partial: Annotated[bool, "a checkpoint says that the life is partial"] = True
    checkpoint_restates_suspended: Annotated[bool, "a checkpoint says that the rank is suspended"] = True
    older_life_unloads: Annotated[bool, "an accepted record of an older life, read first now, unloads"] = True
    unreadable_unloads: Annotated[bool, "a record that cannot be read unloads the rank of its key"] = True
    unreadable_once: Annotated[bool, "... but not when read again below what was applied since"] = True
    # ---- fold and index
    loaded_by_whole: Annotated[bool, "only Opened or a complete checkpoint load a rank"] = True
    compare_and_set: Annotated[bool, "a unit applies only on the (owner, life, n) that its worker started from"] = True
    restart_compare_and_set: Annotated[bool, "so does the restart offset, in the same call"] = True
    restart_low: Annotated[bool, "the restart offset is the first of anything not yet applied"] = True
    below_start_rebuilds: Annotated[bool, "a stored restart offset below the log's start drops the ranks"] = True
    running_below_start_rebuilds: Annotated[bool, "so does a running worker's; it never jumps ahead"] = True
    catch_up: Annotated[bool, "after a seek ranks are stale until the log's end of that moment is passed"] = True
    catch_up_by_read: Annotated[bool, "that compares the read position, which no unfinished batch holds back"] = True
    # ---- query
    version_unique: Annotated[bool, "the catalogue's version is unique: a rollback repeats no counter"] = True
    version_with_rows: Annotated[bool, "an answer over a changed catalogue is taken again"] = True
    query_same_n: Annotated[bool, "a rank that moved between the reads of one answer is not exact"] = True
    query_same_shards: Annotated[bool, "shards that stand at different (life, n) make no exact answer"] = True


NAMES = tuple(each.name for each in fields(Rules))

WHY: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Rules, include_extras=True).items() if name in NAMES
}
"""Name of a rule -> what it says."""


def without(*names: str) -> Rules:
    """All rules but these; raises KeyError for a name that is none."""
    unknown = set(names) - set(NAMES)
    if unknown:
        raise KeyError(*sorted(unknown))
    return Rules(**dict.fromkeys(names, False))
