"""Calls that ``tool_choice`` demands: every solution of a weak model is one whose arguments are valid."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.types import Capability, ModelInfo
from reasoner.admission.constraints import check_schema
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.search.policies.forced_calls import MAX_CALLS, choose_natively, force_calls
from reasoner.strategies.registry import STRATEGIES
from reasoner.tools.formats.registry import FORMATS
from tests.long import mostly_long, mostly_long_grid
from tests.reasoner.search.test_constraints import HELD
from tests.reasoner.search.test_thoughts import Thinker, nodes_of
from tests.reasoner.search.test_thoughts_on_engine import PLAIN, POLICY
from tests.scripted import THOUGHT
from tests.specs import build_spec
from tests.strategies import SCORING

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"type": "string", "pattern": "^[CF]$"}},
}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock", "parameters": {"properties": {}, "additionalProperties": False}}
FORCED = [name for name, own in FORMATS.items() if own.frame is not None]


@asynccontextmanager
async def serving(folder: Path, model: str) -> AsyncIterator[LocalEngine]:
    """Serve a bundled model, whose chat template gets a variable for tools."""
    copy = folder / model
    shutil.copytree(POLICY.parent / model, copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    template = settings.get("chat_template") or (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": "{% if tools %}{% endif %}" + template})
    )
    engine = LocalEngine({"policy": copy, "prm": POLICY.parent / "prm"}, PLAIN)
    try:
        yield engine
    finally:
        await engine.close()


def make_spec(**fields: Any) -> JobSpec:
    common = {"problem": "Weather?", "seed": 5, "model": "policy", "verifier": None, "tools": [WEATHER, CLOCK]}
    common |= {"budget": {"tokens": 20_000}, "sampling": {"temperature": 5.0, "max_tokens": 400}}
    common |= {"strategy": {"name": "self_consistency", "n": 8}, "tool_format": "hermes", "tool_choice": "required"}
    return build_spec(common | fields)


async def solve(engine: LocalEngine, **fields: Any) -> tuple[JobOutcome, list[list[list[str]]]]:
    """Return the outcome, and the calls of each solution."""
    journal = MemoryJournal()
    outcome = await run_job(make_spec(**fields), engine, journal)
    ends = [entries[-1].data for entries in nodes_of(journal).values()]
    return outcome, [end.get("calls", []) for end in ends if end["reason"] == "stop"]


def check(calls: list[list[str]]) -> None:
    for name, arguments in calls:
        schema = SCHEMA if name == "weather" else CLOCK["parameters"]
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(("model", "name"), mostly_long_grid(["policy", "policy-thinking"], FORCED, every=3))
async def test_every_solution_of_a_hot_model_is_a_valid_call(tmp_path: Path, name: str, model: str) -> None:
    async with serving(tmp_path, model) as engine:
        named = {"tool_choice": {"name": "weather"}}
        single = {"parallel_tool_calls": False}
        held: dict[str, Any] = {"tool_format": name}
        choices: list[dict[str, Any]] = [named, single]
        if model == "policy-thinking":  # whose context holds as many calls as a solution may make
            held |= {"sampling": {"temperature": 5.0, "max_tokens": 1500, "thinking_tokens": 10}}
            choices.append({})
        for choice in choices:
            _, solutions = await solve(engine, **held, **choice)
            assert len(solutions) == 8
            for calls in solutions:
                check(calls)
                assert len(calls) == 1 or choice == {}
                assert 1 <= len(calls) <= MAX_CALLS
                assert choice != named or calls[0][0] == "weather"
            if choice == single:
                assert {calls[0][0] for calls in solutions} == {"weather", "clock"}
        free, _ = await solve(engine, **held, tool_choice="auto")
        assert free.result.tool_calls == []


@pytest.mark.parametrize("strategy", mostly_long(HELD, every=4))
async def test_every_strategy_that_a_constraint_can_hold_returns_a_call(tmp_path: Path, strategy: str) -> None:
    fields: dict[str, Any] = {"strategy": {"name": strategy}, "steps": {"by": "tokens", "every": 8}}
    if strategy in SCORING:
        fields["verifier"] = {"kind": "prm", "model": "prm"}
    async with serving(tmp_path, "policy") as engine:
        outcome, _ = await solve(engine, **fields)
    check([[call.name, call.arguments] for call in outcome.result.tool_calls])
    assert outcome.result.tool_calls


OWN, VLLM = ModelInfo("m", "generate", 99, 99, 1), ModelInfo("m", "generate", 99, 99, 1, {"server": "vllm"})
HOSTED = ModelInfo("m", "generate", 99, 99, 1, {"server": "chat"}, tells_calls=True)
NO_REFERENCE = {"type": "function", "name": "clock"}


@pytest.mark.parametrize(
    ("model", "fields", "kind"),
    [
        (OWN, {}, "grammar"),
        (OWN, {"tool_choice": "auto"}, None),
        (OWN, {"tool_choice": "none"}, None),
        (OWN, {"tool_format": "mistral"}, None),
        (OWN, {"tools": [WEATHER, {"type": "python"}]}, None),
        (OWN, {"strategy": {"name": "budget_forcing"}}, None),
        (OWN, {"constraint": {"regex": "a"}}, None),
        (VLLM, {"tool_format": "llama3_json", "tools": [NO_REFERENCE]}, "json"),
        (VLLM, {"tool_format": "llama3_json"}, None),
        (VLLM, {}, None),
        (HOSTED, {"tool_format": "llama3_json", "tools": [NO_REFERENCE]}, None),
    ],
)
def test_solutions_are_held_where_an_engine_can_and_filtered_elsewhere(
    model: ModelInfo, fields: dict[str, Any], kind: str | None
) -> None:
    spec = make_spec(**fields)
    forced = force_calls(spec, [model], STRATEGIES[spec.strategy.name].constraint_needs)
    assert (None if forced is None else forced.kind) == kind


class Remote(Thinker):
    """Server that holds whole answers to a schema, but cannot lift it for a thought."""

    async def models(self) -> list[ModelInfo]:
        can_do = frozenset(Capability) - {Capability.CONSTRAINT_CONTINUATION, Capability.PENALTY_CONTINUATION}
        served = await super().models()
        return [replace(info, capabilities=can_do, extra=info.extra | {"server": "vllm"}) for info in served]


@pytest.mark.parametrize("opens", ["prompt", "model"])
async def test_a_server_that_cannot_lift_a_constraint_gets_it_after_the_thought_alone(opens: str) -> None:
    engine = Remote(opens=opens)
    spec = make_spec(tool_format="llama3_json", tools=[NO_REFERENCE], problem="how?", sampling={})
    await run_job(spec, engine, MemoryJournal())
    assert not any(request.constraint_escape_tokens for request in engine.requests)
    held = [branch for request in engine.requests if request.constraint for branch in request.branches]
    assert held
    for branch in held:
        assert branch.generated[-1] == THOUGHT
        assert branch.constraint_start == len(engine.requests[0].prompt) + len(branch.generated)
    free = [request for request in engine.requests if not request.constraint]
    assert all(branch.generated == () or THOUGHT not in branch.generated for each in free for branch in each.branches)


def test_a_call_that_is_a_json_object_is_held_by_a_schema() -> None:
    spec = make_spec(tool_format="llama3_json", tools=[NO_REFERENCE])
    forced = force_calls(spec, [VLLM], frozenset())
    assert forced is not None
    schema = json.loads(forced.value)
    jsonschema.validate({"name": "clock", "parameters": {}}, schema)
    for other in ({"name": "weather", "parameters": {}}, {"name": "clock"}, {"name": "clock", "parameters": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(other, schema)


def test_servers_with_fields_of_their_own_get_the_choice() -> None:
    assert choose_natively(make_spec(), HOSTED) == {"tool_choice": "required"}
    named = choose_natively(make_spec(tool_choice={"name": "clock"}), HOSTED)
    assert named == {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
    assert choose_natively(make_spec(tool_choice="auto"), HOSTED) == choose_natively(make_spec(), VLLM) == {}


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(JobRefused, match=r"tools\.0\.parameters\.properties\.a") as caught:
        check_schema(schema, "tools.0.parameters")
    assert caught.value.field == "tools.0.parameters.properties.a"
