"""The spans of a job's search, by OpenTelemetry's GenAI semantic conventions, as a view of its events.

::

    invoke_agent best_of_n            the job, from its submission to its end
    ├─ text_completion policy 0       a node of the tree, below its parent's; with its score, tokens and cost
    │  ├─ execute_tool python         a call of a tool
    │  └─ evaluate prm                a verdict of the verifier, with its tokens and cost
    └─ evaluate judge 0 1             a comparison of two nodes

Each token and each cent of the bill is in exactly one span, so that sums over a trace are the job's bill. A span is
identified by the job's id and the key of its event, so that an export that is repeated overwrites and adds nothing.

The conventions are in development: their names are in this module alone (version 0.1 of
open-telemetry/semantic-conventions-genai). ``gen_ai.usage.cost`` is no part of them; Langfuse reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.view import JobView, NodeView, fold_events
from workers.store.serialization import JobDocument
from workers.telemetry.span_content import split_text, write_input, write_output

Attribute = str | int | float | bool | tuple[str, ...]
Attributes = dict[str, Attribute]

PROVIDER = "reasoner"
JOB = ""
"""Name of the job's own span, the parent of nodes that have none."""
OPERATION, MODEL, RESPONSE_MODEL = "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.model"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS, THOUGHT_TOKENS = "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.reasoning.output_tokens"
COST = "gen_ai.usage.cost"
FINISH_REASONS = "gen_ai.response.finish_reasons"
EVALUATION, SCORE = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
_PROVIDER_NAME = "gen_ai.provider.name"
_SPAN_KIND = "openinference.span.kind"
"""OpenInference's kind, since GenAI has no operation for evaluations; Langfuse and Phoenix read it."""
_GENERATING = ("expand", "complete")
"""Operations of the keys of generated nodes."""


@dataclass(slots=True, kw_only=True)
class SpanRecord:
    """A span. Times are seconds since the epoch; ``name`` and ``parent`` are unique within the job."""

    name: str
    """Key of its event, id of its node, or ``JOB``."""
    parent: str | None
    title: str
    start: float
    end: float
    attributes: Attributes
    kind: Literal["client", "internal"] = "client"
    is_error: bool = False
    marks: list[tuple[str, float, Attributes]] = field(default_factory=list)
    """Events within the span: name, time and attributes."""


def derive_span_id(job_id: str, name: str) -> int:
    """Return the id of a job's span, the same in each process and attempt."""
    return int.from_bytes(blake2b(f"{job_id}/{name}".encode(), digest_size=8).digest()) or 1


def derive_trace_id(job_id: str) -> int:
    """Return the id of the trace of a job whose request was not traced."""
    return int.from_bytes(blake2b(job_id.encode(), digest_size=16).digest()) or 1


def find_job_span(job_id: str, origin: str) -> str:
    """Return the ``traceparent`` of a job's own span, of which its attempts are children.

    ``origin``: that of the job's request; empty without tracing, as is the result.
    """
    if not origin:
        return ""
    version, trace, _, flags = origin.split("-")
    return f"{version}-{trace}-{derive_span_id(job_id, JOB):016x}-{flags}"


def describe_search(job: JobDocument, events: Sequence[Event], *, with_content: bool) -> list[SpanRecord]:
    """Return the spans of a job that has ended, its own first.

    ``with_content`` adds the question, the solutions and what tools returned.
    """
    view = fold_events(events)
    spans = _SearchSpans(job["spec"], view, with_content=with_content)
    for event in events:
        spans.add(event)
    own = _describe_job(job, events, view, with_content=with_content)
    return [own, *spans.nodes.values(), *spans.others]


def _describe_job(job: JobDocument, events: Sequence[Event], view: JobView, *, with_content: bool) -> SpanRecord:
    spec, usage, result, error = job["spec"], Usage.model_validate(job["usage"]), job["result"], job["error"]
    strategy = str(spec["strategy"]["name"])
    attributes: Attributes = {
        OPERATION: "invoke_agent",
        _PROVIDER_NAME: PROVIDER,
        "gen_ai.agent.name": strategy,
        "gen_ai.request.seed": spec["seed"],
        "reasoner.job.id": job["id"],
        "reasoner.job.status": view.status,
        "reasoner.job.nodes": len(view.nodes) - 1,
        "reasoner.job.tokens": usage.total,
        "reasoner.job.cost": usage.cost,
    }
    if spec.get("model") is not None:
        attributes[MODEL] = spec["model"]
    if result is not None:
        attributes[FINISH_REASONS] = (result["finish_reason"],)
        if result["confidence"] is not None:
            attributes["reasoner.job.confidence"] = result["confidence"]
    if error is not None:
        attributes["error.type"] = error["code"]
    if with_content:
        attributes[INPUT_MESSAGES] = write_input(spec)
        if result is not None and result["text"] is not None:
            attributes[OUTPUT_MESSAGES] = write_output([("text", result["text"])], result["finish_reason"])
    return SpanRecord(
        name=JOB,
        parent=None,
        title=f"invoke_agent {strategy}",
        start=events[0].at,
        end=events[-1].at,
        attributes=attributes,
        kind="internal",
        is_error=error is not None,
    )


class _SearchSpans:
    """Spans of a search, added event by event. ``view`` is the end of the search."""

    def __init__(self, spec: Mapping[str, Any], view: JobView, *, with_content: bool) -> None:
        self._spec, self._view, self._with_content = spec, view, with_content
        self._spend: dict[str, Usage] = {}
        """The bill of each node."""
        self.nodes: dict[str, SpanRecord] = {}
        self.others: list[SpanRecord] = []

    def add(self, event: Event) -> None:
        """Add an event, after all before it."""
        data: dict[str, Any] = event.data
        match event.type:
            case "node":
                self._add_part(event)
            case "score":
                self._add_evaluation(event, [data["node"]])
            case "compare":
                self._add_evaluation(event, list(data["nodes"]))
            case _:
                self._add_bill(event)

    def _add_part(self, event: Event) -> None:
        data: dict[str, Any] = event.data
        name, start = data["node"], event.at - data.get("seconds", 0.0)
        view = self._view.nodes[name]
        if name not in self.nodes:
            is_generated = (event.key or "").split(":")[0] in _GENERATING and "copy_of" not in data
            attributes = self._describe_node(view, data, is_generated=is_generated)
            title = " ".join(map(str, filter(None, (attributes.get(OPERATION, "text"), attributes.get(MODEL), name))))
            kind: Literal["client", "internal"] = "client" if is_generated else "internal"
            self.nodes[name] = SpanRecord(
                name=name,
                parent=data["parent"],
                title=title,
                start=start,
                end=event.at,
                attributes=attributes,
                kind=kind,
            )
        span = self.nodes[name]
        span.end = event.at
        self._spend[name] = self._spend.get(name, Usage()) + _read_spend(event)
        span.attributes |= _describe_usage(self._spend[name])
        if "call_ended" in data:
            self._add_call(event, start)

    def _describe_node(self, view: NodeView, data: Mapping[str, Any], *, is_generated: bool) -> Attributes:
        reason = view.end_reason
        is_selected = self._view.best == view.id
        state = "selected" if is_selected else "pruned" if view.reason == "pruned" else reason or "unfinished"
        attributes: Attributes = {"reasoner.node.id": view.id, "reasoner.node.state": state}
        if is_generated:
            attributes |= {OPERATION: "text_completion", _PROVIDER_NAME: PROVIDER}
            model = view.model or self._spec.get("model")
            if model is not None:
                attributes |= {MODEL: model, RESPONSE_MODEL: model}
        if reason is not None:
            attributes[FINISH_REASONS] = (reason,)
        for name, value in (("score", view.score), ("probe", view.probe), ("copy_of", data.get("copy_of"))):
            if value is not None:
                attributes[f"reasoner.node.{name}"] = value
        if self._with_content:
            attributes[OUTPUT_MESSAGES] = write_output(split_text(view.text, view.parts), reason or "unfinished")
        return attributes

    def _add_call(self, event: Event, start: float) -> None:
        data: dict[str, Any] = event.data
        is_error = data["call_ended"] != "ok"
        attributes: Attributes = {
            OPERATION: "execute_tool",
            "gen_ai.tool.name": "python",
            "gen_ai.tool.type": "extension",
            "reasoner.node.id": data["node"],
        }
        if is_error:
            attributes["error.type"] = data["call_ended"]
        if self._with_content:
            attributes["gen_ai.tool.call.result"] = data["text"]
        self.others.append(
            SpanRecord(
                name=event.key or "",
                parent=data["node"],
                title="execute_tool python",
                start=start,
                end=event.at,
                attributes=attributes,
                kind="internal",
                is_error=is_error,
            )
        )

    def _add_evaluation(self, event: Event, nodes: list[str]) -> None:
        """Add the span of a verdict, and mark it on the span of the node that it is about."""
        data: dict[str, Any] = event.data
        verifier: Mapping[str, Any] = self._spec.get("verifier") or {}
        name, usage = str(verifier.get("kind", "verifier")), _read_spend(event)
        verdict: Attributes = {EVALUATION: name}
        if data["score"] is not None:
            verdict[SCORE] = data["score"]
        else:
            verdict["error.type"] = "no_verdict"
        attributes: Attributes = {_SPAN_KIND: "EVALUATOR", OPERATION: "evaluate", _PROVIDER_NAME: PROVIDER}
        attributes |= verdict | _describe_usage(usage)
        model = data.get("model") or verifier.get("model") or (self._spec.get("model") if usage.total else None)
        if model is not None:
            attributes[MODEL] = model
        if len(nodes) == 1:
            self.nodes[nodes[0]].marks.append(("gen_ai.evaluation.result", event.at, verdict))
        else:
            attributes["reasoner.nodes"] = tuple(nodes)
        self.others.append(
            SpanRecord(
                name=event.key or "",
                parent=nodes[0] if len(nodes) == 1 else JOB,
                title=" ".join(["evaluate", model or name, *nodes]),
                start=event.at - data.get("seconds", 0.0),
                end=event.at,
                attributes=attributes,
                is_error=data["score"] is None,
            )
        )

    def _add_bill(self, event: Event) -> None:
        """Add a span for what an event of another type costs, such as tokens that arrived after a cancellation."""
        usage = _read_spend(event)
        if not (usage.total or usage.prompt or usage.cost):
            return
        attributes: Attributes = {OPERATION: event.type, _PROVIDER_NAME: PROVIDER, **_describe_usage(usage)}
        model = event.data.get("model") or self._spec.get("model")
        if model is not None:
            attributes[MODEL] = str(model)
        self.others.append(
            SpanRecord(
                name=event.key or "",
                parent=JOB,
                title=event.type,
                start=event.at,
                end=event.at,
                attributes=attributes,
            )
        )


def _read_spend(event: Event) -> Usage:
    """Return an event's addition to the bill, without fields of other versions."""
    return Usage.model_validate({name: value for name, value in event.spend.items() if name in Usage.model_fields})


def _describe_usage(usage: Usage) -> Attributes:
    """Return the attributes of a bill; none for one of nothing."""
    if not (usage.total or usage.prompt or usage.cost or usage.verifier_cached):
        return {}
    verifier_input = usage.verifier_computed - usage.verifier_generated + usage.verifier_cached
    attributes: Attributes = {
        INPUT_TOKENS: usage.prompt + verifier_input,
        CACHED_TOKENS: usage.cached + usage.verifier_cached,
        OUTPUT_TOKENS: usage.generated + usage.verifier_generated,
    }
    if usage.thought:
        attributes[THOUGHT_TOKENS] = usage.thought
    if usage.cost:
        attributes[COST] = usage.cost
    return attributes
