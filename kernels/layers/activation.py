"""The gated activations of Llama-family feed-forward layers (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each takes a fused float32 ``[rows, 2 n]`` projection, gate first and up second, and returns ``[rows, n]``. A row of the
result does not depend on the other rows, to the bit. torch's operators, where there is no kernel, divide more values
than ``_UNDIVIDED`` among threads, in the middle of a row, and compute what the vector registers leave over at the end
of each share in another way. So there many rows are computed in blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import computes

_UNDIVIDED = 1 << 14


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.silu_mul(gate_up)
    if computes(gate_up):
        from kernels.cpu.layers import activation as on_cpu

        return on_cpu.silu_mul(gate_up)
    return _gated(F.silu, gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation of gelu (GeGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.gelu_tanh_mul(gate_up)
    if computes(gate_up):
        from kernels.cpu.layers import activation as on_cpu

        return on_cpu.gelu_tanh_mul(gate_up)
    return _gated(lambda gate: F.gelu(gate, approximate="tanh"), gate_up)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    rows = max(1, _UNDIVIDED // gate.shape[-1])
    if len(gate) <= rows:
        return activation(gate).mul_(up)
    return torch.cat([activation(some) for some in torch.split(gate, rows)]).mul_(up)
