"""Narration of a search: a line of text for an event of a job, and what an OpenAI answer needs of its end.

The text depends on the events alone, so that every process that reads them produces the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.job import TERMINAL_STATUSES, Alternative, JobError, JobResult, Status
from reasoner.tree import read_answer_level, read_parts, read_refusal

Cut = Literal["length", "content_filter"]
"""``length``, OpenAI's word, stands for every limit: of tokens, of time and of the model's context."""

MAX_ANSWER_CHARS = 80
"""Characters of an answer that are shown in a line."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    ``content`` is the chosen solution without its thought, ``other_contents`` are those of the alternatives.
    ``cuts`` has for each of them what ended it, if not the model did.
    ``num_visible_tokens`` is the length of all that; if the model's thoughts are not known, estimated by the share of
    the characters.
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
        self._num_tokens: Counter[str] = Counter()
        """Tokens by node."""
        self._num_thought: dict[str, int] = {}
        """Generated tokens of thoughts by node."""
        self._fresh_nodes: set[str] = set()
        self._cuts: dict[str, Cut | None] = {}
        """Cuts by node that has ended; ``None`` for one that the model ended."""
        self._classes: dict[tuple[str, bool], _AnswerClass] = {}
        """Answers by their canonical form."""
        self._class_of: dict[str, _AnswerClass] = {}
        """Answers by node."""
        self._leader: _AnswerClass | None = None

    def add(self, event: Event) -> str:
        """Return the text about the next event: whole lines, most often one or none."""
        self.end = None  # a failed job may be retried
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
                yield from self._describe_node(data)
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
        status = event.type.removeprefix("job.")
        if event.type.startswith("job.") and status in TERMINAL_STATUSES:
            self.end = self._read_end(cast(Status, status), event)
            yield _describe_end(self.end)

    def _describe_node(self, data: dict[str, Any]) -> Iterator[str]:
        node: str = data["node"]
        self._num_tokens[node] += 0 if data.get("given") or "call_ended" in data else data["tokens"]
        if "thought" in data:
            own = (part for part in read_parts(data) if (part.kind, part.origin) == ("thought", "generated"))
            self._num_thought[node] = sum(part.num_tokens for part in own)
        if data["reason"] != "said":
            shows = any(part.kind == "thought" and part.num_chars for part in read_parts(data))
            self.has_thoughts = shows or bool(self.has_thoughts)
        if data.get("fresh"):
            self._fresh_nodes.add(node)
        if not data["final"]:
            return
        self._cuts[node] = _find_cut(data)
        answer: str | None = data["answer"]
        if not self._is_concise:
            yield f"Branch {node}: {data['reason'] if answer is None else _shorten(answer)}."
        if answer is not None:
            key = data.get("vote") or canonicalize(answer, self._spec["answer"]["compare"])
            is_strict = read_answer_level(data) == "strict"
            new = _AnswerClass(_shorten(answer), is_strict)
            self._class_of[node] = answers = self._classes.setdefault((key, is_strict), new)
            answers.count += 1
            yield from self._describe_new_leader()

    def _describe_new_leader(self) -> Iterator[str]:
        """Yield a line when another answer leads: a strict one, by best score, number of branches, arrival."""
        leader = max(self._classes.values(), key=lambda answers: (answers.is_strict, answers.score, answers.count))
        if leader is not self._leader:
            self._leader = leader
            score = f", score {leader.score:.2g}" if leader.score else ""
            yield f"Leading: {leader.shown}{score}, {leader.count} of {len(self._class_of)}."

    def _read_end(self, status: Status, event: Event) -> JobEnd:
        data: Any = event.data
        result = None if data["result"] is None else JobResult.model_validate(data["result"])
        error = None if data["error"] is None else JobError.model_validate(data["error"])
        shown = [] if result is None else result.solutions
        contents = [_read_content(solution) for solution in shown]
        counted: set[str] = set()
        num_visible = sum(self._count_visible_tokens(*pair, counted) for pair in zip(shown, contents, strict=True))
        usage = Usage.model_validate(data["usage"])
        content = contents[0] if contents else ""
        otherwise: Cut | None = None if status == "completed" else "length"
        cuts = tuple(self._cuts.get(part.node or "", otherwise) for part in shown)
        return JobEnd(status, event.at, result, error, usage, content, num_visible, tuple(contents[1:]), cuts)

    def _count_visible_tokens(self, solution: JobResult | Alternative, content: str, counted: set[str]) -> int:
        """Return the generated tokens of a solution's content. Tokens of the nodes in ``counted`` are none of them.

        The nodes that it has are added: those of a tree search may belong to several solutions.
        """
        num_tokens = num_thought = 0
        node = solution.node or ""
        while node and node not in self._fresh_nodes:  # up to the node that began the conversation
            if node not in counted:
                num_tokens += self._num_tokens[node]
                num_thought += self._num_thought.get(node, 0)
            counted.add(node)
            node = node.rpartition(".")[0]
        if solution.text and solution.node not in self._num_thought:
            return round(num_tokens * len(content) / len(solution.text))
        return num_tokens - num_thought


def _find_cut(data: dict[str, Any]) -> Cut | None:
    """Return what ended the branch of a node's data; ``None`` if the model did."""
    refusal = read_refusal(data)
    if refusal is not None and refusal.kind == "filtered":
        return "content_filter"
    return None if data["reason"] in ("answer", "stop") else "length"


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
