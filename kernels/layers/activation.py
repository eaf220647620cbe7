"""The gated activations of Llama-family feed-forward layers (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each takes a fused ``[rows, 2 n]`` projection, gate first and up second, and returns ``[rows, n]``. A row of the result
of a kernel does not depend on the other rows, to the bit.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import activation as on_cpu


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (SwiGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.silu_mul(gate_up)
    if can_use_kernels(gate_up):
        return on_cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` with the tanh approximation of gelu (GeGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.gelu_tanh_mul(gate_up)
    if can_use_kernels(gate_up):
        return on_cpu.gelu_tanh_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
