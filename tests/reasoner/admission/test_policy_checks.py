"""The needs of jobs of their models' servers: each part is refused by name where a server cannot do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import Capability, InvalidRequest, ModelInfo
from engine.protocol.wire import read_models, write_model
from engine.remote.openai.dialects import DIALECTS
from reasoner.admission import policy_checks
from reasoner.admission.policy_checks import find_refusal, list_needs
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.run import run_job
from reasoner.strategies.registry import STRATEGIES
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

POLICY = ModelInfo("policy", "generate", 256, 100, 1000)
BEAM = {"strategy": {"name": "beam"}, "verifier": {"kind": "judge"}}
PENALTY = {"sampling": {"frequency_penalty": 0.5}}
PYTHON = {"tools": [{"type": "python"}]}
REGEX = {"constraint": {"regex": "a+"}}


def make_job(*parts: dict[str, Any]) -> JobSpec:
    fields: dict[str, Any] = {"problem": "?", "verifier": None, "seed": 1}
    for part in parts:
        fields |= part
    return build_spec(fields)


CASES: list[tuple[tuple[dict[str, Any], ...], str, str, str]] = [
    ((REGEX,), "constraint", "constraint", "cannot hold a solution to a language"),
    ((PYTHON,), "continuation", "tools", "cannot go on after the output of a tool"),
    ((PENALTY,), "penalties", "sampling.frequency_penalty", "does not penalize tokens as OpenAI does"),
    ((PENALTY, PYTHON), "penalty_continuation", "sampling.frequency_penalty", "what follows the output of a tool"),
    (({"sampling": {"kv_budget": 500}},), "kv_budget", "sampling.kv_budget", "keeps the keys of all tokens"),
    (({"logprobs": 2},), "prompt_logprobs", "logprobs", "does not report those of a given text"),
    ((BEAM,), "continuation", "strategy", "continues unfinished solutions"),
    ((BEAM, REGEX), "constraint_continuation", "strategy", "here within a constraint"),
    ((BEAM, PENALTY), "penalty_continuation", "strategy", "here with penalties"),
    (({"strategy": {"name": "deepconf"}},), "logprobs", "strategy", "reads log-probabilities"),
]


@pytest.mark.parametrize(("parts", "missing", "field", "message"), CASES)
def test_a_part_of_a_job_is_refused_by_name_on_a_server_that_cannot_do_it_alone(
    parts: tuple[dict[str, Any], ...], missing: str, field: str, message: str
) -> None:
    spec = make_job(*parts)
    assert Capability(missing) in {need.capability for need in list_needs(spec)}
    assert find_refusal(spec, POLICY) is None
    refusal = find_refusal(spec, replace(POLICY, capabilities=POLICY.capabilities - {Capability(missing)}))
    assert refusal is not None
    assert refusal.field == field
    assert message in refusal.message
    assert "our engine" in refusal.message
    needed = {need.capability for need in list_needs(spec)}
    assert find_refusal(spec, replace(POLICY, capabilities=frozenset(needed))) is None


@pytest.mark.parametrize("missing", Capability)
def test_the_strategies_that_a_refusal_names_are_those_that_the_server_can_run(missing: Capability) -> None:
    policy = replace(POLICY, capabilities=POLICY.capabilities - {missing})
    jobs = {name: make_job(PENALTY).model_copy(update={"strategy": StrategySpec(name=name)}) for name in STRATEGIES}
    refusals = {name: find_refusal(job, policy) for name, job in jobs.items()}
    able = [name for name, refusal in refusals.items() if refusal is None]
    for refusal in refusals.values():
        if refusal is not None and refusal.field == "strategy":
            assert f"use one of {', '.join(able)}, or a model on" in refusal.message


async def test_a_job_that_was_accepted_while_its_engine_was_away_is_refused_before_a_token_is_spent() -> None:
    class Chat(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            return [replace(info, capabilities=frozenset()) for info in await super().models()]

    engine = Chat()
    with pytest.raises(InvalidRequest, match=r"strategy 'beam' continues unfinished .* use one of greedy"):
        await run_job(make_job(BEAM, {"model": "policy"}), engine, MemoryJournal())
    assert not engine.requests


def test_models_keep_their_capabilities_on_the_wire_and_still_say_what_they_lack() -> None:
    info = replace(POLICY, capabilities=frozenset({Capability.CONTINUATION, Capability.PENALTIES}))
    sent = write_model(info)
    assert sent["capabilities"] == ["continuation", "penalties"]
    assert set(sent["lacks"]) == set(Capability) - info.capabilities
    assert read_models([sent]) == [info]
    earlier = {name: value for name, value in write_model(POLICY).items() if name != "capabilities"}
    assert read_models([earlier]) == [POLICY]


@pytest.mark.parametrize("capability", Capability)
def test_a_refusal_names_exactly_the_kinds_of_servers_that_have_the_capability(capability: Capability) -> None:
    named = policy_checks._SERVERS_WITH[capability]
    for words, kind in (("vLLM", "vllm"), ("SGLang", "sglang"), ("llama.cpp", "llamacpp")):
        assert (words in named) == (capability in DIALECTS[kind].capabilities)
    assert "our engine" in named
