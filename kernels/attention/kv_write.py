"""Queries, keys and values between their projection and attention: rotated, and written into pages of a cache.

A quantized cache has one scale for each token, head and kind. A token is written once and read many times, alone, so
nothing that comes later can change what it was rounded to, whatever the other tokens of its page are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.rotary import rotary
from kernels.quantize import LIMITS, quantize_vectors


def rotary_write(
    qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None = None
) -> Tensor:
    """Rotates queries and keys, writes keys and values where they belong, and returns the queries.

    ``qk``: ``[tokens, heads + kv_heads, head_dim]``, queries first; ``v``: ``[tokens, kv_heads, head_dim]``. ``cos``
    and ``sin``: float32 rows of ``rotary_tables``, ``[tokens, dim]`` with ``dim`` at most ``head_dim``. ``slots``:
    ``[tokens]``, ``page * page_size + offset``; a token whose slot is negative is padding, and not kept. ``cache``: one
    layer, ``[2, kv_heads, pages, page_size, head_dim]``, of the type of ``qk``, or int8 or float8_e4m3fn with
    ``scales``: float32 ``[2, kv_heads, pages, page_size]``. Raises ``ValueError`` where one comes without the other.
    """
    if (scales is not None) != (cache.dtype in LIMITS):
        raise ValueError(f"a cache of {cache.dtype} {'with' if scales is not None else 'without'} scales")
    if qk.is_cuda:
        from kernels.triton import kv_write as on_gpu

        return on_gpu.rotary_write(qk, v, cos, sin, slots, cache, scales, LIMITS.get(cache.dtype, 0.0))
    kv_heads, kept = v.shape[1], slots >= 0
    turned = rotary(qk, cos, sin).to(qk.dtype)
    new = torch.stack((turned[:, -kv_heads:], v))[:, kept].transpose(1, 2)
    where = slots[kept]
    if scales is None:
        cache.flatten(2, 3)[:, :, where] = new
    else:
        values, new_scales = quantize_vectors(new, cache.dtype)
        # Torch can copy float8 but not scatter it; its bytes can be.
        cache.flatten(2, 3).view(torch.int8)[:, :, where] = values.view(torch.int8)
        scales.flatten(2, 3)[:, :, where] = new_scales
    return turned[:, :-kv_heads]
