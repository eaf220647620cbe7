"""CUDA graphs: computations that a GPU replays without the host launching their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
"""Function that computes a captured result from the current contents of its inputs, always in the same tensor."""


def capture_graph(compute: Callable[[], Tensor]) -> Replay:
    """Capture ``compute`` without running it. It must have run before, so that its kernels are compiled.

    Allocations come from a memory pool that all graphs share: one's result is valid until another is replayed.
    """
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls are captured; other threads may use the device meanwhile.
    with torch.cuda.graph(graph, pool=_memory_pool(), capture_error_mode="thread_local"):
        output = compute()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@cache
def _memory_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def pad_num_tokens(num_tokens: int) -> int:
    """Return the padded size of a step: a power of two below 8, else a multiple of 8."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens < 8 else -(-num_tokens // 8) * 8
