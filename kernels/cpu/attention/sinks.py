"""Attention sinks: a learned logit for each query head that takes weight from the keys and adds no value.

Attention without the sink is a weighted mean with the sum of weights ``s`` relative to the score ``t``. With a sink of
logit ``l`` that sum is ``s + exp(l - t)``, so the result only has to be scaled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.attention.keys import STEP_WORDS
from kernels.cpu.runtime.kernel import float32_array, int64_array, kernel, read_arguments, split_range
from kernels.cpu.simd.exp import exp32


@kernel
def scale_by_sinks(address: Any) -> None:
    """Scale the results of ``paged.attend`` in place.

    Arguments ``(out, step, sinks, tokens, heads, dim)``: ``out`` ``[tokens, heads, dim]``, the ``step`` of ``attend``,
    whose ``states`` it has just written, and ``sinks`` ``[heads]``.
    """
    a, thread, threads = read_arguments(address)
    tokens, heads, dim = a[3], a[4], a[5]
    out, sinks = float32_array(a[0], (tokens, heads, dim)), float32_array(a[2], heads)
    states = float32_array(int64_array(a[1], STEP_WORDS)[10], (tokens, heads, 2))
    first, end = split_range(tokens, thread, threads)
    for token in range(first, end):
        for head in range(heads):
            top, total = states[token, head, 0], states[token, head, 1]
            # Relative to the larger of both logits, so that neither exponential overflows.
            largest = max(top, sinks[head])
            kept = total * exp32(np.float32(top - largest))
            factor = kept / (kept + exp32(np.float32(sinks[head] - largest)))
            for i in range(dim):
                out[token, head, i] *= factor
