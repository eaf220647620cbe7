"""Sampling noise as a pure function of where it is used, so that a token never depends on its neighbours in the batch.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") has no state: the noise of
one vocabulary entry is a hash of (seed, key, position, purpose, token). Every row can be drawn alone, in any batch and
in any order, and replayed years later.

The hash is SplitMix64 (Steele, Lea & Flood 2014): four finaliser rounds turn a row's coordinates into a stream, and the
token id counts along that stream. Arithmetic is int64 that wraps, which torch does equally on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 0
"""Purpose of the noise that draws an ordinary token. Speculation gets purposes of its own, so its coins are
independent."""


def gumbel_noise(seed: Tensor, key: Tensor, position: Tensor, purpose: int, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[rows, vocab]`` in float64 for the int64 coordinates ``[rows]``.

    ``argmax(log p + noise)`` is an exact draw from ``p`` (Gumbel-max).
    """
    return uniform_noise(seed, key, position, purpose, vocab).log_().neg_().log_().neg_()


def uniform_noise(seed: Tensor, key: Tensor, position: Tensor, purpose: int, vocab: int) -> Tensor:
    """Uniform noise in the open interval (0, 1), ``[rows, vocab]`` in float64 with 52 random bits.

    52 bits and an offset of half a step are exact in float64, so 0 and 1 never occur and every logarithm is finite.
    """
    bits = _shift_right(hash_noise(seed, key, position, purpose, vocab), 12)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def hash_noise(seed: Tensor, key: Tensor, position: Tensor, purpose: int, vocab: int) -> Tensor:
    """64 hashed bits for each row and token, as int64 ``[rows, vocab]``."""
    row = _finalise(seed + _GAMMA)
    for coordinate in (key, position, torch.full_like(seed, purpose)):
        row = _finalise((row ^ coordinate).add_(_GAMMA))
    counter = torch.arange(1, vocab + 1, dtype=torch.int64, device=seed.device).mul_(_GAMMA)
    return _finalise(row[:, None] + counter)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _finalise(state: Tensor) -> Tensor:
    """SplitMix64's bijective mixer, in place."""
    for shift, multiplier in _MULTIPLIERS:
        state.bitwise_xor_(_shift_right(state, shift)).mul_(multiplier)
    return state.bitwise_xor_(_shift_right(state, 31))


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's ``>>`` copies the sign, so the copies are masked away."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)
