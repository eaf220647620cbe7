"""RoPE of queries and keys, and the write of keys and values into the pages of a cache.

A quantized cache has one scale or several for each token, head and kind. So what a token is rounded to never depends on
the other tokens of its page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.rotary import rotary
from kernels.quantize import LIMITS, QUANTIZED, quantize_vectors


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries ``[tokens, heads, head_dim]`` after RoPE; ``cos`` and ``sin`` as in ``rotary_write``."""
    if q.is_cuda:
        from kernels.triton import kv_write as on_gpu

        return on_gpu.rotate(q, cos, sin)
    return rotary(q, cos, sin).to(q.dtype)


def rotary_write(
    qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None = None
) -> Tensor:
    """Apply RoPE to queries and keys, write keys and values into their slots, and return the queries.

    ``qk``: ``[tokens, heads + kv_heads, head_dim]``, queries first; ``v``: ``[tokens, kv_heads, head_dim]``, or without
    heads if keys are values, too. ``cos`` and ``sin``: float32 rows of ``rotary_tables``, ``[tokens, dim]`` with
    ``dim`` at most ``head_dim``. ``slots``:
    ``[tokens]``, ``page * page_size + offset``; a token with a negative slot is padding and not written. ``cache``: one
    layer, ``[kinds, kv_heads, pages, page_size, head_dim]``, of the type of ``qk``, or int8 or float8_e4m3fn with
    ``scales``: float32 ``[kinds, kv_heads, pages, page_size]``, or packed to 4 bits with float16 scales, see
    ``kernels.common.int4``. Raises ``ValueError`` if the type and ``scales`` disagree.
    """
    if (scales is not None) != (cache.dtype in QUANTIZED):
        raise ValueError(f"a cache of type {cache.dtype} {'needs' if scales is None else 'cannot have'} scales")
    if qk.is_cuda:
        from kernels.triton import kv_write as on_gpu

        return on_gpu.rotary_write(qk, v, cos, sin, slots, cache, scales, LIMITS.get(cache.dtype, 0.0))
    (kinds, kv_heads), is_written = cache.shape[:2], slots >= 0
    rotated = rotary(qk, cos, sin).to(qk.dtype)
    new = torch.cat((rotated[:, -kv_heads:], v), dim=1)[is_written]
    new = new.view(len(new), kinds, kv_heads, qk.shape[2]).permute(1, 2, 0, 3)
    indices = slots[is_written]
    if scales is None:
        cache.flatten(2, 3)[:, :, indices] = new
    else:
        values, new_scales = quantize_vectors(new, cache.dtype)
        # Torch can scatter bytes but not float8.
        cache.flatten(2, 3).view(torch.int8)[:, :, indices] = values.view(torch.int8)
        scales.flatten(2, 3)[:, :, indices] = new_scales
    return rotated[:, :-kv_heads]
