"""RoPE (Su et al. 2021, https://arxiv.org/abs/2104.09864) in the half-split layout of Llama.

Frequencies are float32 tensors ``[dim / 2]`` in radians per token, fastest first. Angles too are computed in float32,
as transformers does, so that long contexts agree with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(dim: int, theta: float) -> Tensor:
    """Return the original frequencies, ``theta ** (-2 i / dim)``."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotary_tables(frequencies: Tensor, positions: int, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all angles times ``magnitude``: two float32 tensors ``[positions, dim]``.

    Each angle rotates a pair of coordinates that lie ``dim / 2`` apart, so it appears twice; the sine of the first
    coordinate of a pair is negated.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to ``x`` ``[tokens, heads, head_dim]`` with the angles of each token.

    ``cos`` and ``sin``: rows of ``rotary_tables``, ``[tokens, dim]``. With ``dim`` below ``head_dim`` the last
    ``head_dim - dim`` coordinates stay as they are.
    """
    dim = cos.shape[-1]
    rotated = x[..., :dim]
    result = (rotated * cos[:, None]).addcmul_(rotated.roll(dim // 2, dims=-1), sin[:, None])
    return result if dim == x.shape[-1] else torch.cat((result, x[..., dim:]), dim=-1)
