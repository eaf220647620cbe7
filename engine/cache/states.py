"""States of fixed size beside the pages of keys and values, for layers with a recurrence or a short convolution.

A *slot* holds what all such layers of a model keep after the same tokens of one sequence. Unlike a page, a state is
overwritten with every token, so it belongs to a position: the radix tree knows *snapshots*, slots that are never
written again, at some of the positions of its pages. A prefix can be taken from the cache up to its last snapshot.

A step reads a state from one slot and writes it to another, so that a fork copies nothing: all branches read the same
snapshot, and each writes a slot of its own. Only a slot that one sequence alone references is written in place.

Snapshots are made where later sequences are likely to begin: at the ends of prompts and of branches, where a prefix has
been computed a second time, and along a sequence wherever the keys since the last one take as much memory as a state.
They take what running sequences leave of the slots. The first to be dropped is that of the page that was used longest
ago, pinned pages last; its page stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.cache.pages import PagePool
from engine.cache.radix_tree import Node, RadixTree
from engine.cache.state_layers import NO_STATE, StateLayer, StateSegment, StateStep
from engine.device import CPU, DeviceConfig

SlotWriter = Callable[[int], None]

SLOTS_PER_SEQUENCE = 2
"""Slots that a running sequence may need at once: the state that it reads, and the one that it writes."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """The state of one running sequence."""

    slot: int
    """The slot that the sequence references; ``NO_STATE`` before its first token."""
    num_tokens: int
    """Number of tokens after which the state is that of the slot."""
    previous: int = NO_STATE
    """The slot of the state one token earlier, while the token after that may end the sequence; else ``NO_STATE``."""
    wanted: set[int] = field(default_factory=set)
    """Numbers of tokens after which a snapshot is wanted besides those at regular distances."""


class StateRow(NamedTuple):
    """A sequence's share of a step."""

    state: SequenceState
    num_tokens: int
    """Number of its own tokens."""
    parents: Sequence[int] = ()
    """Parents of its draft tokens."""
    is_token_unread: bool = False
    """True if the host has not read its token, which may be its last one: then the state before it is the one to keep,
    and it is not overwritten."""


@dataclass(eq=False, slots=True)
class StateWork:
    """The slots that a step reads and writes for one sequence."""

    state: SequenceState
    target: int
    """The slot of the state after the sequence's own tokens of the step."""
    num_tokens: int
    """Number of tokens of the sequence after the step, drafts not included."""
    keeps_previous: bool = False
    """True if the slot that is read is kept until the host has read the step's token."""
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    """Snapshots within the step: numbers of tokens, and slots that nothing else references yet."""
    drafts: tuple[int, ...] = ()
    """The slot of the state after each draft token."""


class StatePool:
    """Slots of one model's states, with reference counts, and the snapshots among them."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        slots: int,
        *,
        snapshot_distance: int,
        device_config: DeviceConfig = CPU,
    ) -> None:
        """Allocate ``slots`` slots. ``snapshot_distance``: tokens between two snapshots along a sequence."""
        self.layers = [
            [torch.zeros((slots, *shape), dtype=torch.float32, device=device_config.device) for shape in layer.shapes]
            for layer in layers
        ]
        """The tensors of each layer, ``[slots, …]``."""
        self.snapshot_distance = snapshot_distance
        self.num_slots = slots
        self.reset()

    def reset(self) -> None:
        """Forget every state. What is read before it is written is never used, so nothing has to be zeroed."""
        self.slots = PagePool(self.num_slots)
        self._nodes: dict[int, Node] = {}
        """The cached page of each snapshot, by its slot."""
        self._work: list[StateWork] = []
        self._tree: RadixTree | None = None
        self.on_evict: Callable[[Node, int], None] | None = None
        """Receiver of each snapshot that is about to be dropped for lack of memory: its page and number of tokens."""

    def connect(self, tree: RadixTree) -> None:
        """Keep snapshots at the pages of a tree, which is empty."""
        self._tree, tree.snapshots = tree, self

    @property
    def max_running(self) -> int:
        """Number of sequences that can run at once."""
        return self.num_slots // SLOTS_PER_SEQUENCE

    @property
    def num_used(self) -> int:
        """Slots that running sequences and snapshots hold."""
        return self.num_slots - self.slots.num_free

    @property
    def num_snapshots(self) -> int:
        return len(self._nodes)

    # Sequences.

    def open(self, slot: int, num_tokens: int, wanted: Iterable[int]) -> SequenceState:
        """Return the state of a sequence that begins with a snapshot, or ``NO_STATE`` after no token."""
        if slot != NO_STATE:
            self.slots.incref([slot])
        return SequenceState(slot, num_tokens, wanted=set(wanted))

    def close(self, state: SequenceState) -> None:
        """Release the state of a sequence that ends."""
        self.release_previous(state)
        self._release(state.slot)
        state.slot = NO_STATE

    def _release(self, slot: int) -> None:
        if slot != NO_STATE:
            self.slots.decref([slot])

    # Steps.

    def count_spare_slots(self, states: Iterable[SequenceState]) -> int:
        """Return how many slots are left when each of some sequences has one to write in a step."""
        spare = self.slots.num_free + sum(self.slots.ref_counts[slot] == 1 for slot in self._nodes)
        return spare - sum(not self._owns_slot(state) for state in states)

    def _owns_slot(self, state: SequenceState) -> bool:
        """Return True if a sequence alone references its slot, so that it may be overwritten."""
        return state.slot != NO_STATE and self.slots.ref_counts[state.slot] == 1

    def plan(self, rows: Sequence[StateRow]) -> StateStep:
        """Plan a step that computes tokens of some sequences, given in the order of its batch.

        For each draft token there must be a spare slot (``count_spare_slots``). The slots that are read stay referenced
        until ``commit``.
        """
        self._work = [self._reserve(row) for row in rows]
        for work, row in zip(self._work, rows, strict=True):
            work.drafts = tuple(self._allocate_needed() for _ in row.parents)
        segments: list[StateSegment] = []
        start = 0
        for work, (state, count, parents, _) in zip(self._work, rows, strict=True):
            own = self._cut_segments(work, start)
            own_end = start + count
            for index, parent in enumerate(parents):
                source = work.target if parent < 0 else work.drafts[parent]
                own.append(StateSegment(own_end + index, own_end + index + 1, source, work.drafts[index]))
            segments += own if len(own) == 1 else [own[0]._replace(num_chained=len(own)), *own[1:]]
            start = own_end + len(parents)
            state.wanted = {position for position in state.wanted if position >= work.num_tokens}
        return StateStep(self.layers, segments)

    def _reserve(self, row: StateRow) -> StateWork:
        """Return the work of a row with the slot that it writes: its own, if nothing else needs what that holds."""
        state, is_own = row.state, self._owns_slot(row.state) and not row.is_token_unread
        target = state.slot if is_own else self._allocate_needed()
        return StateWork(state, target, state.num_tokens + row.num_tokens, keeps_previous=row.is_token_unread)

    def _cut_segments(self, work: StateWork, start: int) -> list[StateSegment]:
        """Return the segments of a row whose first token in the batch is ``start``, cut where snapshots are wanted."""
        state, position, source = work.state, work.state.num_tokens, work.state.slot
        segments: list[StateSegment] = []
        for cut in self._wanted_within(state, work.num_tokens):
            slot = self._allocate()
            if slot is None:
                break
            segments.append(StateSegment(start, start + cut - position, source, slot, num_chained=int(not segments)))
            work.snapshots.append((cut, slot))
            start, position, source = start + cut - position, cut, slot
        end = start + work.num_tokens - position
        segments.append(StateSegment(start, end, source, work.target, num_chained=int(not segments)))
        return segments

    def _wanted_within(self, state: SequenceState, end: int) -> list[int]:
        """Return the positions before ``end`` of this step at which snapshots are wanted."""
        distance = self.snapshot_distance
        regular = range((state.num_tokens // distance + 1) * distance, end, distance)
        return sorted({*regular, *(position for position in state.wanted if state.num_tokens < position < end)})

    def commit(self) -> list[StateWork]:
        """Make what the planned step wrote the states of its sequences; return its work, in the order of the batch."""
        done, self._work = self._work, []
        for work in done:
            if work.keeps_previous:
                work.state.previous = work.state.slot
            elif work.state.slot != work.target:
                self._release(work.state.slot)
            work.state.slot, work.state.num_tokens = work.target, work.num_tokens
        return done

    def rewind(self, state: SequenceState, num_tokens: int) -> None:
        """Move a sequence back to the state after ``num_tokens`` tokens, if it is the one that was kept."""
        if state.previous != NO_STATE and state.num_tokens == num_tokens + 1:
            self._release(state.slot)
            state.slot, state.num_tokens, state.previous = state.previous, num_tokens, NO_STATE

    def release_previous(self, state: SequenceState) -> None:
        """Release the state before the latest one, as the token after that did not end the sequence."""
        self._release(state.previous)
        state.previous = NO_STATE

    def accept(self, work: StateWork, path: Sequence[int]) -> None:
        """Move a sequence on to the state after the last of some accepted draft tokens, given by their indices."""
        if not path:
            return
        slot = work.drafts[path[-1]]
        self.slots.incref([slot])
        self._release(work.state.slot)
        work.state.slot, work.state.num_tokens = slot, work.num_tokens + len(path)

    def release_drafts(self, work: StateWork) -> None:
        """Release the states after draft tokens."""
        self.slots.decref(work.drafts)
        work.drafts = ()

    # Snapshots.

    def wants_snapshot(self, state: SequenceState) -> bool:
        """Return True if a snapshot is wanted of a sequence's present state."""
        return state.num_tokens in state.wanted or state.num_tokens % self.snapshot_distance == 0

    def add_snapshot(self, path: Sequence[Node], num_tokens: int, slot: int, page_size: int) -> None:
        """Keep a slot as the state after ``num_tokens`` tokens of cached pages. Takes over a reference to it."""
        index = (num_tokens - 1) // page_size
        offset = num_tokens - index * page_size
        if num_tokens < 1 or index >= len(path) or len(path[index].key) < offset or offset in path[index].snapshots:
            self._release(slot)
            return
        if slot in self._nodes:
            raise RuntimeError(f"slot {slot} is the state after two different prefixes")
        path[index].snapshots[offset] = slot
        self._nodes[slot] = path[index]
        self._note_change()

    def share_snapshot(self, path: Sequence[Node], state: SequenceState, page_size: int) -> None:
        """Keep the present state of a sequence as a snapshot of the cached pages of its tokens."""
        if state.slot != NO_STATE and state.slot not in self._nodes:
            self.slots.incref([state.slot])
            self.add_snapshot(path, state.num_tokens, state.slot, page_size)

    def restore_snapshot(self, path: Sequence[Node], num_tokens: int, page_size: int, write: SlotWriter) -> bool:
        """Keep a state that a lower tier had as a snapshot of cached pages; return False if there is no slot for it.

        ``write``: writes the state into a slot.
        """
        slot = self._allocate()
        if slot is None:
            return False
        write(slot)
        self.add_snapshot(path, num_tokens, slot, page_size)
        return True

    def move(self, node: Node, by: Node) -> None:
        """Move the snapshots of a page to another one that begins with its tokens."""
        for offset, slot in list(node.snapshots.items()):
            if offset not in by.snapshots:
                by.snapshots[offset] = node.snapshots.pop(offset)
                self._nodes[slot] = by

    def drop(self, node: Node) -> None:
        """Drop the snapshots of a page."""
        for slot in node.snapshots.values():
            del self._nodes[slot]
            self._release(slot)
        node.snapshots.clear()
        self._note_change()

    def find_damaged(self) -> set[int]:
        """Return the pages that have a snapshot with a number that is not finite."""
        tensors = [tensor for layer in self.layers for tensor in layer]
        return {
            node.page
            for slot, node in self._nodes.items()
            if not all(bool(tensor[slot].isfinite().all()) for tensor in tensors)
        }

    def check(self, states: Iterable[SequenceState], nodes: Iterable[Node]) -> None:
        """Raise ``RuntimeError`` unless the references are those of these sequences and of the pages' snapshots."""
        snapshots: Mapping[int, Node] = {slot: node for node in nodes for slot in node.snapshots.values()}
        if snapshots != self._nodes:
            raise RuntimeError("pages and slots do not agree on the snapshots")
        if any(not 0 < offset <= len(node.key) for node in snapshots.values() for offset in node.snapshots):
            raise RuntimeError("a snapshot lies outside of its page")
        states = list(states)
        held = [slot for state in states for slot in (state.slot, state.previous) if slot != NO_STATE]
        self.slots.check([*held, *snapshots])
        if any(state.slot != NO_STATE and state.num_tokens < 1 for state in states):
            raise RuntimeError("a sequence has a state after no token")

    def _allocate_needed(self) -> int:
        slot = self._allocate()
        if slot is None:
            raise RuntimeError("more slots of states are needed than there are")
        return slot

    def _allocate(self) -> int | None:
        """Return a slot with one reference, dropping a snapshot if none is free; ``None`` if all are in use."""
        slot = self.slots.allocate()
        if slot is None and self._evict():
            slot = self.slots.allocate()
        return slot

    def _evict(self) -> bool:
        """Drop the snapshot that is least likely to be used; return False if all are being read."""
        assert self._tree is not None
        ref_counts, pages = self.slots.ref_counts, self._tree.pool.ref_counts
        unread = [(slot, node) for slot, node in self._nodes.items() if ref_counts[slot] == 1]
        if not unread:
            return False
        slot, node = min(unread, key=lambda one: (bool(one[1].pins), pages[one[1].page] > 1, one[1].last_used))
        [offset] = [offset for offset, other in node.snapshots.items() if other == slot]
        if self.on_evict is not None:
            self.on_evict(node, offset)
        del self._nodes[slot]
        del node.snapshots[offset]
        self._release(slot)
        self._note_change()
        return True

    def _note_change(self) -> None:
        """Count a change that may lengthen or shorten a match."""
        if self._tree is not None:
            self._tree.version += 1
