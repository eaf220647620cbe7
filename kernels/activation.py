"""The gated activation of Llama-family feed-forward layers."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of a fused ``[..., 2 n]`` projection: gate first, up second (Shazeer 2020, SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
