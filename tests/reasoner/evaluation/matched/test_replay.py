"""Budgets that are spent on a pool of samples, against enumeration and a job that draws one sample after another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.matched.replay import SCORED_CEILING, spend_budgets
from reasoner.evaluation.plan import CEILING, StrategyCase
from reasoner.evaluation.runs import Run
from tests.reasoner.evaluation.matched.pools import make_pool

LONGEST = 9
CASES = [
    (StrategyCase("self_consistency", "self_consistency"), False),
    (StrategyCase("best_of_n", "best_of_n"), True),
    (StrategyCase("self_consistency:stop=beta", "self_consistency", (("stop", "beta"),)), False),
]
Drawn = Sequence[tuple[str, int]]
SAMPLES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LONGEST)), min_size=60, max_size=60)


def cut(samples: Drawn, most: float) -> list[tuple[str, int]]:
    """Return the shortest beginning whose tokens reach ``most``, as a pool is drawn."""
    ends = itertools.accumulate(tokens for _, tokens in samples)
    return list(samples[: next(count for count, end in enumerate(ends, 1) if end >= most)])


async def spend(samples: Drawn, budgets: Sequence[float], score_tokens: float = 0.0) -> dict[tuple[str, float], Run]:
    drawn = make_pool(cut(samples, budgets[-1]), max_tokens=LONGEST, score_tokens=score_tokens)
    async with Equivalence() as equal:
        runs = await spend_budgets(drawn, "p", 0, CASES, budgets, equal)
    return {(run.strategy, run.budget or 0.0): run for run in runs}


@given(SAMPLES, st.integers(1, 60), st.integers(60, 120))
async def test_the_first_place_has_the_samples_whose_lengths_add_up_to_the_budget(
    samples: Drawn, budget: int, most: int
) -> None:
    drawn = make_pool(cut(samples, most), max_tokens=LONGEST, score_tokens=2)
    for scored in (False, True):
        count = drawn.count_fitting(0, budget, scored=scored)
        total = [sum(tokens + 2 * scored for _, tokens in samples[: count + more]) for more in (0, 1)]
        assert total[0] <= budget < total[1]


@given(SAMPLES, st.integers(1, 60), st.integers(60, 120))
async def test_every_place_begins_after_the_sample_that_the_one_before_cut_off_and_none_runs_out(
    samples: Drawn, budget: int, most: int
) -> None:
    drawn = make_pool(cut(samples, most), max_tokens=LONGEST)
    places = drawn.list_places(budget, most)
    assert len(places) == max(1, most // (budget + LONGEST))  # whatever the samples' lengths
    for place, following in itertools.pairwise([*places, None]):
        end = place + drawn.count_fitting(place, budget, scored=False)  # type: ignore[operator]
        assert end < len(drawn.pool.samples) or sum(tokens for _, tokens in cut(samples, most)) == budget == most
        assert following in (None, end + 1)


@given(SAMPLES, st.sets(st.integers(1, 120), min_size=1, max_size=3), st.integers(0, 4))
async def test_no_strategy_spends_more_than_the_budget_and_one_that_reads_everything_spends_all_of_it(
    samples: Drawn, budgets: set[int], score_tokens: int
) -> None:
    amounts = sorted(map(float, budgets))
    runs = await spend(samples, amounts, score_tokens)
    assert {budget for _, budget in runs} == {*amounts}
    for run in runs.values():
        assert run.total_tokens <= (run.budget or 0.0)
        assert run.correct <= run.reached
    for budget in amounts:
        assert runs["self_consistency", budget].total_tokens == budget == runs[CEILING, budget].total_tokens
        assert runs["self_consistency", budget].reached == runs[CEILING, budget].correct
        assert runs["best_of_n", budget].reached == runs[SCORED_CEILING, budget].correct
        assert runs["best_of_n", budget].samples <= runs["self_consistency", budget].samples


async def test_the_mean_over_all_pools_is_the_accuracy_of_a_job_that_draws_its_samples_alone() -> None:
    """Every sequence of samples is enumerated; the job's accuracy is from the sequences of a job with one budget."""
    kinds = {("a", 1): 0.2, ("b", 1): 0.3, ("b", 3): 0.4, ("a", 3): 0.1}  # right ones are shorter

    def sequences(most: int) -> dict[tuple[tuple[str, int], ...], float]:
        ended, open_ones = {}, {(): 1.0}
        while open_ones:
            longer = {(*sequence, kind): p * q for sequence, p in open_ones.items() for kind, q in kinds.items()}
            sums = {sequence: sum(tokens for _, tokens in sequence) for sequence in longer}
            ended |= {sequence: p for sequence, p in longer.items() if sums[sequence] >= most}
            open_ones = {sequence: p for sequence, p in longer.items() if sums[sequence] < most}
        return ended

    budget, most = 2, 10
    alone = 0.0
    for sequence, p in sequences(budget + 1).items():
        ends = itertools.accumulate(tokens for _, tokens in sequence)
        alone += p * any(letter == "a" for (letter, _), end in zip(sequence, ends, strict=True) if end <= budget)
    pooled, places = 0.0, set()
    for sequence, p in sequences(most).items():
        drawn = make_pool(sequence, max_tokens=3)
        starts = drawn.list_places(budget, most)
        places.add(len(starts))
        runs = await spend_budgets(drawn, "p", 0, [], [budget, most], Equivalence())
        pooled += p * next(run.correct for run in runs if run.budget == budget and run.strategy == CEILING)
    assert places == {2}
    assert pooled == pytest.approx(alone, abs=1e-12)


async def test_a_budget_of_flops_pays_the_question_once_and_every_token_of_both_models() -> None:
    samples = [("a", 5), ("b", 4), ("a", 6), ("b", 9)]
    drawn = replace(make_pool(samples, max_tokens=LONGEST, score_tokens=2), quantity="flops")
    # 10 of the question, and of the first three samples 1 each, 2 a token and 3 a token of the verifier.
    spent = list(itertools.accumulate(1 + 2 * tokens + 3 * 2 for _, tokens in samples))
    for count in range(4):
        most = 10 + (spent[count - 1] if count else 0)
        assert drawn.count_fitting(0, most, scored=True) == count
        assert drawn.count_fitting(0, most + 0.5, scored=True) == count
        assert count == 0 or drawn.count_fitting(0, most - 0.5, scored=True) == count - 1
    async with Equivalence() as equal:
        runs = await spend_budgets(drawn, "p", 0, CASES[1:2], [10 + spent[2] + 8], equal)
    assert runs[0].samples == 3
    assert runs[0].flops == 10 + spent[2] + 7  # the fourth is begun, and cut off after three tokens


async def test_a_budget_that_pays_for_no_sample_is_no_answer_and_is_spent_on_the_one_that_is_cut() -> None:
    runs = await spend([("a", 9)] * 60, [4.0, 30.0])
    run = runs["self_consistency", 4.0]
    assert (run.correct, run.answered, run.samples, run.tokens) == (0.0, 0.0, 0.0, 4.0)
    assert runs["self_consistency", 30.0].correct == 1.0


async def test_a_rule_that_stops_early_leaves_the_rest_of_the_budget() -> None:
    runs = await spend([("a", 2)] * 60, [100.0])
    assert runs["self_consistency", 100.0].tokens == 100.0
    assert runs["self_consistency:stop=beta", 100.0].tokens < 100.0
