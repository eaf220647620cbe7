"""The types of a job's events, with all their fields. They are part of the REST schema.

The journal's entries are events with a ``key``; what happens to the job as a whole, such as its start, is in those
whose type begins with ``job.``. A field with a default may be missing in an event.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter

from engine.protocol.wire import JsonToken
from reasoner.base_model import StrictModel
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobError, JobResult
from reasoner.tree import AnswerLevel, Origin, PartKind, Reason, ThoughtState

MAX_SEQ = 2**53
"""Largest sequence number of an event: more than any job has, and exact in JavaScript."""

NodeId = Annotated[str, Field(description="Path of a branch from the root, which is the empty text: `0.2.1`")]


class Event(StrictModel):
    """One entry of a job's journal. ``seq`` counts from 1 without gaps; a replay uses entries that have a ``key``."""

    seq: int
    type: str
    at: float
    key: str | None = None
    data: dict[str, JsonValue]
    spend: dict[str, float] = Field(default_factory=dict)
    """Addition to the bill: the fields of ``Usage`` that are not 0. All of a job's add up to its ``usage``."""


class EventData(StrictModel):
    """Data of an event. Most processes that import these models need none, so they are built at their first use."""

    model_config = ConfigDict(defer_build=True)


class EntryData(EventData):
    """Fields that the data of all journal entries have."""

    batch: int = Field(description="Entries with the same number were written, and seen by the strategy, together")
    early: bool = Field(False, description="The entry was written when its worker stopped, before the strategy saw it")


class ThoughtProgressData(EventData):
    """The thought of a branch so far."""

    state: ThoughtState
    tokens: int


class RefusalData(EventData):
    """A server's refusal of a branch, in its words."""

    kind: str
    message: str
    field: str | None = None


class NodeData(EntryData):
    """A part of a branch: a branch may arrive in several, of which the last is ``final`` and has its end."""

    node: NodeId
    parent: NodeId
    part: int = Field(description="Number of the part, from 0")
    text: str = Field(description="The part's text, which follows those before")
    token_ids: list[JsonToken] = Field(
        description="Ids of the part's tokens. A server that only chats has none: there they are its text, cut into as "
        "many tokens as it bills, those of a thought each in a list. Older versions packed such texts into numbers"
    )
    tokens: int = Field(description="Tokens of the part; 0 for a copy")
    cached: int = Field(description="Tokens of the branch's prompt that were cached")
    logprob: float = Field(description="Sum of the log-probabilities of the part's tokens")
    final: bool = Field(description="The branch has ended")
    reason: Reason | None = Field(description="Why it ended; `said` for text that was not sampled")
    answer: str | None = Field(description="The answer that the solution states, once the branch has ended")
    answer_level: AnswerLevel | None = Field(None, description="How the answer was found; absent in old entries")
    closed: bool = Field(False, description="The model ended its turn")
    model: str | None = Field(None, description="The model that wrote it, in a job with several")
    parts: list[tuple[PartKind, Origin, int, int]] = Field(
        [], description="Ranges of all of its text so far: kind, origin, characters and tokens"
    )
    thought: ThoughtProgressData | None = Field(None, description="Its thought, if the model's thoughts are known")
    confidence: list[float] = Field([], description="The model's confidence in each token of the part")
    logprobs: list[float | None] | None = Field(
        None,
        description="Log-probabilities of the part's tokens by the model's own distribution, with `record_logprobs`; "
        "null for a token that was not generated, or of which the server reported none",
    )
    probe: float | None = Field(None, description="Score of the probe on the policy's hidden states, at the end")
    vote: str | None = Field(None, description="What votes for it are counted by, if that is not its answer")
    calls: list[tuple[str, str]] = Field([], description="Functions that it calls: name, and arguments in JSON")
    words: str | None = Field(None, description="What it says beside its calls, or in the channel for the user")
    call_fault: str | None = Field(None, description="Why a call of it could not be read")
    stop: str | None = Field(None, description="The job's stop string that ended it, if its server names it")
    calling: bool = Field(False, description="The part ends with a call of a tool that runs now")
    call_ended: str | None = Field(None, description="How that call ended, in the part with its output")
    seconds: float | None = Field(None, description="Time from the request of the part, or of the call, to the part")
    refusal: RefusalData | None = Field(None, description="The server's words, if it refused the branch")
    copy_of: NodeId | None = Field(None, description="The branch whose text it has, for equal greedy branches")
    given: bool = Field(False, description="A candidate that the client brought")
    left_out: int = Field(0, description="Characters of such a candidate that were left out, to fit into the verifier")
    fresh: bool = Field(False, description="It begins another conversation: its text follows no text before it")
    undone: int = Field(0, description="Characters at the end of its parent that it takes back")
    solves: bool = Field(True, description="It belongs to a solution; else to a question about one")


class PromptData(EntryData):
    """All tokens from the first one of a prompt to the end of a node that was not generated, with `record_logprobs`."""

    node: NodeId
    token_ids: list[JsonToken]
    model: str | None = None


class VerdictData(EventData):
    """A verdict that a model wrote: the mean of its votes, and what it wrote before each."""

    score: float | None
    votes: list[float | None]
    critiques: list[str]


class VerifierData(EntryData):
    """Fields of what a verifier was asked and said."""

    computed: int = Field(description="Tokens that the verifier computed")
    cached: int = Field(description="Tokens that it found cached")
    model: str | None = Field(None, description="The verifier, in a job with several models")
    criteria: dict[str, float | None] = Field(
        {}, description="Scores by the rubric's criteria; of a branch those of its last step"
    )
    grades: list[float | None] = Field(
        [], description="Scores of all questions of a verifier that grades, in their order; null: none could be read"
    )
    unread: list[str | None] = Field([], description="Reasons for grades that could not be read, in the same order")
    seconds: float | None = Field(None, description="Time that the verifier took, for all that was asked together")


class ScoreData(VerifierData):
    """The verifier's scores of the steps that a branch added."""

    node: NodeId
    scores: list[float] = Field(description="One for each step that the branch added")
    score: float | None = Field(description="Score of the whole branch; null: the verifier gave no verdict")
    verdicts: list[list[VerdictData]] = Field([], description="Verdicts on each step, of a verifier that writes")


class CompareData(VerifierData):
    """A comparison of two branches by the verifier."""

    nodes: tuple[NodeId, NodeId]
    score: float | None = Field(description="Probability that the first is better; null: no verdict")
    verdicts: list[VerdictData] = Field([], description="Verdicts of a verifier that writes")


class PruneData(EntryData):
    """Branches that the strategy gave up."""

    nodes: list[NodeId]


class DecisionData(EntryData):
    """A decision of the strategy, with fields of its own: the shown solutions, the stages of `auto`, a ranking."""

    model_config = ConfigDict(extra="allow")


class SelectData(EntryData):
    """The chosen solution, the last entry of a search."""

    node: NodeId | None


class SettledData(EntryData):
    """A result that depends on more than the engine and the seed, kept for replays."""

    value: str | None
    late: bool = Field(False, description="It came when the job's time was up")


class GrantData(EntryData):
    """Tokens that the job got from its batch's budget."""

    tokens: int


class LogprobsData(EntryData):
    """Log-probabilities of a solution's tokens: token, logarithm and the likeliest others; null: out of budget."""

    node: NodeId
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] | None
    texts: dict[str, str] = Field(description="Texts of the tokens by their ids")
    model: str | None = None


class LostData(EntryData):
    """Tokens that are paid and in no branch, such as those of a part that arrived after a cancellation."""

    node: NodeId
    tokens: int
    withheld: list[float] = Field(description="The rest of the reservation, which stays held")
    model: str | None = None


class QueuedData(EventData):
    """The job waits for a worker, first or again."""

    reason: str | None = Field(None, description="Why it waits again: for an engine, for its batch's budget, a retry")
    detail: str | None = Field(None, description="The same in a sentence")


class AttemptData(EventData):
    """A worker has begun, or gone on, with the job."""

    attempt: int = Field(description="Number of the attempt, from 1")


class EndData(EventData):
    """The job has ended; all that a client waits for."""

    result: JobResult | None
    error: JobError | None
    usage: Usage


DATA: dict[str, type[EventData]] = {
    "job.queued": QueuedData,
    "job.started": AttemptData,
    "job.resumed": AttemptData,
    "node": NodeData,
    "prompt": PromptData,
    "score": ScoreData,
    "compare": CompareData,
    "prune": PruneData,
    "decision": DecisionData,
    "settled": SettledData,
    "grant": GrantData,
    "logprobs": LogprobsData,
    "lost": LostData,
    "select": SelectData,
    "job.completed": EndData,
    "job.incomplete": EndData,
    "job.failed": EndData,
    "job.cancelled": EndData,
}
"""Types of the events' data by the events' types."""


def read_data(type: str, data: dict[str, Any]) -> EventData:
    """Return the data of an event as its type. Raises ``ValidationError`` if it has other fields."""
    return DATA[type].model_validate(data)


def describe_events() -> dict[str, Any]:
    """Return the JSON Schemas of the events by name: ``JobEvent`` is any of them, told apart by ``type``."""
    schemas: dict[str, Any] = {}
    names = {}
    for type, data in DATA.items():
        schema = TypeAdapter(data).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[data.__name__] = schema
        names[type] = "".join(word.capitalize() for word in type.replace(".", "_").split("_")) + "Event"
    for type, name in names.items():
        schema = Event.model_json_schema()
        schema["title"], schema["description"] = name, f"An event of the type `{type}`."
        schema["properties"]["type"] = {"const": type, "type": "string"}
        schema["properties"]["data"] = {"$ref": f"#/components/schemas/{DATA[type].__name__}"}
        schemas[name] = schema
    references = {type: f"#/components/schemas/{name}" for type, name in names.items()}
    schemas["JobEvent"] = {
        "title": "JobEvent",
        "description": "An event of a job.",
        "oneOf": [{"$ref": reference} for reference in references.values()],
        "discriminator": {"propertyName": "type", "mapping": references},
    }
    return schemas
