"""Distribution of a shared token budget over its jobs."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch.shared_budget import TokenPool
from reasoner.budget.allocator import (
    INITIAL_SHARE,
    MAX_TRUST,
    JobProgress,
    TokenRequest,
    expected_gain,
    initial_grant,
)

Samples = list[tuple[str | None, float | None]]


def gain(samples: Samples) -> float:
    return expected_gain(samples, MAX_TRUST)


@given(
    spare=st.integers(0, 3000),
    width=st.integers(1, 5),
    wants=st.lists(
        st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20), st.floats(0, 1)), max_size=8),
        min_size=1,
        max_size=8,
    ),
    order=st.randoms(use_true_random=False),
)
def test_no_token_is_granted_twice_every_job_gets_its_floor_and_every_job_ends(
    spare: int, width: int, wants: list[list[tuple[int, int, float]]], order: object
) -> None:
    """Each job goes through its requests (tokens, gain, fraction actually spent), interleaved at random with the
    others.
    """
    names = [f"job{number}" for number in range(len(wants))]
    budget = len(names) + spare
    pool = TokenPool(budget, names, width)
    asks = dict(zip(names, map(list, wants), strict=True))
    spent = dict.fromkeys(names, 0)
    running = set(names)
    while running:
        job = order.choice(sorted(running))  # type: ignore[attr-defined]
        running.discard(job)
        if asks[job]:
            tokens, worth, part = asks[job].pop(0)
            spent[job] += int(part * (pool.granted[job] - spent[job]))
            dealt = pool.request(job, TokenRequest(tokens, worth / 20))
        else:
            dealt = pool.end(job, spent[job])
            del asks[job]
        for name, tokens in dealt.items():
            running.add(name)
            if tokens == 0:
                asks[name].clear()
        held = sum(pool.granted[name] if name in asks else spent[name] for name in names)
        assert held + pool.unassigned == budget
        assert pool.unassigned >= 0
    assert not asks
    assert all(granted >= initial_grant(budget, len(names)) for granted in pool.granted.values())
    assert sum(spent.values()) <= budget


@given(curves=st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=12), min_size=2, max_size=6))
def test_slices_of_diminishing_gains_are_granted_as_by_the_optimal_knapsack(curves: list[list[int]]) -> None:
    """For equal slices with falling gains the optimum is the set of the largest gains."""
    size = 10
    offers = {f"job{number}": sorted(gains, reverse=True) for number, gains in enumerate(curves)}
    budget = 4 * len(offers) * size
    pool = TokenPool(budget, list(offers), max_active=1)
    affordable = pool.unassigned // size
    bought: list[int] = []
    asked = dict.fromkeys(offers, 0)
    todo = list(offers)
    while todo:
        job = todo.pop(0)
        if asked[job] == len(offers[job]):
            dealt = pool.end(job, pool.granted[job])
        else:
            dealt = pool.request(job, TokenRequest(size, offers[job][asked[job]] / 1000))
        for name, tokens in dealt.items():
            if tokens == size:
                bought.append(offers[name][asked[name]])
                asked[name] += 1
                todo.append(name)
            elif name in offers:
                pool.end(name, pool.granted[name])
    best = heapq.nlargest(affordable, [each for gains in offers.values() for each in gains])
    assert sum(bought[:affordable]) == sum(best)


def test_no_job_gets_more_until_all_have_used_their_floor() -> None:
    pool = TokenPool(400, ["a", "b"])
    assert pool.granted == {"a": 50, "b": 50} == dict.fromkeys("ab", int(INITIAL_SHARE * 400) // 2)
    assert pool.request("a", TokenRequest(10, 1.0)) == {}
    assert pool.request("b", TokenRequest(10, 0.5)) == {"a": 10, "b": 10}


def test_a_job_without_gain_is_closed_and_unused_tokens_are_granted_to_others() -> None:
    pool = TokenPool(8, ["a", "b", "c"], max_active=1)
    assert (pool.granted["a"], pool.unassigned) == (1, 5)
    pool.request("a", TokenRequest(5, 0.9))
    pool.request("b", TokenRequest(5, 0.5))
    assert pool.request("c", TokenRequest(5, 0.0)) == {"a": 5}
    assert pool.end("a", 2) == {"b": 4}  # what "a" left of its 6
    assert pool.end("b", 5) == {"c": 0}
    with pytest.raises(ValueError, match="too few for 3 jobs"):
        TokenPool(2, ["a", "b", "c"])


def test_the_gain_of_another_solution_shrinks_with_agreement_and_is_zero_once_a_rule_accepts() -> None:
    one, agreeing, rivals = [("7", 0.9)], [("7", 0.9), ("7", 0.9)], [("7", 0.9), ("8", 0.9)]
    assert gain(agreeing) < gain(one) < gain(rivals)
    assert gain([]) == 0.5
    assert expected_gain([("7", 1.0)], trust=1.0) == 0.0
    assert expected_gain([("7", 0.0)], trust=1.0) > 0.0


def test_the_gain_falls_with_every_low_scored_solution_without_agreement() -> None:
    gains = [gain([(str(number), 0.02) for number in range(count)]) for count in range(30)]
    assert gains == sorted(gains, reverse=True)
    assert gains[29] < 0.2 * gains[0]
    hopeful: Samples = [(str(number), 0.3) for number in range(29)]
    assert gain(hopeful) > 2 * gains[29]


@given(st.lists(st.tuples(st.sampled_from([None, "1", "2", "3"]), st.one_of(st.none(), st.floats(0, 1))), max_size=20))
def test_a_gain_is_a_probability(samples: Samples) -> None:
    assert 0.0 <= gain(samples) <= 1.0


def test_without_scores_the_gain_follows_the_votes() -> None:
    torn: Samples = [("1", None)] * 3 + [("2", None)] * 3
    sure: Samples = [("1", None)] * 6
    assert gain(sure) < 0.1 * gain(torn)


def test_a_slice_is_about_one_solution() -> None:
    assert JobProgress([("1", 0.5)] * 4, 410).next_request().tokens == 103
    assert JobProgress([], 50).next_request().tokens == 50
    assert JobProgress([], 0).next_request().tokens == 1
