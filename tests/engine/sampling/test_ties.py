"""The rule for ties knows the sampled token, allows another only within the bound, and sees every other difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.protocol.types import Branch
from engine.sampling.sampler import sample
from engine.scheduler.draft import Draft
from kernels.common.sampling_tensors import NoiseKeys
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.sampling.test_sampler import LAWS, laws
from tests.engine.ties import assert_same_draft, count_same_tokens, find_kept, find_possible_tokens
from tests.long import mostly_long
from tests.seeds import shift

PROMPT = (0, 0, 0)


def possible(logits: list[float], bound: float, generated: tuple[int, ...] = (), **law: object) -> set[int]:
    request = generate(PROMPT, [Branch(3, 4, 9)], **law)
    return find_possible_tokens(np.array(logits), bound, request, request.branches[0], generated, {2})


@pytest.mark.parametrize("law", mostly_long(LAWS, every=3))
def test_without_an_error_only_the_sampled_token_is_possible(law: dict[str, float]) -> None:
    rows, vocab = 200, 150
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(shift(1))) * 3
    positions = np.arange(rows)
    keys = NoiseKeys(np.full(rows, 3), np.full(rows, 4), positions + len(PROMPT))
    tokens, _ = sample(logits, laws(rows, **law), keys)  # type: ignore[arg-type]
    for row, token, position in zip(logits.double().tolist(), tokens.tolist(), positions.tolist(), strict=True):
        assert token in possible(row, 1e-9, tuple([0] * position), **law)
        assert len(possible(row, 1e-9, tuple([0] * position), **law)) == 1


def test_two_greedy_tokens_are_possible_within_twice_the_bound() -> None:
    assert possible([1.0, 1.0 + 1e-5, 0.5], 1e-5, temperature=0.0) == {0, 1}
    assert possible([1.0, 1.0 + 3e-5, 0.5], 1e-5, temperature=0.0) == {1}
    # A penalty enlarges the error with the logit.
    assert possible([-9.0, -1.0 - 5e-5, -2.0], 1e-5, (1,), temperature=0.0, repetition_penalty=2.0) == {2}
    assert possible([-9.0, -1.0 - 1.5e-5, -2.0], 1e-5, (1,), temperature=0.0, repetition_penalty=2.0) == {1, 2}


def test_a_token_at_the_border_of_truncation_may_be_kept_or_not() -> None:
    """Whatever the noise, a token that truncation surely drops is impossible, and the last one kept may be dropped."""
    for step in range(40):
        near = possible([0.0, 1.0, 1.0 + 1e-5, 1.0 + 2e-5], 1e-5, (0,) * step, top_k=2)
        assert near
        assert 0 not in near
        assert possible([0.0, 1.0, 1.0 + 1e-5, 5.0], 1e-5, (0,) * step, top_k=1) == {3}
        assert possible([-9.0, 1.0, 1.0, 1.0], 1e-5, (0,) * step, min_p=0.5) <= {1, 2, 3}
        assert possible([1.0, 3.0, 1.0, 1.0], 1e-5, (0,) * step, top_p=0.1) == {1}


def test_ends_are_impossible_before_the_least_number_of_tokens() -> None:
    assert possible([0.0, 0.0, 9.0, 1.0], 1e-5, temperature=0.0, min_tokens=2) == {3}
    assert possible([0.0, 0.0, 9.0, 1.0], 1e-5, (0, 0), temperature=0.0, min_tokens=2) == {2}


def test_a_text_that_parts_elsewhere_than_at_a_tie_is_seen(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    request = generate(PROMPT, [Branch(1, 1, 12)], ignore_eos=True, temperature=1.0)
    [branch], [one] = request.branches, Harness(folder).complete(request)
    assert count_same_tokens(folder, request, branch, one.token_ids, one.token_ids) == 12
    other = list(one.token_ids)
    other[5] = (other[5] + 1) % 300
    with pytest.raises(AssertionError, match="token 5"):
        count_same_tokens(folder, request, branch, one.token_ids, other)
    with pytest.raises(AssertionError):
        count_same_tokens(folder, request, branch, one.token_ids, one.token_ids[:-1])


def test_what_a_tie_at_the_edge_of_top_k_weighs_counts_for_top_p() -> None:
    """The first two have 0.84 of the mass of the four that are kept, and 0.8 of all five."""
    surely, maybe = find_kept(np.log([0.5, 0.3, 0.1, 0.05, 0.05]), 1e-6, 4, 0.82, 0.0)
    assert (surely[:3].tolist(), maybe[:3].tolist()) == ([True, True, False], [True, True, True])


def draft(*nodes: tuple[int, int, float]) -> Draft:
    tokens, parents, probs = zip(*nodes, strict=True)
    return Draft(tokens, parents, probs)


def test_drafts_may_differ_by_a_tie_alone() -> None:
    one = draft((5, -1, 0.5), (6, -1, 0.25), (7, 0, 0.5))
    tied = draft((6, -1, 0.25), (5, -1, 0.5), (8, 0, 0.25 + 1e-7))  # another order, and 8 after 6 instead of 7 after 5
    assert_same_draft(one, draft((6, -1, 0.25), (5, -1, 0.5), (7, 1, 0.5)), 1e-6)
    with pytest.raises(AssertionError, match="not by a tie"):
        assert_same_draft(one, tied, 1e-6)
    assert_same_draft(one, draft((5, -1, 0.5), (6, -1, 0.25), (9, 0, 0.5 + 1e-7)), 1e-6)
    with pytest.raises(AssertionError):
        assert_same_draft(one, draft((5, -1, 0.5), (6, -1, 0.25), (7, 0, 0.5 + 1e-3)), 1e-6)
    with pytest.raises(AssertionError):
        assert_same_draft(one, draft((5, -1, 0.5), (6, -1, 0.25)), 1e-6)


def test_drafts_may_differ_by_what_a_candidate_at_the_edge_of_the_filters_weighs() -> None:
    one, other = (draft((5, -1, 0.5), (7, 0, chance)) for chance in (0.5, 0.52))
    edges = {(): 0.0, (5,): 0.04}
    assert_same_draft(one, other, 1e-6, edges.__getitem__)
    for edge in (0.0, 0.03):
        with pytest.raises(AssertionError):
            assert_same_draft(one, other, 1e-6, {**edges, (5,): edge}.__getitem__)
