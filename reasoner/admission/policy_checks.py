"""Check that the models that write a job's solutions, and their servers, can do what the job needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.protocol.types import Capability, InvalidRequest, ModelInfo
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.spec import JobSpec
from reasoner.strategies.base import Feature, Strategy, VerifierUse
from reasoner.strategies.registry import STRATEGIES, parse_params
from reasoner.thoughts import ThoughtFormat


@dataclass(frozen=True, slots=True)
class Need:
    """A capability that a part of a job needs of the servers of its policies."""

    capability: Capability
    field: str
    reason: str
    """The problem of a server without it; of a strategy, the use that the strategy makes of it."""


_SERVERS_WITH: Mapping[Capability, str] = {
    Capability.CONTINUATION: "vLLM, SGLang or our engine",
    Capability.LOGPROBS: "vLLM, SGLang or our engine",
    Capability.PROMPT_LOGPROBS: "vLLM or our engine",
    Capability.CONSTRAINT: "vLLM, SGLang or our engine",
    Capability.CONSTRAINT_CONTINUATION: "our engine",
    Capability.PENALTIES: "vLLM, SGLang or our engine",
    Capability.PENALTY_CONTINUATION: "our engine",
    Capability.KV_BUDGET: "our engine whose layers all attend to all tokens",
}
_USES_OF_STRATEGIES: Mapping[Capability, str] = {
    Capability.CONTINUATION: "continues unfinished solutions",
    Capability.LOGPROBS: "reads log-probabilities",
    Capability.PROMPT_LOGPROBS: "reads the log-probabilities of finished solutions",
    Capability.CONSTRAINT: "holds solutions to a language",
    Capability.CONSTRAINT_CONTINUATION: "continues unfinished solutions, here within a constraint",
    Capability.PENALTIES: "is sampled with penalties",
    Capability.PENALTY_CONTINUATION: "continues unfinished solutions, here with penalties",
    Capability.KV_BUDGET: "bounds the keys of thoughts",
}
_CODES = {
    "constraint": "unsupported-constraint",
    "tools": "unsupported-tool",
    "sampling": "unsupported-penalty",
    "sampling.kv_budget": "unsupported-kv-budget",
    "logprobs": "unsupported-logprobs",
    "record_logprobs": "unsupported-logprobs",
    "strategy": "unsupported-strategy",
}
"""Code of a refusal, by the field of the need or the first part of its name."""


def list_needs(spec: JobSpec, *, closes_thoughts: bool = False) -> Iterator[Need]:
    """Yield what the job needs of the server of each of its policies.

    ``closes_thoughts``: the search closes the policy's thoughts, as is known when its delimiters are.
    """
    if spec.constraint is not None:
        yield Need(Capability.CONSTRAINT, "constraint", "cannot hold a solution to a language")
    if spec.python is not None:
        yield Need(Capability.CONTINUATION, "tools", "cannot go on after the output of a tool")
    if spec.sampling.counts_tokens:
        field = "sampling.frequency_penalty" if spec.sampling.frequency_penalty else "sampling.presence_penalty"
        yield Need(Capability.PENALTIES, field, "does not penalize tokens as OpenAI does")
        for part, is_part in (("the output of a tool", spec.python is not None), ("a thought", closes_thoughts)):
            if is_part:
                reason = f"counts the tokens of one request alone, and what follows {part} is another one"
                yield Need(Capability.PENALTY_CONTINUATION, field, reason)
    if spec.sampling.kv_budget is not None:
        yield Need(Capability.KV_BUDGET, "sampling.kv_budget", "keeps the keys of all tokens")
    if spec.logprobs is not None:
        yield Need(Capability.PROMPT_LOGPROBS, "logprobs", "does not report those of a given text")
    if spec.record_logprobs:
        yield Need(Capability.LOGPROBS, "record_logprobs", "does not report those of its tokens")
    of_strategy = _list_strategy_needs(spec, STRATEGIES[spec.strategy.name])
    yield from (
        Need(capability, "strategy", _USES_OF_STRATEGIES[capability])
        for capability in Capability
        if capability in of_strategy
    )


def find_refusal(spec: JobSpec, policy: ModelInfo, *, closes_thoughts: bool = False) -> JobRefused | None:
    """Return the refusal of a job that needs more than the policy's server can do; ``None`` if it can do all."""
    needs = list_needs(spec, closes_thoughts=closes_thoughts)
    missing = next((need for need in needs if need.capability not in policy.capabilities), None)
    if missing is None:
        return None
    servers = _SERVERS_WITH[missing.capability]
    message = f"the server of model {policy.id!r} {missing.reason}: leave it out, or use a model on {servers}"
    if missing.field == "strategy":
        able = ", ".join(
            name for name, other in STRATEGIES.items() if _list_strategy_needs(spec, other) <= policy.capabilities
        )
        message = (
            f"strategy {spec.strategy.name!r} {missing.reason}, which the server of model {policy.id!r} cannot do: "
            f"use one of {able}, or a model on {servers}"
        )
    code = _CODES.get(missing.field) or _CODES[missing.field.partition(".")[0]]
    return JobRefused(code, missing.field, message)


def check_opened_policy(spec: JobSpec, policy: ModelInfo, thoughts: ThoughtFormat | None) -> None:
    """Raise ``InvalidRequest`` for a job that cannot run on a policy, whose delimiters of thoughts are now known."""
    is_split = thoughts is not None and not thoughts.is_told
    refusal = find_refusal(spec, policy, closes_thoughts=is_split)
    if refusal is not None:
        raise InvalidRequest(str(refusal), refusal.field)
    if thoughts is not None:
        _check_steps_in_thoughts(spec)
    strategy = STRATEGIES[spec.strategy.name]
    if spec.thinking_tokens is not None and Feature.CANDIDATES not in strategy.supports and not is_split:
        _check_servers_limit(policy, thoughts)


def _list_strategy_needs(spec: JobSpec, strategy: Strategy[Any]) -> frozenset[Capability]:
    """Return what a strategy needs, with its parameters if it is the job's own."""
    chosen = spec.strategy
    params = parse_params(chosen.name, chosen.params) if strategy.name == chosen.name else None
    return strategy.list_needs(
        params, is_constrained=spec.constraint is not None, counts_tokens=spec.sampling.counts_tokens
    )


def _check_steps_in_thoughts(spec: JobSpec) -> None:
    """Raise ``InvalidRequest`` for steps within thoughts that the job's verifier does not read."""
    needs_steps = STRATEGIES[spec.strategy.name].verifier is VerifierUse.STEP_SCORES
    if spec.steps is not None and needs_steps and getattr(spec.verifier, "reads", "all") == "answer":
        raise InvalidRequest(
            "steps: they split thoughts, and the verifier reads answers alone: leave 'steps' out, so that a thought is "
            "one step, or let the verifier read them ('reads': 'all'), if it was trained to",
            "steps",
        )


def _check_servers_limit(policy: ModelInfo, thoughts: ThoughtFormat | None) -> None:
    """Raise ``InvalidRequest`` for a limit of thoughts where the policy's server keeps none, and no search can."""
    if policy.limits_thoughts:
        return
    if thoughts is None:
        problem = (
            "has no known delimiters of thoughts, so that none can be closed: leave it out, or give 'thoughts', if its "
            "server continues solutions"
        )
    else:
        problem = (
            "is on a server that only chats, where a search cannot close a thought: leave it out, or name the field "
            "with which the server limits thoughts, by 'thinking_limit' in its table [engines.NAME]"
        )
    raise InvalidRequest(f"budget.thinking_tokens: model {policy.id!r} {problem}", "budget.thinking_tokens")
