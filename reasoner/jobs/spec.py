"""The fields of a job, and the job that runs, as it is stored and echoed. These models are part of the REST schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from engine.protocol.request_checks import MAX_LOGPROBS, check_template_kwargs
from engine.protocol.types import InvalidRequest
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.candidate_spec import Candidates, Piece, read_candidate
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import MAX_MESSAGES, Message, Text
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.step_specs import DEFAULT_STEPS, StepRule, Steps
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.jobs.tool_specs import FunctionTool, PythonTool, ToolChoice, Tools
from reasoner.jobs.verifier_specs import PrmVerifier, Verifier, accept_unknown_verifiers
from reasoner.tools.formats.registry import FORMATS

MAX_POLICIES = 8
MAX_ALTERNATIVES = 7
MAX_METADATA_KEYS = 16
MAX_ADDRESS_CHARS = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TEMPLATE_KWARGS = 32
MAX_ENGINE_WAIT_SECONDS = 30 * 86_400.0
MAX_DEADLINE = 1e11
"""Seconds since the epoch; a present time in milliseconds is more."""
MODEL_WAIT_SECONDS = 20.0
"""Time for which one of several models is waited for, unless the job says another."""
PLACEHOLDER = "{problem}"
DEFAULT_STRATEGY = "best_of_n"
FALLBACK_STRATEGY = "self_consistency"
"""Strategies of jobs that name none: ``DEFAULT_STRATEGY`` with a verifier, ``FALLBACK_STRATEGY`` without one."""
COMPARING_STRATEGY = "tournament"
"""Strategy whose default verifier compares solutions."""
SELECTING_STRATEGY = "select"
"""Strategy of jobs with candidates of their own."""


def _check_template(value: str) -> str:
    if PLACEHOLDER not in value:
        raise ValueError(f"a prompt is a template: write {PLACEHOLDER} where the question belongs")
    return value


def _check_template_kwargs(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        check_template_kwargs(value)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return value


PromptTemplate = Annotated[Text, AfterValidator(_check_template)]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)
]
TemplateKwargs = Annotated[
    dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_KWARGS), AfterValidator(_check_template_kwargs)
]


class StrategySpec(BaseModel):
    """A strategy's name and, beside it, its own parameters, which ``reasoner.admission`` validates."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    name: str

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def compares(self) -> bool:
        """True if it needs a verifier that compares solutions."""
        return COMPARING_STRATEGY in (self.name, self.params.get("by"))


class PolicySpec(StrictModel):
    """One of several models that write a job's solutions."""

    model: Annotated[str, Field(min_length=1, description="Name of a served model.")]
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0,
        description="Its share of the samples, relative to the other weights; of ab_mcts's first round alone.",
    )
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_ENGINE_WAIT_SECONDS)] | None = Field(
        None,
        description="Time for which its server may be away before the job goes on without it, as long as another of "
        f"its models answers; the result names it. By default {MODEL_WAIT_SECONDS:g} seconds.",
        exclude_if=lambda seconds: seconds is None,
    )

    @property
    def patience(self) -> float:
        """The seconds for which its server may be away."""
        return MODEL_WAIT_SECONDS if self.wait_seconds is None else self.wait_seconds


Policies = Annotated[list[PolicySpec], Field(min_length=2, max_length=MAX_POLICIES)]
EngineWait = Annotated[float, Field(gt=0, le=MAX_ENGINE_WAIT_SECONDS)]

_Strategy = Annotated[
    StrategySpec,
    Field(
        description=f"By default {DEFAULT_STRATEGY}, or {FALLBACK_STRATEGY} without a verifier; an effort and the "
        "model may have their own.",
    ),
]
_Verifier = Annotated[
    Verifier | None,
    Field(
        description="Without one the service's own, if it has one (for a tournament: the "
        "job's own model, which compares); null: none.",
    ),
]
_Answer = Annotated[AnswerSpec, Field(description="Where a solution states its answer, and how answers are compared.")]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_SEED = "Without it one is drawn and echoed."


class JobFields(StrictModel):
    """A question, a way to search for its answer, and what the search may cost."""

    model_config = ConfigDict(defer_build=True)  # until the verifiers of other packages can be imported
    problem: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    model: str | None = Field(
        None,
        description="A served model, or a name that stands for a search (GET /v1/models); by default the service's.",
    )
    models: Policies | None = Field(
        None,
        description="Several models that write solutions, instead of 'model'. Defaults of the service are those of the "
        "first one, but each samples with its own parameters where the job leaves them open.",
    )
    candidates: Candidates | None = Field(
        None,
        description="The client's own solutions, texts or conversations that end in an answer. They are ranked, and "
        f"none is written: the strategy is {SELECTING_STRATEGY!r}.",
    )
    system: Text | None = Field(
        None, description="System message before the question; without it the model's default, null: none."
    )
    prompt: PromptTemplate | None = Field(
        None,
        description="Template of the question: its {problem} becomes the problem, or the last of the messages; without "
        "it the model's default, null: none. If there is neither this nor a system message, it becomes the question "
        "with an instruction for the answer (answer.instruct).",
    )
    stop: StopStrings = Field(
        default_factory=list,
        description="Texts that end a solution and are left out of it; without them the model's defaults.",
    )
    chat_template_kwargs: TemplateKwargs = Field(
        default_factory=dict,
        description="Variables of the model's chat template, such as enable_thinking, added to the model's defaults.",
    )
    steps: Steps | None = Field(
        None,
        description="Where a step of a search ends; without it the model's default, else at an empty line. A rule "
        "that is given also splits thoughts; by default a thought is one step.",
    )
    thoughts: ThoughtSpec | None = Field(
        None,
        description="Delimiters of the model's thoughts; without them its default, or those of its tokenizer.",
    )
    constraint: ConstraintSpec | None = Field(
        None,
        description="Language to which solutions are held, token by token, after their thoughts. Their answer is then "
        "the whole solution, unless 'answer' says more.",
    )
    tools: Tools = Field(
        default_factory=list,
        description="python: each ```python block of a solution, and each call of Python in the model's own format, "
        "runs in a sandbox, and its output is the solution's next text. function: a function of the client, which a "
        "solution may end by calling.",
    )
    tool_choice: ToolChoice = Field(
        "auto",
        description="auto: a solution may call functions; required: one that calls none has no answer, and so with "
        "{'name': …} one that calls another function; none: the model does not see them. Where the engine can, "
        "solutions are held to demanded calls, with arguments of the function's schema.",
    )
    tool_vote: Literal["name", "arguments", "exact"] = Field(
        "arguments",
        description="Calls that are one answer. name: of the same functions; arguments: of the same functions with "
        "arguments that are equal as JSON; exact: with the same text.",
    )
    parallel_tool_calls: bool = Field(
        True, description="A solution may make several calls; else one that makes several has no answer."
    )
    tool_format: str | None = Field(
        None, description="Format of the model's calls; without it the model's default, or that of its chat template."
    )
    strategy: _Strategy = Field(default_factory=lambda: StrategySpec(name=DEFAULT_STRATEGY))
    budget: Budget = Field(default_factory=Budget)
    engine_wait_seconds: EngineWait | None = Field(
        None,
        description="Time for which the job waits for an engine that cannot be reached or fails, before it ends with "
        "what it has; without it the service's. It is no part of budget.seconds, the time of work.",
    )
    deadline: Annotated[float, Field(gt=0, le=MAX_DEADLINE)] | None = Field(
        None,
        description="A time in seconds since the epoch. A job that no worker has begun by then fails with the code "
        "expired; one that runs is held to the time that is left, as by budget.seconds.",
        exclude_if=lambda deadline: deadline is None,
    )
    sampling: Sampling = Field(default_factory=Sampling)
    verifier: _Verifier = Field(default_factory=PrmVerifier)
    answer: _Answer = Field(default_factory=AnswerSpec)
    confidence: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Stop as soon as the answer is right, or stays the leader, with this probability. For strategies "
        "that stop by it: see stops_when_sure of GET /v1/strategies.",
    )
    alternatives: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = Field(
        0,
        description="Solutions of other answers that the result has beside the chosen one, the next best first; fewer "
        "if the search finds fewer answers.",
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Log-probabilities of the result's tokens, with this many of the likeliest at each position. They "
        "are computed at the end, as the verifier's tokens of the bill, if the budget is not used up by then.",
    )
    record_logprobs: bool = Field(
        False,
        description="The journal has, for training, the token ids of the prompts and the log-probability of each "
        "generated token by the model's own distribution, at temperature 1 and before filters. See GET "
        "/v1/jobs/export.",
        exclude_if=lambda value: not value,
    )
    seed: _Seed | None = Field(None, description=_SEED)
    deterministic: bool = Field(
        False,
        description="The same job and seed search the same tree, however quick each branch is; it may be slower. Of "
        "all limits only one in tokens ends the search at the same place.",
    )
    priority: Literal["interactive", "batch"] = "interactive"
    webhook: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = Field(
        None, description="An https address that is told how the job ended, signed as Standard Webhooks says."
    )
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA_KEYS)] = Field(
        default_factory=dict
    )

    @property
    def functions(self) -> list[FunctionTool]:
        """The client's functions that a solution may call."""
        return [tool for tool in self.tools if isinstance(tool, FunctionTool) and self.tool_choice != "none"]

    @property
    def has_system_message(self) -> bool:
        """Return True if the client's messages contain a system message."""
        return any(message.role == "system" for message in self.messages or ())

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The question as the client gave it, as chat messages."""
        if self.messages is not None:
            return [message.model_dump() for message in self.messages]
        return [{"role": "user", "content": self.problem or ""}]


class JobSpec(JobFields):
    """A job as it runs, is stored and echoed: nothing is left open, and nothing changes any more."""

    model_config = ConfigDict(defer_build=True, frozen=True)
    strategy: _Strategy
    budget: Budget
    sampling: Sampling
    verifier: _Verifier
    answer: _Answer
    seed: _Seed = Field(description=_SEED)
    name: str | None = Field(
        None,
        description="The name that the request gave as its model; the fields are those that it stands for.",
        exclude_if=lambda name: name is None,
    )

    @property
    def policy_names(self) -> list[str]:
        """The names of the models that write solutions; none if the only one of the engine does."""
        named = [self.model] if self.model is not None else []
        return [entry.model for entry in self.models] if self.models is not None else named

    @property
    def candidate_pieces(self) -> list[list[Piece]]:
        """The text of each candidate in pieces (``read_candidate``)."""
        asked = self.conversation[-1]["content"]
        return [read_candidate(candidate, asked) for candidate in self.candidates or ()]

    @property
    def step_rule(self) -> StepRule:
        """The rule by which steps end."""
        return self.steps or DEFAULT_STEPS

    @property
    def python(self) -> PythonTool | None:
        """The Python that a solution may run, if the job allows it."""
        return next((tool for tool in self.tools if isinstance(tool, PythonTool)), None)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template with which the question is asked."""
        tools = [function.render() for function in self.functions]
        if self.python is not None and self.python.is_declared:
            tools.insert(0, self.python.render())
        return self.chat_template_kwargs | ({"tools": tools} if tools else {})

    @property
    def thinking_tokens(self) -> int | None:
        """The limit of a solution's thought."""
        limits = [limit for limit in (self.budget.thinking_tokens, self.sampling.thinking_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def has_conclusive_verifier(self) -> bool:
        """Return True if a score of 1 is a fact, so that nothing can be better."""
        return self.verifier is not None and self.verifier.is_conclusive

    @property
    def rendered_conversation(self) -> list[dict[str, Any]]:
        """The question as a verifier reads it: chat messages that all have a text, and calls with their arguments."""
        return [message.render() for message in self.messages or [Message(role="user", content=self.problem)]]

    def to_messages(self) -> list[dict[str, Any]]:
        """Return the question as the model gets it: after the system message, and within the prompt template."""
        given = self.messages or [Message(role="user", content=self.problem)]
        tool_format = FORMATS.get(self.tool_format or "")
        arguments_as_text = tool_format is not None and tool_format.has_text_arguments
        messages = [message.render(arguments_as_text=arguments_as_text) for message in given]
        last = messages[-1]
        if self.prompt is not None and last["role"] == "user":
            last["content"] = self.prompt.replace(PLACEHOLDER, last["content"])
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.python is None or self.python.instruction is None or self.python.is_declared:
            return messages
        first = next((message for message in messages if message["role"] == "system"), None)
        if first is None:
            return [{"role": "system", "content": self.python.instruction}, *messages]
        first["content"] += f"\n\n{self.python.instruction}"
        return messages


def read_conversation(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the question of a stored job as chat messages, also if the package of its verifier is gone."""
    with accept_unknown_verifiers():
        return JobSpec.model_validate(spec).conversation
