"""The GPU kernel samples the same tokens as the CPU with any parameters, and applies penalties bit-identically."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.protocol.types import SamplingParams
from engine.sampling import sampler as on_cpu
from engine.sampling.logits_processors import Penalties, penalise
from kernels.common import noise
from kernels.common.noise import SAMPLE
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling.sampling import PenaltyTensors
from kernels.sampling.sampling import apply_penalties as plain_penalties
from kernels.sampling.sampling import sample as plain_sample
from kernels.triton import noise as noise_kernels
from kernels.triton import sampling
from tests.closeness import EPS, log_sum_bound
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.planted import planted
from tests.seeds import shift

VOCAB = 2100
"""Vocabulary of more than one block that is not a multiple of a block."""


def laws() -> tuple[SamplingTensors, NoiseKeys]:
    """Return sampling parameters with all kinds of temperatures and filters, in a random order, and noise keys."""
    rng = np.random.default_rng(shift(7))
    every = [*itertools.product((0.0, 1.0, 0.6, 1e-6, 4.0), (0, 1, 40, VOCAB - 1, 9999), (1.0, 0.9, 0.2), (0.0, 0.1))]
    temperature, top_k, top_p, min_p = np.array([every[index] for index in rng.permutation(len(every))[:16]]).T
    law = SamplingTensors(*(torch.from_numpy(x.copy()) for x in (temperature, top_p, min_p, top_k.astype(np.int64))))
    return law, NoiseKeys(*torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, (3, 16))))


def logits() -> Tensor:
    """Return logits in which half of the rows have many equal ones, and some tokens are impossible.

    The row stride is larger than the rows, and the numbers in between are larger than all logits.
    """
    x = torch.randn(16, VOCAB + 3, generator=torch.Generator().manual_seed(shift(3))) * 3
    x[:, VOCAB:] = 99
    x = x[:, :VOCAB]
    x[::2] = x[::2].bfloat16().float()
    x[1:7, 100:1700] = -torch.inf
    x[3, :] = torch.where(torch.arange(VOCAB) == 2080, 0.0, -torch.inf)
    x[5, :] = 0  # equal logits
    x[8, 50:] = -0.0
    return x


def drawn(x: Tensor, law: SamplingTensors, where: NoiseKeys, module: ModuleType = sampling) -> tuple[Tensor, Tensor]:
    tokens, logprobs = module.sample(*(y.to(DEVICE) for y in (x, *law, *where)), SAMPLE)
    return tokens.cpu(), logprobs.cpu()


def test_the_kernel_and_its_reference_sample_the_same_tokens_as_the_cpu() -> None:
    (law, where), x = laws(), logits()
    columns = SamplingTensors(*(y.numpy() for y in law))
    expected, chances = on_cpu.sample(x, columns, NoiseKeys(*(y.numpy() for y in where)))
    for tokens, logprobs in (drawn(x, law, where), plain_sample(x, law, where)):
        assert tokens.tolist() == expected.tolist()
        torch.testing.assert_close(logprobs, torch.from_numpy(chances), atol=2 * log_sum_bound(VOCAB), rtol=2 * EPS)


def test_non_finite_logits_give_no_token() -> None:
    law, where = laws()
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(shift(0)))
    x[0, 7], x[1, 299], x[2, :] = torch.nan, torch.inf, -torch.inf
    law, where = SamplingTensors(*(y[:4] for y in law)), NoiseKeys(*(y[:4] for y in where))
    for tokens, logprobs in (drawn(x, law, where), plain_sample(x, law, where)):
        assert tokens.tolist()[:3] == [-1, -1, -1]
        assert tokens[3] >= 0
        assert logprobs.isnan().tolist() == [True, True, True, False]


def test_every_noise_key_changes_the_sample() -> None:
    """Changing any noise key changes the samples."""
    row = [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)]
    law = SamplingTensors(*row, torch.zeros(4, dtype=torch.int64))
    where = NoiseKeys(torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 1, 0]), torch.tensor([0, 0, 0, 1]))
    assert len(set(drawn(torch.zeros(4, VOCAB), law, where)[0].tolist())) == 4


def test_penalties_equal_the_engines_bit_for_bit() -> None:
    rng = np.random.default_rng(shift(1))
    x = torch.randn(3, 400, generator=torch.Generator().manual_seed(shift(1))) * 5
    settings = [(1.3, 0.7, 0.1), (1.0, -0.3, 0.0), (0.8, 0.0, 1.9)]
    penalties = []
    for repetition, frequency, presence in settings:
        params = SamplingParams(
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            logit_bias={3: 1.7, 250: -100.0, 9: 0.3},
        )
        one = Penalties(params, rng.integers(0, 400, 300).tolist())
        for token in rng.integers(0, 400, 350).tolist():
            one.add(token)
        penalties.append(one)
    expected = x.clone().numpy()
    penalise(expected, dict(enumerate(penalties)))

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in penalties]))

    starts = torch.tensor([0, *np.cumsum([one.size for one in penalties])])
    columns = [joined(name) for name in ("tokens", "bias", "seen", "counts")]
    changes = PenaltyTensors(starts, *columns, torch.tensor(settings))
    assert len(columns[0]) > 700
    ours, plain = x.to(DEVICE, copy=True), x.clone()
    sampling.apply_penalties(ours, *(y.to(DEVICE) for y in changes))
    plain_penalties(plain, changes)
    assert np.array_equal(ours.cpu().numpy(), expected)
    assert np.array_equal(plain.numpy(), expected)


@triton.jit
def _noise(SEED, KEY, POSITION, BITS, NOISE, BOUND, STREAM: tl.constexpr, HASH: tl.constexpr, GUMBEL: tl.constexpr, BOUNDED: tl.constexpr, N: tl.constexpr):  # fmt: skip  # noqa: E501
    row = tl.program_id(0)
    place = row * N + tl.arange(0, N)
    stream = STREAM(tl.load(SEED + row), tl.load(KEY + row), tl.load(POSITION + row), 3)
    bits = HASH(stream, tl.arange(0, N))
    tl.store(BITS + place, bits.to(tl.int64))
    tl.store(NOISE + place, GUMBEL(bits))
    tl.store(BOUND + place, BOUNDED(bits))


def same_noise(module: ModuleType) -> bool:
    """Return True if a module's noise is that of ``kernels.common.noise``.

    The bits must be equal, the Gumbel noise up to the last place of the logarithm, and the bound a close one where the
    noise is large.
    """
    rng, n = np.random.default_rng(shift(2)), 4096
    where = rng.integers(-(2**63), 2**63 - 1, (3, 5))
    streams = noise.noise_streams(*where, 3)[:, None]
    bits = torch.empty(5, n, dtype=torch.int64, device=DEVICE)
    drawn, bound = torch.empty(5, n, dtype=torch.float64, device=DEVICE), torch.empty(5, n, device=DEVICE)
    functions = (module.noise_stream, module.hash_noise, module.gumbel_noise, module.gumbel_bound)
    _noise[(5,)](*(torch.from_numpy(x.copy()).to(DEVICE) for x in where), bits, drawn, bound, *functions, n)
    exact, limit = noise.gumbel_noise(streams, np.arange(n)), bound.cpu().numpy()
    return (
        np.array_equal(bits.cpu().numpy().view(np.uint64), noise.hash_noise(streams, np.arange(n)))
        # Two logarithms in float64, of numbers up to 40.
        and np.allclose(drawn.cpu().numpy(), exact, atol=1e-14, rtol=1e-14)
        and bool((limit >= exact - 1e-3).all())
        and bool((limit <= exact + 0.05)[exact > 3].all())
    )


def test_the_noise_equals_the_cpus() -> None:
    assert same_noise(noise_kernels)


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(tokens.to(tl.uint64) + 1)", "tokens.to(tl.uint64)"),
        ("(row ^ position.to(tl.uint64))", "(row ^ key.to(tl.uint64))"),
        ("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5B8"),
        ("(bits >> 12)", "(bits >> 11)"),
        ("0xFFFFFFFFFFFFFFFF", "0"),
    ],
)
def test_bugs_planted_in_the_noise_are_detected(right: str, wrong: str, tmp_path: Path) -> None:
    assert not same_noise(planted("noise", right, wrong, "noise", tmp_path))


@cache
def ties() -> tuple[Tensor, SamplingTensors, NoiseKeys, Tensor, Tensor]:
    """Return parameters whose thresholds fall on ties, and the expected samples."""
    x = torch.tensor([4.0, 2.0, 2.0, 2.0, 1.0, -0.0]).repeat(6, 100)
    x[5, ::6] = 0.0
    full, none = torch.full((6,), 2.0, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    top_p = torch.tensor([0.5, 0.9, 0.97, 1.0, 1.0, 1.0], dtype=torch.float64)
    law = SamplingTensors(full, top_p, none, torch.tensor([150, 0, 150, 100, 101, 402]))
    where = NoiseKeys(*(torch.arange(6) * step for step in (0, 3, 5)))
    return x, law, where, *plain_sample(x, law, where)


def draws_ties(module: ModuleType) -> bool:
    x, law, where, tokens, logprobs = ties()
    ours, chances = drawn(x, law, where, module)
    return ours.equal(tokens) and torch.allclose(chances, logprobs, atol=2 * log_sum_bound(600), rtol=2 * EPS)


def test_all_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    assert draws_ties(sampling)


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(step + 1)", "step"),
        ("above >= goal", "above > goal"),
        ("tl.where(x == 0, 0.0, x)", "x"),
        ("(goal - above) * last", "0 * last"),
        ("_to_key(x) >= floor", "_to_key(x) > floor"),
        ("tl.load(POSITION + row)", "tl.load(POSITION)"),
    ],
)
def test_bugs_planted_in_sampling_are_detected(right: str, wrong: str, tmp_path: Path) -> None:
    """Plants thresholds that miss a tie or include one more, and a row with the noise of another."""
    assert not draws_ties(planted("sampling", right, wrong, "sampling", tmp_path))
