"""Steps before the first request: they compile the GPU's kernels and capture the CUDA graphs of common shapes.

Otherwise the first requests wait for them, some seconds for each kernel and a part of a second for each graph."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import numpy as np
import torch

from engine.cache.paged_kv import KVCache
from engine.models.interface import Batch, Model
from engine.protocol.options import EngineOptions
from engine.runner.batch import lay_out
from engine.runner.forward import Forward
from engine.runner.fused_sampler_gpu import FusedGpuSampler
from engine.runner.largest_step import sample_with_masks
from engine.runner.piecewise_gpu import SIZES
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

_log = logging.getLogger(__name__)

_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS = (256, 2048)
"""Lengths of contexts in decode steps: their numbers of tiles, and so their graphs, differ."""
_PROMPTS = tuple(size for size in SIZES if size >= 32)
"""Numbers of tokens of steps with short prompts, captured in pieces; the longest prompt is a whole step."""
_PROGRESS_SECONDS = 10.0


class StepShape(NamedTuple):
    """Shape of a step whose sequences are alike."""

    num_sequences: int
    num_new: int
    """New tokens of each sequence."""
    context: int
    """Tokens of each sequence, the new ones included."""


def list_shapes(max_running: int, step_tokens: int, context: int) -> list[StepShape]:
    """Return the shapes to warm up, the prompts before the decode steps, none twice.

    ``context``: maximum number of tokens of a sequence.
    """
    prompts = [min(length, step_tokens, context) for length in (*_PROMPTS, step_tokens)]
    largest = min(max_running, step_tokens)
    sizes = [size for size in _BATCH_SIZES if size < largest] + [largest]
    shapes = [StepShape(1, length, length) for length in prompts]
    shapes += [StepShape(size, 1, min(length, context)) for length in _CONTEXTS for size in sizes]
    return [*dict.fromkeys(shapes)]


def warm_up(name: str, model: Model, cache: KVCache, forward: Forward, options: EngineOptions) -> None:
    """Run the common shapes on a GPU, each twice: it is captured the second time. The cache must be empty and stays so.

    ``name``: of the model, for the log. On a CPU, where kernels are compiled for any shape before, nothing is run.
    """
    if not model.device_config.uses_gpu_kernels:
        return
    max_rows, num_columns = cache.page_table.shape
    max_rows = min(max_rows, cache.pool.size)
    shapes = list_shapes(max_rows, options.step_tokens, min(num_columns * cache.page_size, model.config.max_context))
    begun = told = time.monotonic()
    # A warning, as this is all that a server says before it is ready, which may take minutes.
    _log.warning("model %s: compiling kernels and capturing CUDA graphs for %d shapes of steps", name, len(shapes))
    with torch.inference_mode():
        for index, shape in enumerate(shapes):
            for _ in range(2):
                _run(shape, model, cache, forward)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                _log.warning("model %s: %d of %d shapes are ready", name, index + 1, len(shapes))
    cache.zero_pages(max_rows)
    _log.warning("model %s: all shapes are ready, after %.1f s", name, time.monotonic() - begun)


def _run(shape: StepShape, model: Model, cache: KVCache, forward: Forward) -> None:
    """Run one step on sequences of one page each, which stands for all their pages, and sample for each."""
    rows = np.arange(shape.num_sequences)
    cache.page_table[rows] = rows[:, None]
    queries, contexts = np.full(len(rows), shape.num_new), np.full(len(rows), shape.context)
    metadata = lay_out(cache, model.config.attention[0], rows, queries, contexts, trees={})
    positions = torch.arange(shape.context - shape.num_new, shape.context).repeat(len(rows))
    hidden = forward(Batch(torch.zeros_like(positions), positions), metadata)[: shape.num_sequences]
    logits = model.compute_logits(hidden)
    if model.config.num_labels:
        return
    sample_with_masks(logits)
    if isinstance(forward.fused_sampler, FusedGpuSampler):
        ones, zeros = np.ones(len(rows)), np.zeros(len(rows), np.int64)
        params = SamplingTensors(ones, ones, zeros, zeros)
        forward.fused_sampler.launch(hidden, params, NoiseKeys(zeros, zeros, zeros))
