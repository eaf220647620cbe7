"""Crossover from which reading a shared prefix once pays: ``python -m benchmarks.engine.cascade``.

One decode step of one layer (8 heads, 4 key-value heads of 64, as in the 50M checkpoint), for prefixes and numbers of
branches around the crossover, each branch with 64 tokens of its own: microseconds if every branch reads all keys alone,
if the prefix is read once, and as the cost model chooses. The layers' memory is larger than the processor's cache, as
in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.attention.cpu_numba import NumbaAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel, AttentionMetadata

HEADS, KV_HEADS, DIM, PAGE, POOL, LAYERS = 8, 4, 64, 16, 4096, 16
OWN = 4
"""Own pages of each branch."""
ALWAYS, NEVER, MODEL = (
    AttentionCostModel(1, piece_cost_bytes=0, query_cost_bytes=0),
    AttentionCostModel(0),
    AttentionCostModel.for_compiled_kernel(2 * KV_HEADS * DIM * 4),
)


def main() -> None:
    """Print the table."""
    layers = [LayerAttentionConfig(HEADS, KV_HEADS, DIM, DIM**-0.5)] * LAYERS
    attend = NumbaAttention(layers, torch.randn(LAYERS, 2, KV_HEADS, POOL, PAGE, DIM))
    table = Table("prefix", "branches", "apart, µs", "shared, µs", "chosen", "best")
    with torch.inference_mode():
        for branches in (2, 4, 8, 16, 32):
            for prefix in (32, 64, 128, 256, 512, 1024):
                apart, shared = (_seconds(attend, prefix, branches, cost) for cost in (NEVER, ALWAYS))
                chosen = MODEL.should_share(prefix, branches, branches)
                times = (f"{apart * 1e6:.0f}", f"{shared * 1e6:.0f}")
                words = ("shared" if chosen else "apart", "shared" if shared < apart else "apart")
                table.add_row(str(prefix), str(branches), *times, *words)
    Console().print(table)


def _seconds(attend: NumbaAttention, prefix: int, branches: int, cost: AttentionCostModel) -> float:
    """Return the median time of one layer in seconds."""
    common = prefix // PAGE
    own = common + np.arange(branches)[:, None] * OWN + np.arange(OWN)
    pages = np.concatenate((np.broadcast_to(np.arange(common), (branches, common)), own), axis=1)
    contexts = np.full(branches, pages.shape[1] * PAGE)
    attend.prepare(
        AttentionMetadata(pages, np.ones_like(contexts), contexts, PAGE, POOL, KV_HEADS, HEADS // KV_HEADS, cost)
    )
    q, k = torch.randn(branches, HEADS, DIM), torch.randn(branches, KV_HEADS, DIM)
    return statistics.median(_time(lambda: [attend(layer, q, k, k) for layer in range(LAYERS)]) for _ in range(9))


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / LAYERS


if __name__ == "__main__":
    main()
