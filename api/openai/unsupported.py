"""OpenAI fields that this service does not support: refused by name, except for values that have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """``neutral`` are the values, beside null, that have no effect; ``instead`` names the alternative."""

    neutral: tuple[Any, ...]
    instead: str


_SAMPLING = "sampling has temperature, top_p, frequency_penalty and presence_penalty"
_PENALTIES = "OpenAI's Responses have none: send it to /v1/chat/completions, or in 'sampling' of POST /v1/jobs"
_TOOLS = "give 'tools' of type 'function' or 'python'"
_CACHE = "prompt prefixes are always cached"
_LOGPROBS = "send it to /v1/chat/completions, or 'logprobs' to POST /v1/jobs"
_HISTORY = "send the whole conversation, or 'previous_response_id'"

_COMMON: dict[str, Unsupported] = {
    "moderation": Unsupported((), "there is no moderation"),
    "prompt_cache_key": Unsupported((), _CACHE),
    "prompt_cache_options": Unsupported((), _CACHE),
    "prompt_cache_retention": Unsupported((), _CACHE),
    "service_tier": Unsupported(("auto", "default"), "'priority' is 'interactive' or 'batch'"),
}

CHAT: dict[str, Unsupported] = _COMMON | {
    "audio": Unsupported((), "answers are text"),
    "function_call": Unsupported(("auto", "none"), _TOOLS),
    "functions": Unsupported(([],), _TOOLS),
    "logit_bias": Unsupported(({},), _SAMPLING),
    "modalities": Unsupported((["text"],), "answers are text"),
    "prediction": Unsupported((), "speculative decoding needs no prediction"),
    "store": Unsupported((False,), "GET /v1/jobs/{id} has the job, until it is deleted"),
    "verbosity": Unsupported(("medium",), "ask for it in a message"),
    "web_search_options": Unsupported((), _TOOLS),
}

RESPONSES: dict[str, Unsupported] = _COMMON | {
    "background_options": Unsupported((), "'priority' is 'interactive' or 'batch'"),
    "context_management": Unsupported(([],), _HISTORY),
    "conversation": Unsupported((), _HISTORY),
    "frequency_penalty": Unsupported((0,), _PENALTIES),
    "image": Unsupported((), "images are not supported"),
    "include": Unsupported(([],), "the response is always complete; GET /v1/jobs/{id}/tree has the search"),
    "max_tool_calls": Unsupported((), "'calls' of the tool 'python' limits its calls"),
    "presence_penalty": Unsupported((0,), _PENALTIES),
    "prompt": Unsupported((), "there are no stored prompts: write 'instructions' and 'input'"),
    "store": Unsupported((True,), "a response lives until it is deleted: DELETE /v1/responses/{id}"),
    "top_logprobs": Unsupported((0,), _LOGPROBS),
    "truncation": Unsupported(("disabled",), "a conversation that is too long is refused, never truncated"),
}


def remove_neutral_fields(body: Any, unsupported: Mapping[str, Unsupported]) -> Any:
    """Return the body without unsupported fields. Raises ``ValidationError`` for those whose value is not neutral."""
    if not isinstance(body, dict):
        return body
    errors = [
        InitErrorDetails(
            type=PydanticCustomError("unsupported", "not supported: {instead}", {"instead": field.instead}),
            loc=(name,),
            input=body[name],
        )
        for name, field in unsupported.items()
        if body.get(name) is not None and body[name] not in field.neutral
    ]
    if errors:
        raise ValidationError.from_exception_data("body", errors)
    return {name: value for name, value in body.items() if name not in unsupported}
