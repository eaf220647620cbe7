"""The flat tensors of one step, built from its schedule."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np
import torch

from engine.attention import LayerAttention
from engine.attention.plan import CostModel
from engine.attention.plan import Rows as RowTable
from engine.cache.kv import KVCache
from engine.models.model import Batch
from engine.sequence import Sequence

Work = tuple[Sequence, int]


def build_batch(work: Rows[Work], cache: KVCache, about: LayerAttention) -> tuple[Batch, RowTable, list[Work]]:
    """The batch, its rows for the attention, and the work in their order (rows of similar shape lie together).

    ``about``: any layer's attention; they agree in what matters here.
    """
    queries = np.array([count for _, count in work])
    contexts = np.array([sequence.computed for sequence, _ in work]) + queries
    order = np.lexsort((-contexts, queries))
    if (np.diff(order) != 1).any():
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
    ids = list(tokens)
    if len(ids) == 1:
        # See ``Rows.single``.
        ids, positions, slots = ids * 2, positions.repeat(2), slots.repeat(2)
    width = -(-int(contexts.max()) // cache.page_size)
    batch = Batch(tokens=torch.tensor(ids), positions=torch.from_numpy(positions))
    token_bytes = 2 * about.kv_heads * about.head_dim * cache.data.element_size()
    layout = RowTable(
        pages=cache.pages[rows, :width],
        slots=slots,
        queries=queries,
        contexts=contexts,
        page_size=cache.page_size,
        pool_pages=cache.pool.size,
        kv_heads=about.kv_heads,
        heads_per_kv=about.heads // about.kv_heads,
        cost=CostModel(token_bytes),
    )
    return batch, layout, list(work)
