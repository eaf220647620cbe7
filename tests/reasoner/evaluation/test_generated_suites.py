"""Generated suites of extraction and of tool calls, and the jobs that they ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation import measure
from reasoner.evaluation.measure import EvaluationContext, evaluate
from reasoner.evaluation.plan import EvaluationPlan, Stage, StrategyCase, parse_cases, split_pooled_and_live
from reasoner.evaluation.runs import RunFile, collect_runs
from reasoner.evaluation.suites import tool_calls
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import PythonTool
from tests.reasoner.search.test_function_calls import FIRST, CallingEngine, write
from tests.scripted import TEXTS, ScriptedEngine
from tests.seeds import shift


async def is_right(suite: Suite, problem: Problem, answer: Any) -> bool:
    return await suite.check(problem, answer if isinstance(answer, str) else json.dumps(answer), Equivalence())


def build_job(suite: Suite, *tools: PythonTool) -> JobSpec:
    plan = EvaluationPlan("policy", (), (), (1,), (1,))
    setting = EvaluationContext(suite, plan, ScriptedEngine(), {}, None, Sampling(), 1, None, {}, tools)
    stage = Stage("", "policy", 0, StrategyCase("greedy", "greedy"), 1)
    return measure.create_spec(setting, stage, suite.problems[0], StrategyCase("greedy", "greedy"))


@pytest.mark.parametrize("name", ["extraction", "extraction-held", "tools"])
async def test_a_suite_is_deterministic_balanced_and_accepts_its_own_answers(name: str) -> None:
    suite = open_suite(name, limit=60, seed=shift(0))
    assert suite.problems[:30] == open_suite(name, limit=30, seed=shift(0)).problems
    assert suite.problems != open_suite(name, limit=60, seed=shift(1)).problems
    assert len({problem.id for problem in suite.problems}) == 60
    assert len({problem.level for problem in suite.problems[:3]}) == 3
    for problem in suite.problems[:12]:
        assert await is_right(suite, problem, problem.answer)


def test_the_data_of_every_message_is_valid_by_a_second_validator() -> None:
    for problem in open_suite("extraction", limit=90, seed=shift(0)).problems:
        assert jsonschema_rs.Draft202012Validator(problem.data["schema"]).is_valid(json.loads(problem.answer))


def test_a_message_has_every_value_of_its_data() -> None:
    """Dates and hours are written in words, so that they are left out here."""

    def list_leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for each in value.values() for leaf in list_leaves(each)]
        return [leaf for each in value for leaf in list_leaves(each)] if isinstance(value, list) else [value]

    for problem in open_suite("extraction", limit=90, seed=shift(0)).problems:
        message = problem.text.partition("Message: ")[2]
        for leaf in list_leaves(json.loads(problem.answer)):
            if isinstance(leaf, float):
                assert f"{leaf:.2f}" in message
            elif isinstance(leaf, str) and "-" not in leaf and ":" not in leaf and leaf not in ("planned", "cancelled"):
                assert leaf in message
            elif isinstance(leaf, int) and not isinstance(leaf, bool):
                assert str(leaf) in message


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data | {"nights": data["nights"] + 1},
        lambda data: data | {"nights": str(data["nights"])},
        lambda data: data | {"remark": None},
        lambda data: {name: value for name, value in data.items() if name != "price"},
        lambda data: [data],
        lambda data: f"Here it is: {json.dumps(data)}",
    ],
    ids=["value", "type", "more", "less", "list", "words"],
)
async def test_other_data_is_wrong(change: Callable[[dict[str, Any]], Any]) -> None:
    suite = open_suite("extraction", limit=1)
    (problem,) = suite.problems
    data = json.loads(problem.answer)
    assert await is_right(suite, problem, f"\n{json.dumps(dict(reversed(data.items())), indent=2)}")
    assert await is_right(suite, problem, data | {"price": float(data["price"]), "nights": float(data["nights"])})
    assert not await is_right(suite, problem, change(data))


async def test_calls_are_right_by_function_and_arguments_in_any_order() -> None:
    suite = open_suite("tools", limit=3)
    problem = next(problem for problem in suite.problems if problem.level == "two")
    first, second = json.loads(problem.answer)
    assert await is_right(suite, problem, [second, first])
    assert await is_right(suite, problem, [first, second | {"arguments": dict(reversed(second["arguments"].items()))}])
    for wrong in (
        [first],
        [first, first],
        [first, second, second],
        [first, second | {"name": "other"}],
        [first, second | {"arguments": second["arguments"] | {"extra": 1}}],
        [first, {"name": second["name"]}],
        {"name": 1},
        "no JSON",
        [1],
        first,
    ):
        assert not await is_right(suite, problem, wrong)


def test_every_function_is_asked_for_with_valid_arguments_that_the_words_name() -> None:
    called = set()
    for problem in open_suite("tools", limit=300, seed=shift(0)).problems:
        shown = {tool.name: tool for tool in problem.tools}
        assert len(shown) == tool_calls.NUM_SHOWN
        for call in json.loads(problem.answer):
            called.add(call["name"])
            parameters = shown[call["name"]].parameters
            assert parameters is not None
            assert jsonschema_rs.Draft202012Validator(parameters).is_valid(call["arguments"])
            for value in call["arguments"].values():
                assert isinstance(value, bool) or str(value) in problem.text
    assert called == {skill.tool.name for skill in tool_calls.SKILLS}


def test_a_near_problem_shows_another_function_of_its_topic() -> None:
    topics = {skill.tool.name: skill.topic for skill in tool_calls.SKILLS}
    for problem in open_suite("tools", limit=90).problems:
        (name, *_) = [call["name"] for call in json.loads(problem.answer)]
        rivals = [tool.name for tool in problem.tools if topics[tool.name] == topics[name] and tool.name != name]
        assert len(rivals) == (problem.level == "near")


async def test_an_evaluation_counts_the_solutions_that_make_the_right_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes the expected call in every greedy solution, and another one in some samples."""
    suite = open_suite("tools", limit=1)
    (problem,) = suite.problems
    (call,) = json.loads(problem.answer)
    right = write((call["name"], json.dumps(call["arguments"], indent=1)))
    texts = (right, write((problem.tools[0].name, "{}")), "I will see to it.")
    for token, text in enumerate(texts, FIRST):
        monkeypatch.setitem(TEXTS, token, text)
    pooled, live = split_pooled_and_live(parse_cases("greedy,self_consistency"))
    plan = EvaluationPlan("policy", pooled, live, (1, 8), (1,))
    with RunFile({}) as file:
        setting = await EvaluationContext.of(suite, plan, CallingEngine(*texts), None, Sampling(), 1)
        await evaluate(setting, file, lambda stage, done, total: None)
    runs = {(run.strategy, run.n): run for run in collect_runs(file.items)}
    assert runs["greedy", 1].correct == 1.0
    assert 0.0 < runs["pass@n", 1].correct < 1.0
    assert runs["pass@n", 8].correct == 1.0


def test_the_jobs_of_a_suite_have_its_functions_or_its_schema() -> None:
    plain, held, calls = (build_job(open_suite(name, limit=1)) for name in ("extraction", "extraction-held", "tools"))
    assert (plain.constraint, plain.tools, plain.answer.compare) == (None, [], "json")
    assert held.constraint is not None
    assert held.constraint.json_schema == open_suite("extraction", limit=1).problems[0].data["schema"]
    assert (len(calls.functions), calls.tool_choice) == (tool_calls.NUM_SHOWN, "required")
    assert len(build_job(open_suite("tools", limit=1), PythonTool(type="python")).tools) == tool_calls.NUM_SHOWN + 1
    assert "Answer in JSON alone." in json.dumps(plain.model_dump()["prompt"])
    assert calls.prompt is None
