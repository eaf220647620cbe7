"""``kernels.common.noise`` for the bodies of kernels: one row's stream and one token's noise at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.noise import GAMMA, MULTIPLIERS, NEGATED
from kernels.cpu.runtime.kernel import function

_M0, _M1 = MULTIPLIERS
_ONE, _12, _27, _30, _31, _32 = map(np.uint64, (1, 12, 27, 30, 31, 32))


@function
def stream_of(seed: Any, key: Any, position: Any, purpose: Any) -> Any:
    """See ``kernels.common.noise.noise_streams``."""
    row = _finalise(np.uint64(seed) + GAMMA)
    row = _finalise((row ^ np.uint64(key)) + GAMMA)
    row = _finalise((row ^ np.uint64(position)) + GAMMA)
    return _finalise((row ^ np.uint64(purpose)) + GAMMA)


@function
def gumbel_of(stream: Any, token: Any) -> Any:
    """See ``kernels.common.noise.gumbel_noise``; the last bits may differ, where the logarithm's do."""
    bits = _finalise(stream + (np.uint64(token) + _ONE) * GAMMA) >> _12
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-52))


@function
def race_bits(stream: Any, token: Any) -> Any:
    """See ``kernels.common.noise.RaceBits.below``. Loops over it become vectors."""
    state = stream + (np.uint64(token) + _ONE) * GAMMA
    state = (state ^ (state >> _30)) * _M0
    state = (state ^ (state >> _27)) * NEGATED
    return np.float32(np.uint32(state >> _32))


@function
def _finalise(state: Any) -> Any:
    state = (state ^ (state >> _30)) * _M0
    state = (state ^ (state >> _27)) * _M1
    return state ^ (state >> _31)
