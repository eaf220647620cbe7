"""Write and read one layer's keys and values in their pages, in torch operators, for every dtype of the cache.

A quantized vector (one token's key or value of one head) has a scale of its own, or several. It is rounded once, when
it is written, and nothing that is written later changes it: a token's numbers are a function of its own key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import dequantize_vectors, quantize_vectors


def write_kv(kv: Tensor, scales: Tensor | None, slots: Tensor, vectors: Tensor) -> None:
    """Write the vectors of tokens ``[tokens, kinds * kv_heads, head_dim]`` into the pages, keys before values.

    ``kv`` and ``scales``: one layer of a ``KeyPool``, ``[kinds, kv_heads, pages, page_size, …]``. ``slots``: see
    ``kv_slots``.
    """
    vectors = vectors.reshape(-1, vectors.shape[-1])
    if scales is None:
        kv.view(-1, kv.shape[-1]).index_copy_(0, slots, vectors)
        return
    codes, factors = quantize_vectors(vectors, kv.dtype)
    # Torch can copy float8 but not scatter it; its bytes can be scattered.
    kv.view(torch.int8).view(-1, kv.shape[-1]).index_copy_(0, slots, codes.view(torch.int8))
    scales.view(-1, *factors.shape[1:]).index_copy_(0, slots, factors)


def gather_pages(pool: Tensor, scales: Tensor | None, pages: Tensor, out: Tensor) -> None:
    """Copy whole pages to ``out``, ``[len(pages), page_size * head_dim]``, and dequantize those of a
    quantized ``pool``.

    ``pool``: all keys, all values or both, ``[…, pages, page_size, head_dim]`` or packed; ``pages``: indices into all
    but its last two axes as one. ``out`` has the dtype of ``pool``, or any if that is quantized.
    """
    flat = pool.flatten(0, -3)
    if scales is None:
        torch.index_select(flat.flatten(1), 0, pages, out=out)
        return
    codes = flat.view(torch.int8)[pages].view(pool.dtype)
    # 8 bits have one scale a vector and so no last axis of scales.
    factors = scales.flatten(0, pool.dim() - 3)[pages]
    out.copy_(dequantize_vectors(codes, factors).flatten(1))
