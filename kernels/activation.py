"""The gated activations of Llama-family feed-forward layers (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each takes a fused ``[..., 2 n]`` projection, gate first and up second, and returns ``[..., n]``.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation of gelu (GeGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
