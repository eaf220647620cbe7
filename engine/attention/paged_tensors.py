"""One layer's keys and values in their pages, in torch operators, whatever type they have there.

With 8 bits each vector, one token's key or value of one head, has a scale of its own. It is rounded once, when it is
written, and nothing that is written later changes it: a token's numbers are a function of its own key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import dequantize_vectors, quantize_vectors


def write(kv: Tensor, scales: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Writes keys and values ``[tokens, kv_heads, head_dim]`` and returns them as they are read from now on.

    ``kv``: ``[2, kv_heads, pages, page_size, head_dim]``; ``scales``: the same without the last axis, of 8-bit ``kv``.
    ``slots``: see ``Rows.head_slots``.
    """
    new, heads = torch.cat((k, v), dim=1), k.shape[1]
    flat = new.view(-1, new.shape[-1])
    if scales is None:
        kv.view(-1, kv.shape[-1]).index_copy_(0, slots, flat)
        return k, v
    numbers, factors = quantize_vectors(flat, kv.dtype)
    # Torch can copy float8 but not scatter it; its bytes can be.
    kv.view(torch.int8).view(-1, kv.shape[-1]).index_copy_(0, slots, numbers.view(torch.int8))
    scales.view(-1).index_copy_(0, slots, factors)
    kept = dequantize_vectors(numbers, factors).view(new.shape)
    return kept[:, :heads], kept[:, heads:]


def gather(pool: Tensor, scales: Tensor | None, pages: Tensor, out: Tensor) -> None:
    """Writes whole pages to ``out``, ``[len(pages), page_size * head_dim]``, of the type of ``pool``, or of any if that
    has 8 bits. ``pool``: all keys, all values or both, ``[…, pages, page_size, head_dim]``; ``pages``: indices into all
    but its last two axes as one."""
    flat = pool.flatten(0, -3)
    if scales is None:
        torch.index_select(flat.flatten(1), 0, pages, out=out)
        return
    numbers = flat.view(torch.int8)[pages].view(pool.dtype)
    out.copy_(dequantize_vectors(numbers, scales.flatten(0, -2)[pages]).flatten(1))
