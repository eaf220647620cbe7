"""The noise inside kernels is that of ``kernels.common.noise``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.common.noise import SAMPLE, noise_streams, uniform_noise
from kernels.common.noise import gumbel_noise as expected_noise
from kernels.cpu.runtime.kernel import float32_array, int64_array, kernel, read_arguments
from kernels.cpu.sampling.noise import gumbel_noise, noise_stream, race_bits
from tests.seeds import shift


@kernel
def _write_noise(address: Any) -> None:
    """Kernel with the arguments ``(keys, bits, noise, rows, vocab)``."""
    a, _, _ = read_arguments(address)
    keys, bits = int64_array(a[0], (3, a[3])), float32_array(a[1], (a[3], a[4]))
    noise = int64_array(a[2], (a[3], a[4])).view(np.float64)
    for row in range(a[3]):
        stream = noise_stream(keys[0, row], keys[1, row], keys[2, row], SAMPLE)
        for token in range(a[4]):
            bits[row, token], noise[row, token] = race_bits(stream, token), gumbel_noise(stream, token)


def test_noise_equals_numpys_and_race_bits_bound_the_uniforms_closely() -> None:
    rows, vocab = 64, 20_000
    keys = np.random.default_rng(shift(17)).integers(-(1 << 63), 1 << 63, (3, rows), np.int64)
    bits, noise = torch.empty(rows, vocab), torch.empty(rows, vocab, dtype=torch.float64)
    _write_noise(torch.from_numpy(keys), bits, noise, rows, vocab)
    streams, tokens = noise_streams(*keys, SAMPLE)[:, None], np.arange(vocab)
    np.testing.assert_allclose(noise.numpy(), expected_noise(streams, tokens), rtol=1e-14, atol=1e-14)
    found, bound = bits.numpy().astype(np.float64), 2.0**32 * (1 - uniform_noise(streams, tokens))
    assert (found * (1 - 2.0**-24) - 2 <= bound).all()
    assert (bound - found <= 2 + 2.0**-23 * bound).all()
