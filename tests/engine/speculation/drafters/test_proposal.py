"""Draft tokens are sampled with the branch's own noise, from the distribution that the branch has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from engine.protocol.types import Branch
from engine.sampling.sampler import Floats, Ints, sample
from engine.scheduler.sequence import GenerateSequence, Request
from engine.speculation.drafters.proposal import _CANDIDATES as CANDIDATES
from engine.speculation.drafters.proposal import _REACH as REACH
from engine.speculation.drafters.proposal import NOISE, DraftSampler, candidate_rules
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling.draft_tree import rank_drafts
from tests.closeness import EPS
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.sampling.test_sampler import closed_form
from tests.seeds import shift

VOCAB = 400
LEVEL = 1e-4
"""Probability that a correct coupling fails a test; the seeds are fixed."""
LAWS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1e-12},  # distribution and probabilities of a greedy branch
    {"temperature": 0.0, "top_k": 1},
    {"top_k": 7},
    {"top_p": 0.7},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"min_p": 0.2, "temperature": 1.4},
]


@pytest.fixture(scope="module")
def harness(checkpoints: Checkpoints) -> Harness:
    return Harness(checkpoints("qwen3"))


def branches(harness: Harness, count: int, seed: int = 3, **law: object) -> list[GenerateSequence]:
    """Return branches of different lengths."""
    in_flight = Request("r", lambda _: None)
    asked = [Branch(seed=seed, key=key, max_tokens=60, generated=tuple(range(key % 5))) for key in range(count)]
    harness.core.model.add_branches(generate([1, 2, 3], asked, **law), in_flight)
    return [one for one in in_flight.sequences if isinstance(one, GenerateSequence)]


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """Return logits so peaked that the likeliest 64 tokens have nearly all of the mass."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(shift(seed))) * 4


def best(sequences: Sequence[GenerateSequence], logits: Tensor, width: int = 1) -> tuple[Ints, Floats]:
    rows = len(sequences)
    tokens, chances = DraftSampler(sequences).best(logits.clone(), np.arange(rows), np.zeros(rows, np.int64), width)
    assert tokens.shape == chances.shape == (rows, width)
    return tokens, chances


@pytest.fixture
def _all_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculation.drafters.proposal.NOISE", 1.0)


@pytest.mark.usefixtures("_all_noise")
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_with_all_of_the_noise_the_best_draft_token_is_the_sample(harness: Harness, law: dict[str, float]) -> None:
    sequences = branches(harness, 40, **law)
    paths = [list(range(20, 20 + place % 4)) for place in range(40)]
    logits = random_logits(40, VOCAB, 1)
    names = ("temperature", "top_p", "min_p")
    laws = SamplingTensors(
        *(np.full(40, getattr(sequences[0].sampling, name)) for name in names), np.full(40, law.get("top_k", 0))
    )
    position = np.array([len(one.tokens) + len(path) for one, path in zip(sequences, paths, strict=True)])
    drawn, _ = sample(logits, laws, NoiseKeys(np.full(40, 3), np.arange(40), position))
    # Some of the branches, in another order.
    places = list(range(0, 40, 3))[::-1]
    ahead = np.array([len(paths[place]) for place in places])
    tokens, _ = DraftSampler(sequences).best(
        logits[places], np.array(places), ahead, 1, [paths[place] for place in places]
    )
    likeliest = logits[places].topk(CANDIDATES).indices
    is_candidate = (likeliest == torch.from_numpy(drawn[places])[:, None]).any(-1).numpy()
    assert is_candidate.sum() > len(places) // 2
    assert tokens[is_candidate, 0].tolist() == drawn[places][is_candidate].tolist()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draft_tokens_are_ranked_by_noisy_logits_and_weighted_by_their_softmax(
    harness: Harness, law: dict[str, float]
) -> None:
    sequences = branches(harness, 30, **law)
    logits = random_logits(30, 60, 2)
    tokens, chances = best(sequences, logits, 4)
    for place, (sequence, row) in enumerate(zip(sequences, logits, strict=True)):
        where = (np.array([word]) for word in (sequence.seed, sequence.key, len(sequence.tokens)))
        noise = gumbel_noise(noise_streams(*where, SAMPLE), np.arange(60))
        scores = row.numpy() + NOISE * law.get("temperature", 1.0) * noise
        scores[row < row.max() - REACH * max(law.get("temperature", 1.0), 1.0)] = -math.inf
        if law.get("temperature", 1.0) > 1e-3:
            scores[closed_form(row - row.max(), **law) == 0] = -math.inf  # type: ignore[arg-type]
        order = np.argsort(-scores)[:4]
        shares = np.exp(scores - scores.max())
        # A score in float32 has a few roundings of up to its own size, which are relative errors of its exponential.
        bound = 8 * EPS * (1 + float(np.abs(scores[np.isfinite(scores)]).max()))
        assert chances[place] == pytest.approx(shares[order] / shares.sum(), rel=bound)
        possible = int((scores[order] > -math.inf).sum())
        assert tokens[place, :possible].tolist() == order[:possible].tolist()


@pytest.mark.usefixtures("_all_noise")
def test_two_distributions_with_shared_noise_agree_as_often_as_the_bound(harness: Harness) -> None:
    rows = 4000
    sequences = branches(harness, rows)
    ours, theirs = random_logits(2, 50, 5).mul_(0.2)
    distance = float((ours.softmax(0) - theirs.softmax(0)).abs().sum()) / 2
    drawn = [best(sequences, logits.repeat(rows, 1))[0][:, 0] for logits in (ours, theirs)]
    agreed = int((drawn[0] == drawn[1]).sum())
    promised, independent = (1 - distance) / (1 + distance), float(ours.softmax(0) @ theirs.softmax(0))
    assert 0.2 < distance < 0.7
    assert stats.binomtest(agreed, rows, promised, alternative="less").pvalue > LEVEL
    assert stats.binomtest(agreed, rows, 1.5 * independent, alternative="greater").pvalue < LEVEL
    # Each is a sample of its own distribution.
    for tokens, logits in zip(drawn, (ours, theirs), strict=True):
        expected = logits.double().softmax(0).numpy() * rows
        # The approximation by chi-square needs five expected draws: rarer tokens count as one.
        order = np.argsort(-expected)
        last = int((expected[order] >= 5).sum()) - 1
        places = np.minimum(np.argsort(order), last)
        drawn_of, expected_of = (np.bincount(places, x) for x in (np.bincount(tokens, minlength=50), expected))
        assert last > 20
        assert stats.chisquare(drawn_of, expected_of).pvalue > LEVEL


def test_an_imprecise_drafter_is_accepted_more_often_with_part_of_the_noise(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's distribution is the mean of the target's over the unknown part of the target's logits.

    The rows are so many that the difference, about one row in fifty, is eight standard deviations of chance.
    """
    rows, generator = 4000, torch.Generator().manual_seed(shift(9))
    better = worse = 0
    for part in range(4):
        sequences = branches(harness, rows, seed=part)
        known = random_logits(rows, 60, 6 + part).mul_(0.75)

        def target(known: Tensor = known) -> Tensor:
            return known + 2 * torch.randn(rows, 60, generator=generator)

        drafter = torch.stack([target().softmax(dim=1) for _ in range(60)]).mean(dim=0).log()
        right = {}
        logits = target()
        for noise in (1.0, NOISE):
            monkeypatch.setattr("engine.speculation.drafters.proposal.NOISE", noise)
            guessed, _ = best(sequences, drafter)
            monkeypatch.setattr("engine.speculation.drafters.proposal.NOISE", 1.0)
            right[noise] = guessed == best(sequences, logits)[0]
        better += int((right[NOISE] & ~right[1.0]).sum())
        worse += int((right[1.0] & ~right[NOISE]).sum())
    assert stats.binomtest(better, better + worse, 0.5, alternative="greater").pvalue < LEVEL


def test_penalties_count_the_draft_tokens_before(harness: Harness) -> None:
    sequences = branches(harness, 5, temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(5, VOCAB)
    logits[:, 70], logits[:, 80] = 1.5, 1.0
    where = np.arange(5), np.full(5, 2)
    guesses = DraftSampler(sequences)
    fresh, _ = guesses.best(logits.clone(), *where, 1, [[9, 8]] * 5)
    again, _ = guesses.best(logits.clone(), *where, 1, [[9, 70]] * 5)
    assert (fresh[:, 0].tolist(), again[:, 0].tolist()) == ([70] * 5, [80] * 5)


def test_logits_that_are_not_finite_have_probability_zero(harness: Harness) -> None:
    logits = random_logits(4, VOCAB, 8)
    logits[0] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    _, chances = best(branches(harness, 4), logits, 2)
    assert [bool((some > 0).any()) for some in chances] == [False, False, False, True]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize(("vocab", "scale"), [(40, 4.0), (400, 4.0), (826, 0.3), (1000, 0.01)])
def test_the_kernel_proposes_what_a_device_does(
    harness: Harness, law: dict[str, float], vocab: int, scale: float
) -> None:
    """Peaked distributions, of which few tokens are examined, and flat ones, which have too many."""
    sequences = branches(harness, 30, **law)
    logits = random_logits(30, vocab, 4) * (scale / 4)
    logits[7, :], logits[8, 3] = math.nan, math.inf
    tokens, chances = best(sequences, logits, 5)
    rows = DraftSampler(sequences)
    params = (torch.from_numpy(params) for params in (rows.float_params, rows.int_params))
    ahead = torch.zeros(30, dtype=torch.int64)
    expected, likely = (x.numpy() for x in rank_drafts(logits, *params, ahead, 5, candidate_rules()))
    sound = np.delete(np.arange(30), (7, 8))
    assert not (chances[[7, 8]] > 0).any()
    assert not (likely[[7, 8]] > 0).any()
    np.testing.assert_allclose(chances[sound], likely[sound], rtol=1e-9, atol=1e-300)
    assert (tokens[sound] == expected[sound])[chances[sound] > 0].all()
