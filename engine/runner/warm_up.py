"""Steps and drafts before the first request: they compile the GPU's kernels and capture the graphs of common shapes.

Otherwise the first requests wait for them, some seconds for each kernel and a part of a second for each graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.attention.plan import TreeMask
from engine.cache.paged_kv import KVCache
from engine.models.interface import Batch, Model
from engine.runner.batch import lay_out
from engine.runner.forward import Forward
from engine.runner.fused_sampler_gpu import FusedGpuSampler
from engine.runner.largest_step import sample_with_masks
from engine.runner.piecewise_gpu import SIZES
from engine.runner.states import plan_first_states
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

_log = logging.getLogger(__name__)

_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS = (256, 2048)
"""Lengths of contexts in decode steps: their numbers of tiles, and so their graphs, differ."""
_PROMPTS = tuple(size for size in SIZES if size >= 32)
"""Numbers of tokens of steps with short prompts, captured in pieces; the longest prompt is a whole step."""
_CHAINS, _TREES = (2, 4), (8, 16)
"""Numbers of draft tokens of a sequence, in chains and in trees."""
_MAX_DRAFTING = 16
"""Maximum number of sequences with drafts: at larger batch sizes drafts are short or none."""
_PROGRESS_SECONDS = 10.0


class StepShape(NamedTuple):
    """Shape of a step whose sequences are alike."""

    num_sequences: int
    num_new: int
    """New tokens of each sequence."""
    context: int
    """Tokens of each sequence, the new ones included."""
    is_tree: bool = False
    """True if all new tokens but the first are a tree of draft tokens."""


class WarmDrafter(Protocol):
    """The part of a drafter that concerns the warm-up."""

    observed_layers: tuple[int, ...]

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return computations to run twice."""
        ...


def list_shapes(max_running: int, step_tokens: int, context: int, *, has_drafts: bool = False) -> list[StepShape]:
    """Return the shapes to warm up, the prompts before the decode steps, none twice.

    ``context``: maximum number of tokens of a sequence. ``has_drafts``: also steps that verify drafts.
    """
    prompts = [min(length, step_tokens, context) for length in (*_PROMPTS, step_tokens)]
    largest = min(max_running, step_tokens)
    sizes = [size for size in _BATCH_SIZES if size < largest] + [largest]
    shapes = [StepShape(1, length, length) for length in prompts]
    shapes += [StepShape(size, 1, min(length, context)) for length in _CONTEXTS for size in sizes]
    if has_drafts:
        drafts = [*((count, False) for count in _CHAINS), *((count, True) for count in _TREES)]
        shapes += [
            StepShape(size, 1 + count, min(length, context), is_tree)
            for (count, is_tree), length, size in product(drafts, _CONTEXTS, sizes)
            if size <= _MAX_DRAFTING and size * (1 + count) <= step_tokens and count < context
        ]
    return [*dict.fromkeys(shapes)]


def warm_up(
    model: Model,
    cache: KVCache,
    forward: Forward,
    *,
    name: str,
    step_tokens: int,
    drafter: WarmDrafter | None = None,
) -> None:
    """Run the common shapes on a GPU, each twice: it is captured the second time. The cache must be empty and stays so.

    The drafts of a drafter are run too, and steps that verify some.

    ``name``: of the model, for the log. On a CPU, where kernels are compiled for any shape before, nothing is run.
    """
    if not model.device_config.uses_gpu_kernels:
        return
    max_rows, num_columns = cache.page_table.shape
    max_rows = min(max_rows, cache.pool.size, max_rows if cache.states is None else cache.states.max_running)
    context = min(num_columns * cache.page_size, model.config.max_context)
    shapes = list_shapes(max_rows, step_tokens, context, has_drafts=drafter is not None)
    layers = frozenset(() if drafter is None else drafter.observed_layers)
    runs: list[Callable[[], None]] = [partial(_run_step, shape, model, cache, forward, layers) for shape in shapes]
    runs += [] if drafter is None else drafter.warm_ups()
    begun = told = time.monotonic()
    # A warning, as this is all that a server says before it is ready, which may take minutes.
    _log.warning("model %s: compiling kernels and capturing CUDA graphs for %d shapes of steps", name, len(runs))
    with torch.inference_mode():
        for index, run in enumerate(runs):
            for _ in range(2):
                run()
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                _log.warning("model %s: %d of %d shapes are ready", name, index + 1, len(runs))
    cache.zero_pages(max_rows)
    _log.warning("model %s: all shapes are ready, after %.1f s", name, time.monotonic() - begun)


def _run_step(shape: StepShape, model: Model, cache: KVCache, forward: Forward, layers: frozenset[int]) -> None:
    """Run one step on sequences of one page each, which stands for all their pages, and sample for each."""
    rows = np.arange(shape.num_sequences)
    cache.page_table[rows] = rows[:, None]
    queries, contexts = np.full(len(rows), shape.num_new), np.full(len(rows), shape.context)
    depths, trees = np.arange(shape.num_new), {}
    if shape.is_tree:
        depths, visible = np.minimum(depths, 1), np.eye(shape.num_new, dtype=np.bool_)
        visible[:, 0] = True
        trees = {int(row): TreeMask(depths, visible) for row in rows}
    metadata = lay_out(
        cache, model.config.first_attention, table_rows=rows, queries=queries, contexts=contexts, trees=trees
    )
    positions = torch.from_numpy(shape.context - shape.num_new + depths).repeat(len(rows))
    states = None
    if cache.states is not None:
        states = plan_first_states(cache.states, queries.tolist(), has_drafts=shape.num_new <= 1 + max(_TREES))
    batch = Batch(torch.zeros_like(positions), positions, states=states)
    hidden = forward(batch, metadata, layers=layers)[: shape.num_sequences]
    logits = model.compute_logits(hidden)
    if model.config.num_labels:
        return
    sample_with_masks(logits)
    if isinstance(forward.fused_sampler, FusedGpuSampler):
        ones, zeros = np.ones(len(rows)), np.zeros(len(rows), np.int64)
        params = SamplingTensors(ones, ones, zeros, zeros)
        forward.fused_sampler.launch(hidden, params, NoiseKeys(zeros, zeros, zeros))
