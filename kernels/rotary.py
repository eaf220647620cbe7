"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(head_dim: int, theta: float, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every angle: two float32 tensors ``[positions, head_dim / 2]``.

    Computed in float32 from float32 frequencies, as transformers does, so that long contexts agree with it.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` ``[tokens, heads, head_dim]`` by the angles of each token, ``cos`` and ``sin`` ``[tokens, head_dim
    / 2]``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
