"""Narration of a search: a line of text for an event of a job, and what an answer needs of its end.

The text depends on the events alone, so that every process that reads them produces the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.budget.usage import Usage
from reasoner.jobs.events import EndData, Event
from reasoner.jobs.job import Alternative, JobError, JobResult, Status, find_end
from reasoner.jobs.view import JobView, NodeView
from reasoner.tree import Node

Cut = Literal["length", "context", "content_filter"]
"""``context``: the model's context was full. ``length`` stands for every other limit: of tokens and of time."""

ReasoningContent = Literal["thought", "narration"]
"""Text that an answer shows as its reasoning: the thought of the chosen solution, or the narration of the search."""

MAX_ANSWER_CHARS = 80
"""Characters of an answer that are shown in a line."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    ``content`` is the chosen solution without its thought, ``other_contents`` are those of the alternatives.
    ``cuts`` has for each of them what ended it, if not the model did, and ``stops`` the job's stop string that did.
    ``num_visible_tokens`` is the length of all that and of the calls of functions; if the model's thoughts are not
    known, estimated by the share of the characters.
    """

    status: Status
    at: float
    result: JobResult | None
    error: JobError | None
    usage: Usage
    content: str
    num_visible_tokens: int
    other_contents: tuple[str, ...] = ()
    cuts: tuple[Cut | None, ...] = ()
    stops: tuple[str | None, ...] = ()


@dataclass(slots=True)
class _AnswerClass:
    """Equivalent answers: one of them as shown, the number of branches, and the best score."""

    shown: str
    is_strict: bool
    count: int = 0
    score: float = 0.0


class Narration:
    """The text about one job, from its stored specification and its events. ``concise`` leaves out single branches."""

    def __init__(self, spec: dict[str, Any], *, concise: bool = False) -> None:
        self.text = ""
        """All text so far."""
        self.end: JobEnd | None = None
        """Set once the job has ended."""
        self._spec = spec
        self._is_concise = concise
        self.has_thoughts: bool | None = None
        """True once a branch has shown a thought; ``None`` before the first part of a branch."""
        self._view = JobView()
        self._classes: dict[tuple[str, bool], _AnswerClass] = {}
        """Answers by their canonical form."""
        self._class_of: dict[str, _AnswerClass] = {}
        """Answers by node."""
        self._leader: _AnswerClass | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the job has written or its verifier computed so far."""
        return self._view.tokens

    def add(self, event: Event) -> str:
        """Return the text about the next event: whole lines, most often one or none."""
        self.end = None  # a failed job may be retried
        self._view.apply(event)
        text = "".join(f"{line}\n" for line in self._describe(event))
        self.text += text
        return text

    def _describe(self, event: Event) -> Iterator[str]:
        data: dict[str, Any] = event.data
        match event.type:
            case "job.started":
                strategy = self._spec["strategy"]
                yield f"Searching by {strategy['name']}" + (f" of {strategy['n']}." if "n" in strategy else ".")
            case "job.queued" if "reason" in data:  # without its detail, which may name internal addresses
                yield f"Waiting: {data['reason'].replace('_', ' ')}."
            case "job.resumed":
                yield "Resumed."
            case "node":
                yield from self._describe_part(self._view.nodes[data["node"]])
            case "score" if data["node"] in self._class_of and data["score"] is not None:
                answers = self._class_of[data["node"]]
                answers.score = max(answers.score, data["score"])
                yield from self._describe_new_leader()
            case "prune" if not self._is_concise:
                yield f"Pruned: {', '.join(data['nodes'])}."
            case "compare" if not self._is_concise:
                first, second = data["nodes"]
                verdict = "no verdict" if data["score"] is None else f"{data['score']:.2f} for {first}"
                yield f"Compared {first} with {second}: {verdict}."
            case "decision" if data.get("players"):
                best = data["players"][0]
                yield f"Strongest of {len(data['players'])}: {best['node']}, with probability {best['best']:.2g}."
            case "decision" if not self._is_concise and "shown" in data:
                yield f"Reading {len(data['shown'])} solutions: {', '.join(data['shown'])}."
            case "decision" if not self._is_concise and "stages" in data:
                yield f"After a probe: {', then '.join(str(stage['name']) for stage in data['stages']) or 'stop'}."
            case _ if find_end(event.type) is not None:
                self.end = self._read_end(event)
                yield _describe_end(self.end)

    def _describe_part(self, node: NodeView) -> Iterator[str]:
        """Yield lines about a branch of which a part has arrived."""
        if node.end_reason != "said":
            shows = any(part.kind == "thought" and part.num_chars for part in node.parts)
            self.has_thoughts = shows or bool(self.has_thoughts)
        if node.end_reason is None:
            return
        if not self._is_concise:
            yield f"Branch {node.id}: {node.end_reason if node.answer is None else _shorten(node.answer)}."
        if node.answer is not None:
            key = node.vote_key or canonicalize(node.answer, self._spec["answer"]["compare"])
            is_strict = node.answer_level == "strict"
            new = _AnswerClass(_shorten(node.answer), is_strict)
            self._class_of[node.id] = answers = self._classes.setdefault((key, is_strict), new)
            answers.count += 1
            yield from self._describe_new_leader()

    def _describe_new_leader(self) -> Iterator[str]:
        """Yield a line when another answer leads: a strict one, by best score, number of branches, arrival."""
        leader = max(self._classes.values(), key=lambda answers: (answers.is_strict, answers.score, answers.count))
        if leader is not self._leader:
            self._leader = leader
            score = f", score {leader.score:.2g}" if leader.score else ""
            yield f"Leading: {leader.shown}{score}, {leader.count} of {len(self._class_of)}."

    def _read_end(self, event: Event) -> JobEnd:
        end, status = EndData.model_validate(event.data), self._view.status
        shown = [] if end.result is None else end.result.solutions
        nodes = [self._view.nodes.get(solution.node or "", self._view.root) for solution in shown]
        contents = [_read_content(solution) for solution in shown]
        counted: set[Node] = set()
        solutions = zip(shown, nodes, contents, strict=True)
        return JobEnd(
            status=status,
            at=event.at,
            result=end.result,
            error=end.error,
            usage=end.usage,
            content=contents[0] if contents else "",
            num_visible_tokens=sum(self._count_visible_tokens(*solution, counted) for solution in solutions),
            other_contents=tuple(contents[1:]),
            cuts=tuple(_find_cut(node, status) for node in nodes),
            stops=tuple(node.stop for node in nodes),
        )

    def _count_visible_tokens(
        self, solution: JobResult | Alternative, node: NodeView, content: str, counted: set[Node]
    ) -> int:
        """Return the generated tokens of a solution's content and calls, without those of the nodes in ``counted``.

        The nodes that it has are added: those of a tree search may belong to several solutions.
        """
        new = [self._view.nodes[each.id] for each in node.lineage() if each not in counted]
        counted.update(new)
        num_tokens = sum(each.written_tokens for each in new)
        if solution.text and node.thought is None:
            shown = (strip_thinking(solution.text) or "") if solution.tool_calls else content
            return round(num_tokens * len(shown) / len(solution.text))
        return num_tokens - sum(each.own_thought_tokens for each in new)


def _find_cut(node: NodeView, status: Status) -> Cut | None:
    """Return what ended a branch; ``None`` if the model did. One that has not ended was cut by the job's end."""
    if node.end_reason is None:
        return None if status == "completed" else "length"
    if node.refusal is not None and node.refusal.kind == "filtered":
        return "content_filter"
    if node.end_reason == "context":
        return "context"
    return None if node.end_reason in ("answer", "stop") else "length"


def _read_content(solution: JobResult | Alternative) -> str:
    return (strip_thinking(solution.text or "") or "") if solution.content is None else solution.content


def _describe_end(end: JobEnd) -> str:
    tokens = f"{end.usage.total} tokens"
    if end.error is not None:
        return f"Failed: {end.error.message}."
    if end.result is None or end.status == "cancelled":
        return f"Cancelled: {tokens}."
    if end.result.answer is None:
        return f"{'Chosen a text without an answer' if end.status == 'completed' else 'No answer'}: {tokens}."
    confidence = "" if end.result.confidence is None else f", confidence {end.result.confidence:.2g}"
    return f"Chosen: {_shorten(end.result.answer)}{confidence}, {tokens}."


def _shorten(answer: str) -> str:
    line = " ".join(answer.split())
    return line if len(line) <= MAX_ANSWER_CHARS else line[: MAX_ANSWER_CHARS - 1] + "…"
