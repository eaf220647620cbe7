"""The step that needs the most memory, for the measurement of what a model needs beside weights and cache."""

from __future__ import annotations

import numpy as np
import torch

from engine.cache.paged_kv import KVCache
from engine.cache.states import StatePool
from engine.models.interface import Batch, Model
from engine.runner.batch import lay_out
from engine.runner.forward import create_forward
from engine.runner.sample_step import max_scored_rows
from engine.runner.states import plan_first_states
from engine.sampling.gpu import sample_on_gpu
from engine.sampling.logits_processors import LogitsRow
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors


def run_largest_step(
    model: Model, kv_dtype: torch.dtype, *, page_size: int, num_tokens: int, num_sampled: int, context: int
) -> None:
    """Compute ``num_tokens`` tokens at the end of contexts of ``context`` tokens, and sample or score what can be.

    ``num_sampled``: maximum number of tokens sampled in a step. The cache has one page for each sequence, which stands
    for all its pages, so the results mean nothing.
    """
    queries = [min(context, num_tokens - start) for start in range(0, num_tokens, context)]
    cache = KVCache(
        layers=model.config.head_shapes,
        pages=len(queries),
        page_size=page_size,
        rows=len(queries),
        context=context,
        device_config=model.device_config,
        dtype=kv_dtype,
    )
    rows = np.arange(len(queries))
    cache.page_table[:] = rows[:, None]
    metadata = lay_out(
        cache,
        model.config.first_attention,
        table_rows=rows,
        queries=np.array(queries),
        contexts=np.full(len(queries), context),
        trees={},
    )
    states = None
    if model.config.states:
        pool = StatePool(model.config.states, 1, snapshot_distance=page_size, device_config=model.device_config)
        states = plan_first_states(pool, queries)
    positions = torch.cat([torch.arange(context - count, context) for count in queries])
    batch = Batch(torch.zeros_like(positions), positions, states=states)
    with torch.inference_mode():
        hidden = create_forward(model, cache)(batch, metadata)
        if model.config.num_labels:
            model.compute_logits(hidden[:num_tokens])
            return
        model.compute_logits(hidden[: min(num_tokens, max_scored_rows(model))])
        logits = model.compute_logits(hidden[:num_sampled])
        reported = logits.clone()  # the logits whose log-probabilities are requested
        sample_with_masks(logits)
        del reported


def sample_with_masks(logits: torch.Tensor) -> None:
    """Sample from all rows of logits on a GPU, with a mask each that allows all tokens."""
    rows, vocab = logits.shape
    mask = np.full(-(-vocab // 32), -1, np.int32)
    zeros = np.zeros(rows, np.int64)
    params = SamplingTensors(np.ones(rows), np.ones(rows), np.zeros(rows), zeros)
    sample_on_gpu(logits, [LogitsRow(None, None, (), mask)] * rows, params, NoiseKeys(zeros, zeros, zeros))
