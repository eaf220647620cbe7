"""Sequences of kernel launches that are recorded once and replayed by one call: CUDA graphs for the CPU.

A decoding step launches a hundred kernels of a few microseconds each, and always the same ones for a given number of
tokens. Launching them from Python takes a tenth of a step, or most of it for a small model. A replay starts its threads
once; they meet at a barrier between two launches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kernels.common import warmup
from kernels.cpu.runtime.kernel import address_of, run_launches
from kernels.cpu.runtime.recorder import Arena, Recording, record

_T = TypeVar("_T")


class KernelGraph:
    """A recording that can be replayed. A replay reads and writes the addresses that were recorded."""

    def __init__(self, recording: Recording) -> None:
        self._launches, self._part_ends = recording.launches, recording.part_ends
        # The argument bytes stay where they are for as long as the launches hold them.
        words = [
            word
            for function, arguments, num_threads in self._launches
            for word in (function, address_of(arguments), num_threads)
        ]
        self._table = struct.pack(f"={len(words)}q", *words)
        self._table_address = address_of(self._table)
        self._num_threads = max((launch.num_threads for launch in self._launches), default=1)

    def __len__(self) -> int:
        return len(self._launches)

    def replay(self, num_parts: int | None = None) -> None:
        """Launch all kernels again in their order, or those of the first ``num_parts`` parts."""
        count = len(self._launches) if num_parts is None else self._part_ends[num_parts - 1]
        run_launches(self._table_address, count, self._num_threads)


class KernelGraphCache(Generic[_T]):
    """Kernel graphs of computations that run one at a time, again and again, each under a key.

    A computation is recorded when its key is new, which takes about as long as running it; the first ones, for which
    there is not enough memory yet, are recorded when they come again. It must read its inputs from the same addresses
    each time; its result is valid until the next computation.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self._graphs: dict[Hashable, tuple[KernelGraph, _T]] = {}
        """Graph and result of each key."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def discard(self, key: Hashable) -> None:
        """Discard the graph of a key, if there is one."""
        self._graphs.pop(key, None)

    def __call__(self, key: Hashable, work: Callable[[], _T], num_parts: int | None = None) -> _T:
        """Return the result of ``work``, which must launch the same kernels whenever the key is the same.

        ``num_parts``: replay only the first parts (``recorder.end_part``).
        """
        cached = self._graphs.get(key)
        if cached is not None:
            graph, result = cached
            graph.replay(num_parts)
            return result
        warmup.count_first_run()
        recording, result = record(work, self._arena)
        # The work is not done again: it may have advanced the states of sequences.
        if self._arena.is_too_small:
            self._arena.grow()
            self._graphs.clear()
        else:
            self._graphs[key] = KernelGraph(recording), result
        return result
