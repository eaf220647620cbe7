"""Sampled tokens follow the truncated distribution exactly, and no row's depends on another's."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import TopPLogitsWarper

from engine.protocol.types import EngineError
from engine.runner.logprobs import largest
from engine.sampling.sampler import sample
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.cpu.sampling.sampler import launch_sampling
from tests.closeness import log_sum_bound
from tests.seeds import keep, shift

LEVEL = 1e-4
"""Probability that a correct sampler fails one of these tests; the seeds are fixed, so no test is flaky."""

LAWS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"top_k": 12, "min_p": 0.08},
    {"top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 150, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 1.0},
]
VOCAB = 200

Law = npt.NDArray[np.float64]


def laws(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingTensors:
    return SamplingTensors(np.full(rows, temperature), np.full(rows, top_p), np.full(rows, min_p), np.full(rows, top_k))


def closed_form(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Law:
    """Return the distribution by its definition, token by token in plain Python."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: top_k or None]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < top_p or top_p == 1.0:
            nucleus.append(token)
        mass += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= min_p * weights[order[0]]]
    law = np.zeros(len(weights))
    law[nucleus] = [weights[token] for token in nucleus]
    return law / law.sum()


def kept(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Return the tokens of one row that the kernel's truncation keeps."""
    threshold = math.log(min_p) * temperature if min_p else -math.inf
    float_params = torch.tensor([[temperature], [top_p], [threshold]], dtype=torch.float64)
    int_params = torch.tensor([[top_k], [0], [0], [0]])
    tokens, results = torch.empty(1, dtype=torch.int64), torch.empty(3, 1, dtype=torch.float64)
    launch_sampling(logits[None], float_params, int_params, tokens, results)
    return (logits >= results[2]).nonzero().squeeze(1).tolist()


def some_logits(scale: float = 1.5) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(keep(3, "p-values"))) * scale


def where(rows: int, *, seed: int = 11, key: int = 0) -> NoiseKeys:
    return NoiseKeys(np.full(rows, seed), np.full(rows, key), np.arange(rows))


def noise(places: NoiseKeys, vocab: int) -> Law:
    streams = noise_streams(places.seed, places.key, places.position, SAMPLE)
    return gumbel_noise(streams[:, None], np.arange(vocab))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_samples_follow_the_closed_form_distribution(law: dict[str, float]) -> None:
    rows, logits = 20_000, some_logits()
    expected = closed_form(logits, **law) * rows  # type: ignore[arg-type]
    tokens, _ = sample(logits.expand(rows, VOCAB), laws(rows, **law), where(rows))  # type: ignore[arg-type]
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > LEVEL
    else:
        assert observed[0] == rows


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_truncation_keeps_the_same_tokens_as_transformers(law: dict[str, float]) -> None:
    for seed in range(20):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(shift(seed))) * (1 + seed / 4)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(law.get("temperature", 1.0))])
        if "top_k" in law:
            warpers.append(TopKLogitsWarper(int(law["top_k"])))
        if law.get("top_p", 1.0) < 1:
            warpers.append(TopPLogitsWarper(law["top_p"]))
        if "min_p" in law:
            warpers.append(MinPLogitsWarper(law["min_p"]))
        theirs = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())
        expected = torch.nonzero(theirs[0].isfinite()).squeeze(1).tolist()
        assert kept(logits, **law | {"top_k": min(law.get("top_k", 0), VOCAB)}) == expected  # type: ignore[arg-type]


def test_tokens_that_tie_with_the_last_one_kept_are_kept_too() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0, 3.0])
    assert kept(logits, top_k=3) == kept(logits, top_p=0.91) == [0, 1, 2, 4, 5]
    assert kept(torch.zeros(50), top_k=1) == list(range(50))


def test_branches_with_different_keys_sample_independently() -> None:
    rows, logits = 20_000, torch.zeros(8)
    first, _ = sample(logits.expand(rows, 8), laws(rows), where(rows, key=0))
    second, _ = sample(logits.expand(rows, 8), laws(rows), where(rows, key=1))
    table = np.bincount(first * 8 + second, minlength=64).reshape(8, 8)
    assert stats.chi2_contingency(table).pvalue > LEVEL


@pytest.mark.parametrize("vocab", [1, 3, 700, 40_000])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(vocab: int) -> None:
    rows = 24
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(shift(0))) * 2
    mixed = SamplingTensors(
        temperature=np.array([0.0, 1.0, 0.7, 1.0] * 6),
        top_p=np.array([1.0, 1.0, 0.9, 0.999, 0.5, 1.0] * 4),
        min_p=np.array([0.0, 0.0, 0.02] * 8),
        top_k=np.array([0, 0, 100, 3, 0, 0, 650, 0] * 3),
    )
    places = where(rows)

    def drawn(order: list[int]) -> list[tuple[int, float]]:
        law = SamplingTensors(*(column[order] for column in mixed))
        place = NoiseKeys(*(column[order] for column in places))
        tokens, logprobs = sample(logits[order], law, place)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    together = drawn(list(range(rows)))
    assert drawn(list(range(rows))[::-1]) == together[::-1]
    assert drawn(list(range(5, rows, 3))) == together[5::3]
    assert [drawn([row])[0] for row in range(rows)] == together


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 30.0])
def test_a_sample_without_truncation_is_the_argmax_over_all_tokens(scale: float) -> None:
    rows, vocab = 400, 1000
    for temperature in (1e-300, 0.01, 0.8, 3.0, 1e300):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(shift(5))) * scale
        tokens, logprobs = sample(logits, laws(rows, temperature=temperature), where(rows))
        x = logits.double().numpy()
        with np.errstate(over="ignore"):
            scores = (x - x.max(axis=-1, keepdims=True)) / temperature
        assert tokens.tolist() == (scores + noise(where(rows), vocab)).argmax(axis=-1).tolist()
        expected = scores[np.arange(rows), tokens] - np.log(np.exp(scores).sum(axis=-1))
        np.testing.assert_allclose(logprobs, expected, atol=log_sum_bound(vocab), rtol=0)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_truncated_sample_is_the_argmax_over_the_tokens_kept(law: dict[str, float]) -> None:
    rows = 300
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(shift(6))) * 2
    tokens, _ = sample(logits, laws(rows, **law), where(rows))  # type: ignore[arg-type]
    scores = logits.double().numpy() / law.get("temperature", 1.0)
    for row, gumbel in enumerate(noise(where(rows), VOCAB)):
        support = np.flatnonzero(closed_form(logits[row], **law))  # type: ignore[arg-type]
        assert tokens[row] == support[(scores[row] + gumbel)[support].argmax()]


def test_temperature_zero_is_argmax_with_the_models_own_probability() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(shift(1)))
    tokens, logprobs = sample(logits, laws(50, temperature=0.0, top_k=3, top_p=0.1), where(50))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(
        logprobs, logits.double().log_softmax(-1).amax(-1).numpy(), atol=log_sum_bound(300), rtol=0
    )


def test_log_probabilities_are_those_of_the_truncated_distribution() -> None:
    rows, logits = 500, some_logits()
    for law in ({"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"temperature": 0.8}, {"min_p": 0.1}):
        tokens, logprobs = sample(logits.expand(rows, VOCAB), laws(rows, **law), where(rows))  # type: ignore[arg-type]
        expected = np.log(closed_form(logits, **law)[tokens])  # type: ignore[arg-type]
        np.testing.assert_allclose(logprobs, expected, atol=log_sum_bound(VOCAB), rtol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_a_nucleus_of_any_width_is_complete(scale: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(shift(2))) * scale
    widths = []
    for top_p in (0.5, 0.9, 0.999):
        expected = np.flatnonzero(closed_form(logits, top_p=top_p)).tolist()
        assert kept(logits, top_p=top_p) == expected
        widths.append(len(expected))
    assert widths[-1] > 3000 or scale > 1


def test_impossible_tokens_are_never_sampled_nor_counted() -> None:
    logits = torch.full((2000, 50), -torch.inf)
    logits[:, 7], logits[:, 9] = 0.0, math.log(3)
    for law in ({}, {"top_k": 30}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 0.0}):
        tokens, logprobs = sample(logits, laws(2000, **law), where(2000))  # type: ignore[arg-type]
        assert set(tokens.tolist()) == ({9} if law.get("temperature") == 0 else {7, 9})
        np.testing.assert_allclose(np.exp(logprobs), np.where(tokens == 9, 0.75, 0.25), rtol=log_sum_bound(50))


@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 299])
def test_nan_and_infinite_logits_are_an_error(place: int, broken: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, place] = broken
    for law in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}):
        with pytest.raises(EngineError, match="not finite"):
            sample(logits, laws(3, **law), where(3))  # type: ignore[arg-type]


def test_a_row_without_any_possible_token_is_an_error() -> None:
    logits = torch.zeros(3, 40)
    logits[2] = -math.inf
    for law in ({}, {"top_k": 3}, {"temperature": 0.0}):
        with pytest.raises(EngineError, match="not finite"):
            sample(logits, laws(3, **law), where(3))  # type: ignore[arg-type]


def test_the_largest_logits_come_in_order_and_equal_ones_by_token() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(shift(4))).round(decimals=1)
    for count in (1, 20, 700, 3000):
        tokens, values = largest(logits.numpy(), count)
        expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :count]
        assert tokens.tolist() == expected.tolist()
        assert values.tolist() == np.take_along_axis(logits.numpy(), expected, axis=-1).tolist()
