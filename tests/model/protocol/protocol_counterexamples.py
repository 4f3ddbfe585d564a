"""Per rule a schedule that breaks a promise without it: found at random or built by hand, shortened, and kept.

A rule that is a second line of defence shows only where the first one is missing, too: ``also`` names that.
"""

from __future__ import annotations

import msgspec
from protocol_parts import Setup
from protocol_schedules import Schedule


class Counterexample(msgspec.Struct, frozen=True):
    """``breaks`` is how the violation's text begins. ``steps`` are ``action:number``."""

    breaks: str
    steps: str
    setup: Setup = Setup()
    also: tuple[str, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """As the world plays it."""
        pairs = (step.split(":") for step in self.steps.split())
        return tuple((name, int(number)) for name, number in pairs)


COUNTEREXAMPLES: dict[str, Counterexample] = {
    "monitor_first": Counterexample(
        "I1 served",
        "start:0 pump:0 deliver:0 turn:0 step:12000 deliver:32 turn:0 restart:0 step:11120 deliver:32 "
        "step:47312 deliver:32",
    ),
    "fresh_sockets": Counterexample(
        "L1 stuck",
        "start:2 start:37932 step:6060 step:47312 step:25152 step:25504 step:22080 start:12508 step:28828 "
        "sync:55276 step:51452 restart:47952 turn:57568 step:23164 step:39676 step:51872 step:10176",
        setup=Setup(partitions=2),
    ),
    "replay_overlaps": Counterexample(
        "I1 served",
        "start:0 pump:6320 deliver:12338 turn:7604 step:28128 deliver:0 turn:11266 step:16224 step:8100 "
        "deliver:0 restart:51984 step:28976 step:17442 turn:54928",
    ),
    "seam": Counterexample(
        "I2 old life",
        "start:0 pump:15442 deliver:58914 step:49744 deliver:12290 restart:3714 turn:56724 pump:276 fold:32 "
        "turn:58370 pump:29988",
    ),
    "idle_probe": Counterexample(
        "L1 stuck",
        "step:28686 clear:37968 step:64176 step:40444 step:29744",
    ),
    "suspect": Counterexample(
        "I2 dead engine",
        "start:0 pump:0 step:8256 turn:0 turn:0 down:0",
    ),
    "restore_suspended": Counterexample(
        "L1 stuck",
        "start:57083 start:56518",
    ),
    "restore_digest": Counterexample(
        "I1 quiet",
        "start:2 sync:50218 step:51043 step:44543 sync:64109 restart:24323 step:24847 kill:38030 step:21619",
        setup=Setup(shards=2, calm=True),
    ),
    "identity_after_connect": Counterexample(
        "I1 served",
        "configure:0 start:0 pump:15442 deliver:58914 turn:49744 step:12290 deliver:3714 turn:56724 turn:276 "
        "pump:58370 kill:29988 start:0 pump:4000 turn:3332 restart:1202 step:28386 deliver:3796 step:29058",
    ),
    "identity_from_engine": Counterexample(
        "I1 served",
        "configure:0 clear:23280 start:0 pump:0 deliver:32 turn:0 step:12848 deliver:32 turn:0 turn:0 restart:0 "
        "step:32992 step:49440",
    ),
    "identity_on_log": Counterexample(
        "I1 served",
        "configure:0 start:0 pump:15442 deliver:58914 turn:49744 step:12290 deliver:3714 turn:56724 turn:276 "
        "restart:13394 start:0 deliver:1202 step:28386 step:3796",
    ),
    "open_with_first_batch": Counterexample(
        "I1 served",
        "configure:0 start:2 sync:47309 restart:20381 step:64461 sync:43581 deliver:6461 step:47309",
        setup=Setup(calm=True),
    ),
    "claim_offset": Counterexample(
        "I1 served",
        "start:2 start:61804 step:24296 sync:26035 sync:10501 restart:1886",
        setup=Setup(shards=2, calm=True),
    ),
    "fence": Counterexample(
        "L1 stuck",
        "start:2 sync:56040 step:18508 start:56727 pump:47503",
    ),
    "owners_fenced": Counterexample(
        "I1 served",
        "start:2 step:5334 start:57083 deliver:19800 step:43706 step:21476 sync:50432 step:64038 start:56518 "
        "step:8368 sync:60092 step:47396",
    ),
    "fence_suspends": Counterexample(
        "I2 dead engine",
        "start:2 sync:8258 step:15440 sync:49744 truncate:0 kill:12290 down:0",
    ),
    "inherit": Counterexample(
        "I1 served",
        "start:2 start:51667 start:32756 step:2390 sync:24024 kill:10332 kill:11349 land:60977 start:27902 "
        "sync:21547 start:6161 kill:4523 resend:54210 pump:16233 restart:4108 checkpoint:30996",
    ),
    "inherit_nothing": Counterexample(
        "I2 old life",
        "start:0 pump:0 turn:0 start:0 pump:2 restart:0 turn:2 land:34 fold:32 pump:0 flush:0",
    ),
    "pointer_per_owner": Counterexample(
        "L4 not in the index although the log holds it",
        "start:0 pump:0 turn:0 start:0 pump:2 turn:2 pump:2 pump:0",
    ),
    "pointer_after_ack": Counterexample(
        "L4 not in the index although the log holds it",
        "start:0 pump:8258 turn:29988 pump:13394 checkpoint:0 land:0 land:4",
    ),
    "pointer_to_opened": Counterexample(
        "L4 not in the index although the log holds it",
        "start:2 sync:58914 checkpoint:1 sync:49744 flush:0",
    ),
    "pointer_names_fence": Counterexample(
        "I2 old life",
        "start:2 pump:0 turn:64928 start:0 restart:0 pump:2 turn:2 pump:2 fold:32 fold:32 start:1 pump:5 "
        "turn:5 pump:5 truncate:0 pump:0",
    ),
    "pointer_restated": Counterexample(
        "I2 old life",
        "start:2 pump:0 turn:64928 start:0 restart:0 pump:2 turn:2 land:34 fold:32 fold:32 start:1 pump:5 "
        "turn:5 pump:5 truncate:0 pump:0",
    ),
    "idempotent": Counterexample(
        "L3 unloaded without a fault",
        "start:0 pump:44962 deliver:43760 turn:772 pump:41732 step:17524 deliver:3060 turn:56948 "
        "restart:57906 deliver:32 turn:27728 turn:36866 turn:35602 land:39856 resend:3392 checkpoint:3920 "
        "land:63360 land:20704",
        setup=Setup(calm=True),
    ),
    "whole_units": Counterexample(
        "I1 served",
        "configure:1 start:2 step:14934 sync:9784 step:41280 step:61574 turn:64358 pump:1298 fold:44337",
        setup=Setup(calm=True),
    ),
    "fence_drops_tail": Counterexample(
        "L1 stuck",
        "start:1 pump:0 deliver:3 turn:3 pump:0 step:33425 deliver:3 turn:3 land:3 kill:2",
    ),
    "next_n": Counterexample(
        "I1 served",
        "start:0 pump:0 turn:0 pump:2 damage:0 step:15440 turn:0 pump:0",
        also=("unreadable_unloads",),
    ),
    "cut_at_clear": Counterexample(
        "I1 served",
        "step:4434 clear:45920",
        setup=Setup(shards=2, calm=True),
    ),
    "gap_unloads": Counterexample(
        "I2 dead engine",
        "start:0 pump:0 step:8256 turn:0 turn:0 step:33424 step:15440 turn:420 turn:546 turn:616 down:0",
        also=("suspect",),
    ),
    "opened_restates_partial": Counterexample(
        "I1 served",
        "configure:1 start:2 step:5155 sync:20741 step:43829",
    ),
    "clear_ends_partial": Counterexample(
        "L1 stuck",
        "configure:1 step:15201",
    ),
    "parts_consecutive": Counterexample(
        "I1 served",
        "start:0 pump:3794 deliver:32644 turn:6784 step:14834 turn:36624 step:17328 deliver:32 checkpoint:0 "
        "turn:688 turn:41104 turn:26832 pump:25794",
    ),
    "checkpoint_restates_opened": Counterexample(
        "L4 not in the index although the log holds it",
        "start:2 sync:39469 checkpoint:45090 pump:41264 flush:49348",
        setup=Setup(partitions=2),
    ),
    "checkpoint_restates_partial": Counterexample(
        "I1 served",
        "step:33424 step:15440 step:64928 step:58912 step:61888 start:0 pump:49744 turn:58370 checkpoint:0 pump:13394",
    ),
    "checkpoint_restates_suspended": Counterexample(
        "I2 dead engine",
        "start:0 pump:15442 deliver:58914 turn:49744 step:12290 deliver:3714 turn:56724 down:0 turn:3332 "
        "checkpoint:0 pump:28386",
    ),
    "older_life_unloads": Counterexample(
        "L1 stuck",
        "damage:0 start:2 pump:0 turn:0 turn:1 pump:0 start:0 pump:2 turn:2 pump:2 checkpoint:5 pump:5 "
        "fold:32 truncate:0 kill:2 checkpoint:4",
        also=("pointer_names_fence",),
    ),
    "unreadable_unloads": Counterexample(
        "I2 dead engine",
        "start:0 pump:0 step:8256 deliver:32 turn:0 turn:0 pump:0 restart:0 deliver:32 turn:0 turn:0 down:0 "
        "damage:0 turn:0 pump:0",
    ),
    "unreadable_once": Counterexample(
        "L4 not in the index although the log holds it",
        "start:0 start:1 pump:0 pump:2 deliver:3 turn:0 turn:3 pump:2 step:8256 turn:0 pump:0 step:33425 "
        "deliver:3 turn:3 fold:32 land:3 fold:32 damage:0 step:15440 turn:0 checkpoint:0 pump:0 fold:32",
    ),
    "loaded_by_whole": Counterexample(
        "I1 served",
        "step:33701 damage:22739 start:1493 sync:53804",
        setup=Setup(partitions=2),
    ),
    "compare_and_set": Counterexample(
        "I1 served",
        "start:0 start:1 pump:2 deliver:3 turn:3 pump:2 step:48544 pump:0 step:49201 deliver:3 turn:3 land:3 "
        "fold:32 step:16544 turn:0 pump:0 stage_late:32 step:25312 turn:0 pump:0 fold:32 fold:32",
    ),
    "restart_compare_and_set": Counterexample(
        "L4 not in the index although the log holds it",
        "start:1 snapshot:40128 pump:2 turn:3 pump:2 fold:32 rollback:0",
    ),
    "restart_low": Counterexample(
        "L4 not in the index although the log holds it",
        "start:1 pump:0 deliver:3 turn:3 pump:0 step:33425 deliver:3 turn:3 land:3 fold:32 pump:2",
    ),
    "below_start_rebuilds": Counterexample(
        "I2 dead engine",
        "start:0 start:1 pump:0 pump:2 step:8256 deliver:0 turn:0 turn:0 pump:0 turn:3 fold:32 fold:32 "
        "restart:0 deliver:32 turn:0 turn:0 down:0 turn:0 pump:0 pump:2 truncate:0",
    ),
    "running_below_start_rebuilds": Counterexample(
        "I2 dead engine",
        "start:0 start:1 pump:0 pump:2 step:8256 deliver:0 turn:0 turn:0 pump:0 step:33425 turn:3 fold:32 "
        "fold:32 restart:0 deliver:32 turn:0 turn:0 down:0 turn:0 pump:0 pump:2 truncate:0",
    ),
    "catch_up": Counterexample(
        "I2 old life",
        "start:2 pump:0 turn:1 turn:0 restart:0 step:33424 turn:0 pump:0 fold:32 flush:0 fold:0 fold:0 fold:0",
    ),
    "catch_up_by_read": Counterexample(
        "L2 stale at the log's end",
        "start:1 pump:0 deliver:3 turn:3 pump:0 step:3793 deliver:3 turn:3 land:3",
    ),
    "version_unique": Counterexample(
        "I1 answer",
        "start:2 pump:0 deliver:33 turn:1 snapshot:0 clear:64929 deliver:33 turn:0 turn:1 pump:0 fold:32 "
        "fold:36 fold:36 ask:0 rollback:0 fold:36 fold:36 fold:36 fold:32 fold:32 hear:0",
        setup=Setup(partitions=2),
    ),
    "version_with_rows": Counterexample(
        "I1 answer",
        "start:0 pump:0 step:17088 turn:0 turn:0 pump:0 fold:32 ask:0 step:48480 turn:0 restart:0 turn:0 "
        "step:62128 turn:0 turn:0 pump:0 fold:32 fold:32 hear:0",
    ),
    "query_same_n": Counterexample(
        "I1 answer",
        "start:0 pump:0 turn:0 pump:0 fold:32 ask:0 step:33424 turn:0 pump:0 fold:32 hear:0",
    ),
    "query_same_shards": Counterexample(
        "I1 answer",
        "start:0 pump:0 turn:0 pump:0 fold:40 step:33424 turn:0 pump:0 fold:32 ask:0 hear:0",
        setup=Setup(shards=2),
    ),
}
