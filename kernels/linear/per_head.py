"""Products with a matrix for each head, as multi-head latent attention has before and after the attention.

A row of the result of the kernels does not depend on the other rows, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.linear import per_head as on_cpu

_LANES = 16
"""Outputs that the kernel computes together."""


class HeadProducts:
    """The products of each head's rows with its own matrix."""

    def __init__(self, weight: Tensor, *, is_batch_invariant: bool = False) -> None:
        """``weight``: ``[heads, in, out]``, float32 on the CPU. ``is_batch_invariant``: on a GPU no row depends, to the
        bit, on the others, either."""
        self._is_batch_invariant = is_batch_invariant
        self._num_out = weight.shape[2]
        self._weight = F.pad(weight, (0, -self._num_out % _LANES)).contiguous()

    @property
    def parameters(self) -> int:
        heads, num_in, _ = self._weight.shape
        return heads * num_in * self._num_out

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[tokens, heads, out]`` of ``x`` ``[tokens, heads, in]``, whose last axis is contiguous."""
        if can_use_kernels(x, self._weight):
            out = on_cpu.multiply_heads(x, self._weight)
        elif x.is_cuda and self._is_batch_invariant:
            from kernels.triton import invariant as on_gpu

            out = on_gpu.head_products(x, self._weight)
        else:
            out = torch.einsum("thi,hio->hto", x, self._weight)
        return out.transpose(0, 1)[:, :, : self._num_out]
