"""Gated activations in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _gated(X, OUT, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(X + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(y)) / 2 is sigmoid(2 y), so that gelu is a gate times a sigmoid as silu is.
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(OUT + row * n + column, (gate * tl.sigmoid(slope) * up).to(OUT.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``kernels.layers.activation.silu_mul`` of CUDA tensors."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``kernels.layers.activation.gelu_tanh_mul`` of CUDA tensors."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, *, gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated[(rows, triton.cdiv(n, _BLOCK))](gate_up, out, n, GELU=gelu, BLOCK=_BLOCK, num_warps=4)
    return out
