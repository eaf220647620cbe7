"""Sampled tokens follow the filtered law exactly."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor

from engine.sampling import Coordinates, Laws, filtered_logits, sample

LEVEL = 1e-4
"""Chance that a sound sampler fails one of these tests; the seeds are fixed, so they do not flicker."""

LAWS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 150, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 1.0},
]
VOCAB = 200

Law = npt.NDArray[np.float64]


def laws(rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Laws:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float64)

    return Laws(full(temperature), full(top_p), full(min_p), torch.full((rows,), top_k))


def closed_form(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Law:
    """The law by its definition, one token after the other in plain Python."""
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


def some_logits(scale: float = 1.5) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * scale


def where(rows: int, *, seed: int = 11, key: int = 0) -> Coordinates:
    return Coordinates(torch.full((rows,), seed), torch.full((rows,), key), torch.arange(rows))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_filtered_logits_are_the_closed_form_law(law: dict[str, float]) -> None:
    logits = some_logits()
    ours = filtered_logits(logits[None], laws(1, **law)).softmax(-1)[0]  # type: ignore[arg-type]
    np.testing.assert_allclose(ours.numpy(), closed_form(logits, **law), atol=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draws_follow_the_closed_form_law(law: dict[str, float]) -> None:
    rows, logits = 20_000, some_logits()
    expected = closed_form(logits, **law) * rows  # type: ignore[arg-type]
    tokens, _ = sample(logits.expand(rows, VOCAB), laws(rows, **law), where(rows))  # type: ignore[arg-type]
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > LEVEL
    else:
        assert observed[0] == rows


def test_branches_with_other_keys_draw_independently() -> None:
    rows, logits = 20_000, torch.zeros(8)
    first, _ = sample(logits.expand(rows, 8), laws(rows), where(rows, key=0))
    second, _ = sample(logits.expand(rows, 8), laws(rows), where(rows, key=1))
    table = np.bincount((first * 8 + second).numpy(), minlength=64).reshape(8, 8)
    assert stats.chi2_contingency(table).pvalue > LEVEL


def test_a_row_draws_the_same_whatever_the_other_rows_ask_for() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 700, generator=generator)
    mixed = Laws(
        temperature=torch.tensor([0.0, 1.0, 0.7] * 4, dtype=torch.float64),
        top_p=torch.tensor([1.0, 0.9, 0.999, 0.5] * 3, dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0, 0.02] * 4, dtype=torch.float64),
        top_k=torch.tensor([0, 100, 3, 0, 0, 650] * 2),
    )
    places = where(12)
    together = sample(logits, mixed, places)
    for row in range(12):
        one = slice(row, row + 1)
        law = Laws(mixed.temperature[one], mixed.top_p[one], mixed.min_p[one], mixed.top_k[one])
        place = Coordinates(places.seed[one], places.key[one], places.position[one])
        token, logprob = sample(logits[one], law, place)
        assert int(token) == int(together[0][row])
        assert float(logprob) == pytest.approx(float(together[1][row]), abs=1e-12)


def test_temperature_zero_is_argmax_with_the_models_own_probability() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, laws(50, temperature=0.0, top_k=3, top_p=0.1), where(50))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.double().log_softmax(-1).amax(-1))


def test_log_probabilities_are_those_of_the_filtered_law() -> None:
    rows, logits = 500, some_logits()
    law = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    tokens, logprobs = sample(logits.expand(rows, VOCAB), laws(rows, **law), where(rows))  # type: ignore[arg-type]
    expected = np.log(closed_form(logits, **law)[tokens.numpy()])  # type: ignore[arg-type]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)


def test_a_nucleus_wider_than_the_first_candidates_is_complete() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.1
    ours = filtered_logits(logits[None], laws(1, top_p=0.9)).softmax(-1)[0]
    expected = closed_form(logits, top_p=0.9)
    assert int((ours > 0).sum()) == int((expected > 0).sum()) > 3000
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-7)
