"""CUDA graphs: captured computations that are replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], None]
"""Function that computes a captured result from the current contents of its inputs, always in the same tensor."""
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Function that captures a computation without running it, and returns its replay and the tensor of its result.

The computation must have run before, so that its kernels are compiled."""


class GraphPool:
    """CUDA graphs that share one memory: the result of one is valid until another is replayed.

    A result that nobody holds is also overwritten by the graphs that are captured after the next one, which may
    therefore read it if they are always replayed in this order.
    """

    def __init__(self) -> None:
        self._newest: torch.cuda.CUDAGraph | None = None
        """Keeps the memory: torch can capture nothing more into that of graphs which all have died."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Capture ``compute``; a ``Capture``."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._newest is None else self._newest.pool()
        # Only this thread's calls are captured; other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = compute()
        self._newest = graph
        return graph.replay, output


def pad_num_tokens(num_tokens: int) -> int:
    """Return the padded size of a step: a power of two below 8, else a multiple of 8."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens < 8 else -(-num_tokens // 8) * 8
