"""Sampling noise as a pure function of its keys, so that a token never depends on the other rows of a batch.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") has no state: the noise of
one vocabulary entry is a hash of (seed, key, position, purpose, token). A row can be sampled alone, in any batch and in
any order, for all tokens or only for those that can win, and replayed years later.

The hash is SplitMix64 (Steele, Lea & Flood 2014): four rounds of its mixer turn the keys of a row into a stream, and
the token id counts along that stream. Arithmetic is that of unsigned 64-bit words, which wrap.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

SAMPLE = 0
"""Purpose of the noise that samples an ordinary token. Another purpose gives independent noise."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def noise_streams(seed: Ints, key: Ints, position: Ints, purpose: int) -> Words:
    """Return the stream of each row, ``[rows]``, from its keys ``[rows]``."""
    state = _mix(seed.astype(np.uint64) + GAMMA)
    for word in (key, position, np.full_like(seed, purpose)):
        state = _mix((state ^ word.astype(np.uint64)) + GAMMA)
    return state


def hash_noise(streams: Words, tokens: Ints) -> Words:
    """Return 64 hashed bits for each pair of stream and token; the two arrays are broadcast."""
    return _mix(streams + (tokens.astype(np.uint64) + np.uint64(1)) * GAMMA)


def uniform_noise(streams: Words, tokens: Ints) -> Floats:
    """Return uniform noise in the open interval (0, 1) with 52 random bits; shapes as in ``hash_noise``.

    52 bits and an offset of half a step are exact in float64, so 0 and 1 never occur and every logarithm is finite.
    """
    bits: Floats = (hash_noise(streams, tokens) >> np.uint64(12)).astype(np.float64)
    return (bits + 0.5) * 2.0**-52


def gumbel_noise(streams: Words, tokens: Ints) -> Floats:
    """Return standard Gumbel noise. ``argmax(log p + noise)`` is an exact sample from ``p`` (Gumbel-max trick)."""
    noise: Floats = -np.log(-np.log(uniform_noise(streams, tokens)))
    return noise


def _mix(state: Words) -> Words:
    """SplitMix64's bijective mixer."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * multiplier
    return state ^ (state >> np.uint64(31))
