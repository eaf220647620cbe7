"""CUDA graphs: computations that a GPU replays without the host launching their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """A captured computation."""

    output: Tensor
    """Tensor that every replay writes."""

    def replay(self) -> None:
        """Compute ``output`` from the current contents of the inputs."""
        ...


class CudaGraph:
    """A ``Graph`` of kernels on a GPU.

    Its allocations come from a memory pool that all graphs share: the output of one is valid until another is replayed.
    """

    _pool: Any = None

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        """Capture ``compute`` without running it. It must have run before, so that its kernels are compiled."""
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are captured; other threads may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            self.output = compute()

    def replay(self) -> None:
        self._graph.replay()


def pad_num_tokens(num_tokens: int) -> int:
    """Return the padded size of a step: a power of two below 8, else a multiple of 8."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens < 8 else -(-num_tokens // 8) * 8
