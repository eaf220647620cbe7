"""Select the attention backend of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.cpu_numba import NumbaAttention
from engine.attention.cpu_torch import TorchAttention
from engine.attention.cuda_flashinfer import FlashInferAttention, is_supported, load_flashinfer
from engine.attention.cuda_triton import TritonAttention
from engine.attention.flashinfer_times import step_times
from engine.attention.layer import FusedAttentionBackend, LayerAttentionConfig, has_compiled_kernel
from engine.attention.plan import AttentionMetadata


class CpuAttention(FusedAttentionBackend, Protocol):
    """A ``FusedAttentionBackend`` that is prepared for each step."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Plan a step. Every layer's call that follows belongs to it."""
        ...


def create_cpu_attention(
    layers: Sequence[LayerAttentionConfig], kv: Tensor, scales: Tensor | None, *, deterministic: bool = False
) -> CpuAttention:
    """Return the fastest backend that supports the layers.

    ``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values: float32, or
    quantized with ``scales``, see ``KVCache``. ``deterministic``: a token's result is, bit for
    bit, a function of its sequence alone.
    """
    if has_compiled_kernel(layers[0], kv):
        return NumbaAttention(layers, kv, scales, sharing=not deterministic)
    return TorchAttention(layers, kv, scales, deterministic=deterministic)


def create_gpu_attention(
    layers: Sequence[LayerAttentionConfig],
    kv: Tensor,
    scales: Tensor | None,
    *,
    has_graphs: bool,
    is_batch_invariant: bool = False,
) -> TritonAttention:
    """Return the backend of a GPU; with FlashInfer if it is installed, was measured on this GPU and can read ``kv``.

    ``kv`` and ``scales``: see ``create_cpu_attention``. ``has_graphs``: repeatable steps are captured.
    ``is_batch_invariant``: see ``TritonAttention``; FlashInfer cuts keys by what else is in the step.
    """
    times = step_times(kv.device) if is_supported(layers, kv) and not is_batch_invariant else None
    flashinfer = None if times is None else load_flashinfer()
    if times is None or flashinfer is None:
        return TritonAttention(layers, kv, scales, is_batch_invariant=is_batch_invariant)
    return FlashInferAttention(layers, kv, flashinfer, times.is_flashinfer_faster, has_graphs=has_graphs)
