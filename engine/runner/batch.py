"""The flat tensors of one step, built from its schedule."""

from __future__ import annotations

from collections import abc
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.gpu_costs import gpu_costs
from engine.attention.layer import LayerAttentionConfig, has_compiled_kernel
from engine.attention.plan import AttentionCostModel, AttentionMetadata, IntArray, TreeMask
from engine.cache.key_pool import kv_bytes_per_token
from engine.cache.paged_kv import KVCache
from engine.models.interface import Batch
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import Sequence
from kernels.linear.low_rank import NO_ADAPTER


class ScheduledSequence(NamedTuple):
    """A step's share of one sequence: its next ``num_tokens`` tokens, and a draft of what follows them."""

    sequence: Sequence
    num_tokens: int
    draft: Draft = EMPTY_DRAFT


class DecodeRows:
    """Rows of a step that computes the last token of every sequence, without drafts; the same in all such steps."""

    def __init__(self, sequences: abc.Sequence[Sequence]) -> None:
        """``sequences``: in the order of the batch."""
        self._sequences = sequences
        self._table_rows = np.array([sequence.pages.row for sequence in sequences])
        self._query_lens = np.ones(len(sequences), np.int64)
        self._drops_pages = any(sequence.drops is not None for sequence in sequences)
        self._adapters = list_adapters(sequences, [1] * len(sequences), [len(one.tokens) - 1 for one in sequences])

    def build(self, cache: KVCache, attention: LayerAttentionConfig) -> tuple[Batch, AttentionMetadata]:
        """Return the batch and its rows for the attention."""
        tokens = np.array([sequence.tokens[-1] for sequence in self._sequences])
        positions = np.array([sequence.num_computed for sequence in self._sequences])
        contexts = positions + 1
        if self._drops_pages:
            contexts -= [sequence.pages.num_dropped_pages * cache.page_size for sequence in self._sequences]
        rows = lay_out(
            cache, attention, table_rows=self._table_rows, queries=self._query_lens, contexts=contexts, trees={}
        )
        return Batch(torch.from_numpy(tokens), torch.from_numpy(positions), adapters=self._adapters), rows


def build_batch(
    scheduled: abc.Sequence[ScheduledSequence],
    cache: KVCache,
    attention: LayerAttentionConfig,
    decode_rows: DecodeRows | None = None,
) -> tuple[Batch, AttentionMetadata, list[ScheduledSequence]]:
    """Return the batch, its rows for the attention, and the scheduled sequences in its order, similar shapes together.

    Draft tokens follow the tokens of their row, in the order of the draft, in the slots after theirs. ``attention``:
    that of any layer; they agree in what matters here. ``decode_rows``: those of ``scheduled``, which is in their
    order, if they are known.
    """
    if decode_rows is not None:
        return *decode_rows.build(cache, attention), list(scheduled)
    scheduled = sort_by_shape(scheduled)
    ids: list[int] = []
    positions: list[int] = []
    table_rows: list[int] = []
    queries: list[int] = []
    contexts: list[int] = []
    trees: dict[int, TreeMask] = {}
    for sequence, num_tokens, draft in scheduled:
        start, draft_tokens = sequence.num_computed, draft.tokens
        end = start + num_tokens + len(draft_tokens)
        ids += sequence.tokens[start : start + num_tokens]
        ids += draft_tokens
        if draft_tokens and not draft.is_chain:
            trees[len(table_rows)] = tree = _build_tree_mask(draft)
            positions += (start + tree.depths).tolist()
        else:
            positions += range(start, end)
        table_rows.append(sequence.pages.row)
        queries.append(end - start)
        contexts.append(end - sequence.pages.num_dropped_pages * cache.page_size)
    rows = lay_out(
        cache,
        attention,
        table_rows=np.array(table_rows),
        queries=np.array(queries),
        contexts=np.array(contexts),
        trees=trees,
    )
    sequences = [sequence for sequence, *_ in scheduled]
    adapters = list_adapters(sequences, queries, [sequence.num_computed for sequence in sequences])
    batch = Batch(torch.from_numpy(np.array(ids)), torch.from_numpy(np.array(positions)), adapters=adapters)
    return batch, rows, scheduled


def list_adapters(
    sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], starts: abc.Sequence[int]
) -> torch.Tensor | None:
    """Return ``Batch.adapters`` of so many tokens of each sequence from these positions on."""
    if all(sequence.adapter_index == NO_ADAPTER for sequence in sequences):
        return None
    adapters = torch.full((sum(counts),), NO_ADAPTER, dtype=torch.int64)
    first = 0
    for sequence, count, start in zip(sequences, counts, starts, strict=True):
        num_before = min(max(sequence.adapter_start - start, 0), count)
        adapters[first + num_before : first + count] = sequence.adapter_index
        first += count
    return adapters if bool((adapters != NO_ADAPTER).any()) else None


def sort_by_shape(scheduled: abc.Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return scheduled sequences in the order of a batch."""
    return sorted(scheduled, key=_get_sort_key)


def _get_sort_key(scheduled: ScheduledSequence) -> tuple[int, int, int]:
    """Sort key: rows with few tokens first, among equals those of one adapter, whose matrices are then read together,
    and among these the longest context first."""
    sequence, num_tokens, draft = scheduled
    num_queries = num_tokens + len(draft.tokens)
    return num_queries, sequence.adapter_index, -sequence.num_computed - num_queries


def lay_out(
    cache: KVCache,
    attention: LayerAttentionConfig,
    table_rows: IntArray,
    queries: IntArray,
    contexts: IntArray,
    trees: abc.Mapping[int, TreeMask],
) -> AttentionMetadata:
    """Lay out the last ``queries`` of ``contexts`` tokens of rows of the page table for the attention.

    ``table_rows``, ``queries``, ``contexts``: ``[rows]`` each. ``trees``: see ``AttentionMetadata``.
    """
    return AttentionMetadata(
        page_table=cache.page_table[table_rows, : -(-int(contexts.max()) // cache.page_size)],
        query_lens=queries,
        seq_lens=contexts,
        page_size=cache.page_size,
        num_pool_pages=cache.pool.size,
        kv_heads=attention.kv_heads,
        heads_per_kv=attention.heads // attention.kv_heads,
        cost_model=find_cost_model(attention, cache.data),
        tree_masks=trees,
    )


def find_cost_model(attention: LayerAttentionConfig, kv: torch.Tensor) -> AttentionCostModel:
    """Return the costs of attention over a cache like ``kv``."""
    return _create_cost_model(attention, kv.dtype, kv.device)


@lru_cache(8)
def _create_cost_model(attention: LayerAttentionConfig, dtype: torch.dtype, device: torch.device) -> AttentionCostModel:
    size = kv_bytes_per_token(attention.shape, dtype)
    if device.type == "cuda":
        return gpu_costs(device).cost_model(size, dtype)
    compiled = has_compiled_kernel(attention, torch.empty(0, dtype=dtype, device=device))
    return AttentionCostModel.for_compiled_kernel(size) if compiled else AttentionCostModel(size)


def _build_tree_mask(draft: Draft) -> TreeMask:
    """Return the attention tree of a row of one token and its draft."""
    sees = np.eye(len(draft) + 1, dtype=np.bool_)
    for index, parent in enumerate(draft.parents):
        sees[index + 1] |= sees[parent + 1]
    return TreeMask(sees.sum(axis=1) - 1, sees)
