"""Narration of a search: the events of a job as lines for people, and what an OpenAI answer needs of its end.

The text depends on the events alone, so that every process that reads them produces the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reasoner.admission.effort import LIMITS
from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.budget.usage import Usage
from reasoner.jobs.event import Event
from reasoner.jobs.job import TERMINAL_STATUSES, JobError, JobResult

MAX_ANSWER_CHARS = 80
"""Characters of an answer that are shown in a line."""
FIRST_WIDTH = 8
"""Number of branches at which progress is first reported; it doubles each time."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    ``content`` is the chosen solution without its thinking, ``num_visible_tokens`` the length of that; if there was
    thinking, estimated by the share of the characters.
    """

    status: str
    at: float
    result: JobResult | None
    error: JobError | None
    usage: Usage
    content: str
    num_visible_tokens: int


@dataclass(slots=True)
class _AnswerClass:
    """Equivalent answers: one of them as shown, how many branches gave it, and the best score."""

    shown: str
    count: int = 0
    score: float | None = None


class Narration:
    """The text about one job, from its stored specification and its events. ``concise`` leaves out single branches."""

    def __init__(self, spec: dict[str, Any], *, concise: bool = False) -> None:
        self.text = ""
        """All text so far."""
        self.end: JobEnd | None = None
        """Set once the job has ended."""
        self._spec = spec
        self._is_concise = concise
        self._num_tokens: dict[str, int] = {}
        """Tokens by node."""
        self._fresh_nodes: set[str] = set()
        self._class_keys: dict[str, str] = {}
        """Canonical answers by node."""
        self._classes: dict[str, _AnswerClass] = {}
        self._leader: str | None = None
        self._num_branches = 0
        self._max_depth = 1
        self._next_width = FIRST_WIDTH

    def add(self, event: Event) -> str:
        """Return the text about the next event: whole lines, most often none."""
        self.end = None  # a failed job may be retried
        lines = self._describe(event)
        self.text += lines
        return lines

    def _describe(self, event: Event) -> str:
        data: dict[str, Any] = event.data
        match event.type:
            case "job.started":
                return self._describe_start()
            case "job.queued" if "reason" in data:  # without its detail, which may name internal addresses
                return f"Waiting: {data['reason'].replace('_', ' ')}.\n"
            case "job.resumed":
                return "Resumed.\n"
            case "node":
                return self._add_node(data)
            case "score":
                return self._add_score(data)
            case "prune" if not self._is_concise:
                return f"{_count(len(data['nodes']), 'branch', 'branches')} pruned.\n"
            case "decision" if not self._is_concise and "stages" in data:
                return _describe_stages(data)
        status = event.type.removeprefix("job.")
        if event.type.startswith("job.") and status in TERMINAL_STATUSES:
            self.end = self._read_end(status, event)
            return _describe_end(self.end)
        return ""

    def _describe_start(self) -> str:
        strategy, budget = self._spec["strategy"], self._spec["budget"]
        width = f" of {strategy['n']}" if "n" in strategy else ""
        limits = [f"{budget[name]:g} {name}" for name in LIMITS if budget[name] is not None]
        budget_text = f"at most {' and '.join(limits)}" if limits else "as long as it takes"
        return f"Searching by {strategy['name']}{width}, for {budget_text}.\n"

    def _add_node(self, data: dict[str, Any]) -> str:
        node: str = data["node"]
        self._num_tokens[node] = self._num_tokens.get(node, 0) + data["tokens"]
        if data.get("fresh"):
            self._fresh_nodes.add(node)
        if not data["final"]:
            return ""
        text = "" if self._is_concise else self._describe_progress(node)
        if data["answer"] is None:
            return text
        answer: str = data["answer"]
        self._class_keys[node] = key = canonicalize(answer, self._spec["answer"]["compare"])
        self._classes.setdefault(key, _AnswerClass(_shorten(answer))).count += 1
        if not self._is_concise:
            text += f"Branch {node} answers {self._classes[key].shown}.\n"
        return text + self._describe_new_leader()

    def _describe_progress(self, node: str) -> str:
        """Return a line when the search gets a step deeper, or twice as wide."""
        self._num_branches += 1
        depth = node.count(".") + 1
        if depth <= self._max_depth and self._num_branches < self._next_width:
            return ""
        self._max_depth = max(self._max_depth, depth)
        while self._next_width <= self._num_branches:
            self._next_width *= 2
        branches = _count(self._num_branches, "branch", "branches")
        return f"{branches}, {self._max_depth} deep, {sum(self._num_tokens.values())} tokens so far.\n"

    def _add_score(self, data: dict[str, Any]) -> str:
        key = self._class_keys.get(data["node"])
        if key is None:
            return ""
        answers = self._classes[key]
        answers.score = data["score"] if answers.score is None else max(answers.score, data["score"])
        return self._describe_new_leader()

    def _describe_new_leader(self) -> str:
        """Return a line when another answer leads: by best score, then by number of branches, then by arrival."""
        key, leader = max(self._classes.items(), key=lambda item: (item[1].score or 0.0, item[1].count))
        if key == self._leader:
            return ""
        self._leader = key
        score = "" if leader.score is None else f", scored {leader.score:.2g}"
        return f"In the lead: {leader.shown}{score}, given by {leader.count} of {len(self._class_keys)}.\n"

    def _read_end(self, status: str, event: Event) -> JobEnd:
        data: Any = event.data
        result = None if data["result"] is None else JobResult.model_validate(data["result"])
        error = None if data["error"] is None else JobError.model_validate(data["error"])
        text = (result and result.text) or ""
        content = strip_thinking(text) or ""
        num_visible = round(self._count_solution_tokens(result) * len(content) / len(text)) if text else 0
        return JobEnd(status, event.at, result, error, Usage.model_validate(data["usage"]), content, num_visible)

    def _count_solution_tokens(self, result: JobResult | None) -> int:
        """Return the tokens of the chosen solution, from its leaf up to the node that began it."""
        node, length = result.node if result and result.node else "", 0
        while node and node not in self._fresh_nodes:
            length += self._num_tokens.get(node, 0)
            node = node.rpartition(".")[0]
        return length


def _describe_end(end: JobEnd) -> str:
    spent = f"{end.usage.total} tokens, {end.usage.verifier_computed} of them the verifier's"
    if end.error is not None:
        return f"Failed: {end.error.message}.\n"
    if end.result is None or end.status == "cancelled":
        return f"Cancelled, after {spent}.\n"
    if end.result.answer is None:
        return f"No branch stated an answer; {spent}.\n"
    confidence = "" if end.result.confidence is None else f", with confidence {end.result.confidence:.2g}"
    return f"Chosen: {_shorten(end.result.answer)}{confidence}; {spent}.\n"


def _describe_stages(data: dict[str, Any]) -> str:
    stages = ", then ".join(str(stage["name"]) for stage in data["stages"])
    return f"Plan after a probe: {stages}.\n" if stages else "The probe was enough.\n"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _shorten(answer: str) -> str:
    line = " ".join(answer.split())
    return line if len(line) <= MAX_ANSWER_CHARS else line[: MAX_ANSWER_CHARS - 1] + "…"
