"""Calls of the client's functions with which solutions end, as answers on which the solutions vote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.extraction.phrases import ExtractionStopped
from reasoner.answers.json_schema import is_valid_json
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import NamedChoice
from reasoner.search.policies.call_format import find_model_format, find_python_format
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import FunctionTool, MalformedCall, ToolCall, vote_key
from reasoner.tree import AnswerLevel, Node, Reason

REPLY = "reply"
"""Vote of solutions that call nothing and state no answer of the job's kind: they reply in words."""
STOPPED_BY_REASON: Mapping[Reason, ExtractionStopped] = {"step": "step", "stop": "end"}
"""Position for answer extraction by the reason of a branch's end; all other reasons cut the text."""


@dataclass(frozen=True, slots=True)
class SolutionEnd:
    """The answer with which a branch ends, or the calls that are its answer."""

    answer: str | None = None
    """The stated answer, calls as JSON, or the words of a reply; ``None`` if there is none."""
    level: AnswerLevel | None = None
    vote_key: str | None = None
    """Text that is the same for solutions of equal calls; ``None`` where answers are compared."""
    calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    """The text of the answer without thought and calls, of a job with functions."""
    fault: str | None = None
    """Reason for which calls, or their absence, are no answer."""

    def describe(self) -> dict[str, Any]:
        """Return the journal data."""
        calls = [[call.name, call.arguments] for call in self.calls]
        more = {"vote": self.vote_key, "calls": calls or None, "words": self.content, "call_fault": self.fault}
        given = {name: value for name, value in more.items() if value is not None}
        return {"answer": self.answer, "answer_level": self.level, **given}


class FunctionReader:
    """Reads the calls of one job's solutions, and the words of those that are messages in channels."""

    def __init__(self, spec: JobSpec, tool_format: ToolFormat) -> None:
        self._spec = spec
        self._format = tool_format
        self._tools = {tool.name: tool for tool in list_functions(spec)}

    async def read(self, text: str, *, has_thought: bool) -> SolutionEnd:
        """Return the calls in a finished solution's text, or its words, which may state an answer.

        ``has_thought``: False if a thought, whose calls are no answer, is no part of the text.
        """
        if has_thought and not self._format.has_channels:
            text = strip_thinking(text) or ""
        try:
            parsed = self._format.parse(text, list(self._tools.values()))
        except MalformedCall as error:
            return SolutionEnd(fault=str(error))
        calls, words = parsed.calls, parsed.text.strip()
        fault = await self._find_fault(calls)
        if fault is not None:
            return SolutionEnd(calls=calls, content=words, fault=fault)
        if not calls:
            return SolutionEnd(content=words)
        return SolutionEnd(
            show_calls(calls),
            "strict",
            vote_key=f"calls {vote_key(calls, self._spec.tool_vote)}",
            calls=calls,
            content=words,
        )

    def read_cut_words(self, text: str, *, has_thought: bool) -> str:
        """Return the words of a solution that was cut off: a part of a call is none. ``has_thought`` as in ``read``."""
        if has_thought and not self._format.has_channels:
            text = strip_thinking(text) or ""
        return self._format.read_cut_words(text, list(self._tools.values()), must_call=self.must_call)

    @property
    def needs_special_tokens(self) -> bool:
        """True if special tokens may stand between the calls, so that they have to be in the text."""
        return bool(self._format.delimiters)

    @property
    def has_functions(self) -> bool:
        """True if solutions may call functions of the client."""
        return bool(self._tools)

    @property
    def has_rule(self) -> bool:
        """True if a rule confirms answers, also those that are not stated."""
        return self._spec.has_conclusive_verifier

    @property
    def must_call(self) -> bool:
        """True if a solution that calls nothing has no answer."""
        return self._spec.tool_choice not in ("auto", "none")

    async def _find_fault(self, calls: Sequence[ToolCall]) -> str | None:
        """Return the reason for which a solution may not end with these calls, or without any."""
        choice, names = self._spec.tool_choice, [call.name for call in calls]
        if isinstance(choice, NamedChoice) and set(names) != {choice.name}:
            return f"it does not call {choice.name!r} alone, as 'tool_choice' demands"
        if choice == "required" and not calls:
            return "it calls no function, as 'tool_choice' demands"
        if len(calls) > 1 and not self._spec.parallel_tool_calls:
            return f"it makes {len(calls)} calls, and 'parallel_tool_calls' is false"
        for call in calls:
            tool = self._tools[call.name]
            if tool.strict and not await is_valid_json(call.arguments, dict(tool.parameters)):
                return f"the arguments of {call.name!r} are not valid under its schema"
        return None


async def read_end(node: Node, reason: Reason, answers: AnswerFinder, functions: FunctionReader | None) -> SolutionEnd:
    """Return the answer that a branch states at its end, or the calls that it makes there."""
    text = node.own_answer_text
    has_thought = node.thought is None
    words: str | None = None
    if functions is not None and reason == "stop":
        read = await functions.read(text, has_thought=has_thought)
        if read.calls or read.fault is not None:
            return read
        words, has_thought = read.content, False
    elif functions is not None and reason not in ("step", "said"):
        words, has_thought = functions.read_cut_words(text, has_thought=has_thought), False
    if functions is not None and functions.must_call:
        return SolutionEnd(content=words)
    stopped = STOPPED_BY_REASON.get(reason, "inside")
    stated = await answers.find(text if words is None else words, stopped, has_thought=has_thought)
    if stated is not None and stated.level == "flexible" and functions is not None and functions.has_functions:
        # A number somewhere in a reply is not stated: it must not rank the reply behind calls and replies without one.
        stated = stated if functions.has_rule else None
    if stated is not None:
        return SolutionEnd(stated.text, stated.level, content=words)
    if not words or reason != "stop" or functions is None or not functions.has_functions:
        return SolutionEnd(content=words)
    return SolutionEnd(words, "strict", REPLY, content=words)


def show_calls(calls: Sequence[ToolCall]) -> str:
    """Return calls as the JSON text of a list."""
    return json.dumps(
        [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls], ensure_ascii=False
    )


def list_functions(spec: JobSpec) -> list[FunctionTool]:
    """Return the client's functions as the readers of calls take them."""
    return [
        FunctionTool(tool.name, tool.description or "", tool.parameters or {}, bool(tool.strict))
        for tool in spec.functions
    ]


def open_function_reader(spec: JobSpec, policies: Sequence[ModelInfo]) -> FunctionReader | None:
    """Return the reader for a job with functions, or with Python calls in channels, beside which the words stand.

    Raises ``InvalidRequest`` for a model whose format is not known.
    """
    python = find_python_format(spec)
    if not spec.functions:
        return FunctionReader(spec, python) if python is not None and python.has_channels else None
    formats = {policy.id: find_model_format(spec, policy) for policy in policies}
    if len(set(formats.values())) > 1:
        named = ", ".join(f"{model} ({found.name})" for model, found in formats.items())
        raise InvalidRequest(f"models: they write calls in several formats: {named}: give models of one", "models")
    return FunctionReader(spec, formats[policies[0].id])
