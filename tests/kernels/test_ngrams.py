"""The n-gram table's evictions, its memory, and probabilities estimated from hit rates."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.cpu.ngrams.table import MAX_FOLLOWERS, extend_hash
from kernels.ngrams import LENGTHS, NOISE, NUM_CONTEXTS, NUM_TEXTS, NgramDrafts, NgramTable
from tests.seeds import shift

SCOPE, SEARCH = 1234567890123456789, 1234567890
"""Fixed hashes, unlike those of names, since they determine which entries of a small table evict which."""
START = (SCOPE, SEARCH, 0, 0, 0, 0, 0)
"""Start of a greedy branch without a prefix."""


def row(slot: int, new: list[int], shape: tuple[int, int] = (0, 0), start: tuple[int, ...] | None = None) -> list[int]:
    return [slot if start is None else ~slot, len(new), *shape, *(start or ()), *new]


def read(table: NgramTable, text: list[int]) -> None:
    """Let the table learn a text as a branch of its own."""
    slot = table.add_branch()
    table.learn_and_propose(row(slot, text, start=START), 1, 0, 0, 0.0)
    table.release_branch(slot)


def propose(table: NgramTable, last: int, depth: int = 1, nodes: int = 1, min_prob: float = 0.0) -> NgramDrafts:
    """Return the draft tokens after a token; nothing is learned."""
    slot = table.add_branch()
    drafts = table.learn_and_propose(row(slot, [last], (depth, nodes), START), 1, nodes, nodes, min_prob)
    table.release_branch(slot)
    total = sum(drafts.counts)
    return NgramDrafts(drafts.counts, drafts.tokens[:total], drafts.parents[:total], drafts.probs[:total])


def sample(table: NgramTable, first: int, then: int) -> None:
    """Propose a draft token after a branch's first token, and then let the branch sample another one."""
    slot = table.add_branch()
    table.learn_and_propose(row(slot, [first], (1, 1), START), 1, 1, 1, 0.0)
    table.learn_and_propose(row(slot, [then]), 1, 0, 0, 0.0)
    table.release_branch(slot)


def test_the_oldest_of_the_rarest_followers_is_evicted() -> None:
    table = NgramTable(64, 64)
    for token in (1, 1, 2, 3, 3, 4, 5, 6):
        read(table, [0, token])
    assert sorted(propose(table, 0, 1, 9).tokens) == [1, 3, 4, 5, 6]
    assert propose(table, 0, 1, 9).tokens[:2] == (3, 1)
    assert propose(table, 0, 1, 9).probs[0] == pytest.approx(0.5 * 2 / 7)
    assert MAX_FOLLOWERS == 5


def test_the_least_recently_used_context_is_evicted() -> None:
    """After texts that fill the table seven times over, it holds the last ones and a pair that recurs."""
    table = NgramTable(1 << 11, 1 << 11)
    texts = [list(range(100 * number, 100 * number + 50)) for number in range(50)]
    for text in texts:
        read(table, [7, 7, *text])
        read(table, [9_999, 9_998])
    num_known = [sum(propose(table, token).tokens == (after,) for token, after in pairwise(text)) for text in texts]
    assert num_known[-2:] == [49, 49]
    assert sum(num_known[:30]) == 0
    assert propose(table, 9_999).tokens == (9_998,)


def test_the_default_table_takes_the_documented_memory() -> None:
    held = NgramTable().num_bytes
    assert (NUM_CONTEXTS, NUM_TEXTS) == (1 << 18, 1 << 17)
    assert held == pytest.approx(21 * 2**20, rel=0.01)


def test_old_occurrences_lose_weight() -> None:
    table = NgramTable(64, 64)
    for _ in range(5000):
        read(table, [0, 1])
    offered = []
    for _ in range(1024):
        offered += propose(table, 0).tokens
        read(table, [0, 2])
    assert offered == sorted(offered)
    assert 200 < offered.count(1) < 1024


def test_probabilities_change_with_compared_tokens_only() -> None:
    table = NgramTable(64, 64)
    for _ in range(200):
        read(table, [5, 6])
    read(table, [5, 7])
    assert propose(table, 5).probs == pytest.approx((0.5 * 200 / 201,))
    for _ in range(9):
        sample(table, 5, 6)
    sample(table, 5, 8)
    assert propose(table, 5).tokens == (6,)
    assert propose(table, 5).probs == pytest.approx((10 / 12 * 209 / 211,))


@pytest.mark.parametrize("lengths", [(), (2, 1), (1, 1), (1, 13), (1, 2, 3, 4, 5, 6, 7)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="up to 6 ascending numbers of at most 12 tokens"):
        NgramTable(64, 64, lengths=lengths)


def test_a_longer_context_is_preferred_to_a_more_frequent_follower() -> None:
    """Two texts share eleven tokens and differ in the one before, and so in the one after."""
    table = NgramTable(1 << 10, 1 << 10)
    common = list(range(10, 21))
    for _ in range(5):
        read(table, [1, *common, 100])
    read(table, [2, *common, 200])
    drafts = []
    for first in (1, 2):
        slot = table.add_branch()
        drafts.append(table.learn_and_propose(row(slot, [first, *common], (1, 1), START), 1, 1, 1, 0.0).tokens)
        table.release_branch(slot)
    assert drafts == [(100,), (200,)]
    assert LENGTHS[-1] == 12


def test_sampled_branches_draft_the_follower_that_their_noise_prefers() -> None:
    """A float64 reference ranks followers by the logarithm of their count plus the weighted Gumbel noise of the
    branch's next position; the estimated probabilities are the shares of that score's exponential."""
    table, counts = NgramTable(1 << 10, 1 << 10), {1: 3, 2: 2, 3: 1, 4: 1}
    for token, count in counts.items():
        for _ in range(count):
            read(table, [0, token])
    tokens = np.array(list(counts))
    chosen = set()
    for key in range(shift(50), shift(50) + 50):
        slot = table.add_branch()
        begin = (SCOPE, SEARCH, 0, 7, key, 30, 1)
        drafts = table.learn_and_propose(row(slot, [0], (1, 4), begin), 1, 4, 4, 0.0)
        table.release_branch(slot)
        stream = noise_streams(np.array([7]), np.array([key]), np.array([31]), SAMPLE)
        weights = np.array(list(counts.values())) * np.exp(NOISE * gumbel_noise(stream, tokens))
        order = np.argsort(-weights)
        assert drafts.tokens == tuple(tokens[order].tolist())
        assert drafts.probs == pytest.approx(tuple(0.5 * weights[order] / weights.sum()))
        chosen.add(drafts.tokens[0])
    assert len(chosen) > 1


def test_greedy_branches_draft_the_most_frequent_follower() -> None:
    table = NgramTable(1 << 10, 1 << 10)
    for token in (1, 2, 2, 3):
        read(table, [0, token])
    for key in range(20):
        slot = table.add_branch()
        begin = (SCOPE, SEARCH, 0, 7, key, 30, 0)
        assert table.learn_and_propose(row(slot, [0], (1, 1), begin), 1, 1, 1, 0.0).tokens == (2,)
        table.release_branch(slot)


def test_tokens_below_the_minimum_probability_are_not_proposed() -> None:
    table = NgramTable(64, 64)
    read(table, [5, 6, 7, 8, 9])
    assert propose(table, 5, 3, 3).probs == pytest.approx((0.5, 0.5, 0.5))
    assert propose(table, 5, 3, 3, 0.25).tokens == (6, 7)
    assert propose(table, 5, 3, 3, 0.51).tokens == ()


def test_different_texts_have_different_hashes() -> None:
    """A million texts of one to three tokens without a collision."""
    hashes = {
        extend_hash(extend_hash(extend_hash(SCOPE, a), b), c)
        for a in range(100)
        for b in range(100)
        for c in range(100)
    }
    assert len(hashes) == 10**6
    assert all(0 <= one < 1 << 62 for one in hashes)
