"""A job that has ended, with all that its journal recorded of its branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from reasoner.jobs.events import Event
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import accept_unknown_verifiers
from reasoner.jobs.view import JobView, NodeView
from reasoner.thoughts import strip_delimiters
from reasoner.training_data.rows import ChatMessage, JobRow


class LeftOut(Exception):
    """The job has no row of a format, for the reason in the message, a word for a table of counts."""


@dataclass(slots=True)
class NodeTokens:
    """The tokens that a node added to its parent's, as far as the journal has them."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None
    """``None`` if the job does not record them."""
    mask: list[bool] = field(default_factory=list)
    """True for generated tokens."""
    prompt_ids: list[int] | None = None
    """All tokens through a node that was not generated."""
    is_copy: bool = False
    has_ids: bool = True
    """False if the server names no tokens."""


@dataclass(eq=False)
class RecordedJob:
    """A job as the API shows it, and what the fold of its events does not keep: tokens and log-probabilities."""

    document: Mapping[str, Any]
    view: JobView
    tokens: Mapping[str, NodeTokens]
    """By node; of the root the prompt."""

    @classmethod
    def from_events(cls, document: Mapping[str, Any], events: Iterable[Event]) -> RecordedJob:
        """Return a job with its events, which are read once."""
        view, tokens = JobView(), {"": NodeTokens()}
        for event in events:
            view.apply(event)
            if event.type == "node":
                _add_part(tokens.setdefault(str(event.data["node"]), NodeTokens()), event.data)
            elif event.type == "prompt":
                _add_prompt(tokens.setdefault(str(event.data["node"]), NodeTokens()), event.data)
        return cls(document, view, tokens)

    @cached_property
    def spec(self) -> JobSpec:
        with accept_unknown_verifiers():
            return JobSpec.model_validate(self.document["spec"])

    @property
    def result(self) -> Mapping[str, Any]:
        """The result; empty if the job has none."""
        return self.document["result"] or {}

    @property
    def columns(self) -> JobRow:
        """The columns of all rows."""
        return {"job": self.document["id"], "finished_at": self.document["finished_at"]}

    @cached_property
    def prompt(self) -> list[ChatMessage]:
        """The question as the model got it. Raises ``LeftOut`` for one with calls, which need columns of their own."""
        if self.spec.candidates is not None:
            raise LeftOut("candidates_of_the_client")
        messages = self.spec.to_messages()
        if self.spec.functions or any(message.keys() - {"role", "content"} for message in messages):
            raise LeftOut("functions")
        return [cast("ChatMessage", message) for message in messages]

    @cached_property
    def solutions(self) -> list[NodeView]:
        """Solutions of the question that the model ended, without copies and without output of tools in their text."""
        return [
            node
            for node in self._iterate_solutions()
            if (node.end_reason in ("answer", "stop"))
            and node.solution.strip()
            and not self.tokens[node.id].is_copy
            and not has_tool_output(node)
            and self._answers_question(node)
        ]

    def _iterate_solutions(self) -> Iterator[NodeView]:
        return (node for name, node in self.view.nodes.items() if name and node.is_solution)

    def _answers_question(self, node: NodeView) -> bool:
        """Return True for a solution of the job's own conversation, not of one that a strategy began."""
        begin = node.lineage()[0].parent
        return begin is not None and (not begin.path or (self.spec.models is not None and len(begin.path) == 1))


def has_tool_output(node: NodeView) -> bool:
    """Return True if a part of the solution was written by a tool."""
    return any(part.origin == "tool" for above in node.lineage() for part in above.parts)


def make_completion(node: NodeView) -> list[ChatMessage]:
    """Return a solution as the assistant's message, with the thought of a model whose thoughts are known apart."""
    thought = node.thought_text if node.thought is not None else ""
    if not thought.strip():
        return [{"role": "assistant", "content": node.solution}]
    return [{"role": "assistant", "content": node.answer_text.strip(), "reasoning_content": strip_delimiters(thought)}]


def _add_part(tokens: NodeTokens, data: Mapping[str, Any]) -> None:
    """Add a part of a branch. The last part of a branch has the ranges of all of its tokens."""
    ids = data["token_ids"]
    tokens.has_ids = tokens.has_ids and all(isinstance(token, int) for token in ids)
    tokens.ids += ids
    tokens.is_copy = "copy_of" in data
    if "logprobs" in data:
        tokens.logprobs = [*(tokens.logprobs or ()), *data["logprobs"]]
    parts: Sequence[Sequence[Any]] = data.get("parts", ())
    if parts and sum(count for *_, count in parts) == len(tokens.ids):
        tokens.mask = [origin == "generated" for _, origin, _, count in parts for _ in range(count)]
    else:  # without parts all of it is generated, or brought by the client
        tokens.mask += [not parts and not data.get("given")] * len(ids)


def _add_prompt(tokens: NodeTokens, data: Mapping[str, Any]) -> None:
    ids = data["token_ids"]
    tokens.has_ids = all(isinstance(token, int) for token in ids)
    tokens.prompt_ids = ids if tokens.has_ids else None
