"""What one rank's cache holds within one life, and what each batch changed of it (DESIGN §3, §5).

    Batch ──> lineage.place: names first, so that a dense event places the masked ones before it
          ──> per event: copies counted per (lane, block); 0 -> 1 and 1 -> 0 are effective
          ──> pieces: one per group, cut at a clear

A lane is (group, medium). An engine announces every physical copy, stored and removed, so residency is a count; after
the ledger everything has set semantics. Hashes without a key are counted too: *unplaced*, told, never claimed.
Pure: no clock, no socket, no log. Raises nothing for what an engine may send; what it cannot use it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger_bridge.blocks import Block, Span
from kvledger_bridge.decode import Batch, BlockRemoved, BlockStored, HashValue, low64
from kvledger_bridge.hearing import names_of
from kvledger_bridge.identity import opaque_from as first_opaque
from kvledger_bridge.lanes import Counts, Lane
from kvledger_bridge.lineage import Lineage, Move
from kvledger_bridge.pace import PIECE_BLOCKS, Work, at_once, batched, slices
from kvledger_bridge.runs import Draft, OpenChange, Part, lay_out
from kvledger_bridge.veil import Veil
from kvledger_index.enginehash import Scheme
from kvledger_index.model import GROUP_MAX, MEDIA, GroupSpec, ModelEntry, medium_of
from kvledger_wire.partition import RANK_WIDE
from kvledger_wire.records import ATTACHED, CLEARED, LIVE, REMOVED, STORED, Change

PARENTS_MAX = 65_536
"""Non-resident blocks whose names are kept, about 400 bytes each, as much as a resident one."""

ORPHANS_MAX = 65_536
"""Strides of tokens kept for dense events whose parent is unknown, 4 bytes per token."""

WORDS_MAX = 1024
"""Pairs of group and medium word, as engines spell it, whose lane is found without parsing the word."""

REASONS_MAX = 32
"""Reasons for doubt per life; each is given once."""

FULL_REPORTS_MIN = 3
"""Batches that look like a full report before a life is called so. Honest engines can write one by chance (two requests
of one step, the second continuing what the first had to compute again), and none of the recorded ones did; the one with
full reports did so in 46 of its 458 batches, the third of them being the 41st.
"""

_CLEARS = tuple(MEDIA.index(medium) for medium in MEDIA if medium != "storage")


class Piece(msgspec.Struct, frozen=True):
    """What one batch changed of one group (None: events without a group; ``*``: the whole rank, clears only).

    ``unplaced`` restates, per medium code, how many hashes of the group are resident without a key after it.
    ``spec`` is the group's facts, when they were first heard or changed; only GPU stores tell them.
    ``uncertain`` are reasons, new in this life, why answers about the rank may be over.
    ``scheme`` is how the engine hashes, when that was found out or more of it; it is about the rank.
    ``opaque`` restates, per medium code, how many of ``unplaced`` no router can compute, ``veiled`` how many are no
    part of a prompt without adapter, salt and media (ADR 4).
    """

    group: int | str | None
    changes: tuple[Change, ...]
    unplaced: tuple[tuple[int, int], ...] = ()
    spec: GroupSpec | None = None
    uncertain: tuple[str, ...] = ()
    scheme: Scheme | None = None
    opaque: tuple[tuple[int, int], ...] = ()
    veiled: tuple[tuple[int, int], ...] = ()


class Ledger:
    """One rank's knowledge within one life; starts empty. Not thread-safe.

    ``parents_max`` bounds non-resident blocks, ``orphans_max`` the strides of dense events that wait for their parent;
    ``piece_blocks`` is after how many blocks, or so, ``work`` pauses.
    """

    def __init__(
        self,
        entry: ModelEntry,
        *,
        parents_max: int = PARENTS_MAX,
        orphans_max: int = ORPHANS_MAX,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> None:
        self.counts = Counts()
        self.lineage = Lineage(entry, parents_max=parents_max, orphans_max=orphans_max, piece_blocks=piece_blocks)
        self._piece = piece_blocks
        self._entry = entry
        self.veil = Veil(parents_max)
        self._counted = entry.copies == "counted"
        self._named_sizes = {spec.group: spec.block_size for spec in entry.groups if spec.block_size}
        self._lanes: dict[tuple[int | None, int], Lane] = {}
        self._heard: dict[tuple[int | None, str | None], Lane] = {}
        self._specs: dict[int | None, GroupSpec] = {}
        self._reasons: set[str] = set()
        self._untold: list[str] = []
        self._drafts: dict[int | None, Draft] = {}
        self._pieces: list[Piece] = []
        self._parts: dict[Span, list[Part]] = {}
        self._seq = -1
        self._ts = 0.0
        self._report_seq = -1
        self._recorded = False
        self._computed: set[tuple[int, ...]] = set()  # first strides of what the batch computed from token 0

    def apply(self, seq: int, batch: Batch, origin: int = LIVE) -> list[Piece]:
        """``work`` without a pause."""
        return at_once(self.work(seq, batch, origin))

    def work(self, seq: int, batch: Batch, origin: int = LIVE) -> Work[list[Piece]]:
        """Take one batch, the next in sequence order, exactly once; ``origin`` is LIVE or REPLAYED.

        Returns the batch's pieces in the order of their records: all groups before a clear, in the order in which
        they first changed, the clear, all groups after it. Nothing changed: an empty list. ``batch.failures`` are the
        caller's: they mean that this batch is not known in full. O(blocks). Until it has returned, the ledger stands
        between two batches: nothing may be read from it but ``take_uncertain``, and if it is left it is worthless.
        """
        self._seq, self._ts = seq, batch.ts
        self._drafts, self._pieces, self._parts = {}, [], {}
        self._computed.clear()
        for tag in batch.unknown:
            if tag not in self._entry.harmless_tags:
                self._doubt(
                    f"unknown event tag {tag}: list it in harmless_tags of the model entry if it changes no cache"
                )
        spans = yield from self.lineage.place(batch.events)
        self._recorded = self.lineage.chains.recorded
        yield from self._follow(self.lineage.moves)
        # a span that was placed before a name of it was taken back is not to be trusted
        by_hash = any(move.was is not None for move in self.lineage.moves)
        done, piece = 0, self._piece
        for event, span in zip(batch.events, spans, strict=True):
            if done >= piece:
                done = 0
                yield
            if isinstance(event, BlockRemoved):
                count = len(event.block_hashes)
                done += 1 + count
                if count <= piece:
                    self._removed(event, event.block_hashes, origin)
                    continue
                for some in slices(event.block_hashes, piece):
                    self._removed(event, some, origin)
                    yield
            elif isinstance(event, BlockStored):
                done += 1 + len(event.block_hashes)
                yield from self._stored(event, span, origin, by_hash=by_hash)
            else:
                yield from self._cleared(origin)
        for name in self.veil.catch_up(self.lineage.chains.finder):
            self._mark_veiled(name)
        self._doubt_lineage()
        self._cut()
        self._parts = {}
        yield from self.lineage.trim()
        return self._pieces

    def _doubt_lineage(self) -> None:
        if self.lineage.chains.finder.refuted:
            self._doubt(
                "hash_scheme of the model entry is not this engine's: correct it, or leave it out to have it found"
            )
        if self.lineage.twins:
            self._doubt(
                "one prefix under two engine hashes: this engine tells prompts apart (salt, adapter, media) by what it "
                "does not publish"
            )

    def take_uncertain(self) -> tuple[str, ...]:
        """Reasons for doubt that no piece has carried yet; for the heartbeat of a batch without pieces."""
        reasons = tuple(self._untold)
        self._untold = []
        return reasons

    def resident(self, group: int | None, medium: str = "gpu") -> dict[int, int]:
        """Copies by engine hash (low 64 bits) in one lane, placed or not. For tests and checkpoints; O(lane)."""
        lane = self._lanes.get((group, MEDIA.index(medium_of(medium))))
        if lane is None:
            return {}
        return {**{block.hash: copies for block, copies in lane.copies.items()}, **lane.unplaced}

    def placed(self, group: int | None, medium: str = "gpu") -> dict[int, int]:
        """Block key by engine hash of what is placed in one lane. For tests and checkpoints; O(lane)."""
        lane = self._lanes.get((group, MEDIA.index(medium_of(medium))))
        return {} if lane is None else {block.hash: block.key for block in lane.copies}

    def unplaced(self, group: int | None, medium: str = "gpu") -> dict[int, int]:
        """Copies by hash of what has no key in one lane. For tests and checkpoints; O(lane)."""
        lane = self._lanes.get((group, MEDIA.index(medium_of(medium))))
        return {} if lane is None else dict(lane.unplaced)

    @property
    def groups(self) -> tuple[int | None, ...]:
        """Groups that stored anything, in the order in which they were heard."""
        return tuple(dict.fromkeys(group for group, _ in self._lanes))

    # -- snapshot and recall --------------------------------------------------------------------------------------

    @property
    def ts(self) -> float:
        """The engine's clock in the last batch."""
        return self._ts

    @property
    def lanes(self) -> list[Lane]:
        """All lanes, in the order in which they were heard; what changes them changes the ledger."""
        return list(self._lanes.values())

    def recall_lane(self, group: int | None, code: int) -> Lane:
        """A lane as the log tells of it: empty at first, and no reason for doubt."""
        lane = self._lanes.get((group, code))
        if lane is None:
            lane = self._lanes[group, code] = Lane(group, code)
        return lane

    def recall_facts(self, specs: Sequence[GroupSpec], reasons: Sequence[str]) -> None:
        """What was learnt of the groups, and every reason for doubt that was given, as the log tells it."""
        self._specs.update((spec.group, spec) for spec in specs)
        self._reasons.update(reasons)

    # -- events ---------------------------------------------------------------------------------------------------

    def _stored(self, event: BlockStored, span: Span | None, origin: int, *, by_hash: bool) -> Work[None]:
        group = event.group_idx
        if not self._nameable(group):
            return
        medium = medium_of(event.medium)
        if medium == "gpu":
            self._learn(event)
        if not event.block_hashes:
            if medium == "gpu" and event.parent_block_hash is None:
                self._computed.add(tuple(event.token_ids[: self.lineage.stride]))
            return
        lane = self._lane(group, MEDIA.index(medium))
        if len(self._heard) < WORDS_MAX:
            self._heard[group, event.medium] = lane
        change = self._draft(group).open(STORED, lane.code, origin, digests=self._recorded)
        before = len(lane.copies) + len(lane.unplaced)
        names = span.hashes if span is not None else (yield from names_of(event.block_hashes, self._piece))
        places: Sequence[int] = range(len(names))
        if span is not None and span.blocks and not by_hash:
            places = yield from self._store_span(lane, span, change)
        if places:
            yield from self._store_by_hash(lane, event, names, places, change)
        if lane.gpu:
            self._watch(lane, event, span, names, fresh=len(lane.copies) + len(lane.unplaced) > before)
        if span is not None and span.start < 0:
            yield from self.lineage.hold(span)

    def _store_span(self, lane: Lane, span: Span, change: OpenChange) -> Work[Sequence[int]]:
        """One copy more of each block of a placed span; returns which of its hashes are none of them."""
        parts = self._parts.get(span)
        if parts is None:
            parts = self._parts[span] = yield from lay_out(span, digests=self._recorded, piece_blocks=self._piece)
        done = 0
        for part in parts:
            if done >= self._piece:
                done = 0
                yield
            done += len(part.members)
            change.add_part(part, self._count_part(lane, part))
        places = range(span.named, len(span.hashes))
        if None in span.blocks:
            return [*[i for i, block in enumerate(span.blocks) if block is None], *places]
        return places

    def _count_part(self, lane: Lane, part: Part) -> int:
        """One copy more of each block of a part; returns which of them had none."""
        copies = lane.copies
        retain = self.lineage.retain
        effective = 0
        for bit, block in part.members:
            have = copies.get(block)
            if have is None:
                copies[block] = 1
                effective |= bit
                retain(block)
            elif self._counted:
                copies[block] = have + 1
        self.counts.stored += len(part.members)
        return effective

    def _store_by_hash(
        self, lane: Lane, event: BlockStored, names: Sequence[int], places: Sequence[int], change: OpenChange
    ) -> Work[None]:
        """Those of an event's hashes that are not part of a placed span: found by name, else unplaced."""
        opaque_from = -1
        loose: list[int] = []
        for i, place in enumerate(places):
            if i and not i % self._piece:
                yield
            name = names[place]
            block = self.lineage.find(name, gpu=lane.gpu)
            if block is not None:
                self.counts.stored += 1
                change.add_block(block, name, effective=self._add(lane, block, 1))
                continue
            self.counts.stored_unplaced += 1
            have = lane.unplaced.get(name)
            if have is None:
                lane.unplaced[name] = 1
                self.lineage.loosen(name)
            elif self._counted:
                lane.unplaced[name] = have + 1
            change.add_unplaced(name, effective=have is None)
            if opaque_from < 0:
                opaque_from = self._opaque_from(lane, event)
            loose.append(place)
            if place >= opaque_from or self.lineage.is_ambiguous(name):
                lane.opaque.add(name)
        if not loose:
            return
        yield from self._veil_of(lane, event, names, loose, opaque_from)
        masked = event.token_ids and len(names) * event.block_size != len(event.token_ids)
        if masked and lane.gpu:
            self.lineage.chains.force()

    def _veil_of(
        self, lane: Lane, event: BlockStored, names: Sequence[int], places: Sequence[int], opaque_from: int
    ) -> Work[None]:
        """Find out which of an event's hashes without a key are veiled, and mark them in every lane that has them."""
        found = places
        if lane.gpu:
            behind = event.parent_block_hash
            parent = None if behind is None else self.lineage.find(low64(behind), gpu=True)
            finder = self.lineage.chains.finder
            found = yield from self.veil.prove(
                event, names, places, opaque_from, parent=parent, finder=finder, piece_blocks=self._piece
            )
        for i, place in enumerate(found):
            if i and not i % self._piece:
                yield
            name = names[place]
            if name not in lane.veiled and (lane.gpu or name in self.veil):
                self._mark_veiled(name)

    def _mark_veiled(self, name: int) -> None:
        """A hash is proven veiled: in every lane that has it without a key, whose counts are then told again."""
        if self.lineage.is_ambiguous(name):
            return
        self.veil.add(name)
        for lane in self._lanes.values():
            if name in lane.unplaced and name not in lane.veiled:
                lane.veiled.add(name)
                self._draft(lane.group)

    def _opaque_from(self, lane: Lane, event: BlockStored) -> int:
        """From which of its hashes on no router can compute the event's (ADR 4)."""
        if not lane.gpu and event.group_idx is None and event.token_ids:
            return 0  # a cache of its own, with chunks and hashes of its own
        parent = event.parent_block_hash
        if parent is not None and low64(parent) in lane.opaque:
            return 0
        return first_opaque(event)

    def _watch(self, lane: Lane, event: BlockStored, span: Span | None, names: Sequence[int], *, fresh: bool) -> None:
        """Look for full reports. ``fresh``: the event brought its lane something new."""
        if event.parent_block_hash is None:
            head = tuple(event.token_ids[: self.lineage.stride])
            if fresh:
                self._computed.add(head)
            elif span is not None and span.blocks:
                lane.reported = self._seq, names[-1], head
        elif span is not None:
            seq, last, head = lane.reported
            if seq == self._seq and span.parent == last and head not in self._computed:
                self._reported()

    def _reported(self) -> None:
        """A span from token 0 that brought nothing new, continued in its own step: what full reports look like.

        Not where an event from the same first block brought something new, or named nothing, in any group of the batch:
        what is reported was hit in all groups. Else it was computed again, as another group had lost it.
        """
        if self._report_seq == self._seq:
            return
        self._report_seq = self._seq
        self.counts.full_reports += 1
        if self.counts.full_reports == FULL_REPORTS_MIN and not self._entry.full_reports:
            self._doubt(
                "clients seem to ask for kv_cache_report_mode=full, which announces blocks that are not there: "
                "forbid it at the gateway, or set full_reports in the model entry"
            )

    def _removed(self, event: BlockRemoved, hashes: Sequence[HashValue], origin: int) -> None:
        """One copy less of each of ``hashes``, which are all of the event's or some of them."""
        group = event.group_idx
        lane = self._heard.get((group, event.medium)) or self._lanes.get((group, MEDIA.index(medium_of(event.medium))))
        if lane is None:
            if not self._nameable(group):
                return
            self.counts.removals_unknown += len(hashes)
            return
        change: OpenChange | None = None
        for each in hashes:
            name = low64(each)
            block = self.lineage.find(name, gpu=lane.gpu)
            have = lane.unplaced.get(name) if block is None else lane.copies.get(block)
            if have is None:
                self.counts.removals_unknown += 1
                continue
            self.counts.removed += 1
            if change is None:
                change = self._draft(group).open(REMOVED, lane.code, origin)
            left = have - 1 if self._counted else 0
            if block is None:
                change.add_unplaced(name, effective=not left)
                self._set_unplaced(lane, name, left)
            else:
                change.add_block(block, name, effective=not left)
                if left:
                    lane.copies[block] = left
                else:
                    del lane.copies[block]
                    self.lineage.release(block)

    def _cleared(self, origin: int) -> Work[None]:
        """GPU, CPU and unknown media are empty from here on; storage outlives the engine."""
        self.counts.clears += 1
        self._cut()
        done = 0
        for lane in self._lanes.values():
            if lane.code in _CLEARS:
                for blocks in batched(lane.copies, self._piece):
                    for block in blocks:
                        self.lineage.release(block)
                    done = yield from self._pause(done + len(blocks))
                for names in batched(lane.unplaced, self._piece):
                    for name in names:
                        self.lineage.tighten(name)
                    done = yield from self._pause(done + len(names))
                lane.copies.clear()
                lane.unplaced.clear()
                lane.opaque.clear()
                lane.veiled.clear()
        changes = tuple(Change(CLEARED, code, self._seq, self._ts, origin=origin) for code in _CLEARS)
        scheme = self.lineage.chains.take_scheme()
        self._pieces.append(Piece(RANK_WIDE, changes, uncertain=self.take_uncertain(), scheme=scheme))

    def _pause(self, done: int) -> Work[int]:
        """Pause if so much was done; what to count on from."""
        if done < self._piece:
            return done
        yield
        return 0

    def _follow(self, moves: Sequence[Move]) -> Work[None]:
        for i, move in enumerate(moves, 1):
            self._move(move)
            if not i % self._piece:
                yield

    def _move(self, move: Move) -> None:
        """Follow a hash from one block, or from none, to another, or to none. No copy comes or goes."""
        if move.now is None:
            self.veil.discard(move.hash)
        for lane in self._lanes.values():
            copies = 0
            if move.was is not None and (move.now is None or not lane.gpu):
                copies = lane.copies.pop(move.was, 0)
                if copies:
                    self.counts.retracted += 1
                    self.lineage.release(move.was)
                    change = self._draft(lane.group).open(REMOVED, lane.code, ATTACHED)
                    change.add_block(move.was, move.hash, effective=True)
            if copies:
                if move.hash not in lane.unplaced:
                    self.lineage.loosen(move.hash)
                lane.unplaced[move.hash] = lane.unplaced.get(move.hash, 0) + copies
                if move.now is None:
                    lane.opaque.add(move.hash)
            if move.now is None or self.lineage.find(move.hash, gpu=lane.gpu) is not move.now:
                continue
            copies = lane.unplaced.get(move.hash, 0)
            if copies:
                self._set_unplaced(lane, move.hash, 0)
                self.counts.attached += 1
                change = self._draft(lane.group).open(STORED, lane.code, ATTACHED, digests=self._recorded)
                change.add_block(move.now, move.hash, effective=self._add(lane, move.now, copies))

    # -- state ----------------------------------------------------------------------------------------------------

    def _lane(self, group: int | None, code: int) -> Lane:
        lane = self._lanes.get((group, code))
        if lane is None:
            lane = self._lanes[group, code] = Lane(group, code)
            if code == 0 and len({group is None for group, medium in self._lanes if medium == 0}) > 1:
                self._doubt(
                    "GPU events with a group number and without one: name the engine's groups in the model entry"
                )
        return lane

    def _add(self, lane: Lane, block: Block, copies: int) -> bool:
        """``copies`` more of a block; whether it had none."""
        have = lane.copies.get(block)
        if have is None:
            lane.copies[block] = copies
            self.lineage.retain(block)
            return True
        if self._counted:
            lane.copies[block] = have + copies
        return False

    def _set_unplaced(self, lane: Lane, name: int, copies: int) -> None:
        if copies:
            lane.unplaced[name] = copies
        else:
            del lane.unplaced[name]
            lane.opaque.discard(name)
            lane.veiled.discard(name)
            self.lineage.tighten(name)

    def _learn(self, event: BlockStored) -> None:
        """What a GPU store says of its group: kind, window, and the largest block size, as pieces have smaller ones."""
        group, size = event.group_idx, event.block_size
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        have = self._specs.get(group)
        if (
            have is not None
            and size <= (have.block_size or 0)
            and (kind is None or kind == have.kind)
            and (window is None or window == have.window)
        ):
            return
        old = have or GroupSpec(group)
        spec = GroupSpec(
            group,
            kind if kind is not None else old.kind,
            max(size, old.block_size or 0) or None,
            window if window is not None else old.window,
        )
        self._specs[group] = spec
        self._draft(group).spec = spec
        word = "none" if group is None else group
        if size % self.lineage.stride:
            self._doubt(
                f"stride {self.lineage.stride} does not divide block size {size} of group {word}: set hash_block_size "
                f"or the block_size of every group in the model entry"
            )
        named = self._named_sizes.get(group)
        if named is not None and size > named:
            self._doubt(
                f"group {word} has blocks of {size} tokens where the model entry says {named}: correct block_size there"
            )

    def _nameable(self, group: int | None) -> bool:
        if group is None or 0 <= group <= GROUP_MAX:
            return True
        self.counts.events_refused += 1
        self._doubt(f"group_idx {group} is outside 0..{GROUP_MAX}: its events are ignored")
        return False

    def _doubt(self, reason: str) -> None:
        if reason in self._reasons:
            return
        if len(self._reasons) >= REASONS_MAX:
            reason = f"more than {REASONS_MAX} reasons for doubt"
            if reason in self._reasons:
                return
        self._reasons.add(reason)
        self._untold.append(reason)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _draft(self, group: int | None) -> Draft:
        draft = self._drafts.get(group)
        if draft is None:
            draft = self._drafts[group] = Draft()
        return draft

    def _cut(self) -> None:
        """Turn the drafts into pieces; the first takes the reasons that nobody was told yet."""
        drafts, self._drafts = self._drafts, {}
        for group, draft in drafts.items():
            lanes = self._lanes_of(group)
            self._pieces.append(
                Piece(
                    group,
                    tuple([change.finish(self._seq, self._ts) for change in draft.changes]),
                    tuple([(lane.code, len(lane.unplaced)) for lane in lanes if lane.unplaced]),
                    draft.spec,
                    self.take_uncertain(),
                    self.lineage.chains.take_scheme(),
                    tuple([(lane.code, len(lane.opaque)) for lane in lanes if lane.opaque]),
                    tuple([(lane.code, len(lane.veiled)) for lane in lanes if lane.veiled]),
                )
            )

    def _lanes_of(self, group: int | None) -> list[Lane]:
        lanes = [self._lanes.get((group, code)) for code in range(len(MEDIA))]
        return [lane for lane in lanes if lane is not None]
