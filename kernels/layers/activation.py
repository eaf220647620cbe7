"""The gated activations of Llama-family feed-forward layers (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each takes a fused ``[rows, 2 n]`` projection, gate first and up second, and returns ``[rows, n]``. A row of the result
of a kernel does not depend on the other rows, to the bit. The result may be quantized for the product that reads it,
in the same kernel on a GPU; the numbers are those of ``kernels.quantize.quantize_rows``.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor
from torch.nn import functional as F

from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import activation as on_cpu
from kernels.quantize import quantize_rows


@overload
def silu_mul(gate_up: Tensor, quantization: None = None) -> Tensor: ...
@overload
def silu_mul(gate_up: Tensor, quantization: Quantization) -> QuantizedRows: ...
def silu_mul(gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
    """Return ``silu(gate) * up`` (SwiGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.silu_mul(gate_up, quantization)
    if quantization is not None:
        return quantize_rows(silu_mul(gate_up), quantization)
    if can_use_kernels(gate_up):
        return on_cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return ``silu(gate) * x``, all ``[rows, n]``."""
    if gate.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.scale_rows(gate, x, silu=True)
    return on_cpu.silu_gate(gate, x) if can_use_kernels(gate, x) else F.silu(gate) * x


@overload
def gelu_tanh_mul(gate_up: Tensor, quantization: None = None) -> Tensor: ...
@overload
def gelu_tanh_mul(gate_up: Tensor, quantization: Quantization) -> QuantizedRows: ...
def gelu_tanh_mul(gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
    """Return ``gelu(gate) * up`` with the tanh approximation of gelu (GeGLU)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.gelu_tanh_mul(gate_up, quantization)
    if quantization is not None:
        return quantize_rows(gelu_tanh_mul(gate_up), quantization)
    if can_use_kernels(gate_up):
        return on_cpu.gelu_tanh_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_silu_mul(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)`` of a gate of at most ``limit`` and an up between its negative
    and it (gpt-oss)."""
    if gate_up.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.clamped_silu_mul(gate_up, alpha, limit)
    if can_use_kernels(gate_up):
        return on_cpu.clamped_silu_mul(gate_up, alpha, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)


@overload
def relu_squared(x: Tensor, quantization: None = None) -> Tensor: ...
@overload
def relu_squared(x: Tensor, quantization: Quantization) -> QuantizedRows: ...
def relu_squared(x: Tensor, quantization: Quantization | None = None) -> Rows:
    """Return ``max(x, 0)²``, of numbers that have no gate (Nemotron)."""
    if quantization is not None:
        return quantize_rows(relu_squared(x), quantization)
    return on_cpu.relu_squared(x) if can_use_kernels(x) else F.relu(x).square()
