"""Sampling noise as a pure function of where it is used, so that a token never depends on its neighbours in the batch.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") has no state: the noise of
one vocabulary entry is a hash of (seed, key, position, purpose, token). Every row can be drawn alone, in any batch and
in any order, for all tokens or only for those that can win, and replayed years later.

The hash is SplitMix64 (Steele, Lea & Flood 2014): four finaliser rounds turn a row's coordinates into a stream, and the
token id counts along that stream. Arithmetic is that of unsigned 64-bit words, which wrap.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

SAMPLE = 0
"""Purpose of the noise that draws an ordinary token. Speculation gets purposes of its own, so its coins are
independent."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
NEGATED = np.uint64((1 << 64) - 0x94D049BB133111EB)


def noise_streams(seed: Ints, key: Ints, position: Ints, purpose: int) -> Words:
    """The stream of each row, ``[rows]``, from its coordinates ``[rows]``."""
    row = _finalise(seed.astype(np.uint64) + GAMMA)
    for coordinate in (key, position, np.full_like(seed, purpose)):
        row = _finalise((row ^ coordinate.astype(np.uint64)) + GAMMA)
    return row


def hash_noise(streams: Words, tokens: Ints) -> Words:
    """64 hashed bits for each pair of stream and token; the two arrays are broadcast."""
    return _finalise(streams + (tokens.astype(np.uint64) + np.uint64(1)) * GAMMA)


def uniform_noise(streams: Words, tokens: Ints) -> Floats:
    """Uniform noise in the open interval (0, 1) with 52 random bits, shaped as ``hash_noise``.

    52 bits and an offset of half a step are exact in float64, so 0 and 1 never occur and every logarithm is finite.
    """
    bits: Floats = (hash_noise(streams, tokens) >> np.uint64(12)).astype(np.float64)
    return (bits + 0.5) * 2.0**-52


def gumbel_noise(streams: Words, tokens: Ints) -> Floats:
    """Standard Gumbel noise. ``argmax(log p + noise)`` is an exact draw from ``p`` (Gumbel-max)."""
    noise: Floats = -np.log(-np.log(uniform_noise(streams, tokens)))
    return noise


class RaceBits:
    """Bounds on the uniforms of whole rows, in a fifth of the time that the uniforms take. Keeps its memory."""

    def __init__(self, rows: int, vocab: int) -> None:
        """For at most ``rows`` rows at once."""
        self._state = np.empty((rows, vocab), np.uint64)
        self._shifted = np.empty((rows, vocab), np.uint64)
        self._bits = np.empty((rows, vocab), np.float32)

    def below(self, streams: Words) -> npt.NDArray[np.float32]:
        """``b`` ``[rows, vocab]`` with ``b * (1 - 2**-24) - 2 <= 2**32 * (1 - u)``, where ``u`` is ``uniform_noise``.

        It is the upper half of the negated hash before the hash's last round, which changes only the lowest bit of that
        half, and so does negating instead of inverting. Where the half is zero the bound may be far too low.
        """
        rows, vocab = len(streams), self._state.shape[1]
        state, shifted = self._state[:rows], self._shifted[:rows]
        np.add(streams[:, None], _counter(vocab), out=state)
        for bits, multiplier in ((30, MULTIPLIERS[0]), (27, NEGATED)):
            np.right_shift(state, np.uint64(bits), out=shifted)
            np.bitwise_xor(state, shifted, out=state)
            np.multiply(state, multiplier, out=state)
        # Little-endian, as every machine that torch runs on.
        np.copyto(self._bits[:rows], state.view(np.uint32)[:, 1::2], casting="same_kind")
        return self._bits[:rows]


@lru_cache(8)
def _counter(vocab: int) -> Words:
    return np.arange(1, vocab + 1, dtype=np.uint64) * GAMMA


def _finalise(state: Words) -> Words:
    """SplitMix64's bijective mixer."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * multiplier
    return state ^ (state >> np.uint64(31))
