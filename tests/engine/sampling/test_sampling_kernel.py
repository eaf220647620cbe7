"""The kernel samples the same tokens as the torch reference, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.sampler import Floats, Ints
from kernels.common.noise import SAMPLE, Words, gumbel_noise, noise_streams
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.cpu.sampling.blocks import weigh_block
from kernels.cpu.sampling.sampler import sample
from kernels.sampling import sampling
from tests.closeness import log_sum_bound
from tests.long import mostly_long
from tests.seeds import shift

ROWS = 160
TEMPERATURES = (1e-300, 1e-3, 0.05, 0.4, 0.7, 1.0, 1.6, 5.0, 1e300)


@pytest.fixture(autouse=True)
def some_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def rows_of(vocab: int, kind: str) -> Tensor:
    chance = torch.Generator().manual_seed(shift(vocab))
    logits = torch.randn(ROWS, vocab, generator=chance) * torch.logspace(-2, 1.2, ROWS)[:, None]
    if kind == "flat":
        logits *= 0
    if kind == "tied":
        logits = (logits * 2).round() / 2
    if kind == "peaked":
        logits[torch.arange(ROWS), torch.randint(vocab, (ROWS,), generator=chance)] += 25
    if kind == "impossible":
        logits[torch.rand(ROWS, vocab, generator=chance) < 0.7] = -torch.inf
        logits[:, vocab // 2] = 0.5
    return logits


def some_laws(vocab: int, filtered: bool) -> SamplingTensors:
    chance = np.random.default_rng(shift(vocab))
    temperature = chance.choice(TEMPERATURES, ROWS)
    if not filtered:
        return SamplingTensors(temperature, np.ones(ROWS), np.zeros(ROWS), np.zeros(ROWS, np.int64))
    temperature[::16] = 0
    return SamplingTensors(
        temperature,
        chance.choice([0.1, 0.5, 0.9, 0.999, 1.0], ROWS),
        chance.choice([0, 0, 0.02, 0.3], ROWS),
        chance.choice([0, 1, 7, 64, 65, 700, 20_000], ROWS),
    )


def places(offset: int = 0) -> NoiseKeys:
    chance = np.random.default_rng(shift(offset))
    seed, key = (chance.integers(-(1 << 63), 1 << 63, ROWS, np.int64) for _ in range(2))
    return NoiseKeys(seed, key, np.arange(ROWS) + offset)


def reference(logits: Tensor, laws: SamplingTensors, where: NoiseKeys) -> tuple[Ints, Floats]:
    params = SamplingTensors(*map(torch.from_numpy, laws))
    tokens, logprobs = sampling.sample(logits, params, NoiseKeys(*map(torch.from_numpy, where)))
    return tokens.numpy(), logprobs.numpy()


def exact(logits: Tensor, laws: SamplingTensors, tokens: Ints) -> Floats:
    """Return the tokens' log-probabilities without truncation, in float64."""
    temperature = torch.from_numpy(np.where(laws.temperature > 0, laws.temperature, 1))
    scores = (logits.double() / temperature[:, None]).log_softmax(-1)
    return scores.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", mostly_long(["any", "flat", "tied", "peaked", "impossible"], every=3))
@pytest.mark.parametrize("vocab", [1, 2, 17, 129, 1000, 32_000])
def test_tokens_equal_those_of_the_reference(vocab: int, kind: str, filtered: bool) -> None:
    logits, laws = rows_of(vocab, kind), some_laws(vocab, filtered)
    for offset in range(1 if vocab == 32_000 else 12):
        tokens, logprobs = sample(logits, laws, places(offset))
        expected, theirs = reference(logits, laws, places(offset))
        assert tokens.tolist() == expected.tolist()
        # If the edge of a wide nucleus is within float32 rounding of a token, one of the two keeps a token more.
        wrong = np.abs(logprobs - theirs)
        # The nucleus then differs in mass by a token that is less likely than any of the many kept.
        assert (wrong > 2 * log_sum_bound(vocab)).sum() <= ROWS // 50
        assert wrong.max() < 2 * log_sum_bound(vocab) + 3e-5
        if not filtered:
            np.testing.assert_allclose(logprobs, exact(logits, laws, tokens), atol=log_sum_bound(vocab), rtol=0)


@pytest.mark.parametrize("vocab", [17, 1000])
def test_near_ties_are_resolved_as_by_the_reference(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a threshold of 1, more than half of all leads are near ties."""
    logits, laws = rows_of(vocab, "any"), some_laws(vocab, filtered=True)
    tokens, logprobs = sample(logits, laws, places())
    monkeypatch.setattr("kernels.cpu.sampling.sampler._NEAR_TIE", 1.0)
    again, theirs = sample(logits, laws, places())
    assert again.tolist() == tokens.tolist()
    assert theirs.tolist() == logprobs.tolist()


def test_exactly_the_near_ties_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the near ties are resolved, compared with the leads under the noise of all tokens."""
    close, rows, vocab = 5e-4, 40_000, 17
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(shift(8))).expand(rows, vocab)
    where = NoiseKeys(np.full(rows, 3), np.full(rows, 4), np.arange(rows))
    streams = noise_streams(where.seed, where.key, where.position, SAMPLE)
    best = np.sort(logits.double().numpy() + gumbel_noise(streams[:, None], np.arange(vocab)), axis=-1)
    decided: list[int] = []

    def noted(stream: Words, tokens: Ints) -> Floats:
        decided.extend(stream.tolist())
        return gumbel_noise(stream, tokens)

    monkeypatch.setattr("kernels.cpu.sampling.sampler._NEAR_TIE", close)
    monkeypatch.setattr("kernels.cpu.sampling.sampler.gumbel_noise", noted)
    sample(logits, SamplingTensors(np.ones(rows), np.ones(rows), np.zeros(rows), np.zeros(rows, np.int64)), where)
    expected = streams[best[:, -1] - best[:, -2] <= close].tolist()
    assert len(expected) > 5
    assert decided == expected


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(filtered: bool) -> None:
    logits, laws, where = rows_of(1000, "any"), some_laws(1000, filtered), places()
    tokens, logprobs = sample(logits, laws, where)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        again, theirs = sample(logits, laws, where)
        assert (again.tolist(), theirs.tolist()) == (tokens.tolist(), logprobs.tolist())
    for row in range(ROWS):
        law = SamplingTensors(*(column[[row]] for column in laws))
        place = NoiseKeys(*(column[[row]] for column in where))
        again, theirs = sample(logits[[row]], law, place)
        assert (again[0], theirs[0]) == (tokens[row], logprobs[row])


def test_rows_need_not_be_contiguous() -> None:
    logits, laws = rows_of(1000, "any"), some_laws(1000, filtered=True)
    tokens, logprobs = sample(logits, laws, places())
    wide = torch.cat((logits, logits), dim=1)[:, :1000]
    for view in (wide, logits.T.contiguous().T):
        again, theirs = sample(view, laws, places())
        assert (again.tolist(), theirs.tolist()) == (tokens.tolist(), logprobs.tolist())


def test_only_rows_with_invalid_logits_are_rejected() -> None:
    logits, laws = rows_of(300, "any"), some_laws(300, filtered=True)
    expected, _ = sample(logits, laws, places())
    logits[3, 299], logits[7, 0], logits[11, 130] = torch.nan, torch.inf, -torch.nan
    logits[20] = -torch.inf
    tokens, _ = sample(logits, laws, places())
    assert np.flatnonzero(tokens != expected).tolist() == np.flatnonzero(tokens == -1).tolist() == [3, 7, 11, 20]


def test_a_sum_of_weights_does_not_depend_on_their_memory_location() -> None:
    """Also directly after the logits."""
    sums = set()
    for gap in (0, 1, 16, 64, 1000):
        memory = np.empty(2000, np.float32)
        x, weights = memory[:16], memory[16 + gap : 32 + gap]
        x[:] = np.random.default_rng(shift(0)).normal(size=16)
        sums.add(float(weigh_block(x, x.max(), np.float32(1), np.float32(-np.inf), weights)))
    assert len(sums) == 1
