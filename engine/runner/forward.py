"""The forward pass of a step, on the device that holds the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.grouped import AttentionGroup, Backend, GroupedAttention, GroupedTritonAttention
from engine.attention.layer import LayerAttentionConfig, has_compiled_kernel
from engine.attention.no_layers import NoAttention
from engine.attention.plan import AttentionMetadata
from engine.attention.select import CpuAttention, create_cpu_attention
from engine.cache.key_pool import KeyPool
from engine.cache.paged_kv import KVCache
from engine.models.interface import Batch, Model
from engine.runner.batch import find_cost_model
from engine.runner.forward_cpu import CpuForward
from engine.runner.forward_gpu import GpuForward
from engine.runner.sample_step import FusedSampler


class Forward(Protocol):
    """Forward pass of one model over one cache."""

    @property
    def fused_sampler(self) -> FusedSampler | None:
        """Sampler of the hidden states of this forward pass; ``None`` if there is none."""
        ...

    kept: Mapping[int, Tensor]
    """Hidden states ``[tokens or more, hidden]`` of the last call after each of the layers that it was to keep."""

    def __call__(
        self,
        batch: Batch,
        rows: AttentionMetadata,
        read: Sequence[int] | None = None,
        layers: frozenset[int] = frozenset(),
    ) -> Tensor:
        """Compute a step's keys, values and final hidden states ``[tokens or more, hidden]``.

        ``batch`` is on the host. ``read``: the tokens whose hidden states are returned, ascending; ``None``: all.
        ``layers``: layers before the last, from 1, after which the hidden states of all tokens are ``kept``. Both are
        valid until the next call.
        """
        ...


def create_forward(model: Model, cache: KVCache) -> Forward:
    """Create the forward pass of a model over the first layers of a cache on the same device."""
    is_batch_invariant = model.device_config.is_batch_invariant
    attention = model.config.attention
    if model.device_config.uses_gpu_kernels:
        if not attention:
            return GpuForward(model, NoAttention(), model.device_config.device)
        on_gpu = create_gpu_attention(attention, cache, is_batch_invariant=is_batch_invariant)
        return GpuForward(model, on_gpu, model.device_config.device)
    create = partial(create_cpu_attention, deterministic=is_batch_invariant)
    pools = _list_pools(attention, cache)
    groups = [_group_layers(attention, pool, create) for pool in pools]
    is_compiled = all(has_compiled_kernel(attention[pool.layers[0]], pool.data) for pool in pools)
    attend: CpuAttention = groups[0].attend if len(groups) == 1 else GroupedAttention(groups)
    return CpuForward(model, attend, num_rows=len(cache.page_table), is_compiled=is_compiled)


def create_gpu_attention(
    attention: Sequence[LayerAttentionConfig], cache: KVCache, *, is_batch_invariant: bool = False
) -> TritonAttention | GroupedTritonAttention:
    """Create the attention of a model's layers over the first layers of a cache on a GPU."""
    create = partial(TritonAttention, is_batch_invariant=is_batch_invariant)
    groups = [_group_layers(attention, pool, create) for pool in _list_pools(attention, cache)]
    return groups[0].attend if len(groups) == 1 else GroupedTritonAttention(groups)


def _list_pools(attention: Sequence[LayerAttentionConfig], cache: KVCache) -> list[KeyPool]:
    """Return the pools with layers of the model, without those of a drafter alone."""
    return [pool for pool in cache.pools if any(layer < len(attention) for layer in pool.layers)]


def _group_layers(
    attention: Sequence[LayerAttentionConfig],
    pool: KeyPool,
    create: Callable[[Sequence[LayerAttentionConfig], Tensor, Tensor | None], Backend],
) -> AttentionGroup[Backend]:
    """Return the attention of the model's layers in a pool, without those of a drafter behind them."""
    own = [layer for layer in pool.layers if layer < len(attention)]
    configs, scales = [attention[layer] for layer in own], None if pool.scales is None else pool.scales[: len(own)]
    attend = create(configs, pool.data[: len(own)], scales)
    return AttentionGroup(pool.shape, own, attend, find_cost_model(configs[0], pool.data))
