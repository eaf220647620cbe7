"""The sampling parameters and noise keys of a step's tokens, gathered from those of their branches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.cpu.runtime.kernel import int64_array, kernel, read_arguments


def gather_params(
    branch_floats: Tensor,
    branch_ints: Tensor,
    rows: Tensor,
    positions: Tensor,
    float_params: Tensor,
    int_params: Tensor,
) -> None:
    """Write the ``float_params`` ``[3, tokens]`` and ``int_params`` ``[4, tokens]`` of ``sampler.launch_sampling``.

    ``branch_floats``: float64 ``[branches, 3]``, temperature, top-p and ``min_p_threshold``; ``branch_ints``: int64
    ``[branches, 3]``, top-k, seed and key. ``rows`` ``[tokens]``: the branch of each token; ``positions`` ``[tokens]``:
    those of the tokens, each before the one that is sampled. All are contiguous.
    """
    _gather_params(branch_floats, branch_ints, rows, positions, float_params, int_params, rows.shape[0], threads=1)


@kernel
def _gather_params(address: Any) -> None:
    a, _, _ = read_arguments(address)
    tokens = a[6]
    rows, positions = int64_array(a[2], tokens), int64_array(a[3], tokens)
    # The floats are copied as the words that they are.
    float_params, int_params = int64_array(a[4], (3, tokens)), int64_array(a[5], (4, tokens))
    for token in range(tokens):
        floats, ints = int64_array(a[0] + 24 * rows[token], 3), int64_array(a[1] + 24 * rows[token], 3)
        for index in range(3):
            float_params[index, token], int_params[index, token] = floats[index], ints[index]
        int_params[3, token] = positions[token] + 1
