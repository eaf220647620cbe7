"""The noise of ``kernels.common.noise``, bit for bit, inside other kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finalise(state):
    """Mix unsigned 64-bit words by SplitMix64's bijective finaliser."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def noise_stream(seed, key, position, PURPOSE: tl.constexpr):
    """Return the stream of a row; its keys are any 64-bit integers."""
    row = finalise(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    row = finalise((row ^ key.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    row = finalise((row ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    return finalise((row ^ PURPOSE) + 0x9E3779B97F4A7C15)


@triton.jit
def hash_noise(stream, tokens):
    """Return 64 hashed bits for each token."""
    return finalise(stream + (tokens.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def gumbel_noise(bits):
    """Return standard Gumbel noise in float64 from hashed bits."""
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_bound(bits):
    """Return an upper bound of the Gumbel noise in float32, up to rounding, at half a dozen instructions.

    It is close where the noise is large: with uniforms ``u``, ``-log(u) >= 1 - u``, and the upper half of the negated
    bits is not more than ``1 - u``.
    """
    rest = ((bits ^ 0xFFFFFFFFFFFFFFFF) >> 32).to(tl.uint32).to(tl.float32)
    return -tl.log(tl.maximum(rest, 4.76837158203125e-07) * 2.3283064365386963e-10)
