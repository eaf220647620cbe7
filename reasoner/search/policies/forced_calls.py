"""The language of the calls that ``tool_choice`` demands, for engines that hold solutions to one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

from engine.protocol.constraint import Constraint
from engine.protocol.grammar_text import write_json_rule
from engine.protocol.types import Capability, ModelInfo
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import FunctionTool, NamedChoice
from reasoner.search.policies.call_format import find_model_format
from reasoner.tools.formats.base import CallFrame

MAX_CALLS = 8
"""Calls of a solution that is held to them: without a bound, a model that finds no end would fill its limit."""


def list_forced(spec: JobSpec) -> list[FunctionTool]:
    """Return the functions of which a solution must call one; none if it may do without."""
    choice = spec.tool_choice
    if choice in ("auto", "none"):
        return []
    return [tool for tool in spec.functions if not isinstance(choice, NamedChoice) or tool.name == choice.name]


def can_force(spec: JobSpec, policies: Sequence[ModelInfo], needs: Collection[Capability] | None) -> bool:
    """Return True if the models' servers can hold solutions to calls, so that they are not only filtered.

    ``needs``: capabilities of servers that the strategy needs under a constraint; ``None`` if no constraint can hold
    its solutions, as it adds text to them. Nor can one hold the output of Python.
    """
    tools = list_forced(spec)
    if not tools or needs is None or spec.constraint is not None or spec.python is not None:
        return False
    frame = _find_frame(spec, policies)
    if frame is None or not all({Capability.CONSTRAINT, *needs} <= policy.capabilities for policy in policies):
        return False
    if all("server" not in policy.extra for policy in policies):
        return True
    # Other servers read grammars in other dialects, but all take a schema, whose references are relative to the whole.
    is_hosted = any(policy.extra.get("server") == "chat" for policy in policies)
    has_references = any('"$ref"' in json.dumps(tool.parameters) for tool in tools)
    return frame.arguments_field is not None and not is_hosted and not has_references


def force_calls(
    spec: JobSpec, policies: Sequence[ModelInfo], needs: Collection[Capability] | None
) -> Constraint | None:
    """Return the language of solutions that are calls, after their thoughts; ``None`` if they are only filtered.

    Several calls are of it where the job allows them; on servers of others it is one call.
    """
    frame = _find_frame(spec, policies) if can_force(spec, policies, needs) else None
    if frame is None:
        return None
    tools = list_forced(spec)
    if any("server" in policy.extra for policy in policies):
        assert frame.arguments_field is not None  # by ``can_force``
        return Constraint("json", json.dumps({"anyOf": [_make_object(frame.arguments_field, tool) for tool in tools]}))
    has_several = spec.parallel_tool_calls and not isinstance(spec.tool_choice, NamedChoice)
    return Constraint("grammar", _write_grammar(frame, tools, has_several=has_several))


def _find_frame(spec: JobSpec, policies: Sequence[ModelInfo]) -> CallFrame | None:
    frames = {find_model_format(spec, policy).frame for policy in policies}
    return frames.pop() if len(frames) == 1 else None


def make_schema(tool: FunctionTool) -> dict[str, Any]:
    """Return the JSON Schema of a function's arguments, which are an object."""
    return {**(tool.parameters or {}), "type": "object"}


def choose_natively(spec: JobSpec, policy: ModelInfo) -> dict[str, Any]:
    """Return the variables by which a server with fields of its own for functions gets the demanded choice."""
    choice = spec.tool_choice
    if not list_forced(spec) or not policy.tells_calls:
        return {}
    if isinstance(choice, NamedChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": choice}


def _write_grammar(frame: CallFrame, tools: Sequence[FunctionTool], *, has_several: bool) -> str:
    """Return a Lark grammar for llguidance."""
    rest = f" ({json.dumps(frame.separator)} call){{0,{MAX_CALLS - 1}}}" if has_several else ""
    rules = [f"start: call{rest}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        begin, end = (json.dumps(text) for text in (frame.begin.replace("NAME", json.dumps(tool.name)), frame.end))
        rules += [f"call_{index}: {begin} arguments_{index} {end}"]
        rules += [f"arguments_{index}: {write_json_rule(deepcopy(make_schema(tool)), is_one_line=True)}"]
    return "\n".join(rules)


def _make_object(arguments_field: str, tool: FunctionTool) -> dict[str, Any]:
    """Return the schema of a whole call that is a JSON object."""
    properties = {"name": {"const": tool.name}, arguments_field: make_schema(tool)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
