"""The laws and the noise of a step's tokens, gathered from those of its branches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.cpu.runtime.kernel import int64_array, kernel, read_arguments


def laws_of(laws: Tensor, noise: Tensor, rows: Tensor, positions: Tensor, settings: Tensor, places: Tensor) -> None:
    """Writes for each token what ``kernels.cpu.sampling.sampler.write_draws`` takes: ``settings`` ``[3, tokens]``
    float64, and ``places`` ``[4, tokens]`` int64.

    ``laws`` ``[branches, 3]`` float64 and ``noise`` ``[branches, 3]`` int64 are those of branches (temperature, top-p
    and reach; top-k, seed and key), ``rows`` ``[tokens]`` the branches of the tokens, whose ``positions`` ``[tokens]``
    lie before those of the draws. All are contiguous.
    """
    _laws_of(laws, noise, rows, positions, settings, places, rows.shape[0], threads=1)


@kernel
def _laws_of(address: Any) -> None:
    a, _, _ = read_arguments(address)
    tokens = a[6]
    rows, positions = int64_array(a[2], tokens), int64_array(a[3], tokens)
    settings, places = int64_array(a[4], (3, tokens)), int64_array(a[5], (4, tokens))
    for token in range(tokens):
        law, noise = int64_array(a[0] + 24 * rows[token], 3), int64_array(a[1] + 24 * rows[token], 3)
        for part in range(3):
            settings[part, token], places[part, token] = law[part], noise[part]
        places[3, token] = positions[token] + 1
