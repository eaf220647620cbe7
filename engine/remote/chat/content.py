"""The content of a chat message, in the forms in which servers send it: a text, or a list of parts."""

from __future__ import annotations

from typing import Any

from engine.protocol.wire import Json
from engine.remote.connection import not_a_completion

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
"""Fields of DeepSeek, SGLang, LiteLLM and older vLLM; of OpenRouter, Groq and newer vLLM; of Ollama; of OpenRouter."""
_THOUGHT_TYPES = ("thinking", "reasoning", "thought")
"""Beginnings of the types of parts that are thoughts."""
_HIDDEN_TYPES = ("redacted_thinking", "reasoning.encrypted")
_WORDS = ("text", "thinking", "reasoning", "refusal", "content", "summary", "value")
"""Fields that hold the words of a part, or further parts."""


def read_message(message: Json, source: str) -> tuple[str, str]:
    """Return the thought and the content of a message, or of a part of one in a stream.

    The words of a refusal are content. Raises ``EngineUnavailable`` for a form that no server of OpenAI's API has.
    """
    thoughts = (_read_value(message.get(name), source, is_thought=True)[0] for name in _REASONING_FIELDS)
    apart: str = next((thought for thought in thoughts if thought), "")  # some send the same in two fields
    thought, content = _read_value(message.get("content"), source, is_thought=False)
    refusal = message.get("refusal")
    return apart or thought, content + (refusal if isinstance(refusal, str) else "")


def _read_value(value: Any, source: str, *, is_thought: bool) -> tuple[str, str]:
    match value:
        case None:
            return "", ""
        case str():
            return (value, "") if is_thought else ("", value)
        case list():
            read = [_read_value(part, source, is_thought=is_thought) for part in value]
            return "".join(thought for thought, _ in read), "".join(content for _, content in read)
        case dict():
            kind = str(value.get("type") or "")
            if kind in _HIDDEN_TYPES:
                return "", ""
            is_thought = is_thought or kind.startswith(_THOUGHT_TYPES)
            words = next((value[name] for name in _WORDS if value.get(name) is not None), None)
            return _read_value(words, source, is_thought=is_thought)
    raise not_a_completion(source, f"its content is {type(value).__name__} instead of a text or a list of parts")
