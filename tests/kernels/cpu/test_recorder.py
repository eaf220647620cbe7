"""Memory of recordings: what did not fit into the arena lives as long as what did."""

from __future__ import annotations

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.cpu.runtime.recorder import Arena, empty, end_layer, record


@pytest.mark.parametrize("num_grown", [0, 1], ids=["without an arena", "beyond the arena"])
def test_memory_that_the_arena_lacked_lives_until_the_next_recording(num_grown: int) -> None:
    """Kernels that were launched read it by its address, when no tensor refers to it any more."""
    arena = Arena()
    for _ in range(num_grown):
        arena.grow()
    lacked: list[StorageWeakRef] = []

    def allocate() -> None:
        empty(16)
        for _ in range(3):  # layers, after each of which a half of the arena is used anew
            lacked.append(StorageWeakRef(empty(1 << 17).untyped_storage()))
            end_layer()

    record(allocate, arena)
    assert arena.is_too_small
    assert not any(memory.expired() for memory in lacked)
    record(lambda: None, arena)
    assert all(memory.expired() for memory in lacked)
