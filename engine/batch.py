"""The flat tensors of one step, built from its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from engine.attention import LayerAttention, is_compiled
from engine.attention.plan import CostModel, Ints, Tree
from engine.attention.plan import Rows as RowTable
from engine.cache.kv import KVCache, token_bytes
from engine.models.model import Batch
from engine.sequence import Sequence
from engine.speculation.draft import EMPTY, Draft


class Work(NamedTuple):
    """What a step computes of one sequence: its next ``due`` tokens, and guesses at what follows them."""

    sequence: Sequence
    due: int
    draft: Draft = EMPTY


def build_batch(work: Rows[Work], cache: KVCache, about: LayerAttention) -> tuple[Batch, RowTable, list[Work]]:
    """The batch, its rows for the attention, and the work in their order (rows of similar shape lie together).

    The guesses of a draft lie behind the row's tokens in the order of the draft, in the slots that follow theirs.
    ``about``: any layer's attention; they agree in what matters here.
    """
    queries = np.array([count + len(draft) for _, count, draft in work])
    contexts = np.array([sequence.computed for sequence, _, _ in work]) + queries
    order = np.lexsort((-contexts, queries))
    if (np.diff(order) != 1).any():
        work = [work[index] for index in order]
        queries, contexts = queries[order], contexts[order]
    ids: list[int] = []
    for sequence, count, draft in work:
        ids += sequence.tokens[sequence.computed : sequence.computed + count]
        ids += draft.tokens
    rows = np.array([sequence.pages.row for sequence, _, _ in work])
    trees = {row: _tree(draft) for row, (_, _, draft) in enumerate(work) if not draft.is_chain}
    layout, positions = lay_out(cache, about, rows, queries, contexts, trees)
    batch = Batch(tokens=torch.tensor(ids), positions=torch.from_numpy(positions))
    return batch, layout, list(work)


def lay_out(
    cache: KVCache, about: LayerAttention, rows: Ints, queries: Ints, contexts: Ints, trees: Mapping[int, Tree]
) -> tuple[RowTable, Ints]:
    """For the attention, the last ``queries`` tokens of ``contexts`` tokens in rows of the cache, ``[rows]`` each; and
    the positions of these tokens, ``[tokens]``. ``trees``: see ``plan.Rows``."""
    row_of_token = np.repeat(np.arange(len(rows)), queries)
    ends = np.cumsum(queries)
    positions = np.arange(ends[-1]) + (contexts - ends)[row_of_token]
    page, offset = np.divmod(positions, cache.page_size)
    size = token_bytes(about, cache.data.dtype)
    layout = RowTable(
        pages=cache.pages[rows, : -(-int(contexts.max()) // cache.page_size)],
        slots=cache.pages[rows[row_of_token], page] * cache.page_size + offset,
        queries=queries,
        contexts=contexts,
        page_size=cache.page_size,
        pool_pages=cache.pool.size,
        kv_heads=about.kv_heads,
        heads_per_kv=about.heads // about.kv_heads,
        cost=CostModel.of_kernel(size) if is_compiled(about, cache.data) else CostModel(size),
        trees=trees,
    )
    for row, tree in trees.items():
        start = ends[row] - queries[row]
        positions[start : ends[row]] = positions[start] + tree.depths
    return layout, positions


def _tree(draft: Draft) -> Tree:
    """A row of one token and a draft of several branches behind it."""
    sees = np.eye(len(draft) + 1, dtype=np.bool_)
    for index, parent in enumerate(draft.parents):
        sees[index + 1] |= sees[parent + 1]
    return Tree(sees.sum(axis=1) - 1, sees)
