"""The arguments of the tools: what an agent may say about a job. What they leave open, the service decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api.http.problems import validation_problem
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.messages import MAX_MESSAGES, Text
from reasoner.jobs.request import By, ScheduleName
from reasoner.jobs.spec import SELECTING_STRATEGY
from reasoner.jobs.verifier_specs import verifier_kinds
from reasoner.strategies.registry import STRATEGIES

MAX_WAIT_SECONDS = 50.0
"""Longest wait of the tool ``job``: clients give up a call after a minute by default."""


class Turn(StrictModel):
    """A message of the conversation that ends with the question."""

    role: Literal["system", "user", "assistant"]
    content: Text


class StrategyArgument(BaseModel):
    """A strategy and, beside its name, its own parameters, such as n, the number of solutions."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(description=f"One of {', '.join(name for name in STRATEGIES if name != SELECTING_STRATEGY)}.")


class VerifierArgument(BaseModel):
    """A verifier: its kind and, beside it, the fields of that kind."""

    model_config = ConfigDict(extra="allow")
    kind: str = Field(description=f"One of {', '.join(verifier_kinds())}.")


class SearchArguments(StrictModel):
    """The arguments of all tools that begin a job."""

    problem: Text | None = Field(
        None,
        description="The question, with everything that is needed to answer it: the service sees neither your "
        "conversation nor your files. Give this or 'messages'.",
    )
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        None, description="The question as a conversation that ends with it, instead of 'problem'."
    )
    system: Text | None = Field(None, description="System message before the question.")
    model: str | None = Field(
        None, description="A served model, or a name that the service defines; without it the service's own."
    )
    budget: Budget | None = Field(
        None,
        description="The most that the job may spend; it answers with the best that it has by then. The simplest is "
        '{"effort": "low"}, medium or high; {"tokens": 20000, "seconds": 60} are limits of your own. Without one the '
        "service's default holds.",
    )
    answer: AnswerSpec | None = Field(
        None, description='How answers are found in solutions and compared, such as {"compare": "choice"}.'
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(None, description="The same seed searches alike.")
    metadata: dict[str, str] | None = Field(None, description="Labels of your own, kept with the job.")
    background: bool = Field(
        False,
        description="Return at once with a job_id, for work that may take longer than your client waits for a tool; "
        "then call 'job' for the result. The job goes on by itself.",
    )


class SolveArguments(SearchArguments):
    """The arguments of ``solve``."""

    strategy: StrategyArgument | None = Field(
        None,
        description="How to search; without it the service chooses by effort, model and verifier. "
        '{"name": "self_consistency", "n": 16} samples 16 solutions and votes on their answers; best_of_n takes the '
        "one that the verifier scores highest; beam, mcts and others search a tree of steps that it scores; auto "
        "measures the difficulty first.",
    )
    verifier: VerifierArgument | None = Field(
        None,
        description="What scores solutions, instead of the service's own verifier. A check of yours is best: "
        '{"kind": "numeric", "expected": 42}, {"kind": "regex", "pattern": "^[A-D]$"}; {"kind": "judge"} asks a model.',
    )
    confidence: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Stop early once the answer is right with this probability; for strategies that vote."
    )


class SelectArguments(SearchArguments):
    """The arguments of ``select``."""

    candidates: Annotated[list[Text], Field(min_length=1, max_length=MAX_N)] = Field(
        description="The solutions to rank, each a text that is complete with its answer."
    )
    by: By = None
    schedule: ScheduleName | None = Field(None, description="Who meets whom in a tournament.")
    verifier: VerifierArgument | None = Field(
        None, description='What scores the candidates, or compares them: {"kind": "pairwise"} for a tournament.'
    )


class CancelArguments(StrictModel):
    """The arguments of ``cancel``."""

    job_id: str = Field(description="The job_id in a result of 'solve' or 'select', or the id of a task.")


class JobArguments(CancelArguments):
    """The arguments of ``job``."""

    wait_seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)] = Field(
        0.0, description="Wait this long for the job to end, instead of asking again and again."
    )


M = TypeVar("M", bound=BaseModel)


def parse_model(model: type[M], sent: Mapping[str, Any]) -> M:
    """Return what was sent as a model. Raises ``Problem``, which says where it was wrong, and what would be right."""
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        errors = [{**part, "loc": ("body", *part["loc"])} for part in error.errors()]
        raise validation_problem(errors, sent, model) from None
