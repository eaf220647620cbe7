"""What OpenAI's routes know and a search has nothing for: refused by name, but for values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """``neutral``: values, beside null, that ask for nothing. ``instead``: what would be right."""

    neutral: tuple[Any, ...]
    instead: str


_SAMPLING = "a search samples by temperature and top_p"
_TOOLS = "there are no tools here"
_CACHE = "prefixes are cached by themselves"
_LOGPROBS = "GET /v1/jobs/{id}/tree has the log-probability of every branch"
_HISTORY = "send the whole conversation, or 'previous_response_id'"

_COMMON: dict[str, Unsupported] = {
    "moderation": Unsupported((), "nothing is moderated here"),
    "parallel_tool_calls": Unsupported((True, False), _TOOLS),
    "prompt_cache_key": Unsupported((), _CACHE),
    "prompt_cache_options": Unsupported((), _CACHE),
    "prompt_cache_retention": Unsupported((), _CACHE),
    "service_tier": Unsupported(("auto", "default"), "'priority' is 'interactive' or 'batch'"),
    "tool_choice": Unsupported(("auto", "none"), _TOOLS),
    "tools": Unsupported(([],), _TOOLS),
    "top_logprobs": Unsupported((0,), _LOGPROBS),
}

CHAT: dict[str, Unsupported] = _COMMON | {
    "audio": Unsupported((), "answers are text"),
    "frequency_penalty": Unsupported((0,), _SAMPLING),
    "function_call": Unsupported(("auto", "none"), _TOOLS),
    "functions": Unsupported(([],), _TOOLS),
    "logit_bias": Unsupported(({},), _SAMPLING),
    "logprobs": Unsupported((False,), _LOGPROBS),
    "modalities": Unsupported((["text"],), "answers are text"),
    "n": Unsupported((1,), "a search gives one answer; how many solutions it draws is 'n' of 'strategy'"),
    "prediction": Unsupported((), "drafters guess by themselves"),
    "presence_penalty": Unsupported((0,), _SAMPLING),
    "response_format": Unsupported(
        ({"type": "text"},), "a 'verifier' of the kind 'json_schema' picks a solution whose answer is valid"
    ),
    "stop": Unsupported(([], ""), "a solution ends by itself; 'answer' says where it states its answer"),
    "store": Unsupported((False,), "GET /v1/jobs/{id} has the job, until it is deleted"),
    "verbosity": Unsupported(("medium",), "ask for it in a message"),
    "web_search_options": Unsupported((), _TOOLS),
}

RESPONSES: dict[str, Unsupported] = _COMMON | {
    "background_options": Unsupported((), "'priority' is 'interactive' or 'batch'"),
    "context_management": Unsupported(([],), _HISTORY),
    "conversation": Unsupported((), _HISTORY),
    "image": Unsupported((), "there are no images here"),
    "include": Unsupported(([],), "the answer holds all that there is; GET /v1/jobs/{id}/tree has the search"),
    "max_tool_calls": Unsupported((), _TOOLS),
    "prompt": Unsupported((), "there are no stored prompts: write 'instructions' and 'input'"),
    "store": Unsupported((True,), "a response lives until it is deleted: DELETE /v1/responses/{id}"),
    "text": Unsupported(
        ({}, {"format": {"type": "text"}}),
        "a 'verifier' of the kind 'json_schema' picks a solution whose answer is valid",
    ),
    "truncation": Unsupported(("disabled",), "nothing is cut off a conversation that is too long"),
}


def remove_neutral_fields(body: Any, unsupported: Mapping[str, Unsupported]) -> Any:
    """The body without fields that ask for nothing. Raises ``ValidationError`` that names every other one."""
    if not isinstance(body, dict):
        return body
    refused = [
        InitErrorDetails(
            type=PydanticCustomError("unsupported", "this is not supported: {instead}", {"instead": what.instead}),
            loc=(name,),
            input=body[name],
        )
        for name, what in unsupported.items()
        if body.get(name) is not None and body[name] not in what.neutral
    ]
    if refused:
        raise ValidationError.from_exception_data("body", refused)
    return {name: value for name, value in body.items() if name not in unsupported}
