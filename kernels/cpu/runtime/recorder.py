"""Recording the kernels that a thread launches, and the memory that a recorded sequence reuses when it is replayed.

``Kernel`` adds its launches to the thread's active recording; ``kernels.cpu.runtime.kernel_graph`` replays them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

_MIN_ARENA_FLOATS = 1 << 16


class Launch(NamedTuple):
    """One kernel launch."""

    function: int
    """Address of the compiled function."""
    arguments: bytes
    """Argument words, which the function reads where these bytes lie."""
    num_threads: int


class Arena:
    """Memory of recordings that are never replayed at the same time, in two halves.

    A layer allocates from one half and reads the results of the layer before from the other.
    """

    def __init__(self) -> None:
        self._halves = [torch.empty(0), torch.empty(0)]
        self._num_used = 0
        self._num_needed = 0
        """Floats that a half must have for what was allocated since the last growth."""
        self._others: list[Tensor] = []
        """Tensors allocated elsewhere, whose memory kernels may read by its address as long as the arena's own."""

    @property
    def is_too_small(self) -> bool:
        """True if something was allocated elsewhere, so that what is being recorded cannot be replayed."""
        return self._num_needed > len(self._halves[0])

    def grow(self) -> None:
        """Make the memory large enough, at least twice as large. What was recorded must not be replayed any more."""
        size = max(_MIN_ARENA_FLOATS, 2 * len(self._halves[0]), self._num_needed)
        self._halves = [torch.empty(size), torch.empty(size)]

    def release_others(self) -> None:
        """Release what was allocated elsewhere by the recording before."""
        self._others.clear()

    def swap_halves(self) -> None:
        """Allocate from the other half from now on, which overwrites what was allocated before the last swap."""
        self._halves.reverse()
        self._num_used = 0

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return an uninitialised float32 tensor, aligned to 64 bytes; with memory of its own if the half is full."""
        size = math.prod(shape)
        start, self._num_used = self._num_used, self._num_used + -(-size // 16) * 16
        if self._num_used > len(self._halves[0]):
            self._num_needed = max(self._num_needed, self._num_used)
            self._others.append(torch.empty(shape))
            return self._others[-1]
        return self._halves[0][start : start + size].view(*shape)


@dataclass(slots=True)
class Recording:
    """Launches in their order."""

    arena: Arena
    launches: list[Launch] = field(default_factory=list)
    part_ends: list[int] = field(default_factory=list)
    """Number of launches up to the end of each part (``end_part``)."""


class _Active(threading.local):
    recording: Recording | None = None


active = _Active()
"""The recording of the calling thread, ``None`` if it does not record."""


def record(work: Callable[[], _T], arena: Arena) -> tuple[Recording, _T]:
    """Call ``work`` and return the kernels that it launched from this thread, and its result.

    Anything that ``work`` does by other means than kernels is not recorded. The result is right in any case, but cannot
    be replayed if the arena was too small (``Arena.is_too_small``).
    """
    arena.release_others()
    arena.swap_halves()
    active.recording = recording = Recording(arena)
    try:
        return recording, work()
    finally:
        active.recording = None


def empty(*shape: int) -> Tensor:
    """Return an uninitialised float32 tensor for a kernel's result or scratch; from the arena while recording."""
    recording = active.recording
    return torch.empty(shape) if recording is None else recording.arena.allocate(shape)


def end_layer() -> None:
    """Allow what ``empty`` returned before the last ``end_layer`` to be overwritten."""
    if active.recording is not None:
        active.recording.arena.swap_halves()


def end_part() -> None:
    """Mark a point up to which the recording can be replayed alone."""
    if active.recording is not None:
        active.recording.part_ends.append(len(active.recording.launches))
