"""``kernels.common.noise`` inside kernels: the stream of one row and the noise of one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.noise import GAMMA, MULTIPLIERS
from kernels.cpu.runtime.kernel import function

_M0, _M1 = MULTIPLIERS
_NEGATED_M1 = np.uint64((1 << 64) - int(_M1))
_ONE, _12, _27, _30, _31, _32 = map(np.uint64, (1, 12, 27, 30, 31, 32))


@function
def noise_stream(seed: Any, key: Any, position: Any, purpose: Any) -> Any:
    """Return a row's stream, as ``kernels.common.noise.noise_streams``."""
    state = _mix(np.uint64(seed) + GAMMA)
    state = _mix((state ^ np.uint64(key)) + GAMMA)
    state = _mix((state ^ np.uint64(position)) + GAMMA)
    return _mix((state ^ np.uint64(purpose)) + GAMMA)


@function
def gumbel_noise(stream: Any, token: Any) -> Any:
    """Return a token's noise, as ``kernels.common.noise.gumbel_noise``; the last bits may differ with the logarithm."""
    bits = _mix(stream + (np.uint64(token) + _ONE) * GAMMA) >> _12
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-52))


@function
def race_bits(stream: Any, token: Any) -> Any:
    """Return a float32 ``b`` with ``b * (1 - 2**-24) - 2 <= 2**32 * (1 - u)`` and close to it, for the uniform ``u``.

    ``u`` is ``kernels.common.noise.uniform_noise``. ``b`` is the upper half of the negated hash before its last round,
    which changes only the lowest bit of that half, as negating instead of inverting does. If the half is 0, the bound
    may be far too low. Loops over this function become vectors, and take a fifth of the time of the uniforms.
    """
    state = stream + (np.uint64(token) + _ONE) * GAMMA
    state = (state ^ (state >> _30)) * _M0
    state = (state ^ (state >> _27)) * _NEGATED_M1
    return np.float32(np.uint32(state >> _32))


@function
def _mix(state: Any) -> Any:
    state = (state ^ (state >> _30)) * _M0
    state = (state ^ (state >> _27)) * _M1
    return state ^ (state >> _31)
