"""A search told in words: a job's events, folded into lines for people and into the numbers of the answer.

What is told depends on the events alone: whoever reads them again, in another process on another day, tells the same.
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

LONGEST_ANSWER = 80
"""Characters of an answer that fit in a line."""
FIRST_WIDTH = 8
"""Branches that are worth a line of their own; then twice as many each time."""


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended. ``content`` is the chosen solution without its thoughts, ``visible`` its length in tokens: where
    there were thoughts, by its share of the characters."""

    status: str
    at: float
    result: JobResult | None
    error: JobError | None
    usage: Usage
    content: str
    visible: int


@dataclass(slots=True)
class _Said:
    """What is known of one answer."""

    shown: str
    count: int = 0
    score: float | None = None


class Narration:
    """One job's, by its specification as it is stored. ``concise`` leaves out single branches."""

    def __init__(self, spec: dict[str, Any], *, concise: bool = False) -> None:
        self.text = ""
        """All that was told."""
        self.end: End | None = None
        """Once the job has ended."""
        self._spec = spec
        self._concise = concise
        self._tokens: dict[str, int] = {}
        self._fresh: set[str] = set()
        self._answers: dict[str, str] = {}
        """Classes of answers by node."""
        self._said: dict[str, _Said] = {}
        self._leader: str | None = None
        self._branches = 0
        self._deepest = 1
        self._widest = FIRST_WIDTH

    def take(self, event: Event) -> str:
        """What there is to tell of the next event, in whole lines; mostly nothing."""
        self.end = None  # a failed job may be retried
        told = self._told(event)
        self.text += told
        return told

    def _told(self, event: Event) -> str:
        data: dict[str, Any] = event.data
        match event.type:
            case "job.started":
                return self._beginning()
            case "job.queued" if "reason" in data:  # its detail may name addresses of this service
                return f"Waiting: {data['reason'].replace('_', ' ')}.\n"
            case "job.resumed":
                return "Going on.\n"
            case "node":
                return self._grown(data)
            case "score":
                return self._scored(data)
            case "prune" if not self._concise:
                return f"{_count(len(data['nodes']), 'branch', 'branches')} given up.\n"
            case "decision" if not self._concise and "stages" in data:
                return _plan(data)
        status = event.type.removeprefix("job.")
        if event.type.startswith("job.") and status in TERMINAL_STATUSES:
            return self._ending(status, event)
        return ""

    def _beginning(self) -> str:
        strategy, budget = self._spec["strategy"], self._spec["budget"]
        width = f" of {strategy['n']}" if "n" in strategy else ""
        limits = [f"{budget[name]:g} {name}" for name in LIMITS if budget[name] is not None]
        return f"Searching by {strategy['name']}{width}, for at most {' and '.join(limits) or 'what it takes'}.\n"

    def _grown(self, data: dict[str, Any]) -> str:
        node: str = data["node"]
        self._tokens[node] = self._tokens.get(node, 0) + data["tokens"]
        if data.get("fresh"):
            self._fresh.add(node)
        if not data["final"]:
            return ""
        told = "" if self._concise else self._progress(node)
        if data["answer"] is None:
            return told
        answer: str = data["answer"]
        self._answers[node] = key = canonicalize(answer, self._spec["answer"]["compare"])
        self._said.setdefault(key, _Said(_short(answer))).count += 1
        if not self._concise:
            told += f"Branch {node} answers {self._said[key].shown}.\n"
        return told + self._lead()

    def _progress(self, node: str) -> str:
        """Says so when the search gets a step deeper, or twice as wide."""
        self._branches += 1
        depth = node.count(".") + 1
        if depth <= self._deepest and self._branches < self._widest:
            return ""
        self._deepest = max(self._deepest, depth)
        while self._widest <= self._branches:
            self._widest *= 2
        branches = _count(self._branches, "branch", "branches")
        return f"{branches}, {self._deepest} deep, {sum(self._tokens.values())} tokens so far.\n"

    def _scored(self, data: dict[str, Any]) -> str:
        key = self._answers.get(data["node"])
        if key is None:
            return ""
        said = self._said[key]
        said.score = data["score"] if said.score is None else max(said.score, data["score"])
        return self._lead()

    def _lead(self) -> str:
        """Says so when another answer is ahead: by its best score, then by how many gave it, then by who came first."""
        key, said = max(self._said.items(), key=lambda item: (item[1].score or 0.0, item[1].count))
        if key == self._leader:
            return ""
        self._leader = key
        score = "" if said.score is None else f", scored {said.score:.2g}"
        return f"In the lead: {said.shown}{score}, given by {said.count} of {len(self._answers)}.\n"

    def _ending(self, status: str, event: Event) -> str:
        data: Any = event.data
        result = None if data["result"] is None else JobResult.model_validate(data["result"])
        error = None if data["error"] is None else JobError.model_validate(data["error"])
        text = (result and result.text) or ""
        content = strip_thinking(text) or ""
        visible = 0 if not text else round(self._length(result) * len(content) / len(text))
        usage = Usage.model_validate(data["usage"])
        self.end = End(status, event.at, result, error, usage, content, visible)
        return self._closing(self.end)

    def _length(self, result: JobResult | None) -> int:
        """Tokens of the chosen solution."""
        node, length = result.node if result and result.node else "", 0
        while node and node not in self._fresh:
            length += self._tokens.get(node, 0)
            node = node.rpartition(".")[0]
        return length

    def _closing(self, end: End) -> str:
        spent = f"{end.usage.total} tokens, {end.usage.verifier_computed} of them the verifier's"
        if end.error is not None:
            return f"Failed: {end.error.message}.\n"
        if end.result is None or end.status == "cancelled":
            return f"Cancelled, after {spent}.\n"
        if end.result.answer is None:
            return f"No branch stated an answer; {spent}.\n"
        sure = "" if end.result.confidence is None else f", with confidence {end.result.confidence:.2g}"
        return f"Chosen: {_short(end.result.answer)}{sure}; {spent}.\n"


def _plan(data: dict[str, Any]) -> str:
    stages = ", then ".join(str(stage["name"]) for stage in data["stages"])
    return f"Plan after a probe: {stages}.\n" if stages else "The probe was enough.\n"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _short(answer: str) -> str:
    line = " ".join(answer.split())
    return line if len(line) <= LONGEST_ANSWER else line[: LONGEST_ANSWER - 1] + "…"
