"""Loads of evicted prefixes ahead of the first step of the sequences that wait for them.

A waiting sequence whose prefix goes on in the lower tier waits for a load, alone: a thread reads its records from disk
while others run. When it can start, the bytes are copied into free pages, which enter the radix tree as if they had
never left it; the sequence then starts from a longer match. Sequences with the same missing page share one load. What
is lost, late or slower than computing is computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.cache.page_table import RestoredPage
from engine.cache.paged_kv import KVCache
from engine.cache.radix_tree import Match, Node
from engine.offloading.costs import Costs
from engine.offloading.disk_store import CLOSE_SECONDS
from engine.offloading.page_bytes import SlotBytes
from engine.offloading.record_file import RecordLost, StoredRecord, read_records
from engine.offloading.records import RecordName, unpack_tokens
from engine.offloading.tier import OffloadingTier, Part, Plan

_log = logging.getLogger(__name__)

MAX_LOADED_BYTES = 256 << 20
"""Bytes of loads that are read or wait for room. A longer prefix comes in several loads."""
MAX_LOADS = 128
"""Loads at a time."""
MAX_ROUNDS = 64
"""Loads for one sequence, after which it computes the rest."""
LOAD_SECONDS = 30.0
"""Time after which a sequence computes what it waits for, and until which no other waits for such a disk."""


@dataclass(eq=False, slots=True)
class Load:
    """A prefix that is read for some waiting sequences."""

    plan: Plan
    deadline: float
    num_waiting: int = 0
    data: dict[RecordName, Tensor] = field(default_factory=dict)
    """Bytes on the host by record; those in host memory are read when they are copied."""
    reads: list[tuple[str, list[StoredRecord]]] = field(default_factory=list)
    """Records to read by file."""
    lost: list[RecordLost] = field(default_factory=list)
    seconds: float = 0.0
    is_read: bool = False
    is_over: bool = False
    """True once the pages are in the cache, or given up."""


@dataclass(eq=False, slots=True)
class SequenceLoads:
    """The loads of one waiting sequence."""

    load: Load | None = None
    num_rounds: int = 0
    last_miss: tuple[int, int, int] | None = None
    """Version of the index, and lengths of the match, for which nothing was found last."""


class Loader:
    """The loads of one model. Its reader thread gets paths and returns bytes, and knows nothing else."""

    def __init__(
        self, cache: KVCache, tier: OffloadingTier, costs: Costs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tier, self.costs, self._cache, self._clock = tier, costs, cache, clock
        self.on_read: Callable[[], None] = lambda: None
        """Called by the reader after each load."""
        self._loads: dict[RecordName, Load] = {}
        """Loads that are not over, by their first record."""
        self._queue: queue.Queue[Load | None] = queue.Queue(MAX_LOADS + 1)
        tier.on_clear = self.reset
        self._is_stuck = False
        """True after a load was given up, until the reader has read another one."""
        self._read: deque[Load] = deque()  # at most as many as loads
        self._has_read = threading.Event()
        self._reader = threading.Thread(target=self._read_loads, name="cache reader", daemon=True)
        self._reader.start()

    @property
    def has_news(self) -> bool:
        """True if a load was read since ``poll``. May be read from another thread."""
        return bool(self._read)

    @property
    def is_reading(self) -> bool:
        """True if the reader has something to do, and will call ``on_read``."""
        return not self._queue.empty() or any(not load.is_read for load in self._loads.values())

    @property
    def next_deadline(self) -> float:
        """Time at which the first load that is being read is given up; infinite without one."""
        return min((load.deadline for load in self._loads.values() if not load.is_read), default=float("inf"))

    def poll(self) -> None:
        """Note what was read and written meanwhile."""
        self._has_read.clear()
        while self._read:
            self._finish_read(self._read.popleft())
        self.tier.poll()

    def wait(self) -> None:
        """Wait until a load was read, or is given up."""
        self._has_read.wait(max(0.0, min(self.next_deadline - self._clock(), LOAD_SECONDS)))

    # Waiting sequences.

    def must_wait(
        self, own: SequenceLoads, match: Match, namespace: str | None, tokens: Sequence[int], limit: int
    ) -> bool:
        """Return True if a sequence should wait for a load, which is started if need be.

        ``match``: its cached prefix, up to date; ``limit``: most tokens to take from the cache.
        """
        load = own.load
        if load is not None and load.is_over:
            self._leave(own)
            load = None
        if load is not None and load.is_read:
            return False
        if load is not None:
            if self._clock() < load.deadline:
                return True
            _log.warning("a load took longer than %g s and is computed instead", LOAD_SECONDS)
            self._leave(own)
            own.num_rounds, self._is_stuck = MAX_ROUNDS, True
        if own.num_rounds >= MAX_ROUNDS:
            return False
        place = self.tier.index.version, len(match.path), match.num_tokens
        if own.last_miss == place:
            return False
        plan = self.tier.find(match, namespace, tokens, limit, max_bytes=MAX_LOADED_BYTES)
        if plan is None:
            own.last_miss = place
            return False
        return self._start(own, plan)

    def restore(self, own: SequenceLoads, match: Match, namespace: str | None) -> bool:
        """Copy what was read for a sequence into the cache; return True if its match may be longer now.

        ``match``: up to date; there must be room for the sequence.
        """
        load = own.load
        if load is None or not load.is_read:
            return False
        if load.plan.parts[0].start > len(match.path) * self._cache.page_size:
            self._leave(own)  # pages before it were evicted while the sequence waited for room: they come, too
            return True
        stats, started = self.tier.stats, time.perf_counter()
        num_bytes = stats.bytes_loaded
        pages = [self._create_page(load, part) for part in load.plan.pages if self._is_available(load, part)]
        path = self._cache.restore(match, namespace, pages)
        if load.plan.state is not None and self._is_available(load, load.plan.state):
            self._restore_state(load, load.plan.state, path, namespace)
        seconds = time.perf_counter() - started
        stats.load_seconds += seconds
        if stats.bytes_loaded == num_bytes:
            own.num_rounds = MAX_ROUNDS
        else:
            self.costs.add_copy(stats.bytes_loaded - num_bytes, seconds)
        self._end(load)
        self._leave(own)
        return True

    def forget(self, own: SequenceLoads) -> None:
        """Forget the load of a sequence that ends."""
        self._leave(own)
        own.num_rounds = 0

    def reset(self) -> None:
        """Forget all loads, for which no sequence waits any more."""
        for load in list(self._loads.values()):
            self._end(load)

    def close(self) -> None:
        """Stop the reader, and remove all files."""
        self.reset()
        if not self._queue.full():
            self._queue.put_nowait(None)
        if not self._is_stuck:
            self._reader.join(CLOSE_SECONDS)
        self.tier.close()

    def check(self, waiting: Sequence[SequenceLoads]) -> None:
        """Raise ``RuntimeError`` unless each load has the sequences that wait for it, and records their readers."""
        for load in self._loads.values():
            if load.is_over or load.num_waiting != sum(one.load is load for one in waiting):
                raise RuntimeError("a load is kept that is over, or that other sequences wait for")
        readers = [part.record for load in self._loads.values() for part in load.plan.parts]
        if any(record.num_readers != readers.count(record) for record in self.tier.index):
            raise RuntimeError("records do not agree with the loads that read them")

    # Loads.

    def _start(self, own: SequenceLoads, plan: Plan) -> bool:
        """Let a sequence wait for a plan; return False if computing it is cheaper."""
        first = plan.parts[0].record.name
        load = self._loads.get(first)
        if load is None:
            disk_bytes = _count_disk_bytes(plan)
            if not self.costs.is_load_cheaper(plan.num_tokens, disk_bytes=disk_bytes, num_bytes=plan.num_bytes):
                self.tier.stats.loads_skipped += 1
                own.num_rounds = MAX_ROUNDS
                return False
            if self._is_stuck:
                return False  # the disk does not answer
            held = sum(one.plan.num_bytes for one in self._loads.values())
            is_full = len(self._loads) >= MAX_LOADS or self._queue.full()
            if is_full or (self._loads and held + plan.num_bytes > MAX_LOADED_BYTES):
                return True
            load = self._loads[first] = self._create_load(plan)
        own.load = load
        own.num_rounds += 1
        load.num_waiting += 1
        return not load.is_read

    def _create_load(self, plan: Plan) -> Load:
        load = Load(plan, self._clock() + LOAD_SECONDS)
        reads: dict[str, list[StoredRecord]] = {}
        for part in plan.parts:
            record = part.record
            record.num_readers += 1
            if record.is_in_host_memory:
                continue
            if record.data is not None:
                load.data[record.name] = record.data
            elif record.group is not None:
                stored = StoredRecord(record.name, record.offset, record.size)
                reads.setdefault(record.group.path, []).append(stored)
        load.reads = list(reads.items())
        self.tier.touch(plan.parts)
        if load.reads:
            self._queue.put_nowait(load)
        else:
            load.is_read = True
        return load

    def _finish_read(self, load: Load) -> None:
        load.is_read, self._is_stuck = True, False
        self.tier.stats.load_seconds += load.seconds
        if load.data:
            self.costs.add_read(sum(len(data) for data in load.data.values()), load.seconds)
        if load.lost and not load.is_over:
            if not self.tier.stats.pages_lost:
                _log.warning("a cached page is lost and computed again: %s", load.lost[0])
            self.tier.stats.pages_lost += len(load.lost)
            for part in load.plan.parts:
                if not self._is_available(load, part):
                    self.tier.forget(part.record)

    def _is_available(self, load: Load, part: Part) -> bool:
        return part.record.name in load.data or part.record.is_in_host_memory

    def _create_page(self, load: Load, part: Part) -> RestoredPage:
        key = unpack_tokens(part.record.name.tokens)
        return RestoredPage(part.start, key, lambda page: self._write(load, part, self.tier.page_bytes, page))

    def _write(self, load: Load, part: Part, slots: SlotBytes, index: int) -> None:
        """Write the bytes of a record into a page or a slot of the cache."""
        slots.write(index, self._get_bytes(load, part))
        self.tier.stats.pages_loaded += 1
        self.tier.stats.bytes_loaded += slots.num_bytes

    def _get_bytes(self, load: Load, part: Part) -> Tensor:
        data = load.data.get(part.record.name)
        if data is None:
            assert self.tier.host is not None
            return self.tier.host.read(part.record)
        return data if self._cache.data.device.type == "cpu" else data.pin_memory()

    def _restore_state(self, load: Load, state: Part, path: Sequence[Node], namespace: str | None) -> None:
        """Make a state a snapshot of its page, if that is cached."""
        states, size, state_bytes = self._cache.states, self._cache.page_size, self.tier.state_bytes
        assert states is not None
        assert state_bytes is not None
        key = unpack_tokens(state.record.name.tokens)
        end = state.start + len(key)
        path = path[: state.start // size + 1]
        if len(path) * size == state.start:  # the page may be cached, though not full
            parent = path[-1] if path else self._cache.tree.root(namespace)
            following = self._cache.tree.find_extension(parent, key)
            path = path if following is None else [*path, following]
        if len(path) * size > state.start:
            states.restore_snapshot(path, end, size, lambda slot: self._write(load, state, state_bytes, slot))

    def _end(self, load: Load) -> None:
        """Forget a load, and what was read."""
        if load.is_over:
            return
        load.is_over = True
        load.data = {}
        self._loads = {name: one for name, one in self._loads.items() if one is not load}
        for part in load.plan.parts:
            part.record.num_readers -= 1

    def _leave(self, own: SequenceLoads) -> None:
        load, own.load = own.load, None
        if load is not None:
            load.num_waiting -= 1
            if not load.num_waiting:
                self._end(load)

    # The reader's thread.

    def _read_loads(self) -> None:
        while (load := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                self._read_files(load)
            except Exception as error:  # whatever it is: what was not read is computed
                _log.exception("a load failed")
                load.lost.append(RecordLost(repr(error)))
            load.seconds = time.perf_counter() - started
            self._read.append(load)
            self._has_read.set()
            self.on_read()

    def _read_files(self, load: Load) -> None:
        for path, records in load.reads:
            if load.is_over:
                break
            for record, data in zip(records, read_records(Path(path), self._layout, records), strict=True):
                if isinstance(data, RecordLost):
                    load.lost.append(data)
                else:
                    load.data[record.name] = torch.from_numpy(data)

    @property
    def _layout(self) -> bytes:
        assert self.tier.disk is not None
        return self.tier.disk.layout


def _count_disk_bytes(plan: Plan) -> int:
    records = [part.record for part in plan.parts]
    return sum(one.size for one in records if not one.is_in_host_memory and one.data is None)
