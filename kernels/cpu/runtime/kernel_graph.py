"""Launches of kernels that are recorded and repeated.

A decoding step launches a hundred kernels of a few microseconds each, always the same ones for a number of tokens. What
Python needs to launch them is a tenth of a step, or most of it for a small model. So they are recorded once, and then
repeated by one call, on threads that are started once and meet between two launches: on a GPU, a graph.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.common.warmup import Firsts

_T = TypeVar("_T")


class Arena:
    """The memory of tapes that are never repeated at the same time, in two halves."""

    def __init__(self) -> None:
        self._halves = [torch.empty(0), torch.empty(0)]
        self._taken = 0

    def grow(self) -> None:
        """Makes room. What was recorded before must not be repeated any more."""
        self._halves = [torch.empty(max(1 << 16, 2 * len(half))) for half in self._halves]

    def turn(self) -> None:
        """What is taken from now on may overwrite what was taken before the last turn."""
        self._halves.reverse()
        self._taken = 0

    def take(self, shape: Sequence[int]) -> Tensor:
        """An uninitialised tensor. Raises ``MemoryError`` where there is no room for it."""
        size = math.prod(shape)
        start, self._taken = self._taken, self._taken + -(-size // 16) * 16
        if self._taken > len(self._halves[0]):
            raise MemoryError
        return self._halves[0][start : start + size].view(*shape)


class Tape:
    """Launches that one call repeats, on threads that meet in between and are started once.

    They read and write the same addresses again: what they take for memory comes from an ``Arena``.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._launches: list[tuple[int, bytes, int]] = []
        self._table = b""
        self._address = 0
        """Where it lies."""
        self._threads = 1
        self.parts: list[int] = []
        """How many launches there were when each part ended (``part_ends``)."""

    def record(self, work: Callable[[], _T]) -> _T:
        """Does ``work`` and keeps its launches on this thread. What it does in other ways is not repeated.

        Raises ``MemoryError`` where the arena must grow.
        """
        self.arena.turn()
        recorder.tape = self
        try:
            return work()
        finally:
            recorder.tape = None

    def add(self, address: int, values: bytes, threads: int) -> None:
        """Another launch: the function, its arguments and its threads."""
        self._launches.append((address, values, threads))

    @property
    def launches(self) -> int:
        """How many there are."""
        return len(self._launches)

    def repeat(self, parts: int | None = None) -> None:
        """The launches once more, in their order, or those of the first so many parts."""
        from kernels.cpu.runtime.kernel import address_of, repeat

        if not self._table:
            # The bytes of the arguments stay where they are: the launches hold them.
            words = [
                word for address, values, threads in self._launches for word in (address, address_of(values), threads)
            ]
            self._table = struct.pack(f"={len(words)}q", *words)
            self._address = address_of(self._table)
            self._threads = max(threads for _, _, threads in self._launches)
        count = len(self._launches) if parts is None else self.parts[parts - 1]
        repeat(self._address, count, self._threads)


class Tapes(Generic[_T]):
    """Computations of which one is wanted at a time, again and again, each known by a key.

    It is recorded when it is met for the first time, which takes about as long as any time without. It must read its
    inputs where it read them before, and its result is valid until the next computation.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self.known: dict[Hashable, tuple[Tape, _T]] = {}
        """With what they leave."""

    def __call__(self, key: Hashable, work: Callable[[], _T], parts: int | None = None) -> _T:
        """The result of ``work``, which launches the same kernels whenever it has this key. ``parts``: when it is
        repeated, only the first so many."""
        known = self.known.get(key)
        if known is not None:
            known[0].repeat(parts)
            return known[1]
        Firsts.count += 1
        known = self.known[key] = self._record(work)
        return known[1]

    def _record(self, work: Callable[[], _T]) -> tuple[Tape, _T]:
        while True:
            tape = Tape(self._arena)
            try:
                return tape, tape.record(work)
            except MemoryError:
                self._arena.grow()
                self.known.clear()


class _Recorder(threading.local):
    tape: Tape | None = None


recorder = _Recorder()


def empty(*shape: int) -> Tensor:
    """An uninitialised float32 tensor for a kernel's result or scratch, that a tape's repetition finds again."""
    tape = recorder.tape
    return torch.empty(shape) if tape is None else tape.arena.take(shape)


def layer_ends() -> None:
    """What was taken by ``empty`` before the last layer's end is not needed any more."""
    if recorder.tape is not None:
        recorder.tape.arena.turn()


def part_ends() -> None:
    """What is recorded up to here can be repeated without what comes after it."""
    if recorder.tape is not None:
        recorder.tape.parts.append(recorder.tape.launches)
