"""The texts in spans, as JSON by the schemas of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reasoner.tree import Part


def split_text(text: str, parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return the text of a node in pieces, each with its type by the conventions."""
    pieces, start = [], 0
    for part in parts:
        end = start + part.num_chars
        if end > start:
            pieces.append(("reasoning" if part.kind == "thought" else "text", text[start:end]))
        start = end
    return [*pieces, ("text", text[start:])] if start < len(text) else pieces


def write_output(pieces: Sequence[tuple[str, str]], finish_reason: str) -> str:
    """Return ``gen_ai.output.messages`` of a text in pieces."""
    parts = [{"type": kind, "content": content} for kind, content in pieces]
    return json.dumps([{"role": "assistant", "parts": parts, "finish_reason": finish_reason}])


def write_input(spec: Mapping[str, Any]) -> str:
    """Return ``gen_ai.input.messages`` of a job: its question, as the client gave it."""
    messages = spec.get("messages") or [{"role": "user", "content": spec["problem"]}]
    if spec.get("system") is not None:
        messages = [{"role": "system", "content": spec["system"]}, *messages]
    return json.dumps([{"role": message["role"], "parts": list(_write_parts(message))} for message in messages])


def _write_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message["content"]}]
    parts: list[dict[str, Any]] = [{"type": "text", "content": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            {"type": "tool_call", "id": call["id"], "name": function["name"], "arguments": function["arguments"]}
        )
    return parts
