"""Checks that the fields of a job are compatible, made once at admission; ``JobSpec`` checks single fields only."""

from __future__ import annotations

from collections.abc import Mapping

from reasoner.answers.spec import CodeExtract
from reasoner.jobs.job import Job
from reasoner.jobs.spec import FALLBACK_STRATEGY, JobSpec
from reasoner.jobs.verifier_specs import ProbeVerifier, verifier_kinds
from reasoner.strategies.base import Feature, VerifierUse
from reasoner.strategies.registry import STRATEGIES, parse_params
from reasoner.tools.fences import PYTHON_NAMES

# The verifiers of other packages can be imported by now. What holds a job, such as a route, is built at once again.
for _model in (JobSpec, Job):
    _model.model_config["defer_build"] = False
    _model.model_rebuild()


class JobRefused(Exception):
    """A job that cannot run as it was submitted."""

    def __init__(self, code: str, field: str | None, message: str) -> None:
        """``code`` is the stable name of the error; ``field`` is ``None`` if the fault is not in a single field."""
        super().__init__(message if field is None or message.startswith(field) else f"{field}: {message}")
        self.code = code
        self.field = field
        self.message = message


_FEATURES: Mapping[Feature, tuple[str | None, str]] = {
    Feature.SEVERAL_MODELS: ("models", "searches with one model: give 'model'"),
    Feature.CONSTRAINT: ("constraint", "adds text or writes no solutions, which no constraint can hold: leave it out"),
    Feature.EARLY_STOP: (None, "cannot stop by 'confidence': leave it out"),
}
"""The field of a job that asks for each feature of strategies, and what a strategy without it does."""


def check_job(spec: JobSpec) -> None:
    """Check that the strategy exists, accepts its parameters, and is compatible with the rest of the job.

    Raises ``JobRefused`` with a correction.
    """
    _check_last_message(spec)
    try:
        params = parse_params(spec.strategy.name, spec.strategy.params)
    except ValueError as error:
        raise JobRefused("invalid-request", "strategy", str(error)) from None
    _check_verifier(spec, STRATEGIES[spec.strategy.name].verifier_use(params))
    _check_features(spec)
    _check_tools(spec)
    limit, budget = spec.thinking_tokens, spec.budget.tokens
    if limit is not None and budget is not None and limit > budget:
        raise JobRefused(
            "impossible-budget",
            "budget.thinking_tokens",
            f"a thought of {limit} tokens does not fit into the job's {budget} tokens: give at most {budget}, fewer "
            "to leave some for the answer",
        )


def _check_verifier(spec: JobSpec, use: VerifierUse) -> None:
    """Check that the job has a verifier that does what its strategy asks of it, ``use``."""
    name, verifier = spec.strategy.name, spec.verifier
    if verifier is None and use.needs_scores:
        raise _invalid(
            f"strategy {name!r} needs a verifier, but 'verifier' is null: name one, or use {FALLBACK_STRATEGY}"
        )
    if use is VerifierUse.COMPARISONS and not (verifier is not None and verifier.compares):
        suitable = ", ".join(kind for kind, model in verifier_kinds().items() if model.compares)
        given = "null" if verifier is None else repr(verifier.kind)
        raise _invalid(
            f"strategy {name!r} needs a verifier that compares two solutions, and 'verifier' is {given}: leave it out, "
            f"so that the job's own model compares, or use one of {suitable}"
        )
    if verifier is None:
        return
    if verifier.compares and use is not VerifierUse.COMPARISONS:
        able = ", ".join(name for name, other in STRATEGIES.items() if other.verifier is VerifierUse.COMPARISONS)
        raise _invalid(
            f"verifier {verifier.kind!r} compares two solutions, and strategy {name!r} needs scores of single ones or "
            f"none: use one of {able}, or another kind of verifier"
        )
    if use is VerifierUse.STEP_SCORES and not verifier.scores_steps:
        suitable = ", ".join(kind for kind, model in verifier_kinds().items() if model.scores_steps)
        raise _invalid(
            f"strategy {name!r} needs a verifier of single steps, and {verifier.kind!r} scores finished solutions "
            f"alone: use one of {suitable}"
        )
    if spec.models is not None and isinstance(verifier, ProbeVerifier):
        raise JobRefused(
            "invalid-request", "models", "a probe reads the states of one policy: give 'model', or another verifier"
        )


def _check_features(spec: JobSpec) -> None:
    """Check that the strategy supports all that the job asks for beyond a question."""
    asked = {
        Feature.SEVERAL_MODELS: spec.models is not None,
        Feature.CONSTRAINT: spec.constraint is not None,
        Feature.EARLY_STOP: spec.confidence is not None,
    }
    supported = STRATEGIES[spec.strategy.name].supports
    missing = next((feature for feature, is_asked in asked.items() if is_asked and feature not in supported), None)
    if missing is not None:
        able = ", ".join(name for name, strategy in STRATEGIES.items() if missing in strategy.supports)
        field, problem = _FEATURES[missing]
        message = f"strategy {spec.strategy.name!r} {problem}, or use one of {able}"
        raise JobRefused("invalid-request", field, message)


def _check_last_message(spec: JobSpec) -> None:
    if spec.messages and spec.messages[-1].role == "assistant":
        raise JobRefused(
            "invalid-request",
            "messages",
            "the last message is the assistant's, and a job writes the assistant's next one: end with a message of the "
            "user or a tool (a text that the assistant began is not continued)",
        )


def _check_tools(spec: JobSpec) -> None:
    """Check that solutions can hold calls of Python and their output."""
    if spec.python is None:
        return
    extract = spec.answer.extract
    reads_code = extract == "code" or (extract == "auto" and spec.answer.compare == "code")
    if isinstance(extract, CodeExtract):
        reads_code = extract.code in PYTHON_NAMES
    problem = None
    if Feature.CANDIDATES in STRATEGIES[spec.strategy.name].supports:
        problem = f"strategy {spec.strategy.name!r} writes no solutions, so that nothing calls a tool"
    elif spec.constraint is not None:
        problem = "no constraint can hold the output of a tool: leave out 'constraint' or 'tools'"
    elif reads_code:
        verifier = spec.verifier
        has_tests = verifier is not None and verifier.answer_language == "python"
        reader = f"verifier {verifier.kind!r}" if verifier and has_tests else "the job"
        problem = (
            f"{reader} reads a block of code as the answer, and a block of Python is a call: leave 'tools' out, or "
            "give 'answer' an 'extract' that names another language or a pattern"
        )
    elif stop := next((stop for stop in spec.stop if stop in "\n```python\n"), None):
        problem = f"the stop string {stop!r} ends a solution in the middle of a call: leave it out"
    if problem is not None:
        raise JobRefused("invalid-request", "tools", problem)


def _invalid(message: str) -> JobRefused:
    return JobRefused("invalid-request", None, message)
