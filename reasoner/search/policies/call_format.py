"""Finds the format in which a policy writes calls: of the client's functions, and of Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import BLOCKS, PythonTool
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.registry import FORMATS, find_format


def find_model_format(spec: JobSpec, policy: ModelInfo) -> ToolFormat:
    """Return the format in which a model writes calls. Raises ``InvalidRequest`` that names the known ones."""
    found = FORMATS["hermes"] if spec.tool_format is None and policy.tells_calls else _find(spec, policy)
    if found is None:
        problem = "has none that is known" if policy.chat_template else "is not known here"
        raise InvalidRequest(
            f"tools: model {policy.id!r} writes calls in the format of its chat template, which {problem}: "
            f"give 'tool_format', one of {', '.join(FORMATS)}; an operator sets it in [models.{policy.id}]",
            "tools",
        )
    if found.has_channels and "server" not in policy.extra:
        raise InvalidRequest(
            f"tools: this engine leaves the delimiters of model {policy.id!r}'s calls out of its text: serve it with "
            "vLLM",
            "tools",
        )
    return found


def resolve_python(spec: JobSpec, policies: Sequence[ModelInfo]) -> JobSpec:
    """Return the job with the format of its models' own calls of Python.

    Without a format that all of them share, and that their servers can continue after an output, calls are fenced
    blocks alone. Raises ``InvalidRequest`` if the job names a format that does not run on one of them.
    """
    tool = spec.python
    if tool is None:
        return spec
    if tool.call_format is not None:
        named = FORMATS.get(tool.call_format)
        problems = [] if named is None else [_find_obstacle(named, policy) for policy in policies]
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise InvalidRequest(f"tools: {problem}: give the tool 'python' the 'call_format' {BLOCKS!r}", "tools")
        return spec
    formats = {_find(spec, policy) for policy in policies}
    [found] = formats if len(formats) == 1 else [None]
    has_obstacle = found is None or any(_find_obstacle(found, policy) for policy in policies)
    chosen = BLOCKS if found is None or has_obstacle else found.name
    tools = [
        other.model_copy(update={"call_format": chosen}) if isinstance(other, PythonTool) else other
        for other in spec.tools
    ]
    return spec.model_copy(update={"tools": tools})


def find_python_format(spec: JobSpec) -> ToolFormat | None:
    """Return the format of a resolved job's own calls of Python; ``None`` if calls are fenced blocks alone."""
    return None if spec.python is None else FORMATS.get(spec.python.call_format or BLOCKS)


def _find(spec: JobSpec, policy: ModelInfo) -> ToolFormat | None:
    """Return the format that the job names, or that of a model's chat template."""
    if spec.tool_format is None:
        return find_format(policy.chat_template)
    found = FORMATS.get(spec.tool_format)
    if found is None:
        raise InvalidRequest(
            f"tool_format: there is no format {spec.tool_format!r}; known are {', '.join(FORMATS)}", "tool_format"
        )
    return found


def _find_obstacle(found: ToolFormat, policy: ModelInfo) -> str | None:
    """Return the reason for which calls in a format do not run on a model's server."""
    if policy.extra.get("server") == "chat":
        return f"the server of model {policy.id!r} only chats, where the output of a call ends no turn"
    if found.has_channels and "server" not in policy.extra:
        return f"this engine leaves the delimiters of model {policy.id!r}'s calls out of its text"
    return None
