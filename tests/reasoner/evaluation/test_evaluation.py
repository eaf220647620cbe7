"""Evaluation: sample pools and resampling from them, live searches, and resuming an interrupted run."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.types import Completion, EngineUnavailable, GenerateRequest, InvalidRequest, TokenLogprob
from reasoner.admission.defaults import ModelDefaults
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.usage import Usage
from reasoner.evaluation import measure, pool
from reasoner.evaluation.measure import EvaluationContext, evaluate, is_incomplete
from reasoner.evaluation.plan import EvaluationPlan, Stage, StrategyCase, parse_cases, split_pooled_and_live
from reasoner.evaluation.pool import NotInPool, PoolSearch, SamplePool, decide, sample_subsets
from reasoner.evaluation.runs import FORMAT, RUNS_FILE, EvaluationMismatch, FinishedItem, Run, RunFile, collect_runs
from reasoner.evaluation.suites.registry import load_problems, open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.verifier_specs import GradedVerifier, JudgeVerifier, PrmVerifier
from reasoner.run import open_search, run_job
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Strategy
from reasoner.strategies.registry import STRATEGIES
from reasoner.tree import Node
from tests.reasoner.search.test_policies import Two
from tests.scripted import CONTEXT, ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec
from tests.strategies import COMPARING, WRITING

SUITE = open_suite("words", limit=5)
PLAIN = {"policy": ModelDefaults(prompt="{problem}")}
"""Prompts without an instruction, for which the scripted engine's context is too short."""
PRM = PrmVerifier(model="prm")


def plan(strategies: str, *ns: int, seeds: int = 1, live_ns: tuple[int, ...] = (4,)) -> EvaluationPlan:
    pooled, live = split_pooled_and_live(parse_cases(strategies))
    return EvaluationPlan("policy", pooled, live, ns, live_ns, seeds)


async def measured(
    wanted: EvaluationPlan, engine: ScriptedEngine, suite: Suite = SUITE, file: RunFile | None = None
) -> list[Run]:
    with file or RunFile({}) as opened:
        setting = await EvaluationContext.of(suite, wanted, engine, PRM, Sampling(), 3, defaults=PLAIN)
        await evaluate(setting, opened, lambda stage, done, total: None)
    return collect_runs(opened.items)


def made(answers: str, lengths: Sequence[int] | None = None) -> SamplePool:
    """Return a pool with one sample for each letter of ``answers``; ``a`` is right."""
    root = Node((), None, (1,))
    samples = []
    for place, letter in enumerate(answers):
        tokens = 5 if lengths is None else lengths[place]
        node = Node((place,), root, (1, place), letter, tokens, reason="stop", answer=letter, answer_level="strict")
        samples.append(pool.Sample(node, letter == "a", "stop", (), None, frozenset({place})))
    spec = build_spec({"problem": "?", "strategy": {"name": "self_consistency"}, "answer": "text", "seed": 0})
    return SamplePool(spec, root, tuple(samples), Usage(generated=1), (1, 1), (0.0, 0.0))


async def vote(drawn: SamplePool, order: Sequence[int]) -> bool:
    """Return True if the majority answer (the most frequent letter, the first one on a tie) is right."""
    letters = [drawn.samples[index].node.answer or "" for index in order]
    return max(dict.fromkeys(letters), key=letters.count) == "a"


@pytest.mark.parametrize(("answers", "n"), [("aaabb", 3), ("abbcc", 4), ("aabbc", 2), ("abbb", 1)])
async def test_the_resampled_accuracy_of_majority_is_the_mean_over_all_ordered_subsets(
    answers: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4000 resamples an error above 4 standard errors has p < 1e-4 (sharing an order only lowers the variance)."""
    monkeypatch.setattr(pool, "NUM_DRAWS", 4000)
    drawn = made(answers)
    orders = list(itertools.permutations(range(len(answers)), n))
    exact = sum([await vote(drawn, order) for order in orders]) / len(orders)
    async with Equivalence() as equal:
        runs = await decide(drawn, "p", 0, [(StrategyCase("sc", "self_consistency"), [n])], [n], equal)
    by_name = {run.strategy: run for run in runs}
    assert by_name["sc"].correct == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 4000) + 1e-9)
    assert by_name["sc"].tokens == 5 * n
    subsets = list(itertools.combinations(answers, n))
    assert by_name["pass@n"].correct == pytest.approx(sum("a" in subset for subset in subsets) / len(subsets))


def test_resamples_have_no_repetition_and_use_all_samples_equally() -> None:
    import random

    taken = list(sample_subsets(8, 2, random.Random(shift(0))))
    assert len(taken) == pool.NUM_DRAWS
    assert all(len(set(draw)) == 2 for draw in taken)
    assert {sum(index in draw for draw in taken) for index in range(8)} == {16}
    assert len(list(sample_subsets(8, 8, random.Random(shift(0))))) == pool.NUM_FULL_DRAWS


async def test_a_resample_of_the_whole_pool_has_the_bill_of_the_live_job() -> None:
    runs = await measured(plan("self_consistency,best_of_n,weighted_vote", 2, 8), ScriptedEngine())
    by_case = {(run.strategy, run.n, run.problem): run for run in runs}
    for problem in SUITE.problems:
        stage = Stage("", "policy", 0, None, 8)
        setting = await EvaluationContext.of(
            SUITE, plan("best_of_n", 8), ScriptedEngine(), PRM, Sampling(), 1, defaults=PLAIN
        )
        for name in ("self_consistency", "best_of_n", "weighted_vote"):
            spec = measure.create_spec(setting, stage, problem, StrategyCase(name, name))
            alone = await run_job(spec, ScriptedEngine(), MemoryJournal())
            run = by_case[name, 8, problem.id]
            assert (run.tokens, run.verifier_tokens) == (
                alone.usage.generated,
                pytest.approx(alone.usage.verifier_computed),
            )
            assert by_case[name, 2, problem.id].tokens == pytest.approx(run.tokens / 4)


async def test_a_resample_pays_one_question_for_each_solution_that_is_graded() -> None:
    engine, problem, verifier = ScriptedEngine(context=3000), SUITE.problems[0], GradedVerifier()
    setting = await EvaluationContext.of(SUITE, plan("best_of_n", 8), engine, verifier, Sampling(), 1, defaults=PLAIN)
    spec = measure.create_spec(
        setting, Stage("", "policy", 0, None, 8), problem, StrategyCase("best_of_n", "best_of_n")
    )
    strategy = STRATEGIES["best_of_n"]
    async with open_search(spec, engine, MemoryJournal()) as search:
        await strategy.run(search, strategy.params())
        computed = search.ledger.usage.verifier_computed
        whole, samples = _whole(search)
        scored = {sample.node.completion_ids for sample in samples if sample.score is not None}
        for drawn in (samples, samples[:3]):
            resample = PoolSearch(whole, drawn, search.equivalence)
            await strategy.run(resample, strategy.params())
            graded = scored & {sample.node.completion_ids for sample in drawn}
            assert resample.verifier_tokens == pytest.approx(computed * len(graded) / len(scored))


async def test_strategies_choose_the_same_from_a_pool_resample_as_alone() -> None:
    engine, problem = ScriptedEngine(), SUITE.problems[0]
    setting = await EvaluationContext.of(SUITE, plan("best_of_n", 8), engine, PRM, Sampling(), 1, defaults=PLAIN)
    for name in ("self_consistency", "best_of_n", "weighted_vote"):
        spec = measure.create_spec(setting, Stage("", "policy", 0, None, 8), problem, StrategyCase(name, name))
        async with open_search(spec, engine, MemoryJournal()) as search:
            strategy = STRATEGIES[name]
            alone = await strategy.run(search, strategy.params())
            text = None if alone.node is None else alone.node.text
            drawn = PoolSearch(*_whole(search), search.equivalence)
            pooled = await strategy.run(drawn, strategy.params())
        assert (None if pooled.node is None else pooled.node.text) == text


def _whole(search: Search) -> tuple[SamplePool, tuple[pool.Sample, ...]]:
    whole = SamplePool.of(search, dict.fromkeys(search.root.children, False), (1, 1))
    return whole, whole.samples


async def test_a_strategy_that_stops_early_pays_for_its_other_branches_until_then() -> None:
    class First(Params):
        n: int = 4

    async def first(search: Search, params: First) -> Choice:
        async with search.stream() as stream:
            stream.complete([search.root], params.n)
            async for nodes in stream:
                return Choice(nodes[0])
        return Choice(None)

    drawn = made("babb", lengths=(9, 3, 5, 3))
    search = PoolSearch(drawn, drawn.samples, Equivalence())
    choice = await Strategy("first", First, first).run(search, First())
    assert choice.node is not None
    assert choice.node.answer == "a"
    assert search.tokens == 4 * 3


async def test_a_pool_has_neither_steps_nor_greedy_solutions() -> None:
    drawn = made("ab")
    search = PoolSearch(drawn, drawn.samples, Equivalence())
    with pytest.raises(NotInPool):
        await anext(search.expand([search.root], 1))
    with pytest.raises(NotInPool):
        await anext(search.complete([search.root], 1, greedy=True))


async def test_one_pool_serves_all_its_strategies_and_differs_by_seed() -> None:
    engine = ScriptedEngine()
    runs = await measured(plan("greedy,best_of_n,weighted_vote", 1, 8, seeds=2), engine)
    pooled = [run for run in runs if run.strategy == "best_of_n" and run.n == 8]
    greedy = [run for run in runs if run.strategy == "greedy"]
    assert len(pooled) == 10
    assert len(greedy) == 5
    assert engine.total == pytest.approx(
        sum(run.tokens + run.verifier_tokens for run in pooled) + sum(run.tokens for run in greedy)
    )
    first, second = ([run.tokens for run in pooled if run.seed == seed] for seed in (0, 1))
    assert first != second


def test_a_case_with_its_own_n_runs_with_it_and_reports_it() -> None:
    stages = plan("beam,beam:n=2,budget_forcing:thinking=5", 1, live_ns=(4, 8)).stages()
    assert [(stage.name, stage.n) for stage in stages] == [
        ("beam n=4", 4),
        ("beam n=8", 8),
        ("beam:n=2", 2),
        ("budget_forcing:thinking=5 n=4", 4),
        ("budget_forcing:thinking=5 n=8", 8),
    ]


async def test_an_evaluation_pins_nothing_in_the_cache() -> None:
    engine = ScriptedEngine()
    await measured(plan("beam,best_of_n", 4), engine)
    assert engine.pin_keys == {None}
    assert engine.pruned == []


async def test_deepconf_on_finished_solutions_uses_the_pool_and_decides_as_alone() -> None:
    class Sure(ScriptedEngine):
        """Scripted engine that reports log-probabilities."""

        def _complete(self, request: GenerateRequest, index: int) -> Completion:
            done = super()._complete(request, index)
            if request.sampling.logprobs is None:
                return done
            told = tuple(TokenLogprob(token, -0.1, ((token, -0.1 - token / 10), (9, -3.0))) for token in done.token_ids)
            return replace(done, logprobs=told)

    wanted = plan("deepconf:keep=50,deepconf:mode=online,deepconf:top=3", 2, 8)
    assert [case.label for case in wanted.pooled] == ["deepconf:keep=50"]
    runs = await measured(replace(wanted, live=()), Sure())
    setting = await EvaluationContext.of(SUITE, wanted, Sure(), PRM, Sampling(), 1, defaults=PLAIN)
    for problem in SUITE.problems:
        spec = measure.create_spec(setting, Stage("", "policy", 0, None, 8), problem, wanted.pooled[0])
        alone = await run_job(spec, Sure(), MemoryJournal())
        (run,) = [run for run in runs if (run.strategy, run.n, run.problem) == ("deepconf:keep=50", 8, problem.id)]
        assert run.tokens == alone.usage.generated
        assert run.answered == (alone.result.answer is not None)


async def test_a_plan_without_a_verifier_uses_no_verifier_tokens() -> None:
    runs = await measured(plan("greedy,self_consistency", 1, 4), ScriptedEngine())
    cases = {(run.strategy, run.n) for run in runs}
    assert cases == {("greedy", 1), *(("self_consistency", n) for n in (1, 2, 4)), *(("pass@n", n) for n in (1, 2, 4))}
    assert all(run.verifier_tokens == 0 for run in runs)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
async def test_beam_with_n_never_has_more_than_n_branches_on_a_level(n: int) -> None:
    journal = MemoryJournal()
    spec = build_spec({"problem": "how?", "strategy": {"name": "beam", "n": n}, "seed": 1})
    await run_job(spec, ScriptedEngine(), journal)
    steps = [entry for entry in journal.entries if entry.type == "node" and entry.key.startswith("expand:")]
    levels = [entry.data["node"].count(".") for entry in steps]
    assert max(levels.count(level) for level in set(levels)) <= n


# Resuming.


def timeless(runs: list[Run]) -> list[Run]:
    return sorted((replace(run, seconds=0.0) for run in runs), key=repr)


async def test_a_run_that_lost_its_engine_resumes_and_ends_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RETRY_DELAYS_SECONDS", ())
    wanted = plan("greedy,best_of_n,beam", 1, 4, seeds=2)
    whole = await measured(wanted, ScriptedEngine())
    known = 0
    for life in range(50):
        try:
            runs = await measured(wanted, ScriptedEngine(order=life, die_after=40), file=RunFile({"a": 1}, tmp_path))
        except EngineUnavailable:
            with RunFile({"a": 1}, tmp_path) as file:
                assert len(file.items) >= known
                known = len(file.items)
                assert is_incomplete(SUITE, wanted, file)
        else:
            break
    assert life > 2
    assert timeless(runs) == timeless(whole)
    lines = (tmp_path / RUNS_FILE).read_text().splitlines()
    assert len(lines) == 1 + 5 * (1 + 2 * 2)


async def test_an_engine_that_recovers_is_called_again_and_its_failure_is_not_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Flaky(ScriptedEngine):
        def _count_answer(self) -> None:
            self._answers += 1
            if self._answers % 40 == 0:
                raise EngineUnavailable("for a moment")

    monkeypatch.setattr(measure, "RETRY_DELAYS_SECONDS", (0.0,) * 20)
    wanted = plan("best_of_n,beam", 4)
    assert timeless(await measured(wanted, Flaky())) == timeless(await measured(wanted, ScriptedEngine()))


async def test_a_problem_longer_than_the_models_context_is_reported_and_not_counted() -> None:
    long = replace(SUITE.problems[0], id="long", text="x" * CONTEXT)
    suite = replace(SUITE, problems=[*load_problems("words", limit=2), long])
    with RunFile({}) as file:
        runs = await measured(plan("greedy,best_of_n", 2), ScriptedEngine(), suite, file)
    failed = [piece for piece in file.items if piece.failed]
    assert {piece.problem for piece in failed} == {"long"}
    assert "shorten" in (failed[0].failed or "")
    assert {run.problem for run in runs} == {problem.id for problem in suite.problems[:2]}


PIECE = FinishedItem(
    "greedy", 0, "p", (Run("m", "greedy", 1, 0, "p", 1.0, 1.0, 1.0, 1.0, 5.0, 0.0, 0.0, 10.0, 0.1, 1.0, 0.0),)
)


def test_a_truncated_last_line_is_dropped_and_the_next_record_starts_on_a_new_line(tmp_path: Path) -> None:
    with RunFile({"n": [1]}, tmp_path) as file:
        file.add(PIECE)
        file.add(replace(PIECE, problem="q"))
    path = tmp_path / RUNS_FILE
    path.write_bytes(path.read_bytes()[:-7])
    with RunFile({"n": [1]}, tmp_path) as file:
        assert file.items == [PIECE]
        file.add(replace(PIECE, problem="r"))
    with RunFile({"n": [1]}, tmp_path) as file:
        assert [piece.problem for piece in file.items] == ["p", "r"]


def test_a_different_evaluation_in_the_same_folder_is_refused_with_the_difference(tmp_path: Path) -> None:
    with RunFile({"suite": "words", "problems": 300, "n": [1, 4]}, tmp_path):
        pass
    with (
        pytest.raises(
            EvaluationMismatch, match=r"problems is 300 there and 10 here; n is \[1, 4\] there and \[1\] here"
        ),
        RunFile({"suite": "words", "problems": 10, "n": [1]}, tmp_path),
    ):
        pass


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    for broken in ("{", "[]", json.dumps({"stage": "x"})):
        (tmp_path / RUNS_FILE).write_text(f'{{"format":{FORMAT}}}\n' + broken + "\n")
        with pytest.raises(EvaluationMismatch, match="line 2"), RunFile({}, tmp_path):
            pass


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with RunFile({}, tmp_path), pytest.raises(EvaluationMismatch, match="another process"), RunFile({}, tmp_path):
        pass


async def test_without_a_verifier_voting_strategies_run_and_the_rest_are_refused_by_name() -> None:
    every = {case.name for case in parse_cases("all", has_verifier=False)}
    alone = {name for name in WRITING if not STRATEGIES[name].needs_verifier and name not in COMPARING}
    assert every == alone
    assert [case.name for case in parse_cases("tournament", has_verifier=False)] == ["tournament"]
    with pytest.raises(ValueError, match=r"'beam' needs a verifier.*REASONER_PRM"):
        parse_cases("greedy,beam", has_verifier=False)
    pooled, live = split_pooled_and_live(parse_cases("auto,self_consistency", has_verifier=False))
    wanted = EvaluationPlan("policy", pooled, live, (4,), (4,), 1)
    with RunFile({}) as opened:
        setting = await EvaluationContext.of(SUITE, wanted, ScriptedEngine(), None, Sampling(), 3, defaults=PLAIN)
        await evaluate(setting, opened, lambda stage, done, total: None)
    assert not any(run.verifier_tokens for run in collect_runs(opened.items))


async def test_a_verifier_without_a_model_of_its_own_is_billed_as_the_model_that_judges() -> None:
    named = await EvaluationContext.of(
        SUITE, plan("best_of_n", 2), ScriptedEngine(), JudgeVerifier(model="prm"), Sampling(), 1
    )
    own = await EvaluationContext.of(SUITE, plan("best_of_n", 2), ScriptedEngine(), JudgeVerifier(), Sampling(), 1)
    assert named.count_verifier_parameters("best_of_n") == named.models["prm"].parameters
    assert own.count_verifier_parameters("best_of_n") == own.models["policy"].parameters


async def test_strategies_sample_from_several_models_live_and_are_billed_by_the_size_of_each() -> None:
    pooled, live = split_pooled_and_live(parse_cases("best_of_n,ab_mcts"), has_several_models=True)
    wanted = EvaluationPlan("policy", pooled, live, (4,), (4,), mixed=("other",))
    runs = await measured(wanted, Two(1))
    assert {run.strategy for run in runs} == {"best_of_n", "ab_mcts"}
    assert all(run.flops > 0 and run.tokens > 0 for run in runs)
    with pytest.raises(ValueError, match=r"'beam' samples from one model: use one of .*ab_mcts"):
        split_pooled_and_live(parse_cases("beam"), has_several_models=True)
    with pytest.raises(InvalidRequest, match="'gone' is not served"):
        await measured(EvaluationPlan("policy", (), live, (4,), (4,), mixed=("gone",)), Two(1))
