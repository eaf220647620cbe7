"""The flat tensors of one step, built from its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.layer import LayerAttentionConfig, has_compiled_kernel
from engine.attention.plan import AttentionCostModel, AttentionMetadata, IntArray, TreeMask
from engine.cache.paged_kv import KVCache, kv_bytes_per_token
from engine.models.interface import Batch
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """What a step computes of one sequence: its next ``due`` tokens, and guesses at what follows them."""

    sequence: Sequence
    num_tokens: int
    draft: Draft = EMPTY_DRAFT


def build_batch(
    work: Rows[ScheduledSequence], cache: KVCache, about: LayerAttentionConfig
) -> tuple[Batch, AttentionMetadata, list[ScheduledSequence]]:
    """The batch, its rows for the attention, and the work in their order (rows of similar shape lie together).

    The guesses of a draft lie behind the row's tokens in the order of the draft, in the slots that follow theirs.
    ``about``: any layer's attention; they agree in what matters here.
    """
    work = sorted(work, key=_shape)
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    queries: list[int] = []
    contexts: list[int] = []
    trees: dict[int, TreeMask] = {}
    for sequence, count, draft in work:
        done, guesses = sequence.num_computed, draft.tokens
        end = done + count + len(guesses)
        ids += sequence.tokens[done : done + count]
        ids += guesses
        if guesses and not draft.is_chain:
            trees[len(rows)] = tree = _tree(draft)
            positions += (done + tree.depths).tolist()
        else:
            positions += range(done, end)
        rows.append(sequence.pages.row)
        queries.append(end - done)
        contexts.append(end)
    layout = lay_out(cache, about, np.array(rows), np.array(queries), np.array(contexts), trees)
    return Batch(torch.from_numpy(np.array(ids)), torch.from_numpy(np.array(positions))), layout, work


def _shape(work: ScheduledSequence) -> tuple[int, int]:
    """Rows with few tokens come first, and of those with as many the one with the longest context."""
    sequence, count, draft = work
    queries = count + len(draft.tokens)
    return queries, -sequence.num_computed - queries


def lay_out(
    cache: KVCache,
    about: LayerAttentionConfig,
    rows: IntArray,
    queries: IntArray,
    contexts: IntArray,
    trees: Mapping[int, TreeMask],
) -> AttentionMetadata:
    """For the attention, the last ``queries`` tokens of ``contexts`` tokens in rows of the cache, ``[rows]`` each.
    ``trees``: see ``AttentionMetadata``."""
    return AttentionMetadata(
        page_table=cache.page_table[rows, : -(-int(contexts.max()) // cache.page_size)],
        query_lens=queries,
        seq_lens=contexts,
        page_size=cache.page_size,
        num_pool_pages=cache.pool.size,
        kv_heads=about.kv_heads,
        heads_per_kv=about.heads // about.kv_heads,
        cost_model=_cost(about, cache.data.dtype, cache.data.device),
        tree_masks=trees,
    )


@lru_cache(8)
def _cost(about: LayerAttentionConfig, dtype: torch.dtype, device: torch.device) -> AttentionCostModel:
    size = kv_bytes_per_token(about, dtype)
    compiled = has_compiled_kernel(about, torch.empty(0, dtype=dtype, device=device))
    return AttentionCostModel.for_compiled_kernel(size) if compiled else AttentionCostModel(size)


def _tree(draft: Draft) -> TreeMask:
    """A row of one token and a draft of several branches behind it."""
    sees = np.eye(len(draft) + 1, dtype=np.bool_)
    for index, parent in enumerate(draft.parents):
        sees[index + 1] |= sees[parent + 1]
    return TreeMask(sees.sum(axis=1) - 1, sees)
