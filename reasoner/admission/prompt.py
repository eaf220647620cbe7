"""The prompt of a job: that of its model, or the question with an instruction that asks for the answer."""

from __future__ import annotations

from collections.abc import Mapping

from reasoner.admission.defaults import ModelDefaults, apply_defaults
from reasoner.answers.instruction import find_instruction
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import PLACEHOLDER, JobSpec
from reasoner.strategies.base import DecidedBy
from reasoner.strategies.registry import STRATEGIES


def add_instruction(spec: JobSpec) -> JobSpec:
    """Return the job with a prompt that asks for the answer, unless it has a system message or a prompt already.

    The answer is asked for only where it is compared, so that a conversation is left as it is.
    """
    if not _compares_answers(spec):
        return spec
    has_prompt = spec.system is not None or spec.prompt is not None or spec.has_system_message
    instruction = None if has_prompt or spec.conversation[-1]["role"] != "user" else find_instruction(spec.answer)
    return spec if instruction is None else spec.model_copy(update={"prompt": f"{PLACEHOLDER}\n\n{instruction}"})


def _compares_answers(spec: JobSpec) -> bool:
    """Return True if a vote, a rule or the client, who says what an answer is, compares what solutions state."""
    votes = STRATEGIES[spec.strategy.name].decided_by is DecidedBy.VOTE
    return "answer" in spec.model_fields_set or votes or spec.has_conclusive_verifier


def resolve_prompt(spec: JobSpec, models: Mapping[str, ModelDefaults]) -> JobSpec:
    """Return a job that runs outside of a service, asked as a service would ask it.

    It has all defaults of its model but the budget and the strategy.
    """
    defaults = models.get(spec.model or "")
    if defaults is not None:
        spec = apply_defaults(spec, defaults.model_copy(update={"budget": Budget(), "strategy": None}), {})
    return add_instruction(spec)
