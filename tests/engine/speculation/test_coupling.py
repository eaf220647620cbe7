"""Guesses are drawn with the branch's own noise, from the law that the branch has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from engine.sampling import Coordinates, Laws, sample
from engine.sequence import GenerateSequence, Job
from engine.speculation.coupling import Coupling
from engine.types import Branch
from kernels.noise import SAMPLE, gumbel_noise, noise_streams
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.test_sampling import closed_form

VOCAB = 400
LEVEL = 1e-4
"""Chance that a sound coupling fails a test; the seeds are fixed."""
LAWS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1e-12},
    {"temperature": 0.0, "top_k": 1},
    {"top_k": 7},
    {"top_p": 0.7},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"min_p": 0.2, "temperature": 1.4},
]


@pytest.fixture(scope="module")
def harness(checkpoints: Checkpoints) -> Harness:
    return Harness(checkpoints("qwen3"))


def branches(harness: Harness, count: int, **law: object) -> list[GenerateSequence]:
    """Branches of different lengths."""
    job = Job("r", lambda _: None)
    asked = [Branch(seed=3, key=key, max_tokens=60, generated=tuple(range(key % 5))) for key in range(count)]
    harness.core.model.add_branches(generate([1, 2, 3], asked, **law), job)
    return [one for one in job.sequences if isinstance(one, GenerateSequence)]


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """So peaked that the likeliest 64 tokens have nearly all of the mass."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def first(guesses: list[list[tuple[int, float]]]) -> list[int]:
    assert all(len(some) == 1 for some in guesses)
    return [token for [(token, _)] in guesses]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_first_guess_is_what_the_sampler_draws(harness: Harness, law: dict[str, float]) -> None:
    sequences = branches(harness, 40, **law)
    paths = [list(range(20, 20 + place % 4)) for place in range(40)]
    logits = random_logits(40, VOCAB, 1)
    names = ("temperature", "top_p", "min_p")
    laws = Laws(
        *(np.full(40, getattr(sequences[0].sampling, name)) for name in names), np.full(40, law.get("top_k", 0))
    )
    position = np.array([len(one.tokens) + len(path) for one, path in zip(sequences, paths, strict=True)])
    drawn, _ = sample(logits, laws, Coordinates(np.full(40, 3), np.arange(40), position))
    # In another order than the branches', and not all of them.
    places = list(range(0, 40, 3))[::-1]
    guesses = Coupling(sequences, 4).guesses(places, [paths[place] for place in places], logits[places], 1)
    assert first(guesses) == drawn[places].tolist()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_runners_up_are_those_that_the_noise_puts_next(harness: Harness, law: dict[str, float]) -> None:
    sequences = branches(harness, 30, **law)
    logits = random_logits(30, 60, 2)
    temperature = law.get("temperature", 1.0)
    expected = []
    for sequence, row in zip(sequences, logits, strict=True):
        where = (np.array([word]) for word in (sequence.seed, sequence.key, len(sequence.tokens)))
        scores = row.numpy() + temperature * gumbel_noise(noise_streams(*where, SAMPLE), np.arange(60))
        if temperature:
            scores[closed_form(row - row.max(), **law) == 0] = -math.inf  # type: ignore[arg-type]
        order = np.argsort(-scores)[:4]
        expected.append(order[scores[order] > -math.inf].tolist())
    guesses = Coupling(sequences, 1).guesses(range(30), [()] * 30, logits, 4)
    assert [[guess.token for guess in some] for some in guesses] == expected


def test_two_laws_that_share_the_noise_agree_as_often_as_theory_promises(harness: Harness) -> None:
    rows = 4000
    sequences = branches(harness, rows)
    ours, theirs = random_logits(2, 50, 5).mul_(0.2)
    distance = float((ours.softmax(0) - theirs.softmax(0)).abs().sum()) / 2
    drawn = [
        first(Coupling(sequences, 1).guesses(range(rows), [()] * rows, x.repeat(rows, 1), 1)) for x in (ours, theirs)
    ]
    agreed = int(np.equal(*drawn).sum())
    promised, independent = (1 - distance) / (1 + distance), float(ours.softmax(0) @ theirs.softmax(0))
    assert 0.2 < distance < 0.7
    assert stats.binomtest(agreed, rows, promised, alternative="less").pvalue > LEVEL
    assert stats.binomtest(agreed, rows, 1.5 * independent, alternative="greater").pvalue < LEVEL
    # Each is a draw from its own law.
    for tokens, logits in zip(drawn, (ours, theirs), strict=True):
        seen = np.bincount(tokens, minlength=50)
        likely = logits.softmax(0).double().numpy()
        assert (likely * rows > 5).all()
        assert stats.chisquare(seen, likely / likely.sum() * rows).pvalue > LEVEL


def test_a_chance_is_one_where_nothing_else_can_be_drawn_and_chances_of_a_place_are_no_more_than_that(
    harness: Harness,
) -> None:
    logits = random_logits(20, VOCAB, 7)
    for law in LAWS:
        guesses = Coupling(branches(harness, 20, **law), 1).guesses(range(20), [()] * 20, logits.clone(), 10)
        sums = np.array([sum(guess.chance for guess in some) for some in guesses])
        assert (sums < 1 + 1e-9).all()
        if law.get("temperature") == 1e-12:
            assert sums == pytest.approx(1)


def test_logits_that_are_not_finite_give_no_guess(harness: Harness) -> None:
    logits = random_logits(4, VOCAB, 8)
    logits[0] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    guesses = Coupling(branches(harness, 4), 1).guesses(range(4), [()] * 4, logits, 2)
    assert [len(some) for some in guesses] == [0, 0, 0, 2]
