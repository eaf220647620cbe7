"""RoPE (Su et al. 2021, https://arxiv.org/abs/2104.09864) in the half-split layout of Llama, and its extensions.

Frequencies are float32 tensors ``[dim / 2]`` in radians per token, fastest first. Angles too are computed in float32,
as transformers does, so that long contexts agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def frequencies(dim: int, theta: float) -> Tensor:
    """Return the original frequencies, ``theta ** (-2 i / dim)``."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def llama3_frequencies(plain: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Divide slow frequencies by ``factor``, keep fast ones, and blend linearly between (Llama 3.1).

    A frequency is slow with fewer than ``low`` rotations within the ``original`` context, and fast with more than
    ``high``.
    """
    rotations = original * plain / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def yarn_frequencies(
    dim: int, theta: float, factor: float, fast: float, slow: float, original: int, *, whole: bool
) -> Tensor:
    """Return YaRN's "NTK by parts" (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    Frequencies with more than ``fast`` rotations within the ``original`` context are kept, those with fewer than
    ``slow`` divided by ``factor``, with a linear blend by index between. ``whole``: the ends of the ramp are rounded
    outwards to whole indices.
    """

    def index(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(fast), index(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    plain = frequencies(dim, theta)
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / factor * divided + plain * (1 - divided)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys (section 3.3): longer contexts need sharper attention."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_frequencies(dim: int, theta: float, divisors: Sequence[float]) -> Tensor:
    """Divide each frequency by its own searched factor (Ding et al. 2024, https://arxiv.org/abs/2402.13753)."""
    return 1.0 / (torch.tensor(divisors) * theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def longrope_magnitude(factor: float, original: int) -> float:
    """Return LongRoPE's factor of queries and keys."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


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
