"""The flat tensors of one step, built from its schedule."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np
import torch

from engine.attention.torch_backend import StepPlan
from engine.cache.kv import KVCache
from engine.models.model import Batch
from engine.sequence import Sequence
from kernels.attention import plan_rows, row_classes

Work = tuple[Sequence, int]


def build_batch(work: Rows[Work], cache: KVCache, heads_per_kv: int) -> tuple[Batch, StepPlan, list[Work]]:
    """The batch, how it attends, and the work in the batch's row order (rows of similar shape lie together)."""
    queries = np.array([count for _, count in work])
    contexts = np.array([sequence.computed for sequence, _ in work]) + queries
    classes = row_classes(queries, contexts)
    if (classes[1:] < classes[:-1]).any():
        order = np.argsort(classes, kind="stable")
        work = [work[index] for index in order]
        queries, contexts = queries[order], contexts[order]
    tokens = chain.from_iterable(
        sequence.tokens[sequence.computed : sequence.computed + count] for sequence, count in work
    )
    rows = np.array([sequence.pages.row for sequence, _ in work])
    row_of_token = np.repeat(np.arange(len(work)), queries)
    ends = np.cumsum(queries)
    positions = np.arange(ends[-1]) + (contexts - ends)[row_of_token]
    page, offset = np.divmod(positions, cache.page_size)
    slots = cache.pages[rows[row_of_token], page] * cache.page_size + offset
    width = -(-int(contexts.max()) // cache.page_size)
    batch = Batch(tokens=torch.tensor(list(tokens)), positions=torch.from_numpy(positions))
    plan = StepPlan(
        slots=torch.from_numpy(slots),
        rows=plan_rows(cache.pages[rows, :width], queries, contexts, cache.page_size, heads_per_kv),
    )
    return batch, plan, list(work)
