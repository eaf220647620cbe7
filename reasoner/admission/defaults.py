"""Default settings by model for the fields that a job leaves open, configured by the operator."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from reasoner.admission.effort import DefaultStrategy
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.prices import Prices
from reasoner.budget.spec import Budget
from reasoner.jobs.messages import Text
from reasoner.jobs.sampling_spec import MaxTokens, Sampling
from reasoner.jobs.spec import PromptTemplate, StopStrings, TemplateKwargs
from reasoner.jobs.step_specs import Steps
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.jobs.verifier_specs import Verifier

NO_VERIFIER = "none"


def parse_verifier_name(value: Any) -> Any:
    """Return the verifier of an operator's settings as a job has it."""
    if value == NO_VERIFIER:
        return None
    return {"model": value} if isinstance(value, str) else value


class ModelDefaults(StrictModel):
    """Defaults of one model. A job's own settings take precedence, those of ``sampling`` field by field."""

    system: Text | None = Field(None, description="The system message.")
    prompt: PromptTemplate | None = Field(
        None, description="The template of questions, in which {problem} stands for the question."
    )
    sampling: Sampling = Field(
        default_factory=Sampling, description="The sampling parameters; by default the model's own."
    )
    max_tokens: MaxTokens | None = Field(None, description="The length of the longest solution, in tokens.")
    stop: StopStrings = Field(default_factory=list, description="The texts that end a solution.")
    chat_template_kwargs: TemplateKwargs = Field(
        default_factory=dict, description="Variables of the chat template, such as enable_thinking."
    )
    steps: Steps | None = Field(None, description="Where a step of a search ends, as in a job.")
    thoughts: ThoughtSpec | None = Field(None, description="The delimiters of the model's thoughts, as in a job.")
    tool_format: str | None = Field(
        None, description="The format of the model's calls of functions; by default that of its chat template."
    )
    verifier: Annotated[Verifier | None, BeforeValidator(parse_verifier_name)] = Field(
        None,
        description="The verifier: the name of a served process reward model, a table as in a job, or none; the "
        "default is none, and for the bundled policies the bundled one.",
    )
    answer: AnswerSpec | None = Field(None, description="How answers are found and compared, as in a job.")
    budget: Budget = Field(default_factory=Budget)
    strategy: DefaultStrategy | None = Field(None, description="A name, or a name with parameters.")
    record_logprobs: bool | None = Field(
        None,
        description="The journals have what training needs, as in a job. Searches on such a model can be exported.",
    )
    prices: Prices | None = Field(None, description="The prices of a million tokens. Required for budgets in money.")

    @model_validator(mode="after")
    def _check_one_max_tokens(self) -> Self:
        if self.max_tokens is not None and self.sampling.max_tokens is not None:
            raise ValueError("give either 'max_tokens' or 'max_tokens' in 'sampling', not both")
        return self

    def merge(self, more: ModelDefaults) -> Self:
        """Return the defaults with those that ``more`` sets, of ``sampling`` and ``chat_template_kwargs`` in parts."""
        changes = more.list_given()
        if "sampling" in changes:
            changes["sampling"] = self.sampling.model_copy(update=more.sampling.list_given())
        if "chat_template_kwargs" in changes:
            changes["chat_template_kwargs"] = self.chat_template_kwargs | more.chat_template_kwargs
        return self.model_copy(update=changes)
