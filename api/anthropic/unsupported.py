"""Anthropic's fields, blocks and tools that this service does not have, with what would be right instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.conversation.unsupported import Unsupported

IGNORED = frozenset(
    {
        "cache_control",  # prefixes are cached anyway
        *("service_tier", "speed"),  # price and speed
        *("diagnostics", "user_profile_id"),  # reports and accounts
    }
)
"""Fields that are ignored with any value: an answer is the same without them."""


def _clears_only_thoughts(management: Any) -> bool:
    """Return True for edits of the context that only concern earlier thoughts, which models do not see here."""
    edits = management.get("edits") if isinstance(management, dict) and management.keys() <= {"edits"} else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking") for edit in edits
    )


_CONTEXT = "shorten the conversation before you send it; thoughts of earlier turns are left out anyway"
_ALTERNATIVES = "name one model: a name of several models, or 'models' of POST /v1/jobs, asks more"

FIELDS: dict[str, Unsupported] = {
    "compaction": Unsupported((), _CONTEXT),
    "container": Unsupported((), "there are no containers: give the tool {'type': 'python'}"),
    "context_management": Unsupported(({},), _CONTEXT, takes=_clears_only_thoughts),
    "fallback_credit_token": Unsupported((), _ALTERNATIVES),
    "fallbacks": Unsupported(([],), _ALTERNATIVES),
    "inference_geo": Unsupported(("global",), "the service runs where its operator runs it: leave it out"),
    "mcp_servers": Unsupported(([],), "give the functions of the server as 'tools', and call it from the client"),
    "output_format": Unsupported((), "write {'output_config': {'format': …}}"),
    "thread": Unsupported((), "send the whole conversation as 'messages'"),
}

_FILES = "give its content as a text block"
_SERVER_TOOL = "it is of a tool that runs at Anthropic: leave it out, or give it as text"
BLOCKS: dict[str, str] = {
    "image": "images are not supported: give a text block",
    "document": f"documents are not supported: {_FILES}",
    "search_result": f"search results are not supported: {_FILES}",
    "container_upload": f"files are not supported: {_FILES}",
    "tool_reference": "references to tools are not supported: give all tools in 'tools'",
    "compaction": f"compacted turns are not supported: {_FILES}",
    **dict.fromkeys(("server_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing"), _SERVER_TOOL),
}
"""Blocks of a message's content that are refused, with what would be right instead."""

_CLIENT_TOOL = "its schema is known to Anthropic's models alone: define it as a tool with a name and an input_schema"
TOOLS: dict[str, str] = {
    "code_execution": "give {'type': 'python'}, which solutions run in this service's sandbox",
    "web_search": "this service reads no web: define a tool of your own, with a name and an input_schema",
    "web_fetch": "this service reads no web: define a tool of your own, with a name and an input_schema",
    "tool_search_tool": "give all tools in 'tools', without defer_loading",
    "mcp_toolset": "give the functions of the server as tools with a name and an input_schema",
    **dict.fromkeys(("bash", "text_editor", "memory", "computer", "browser"), _CLIENT_TOOL),
}
"""Tools that are refused, by the beginning of their type, with what would be right instead."""


def refuse_types(value: Any, refused: Mapping[str, str], kind: str) -> Any:
    """Return the value unless its ``type`` begins with a refused one; then raise ``ValueError``."""
    name = str(value.get("type")) if isinstance(value, dict) else ""
    for beginning, instead in refused.items():
        if name.startswith(beginning):
            raise ValueError(f"the {kind} {name!r} is not supported: {instead}")
    if name.endswith("_tool_result"):
        raise ValueError(f"the {kind} {name!r} is not supported: {_SERVER_TOOL}")
    return value
