"""OpenAI fields that this service does not have: ignored where they change no answer, else refused by name."""

from __future__ import annotations

from typing import Any

from api.conversation.unsupported import Unsupported

IGNORED = frozenset(
    {
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),  # speed
        *("service_tier", "store", "access_programs"),  # price, storage and who may ask
    }
)
"""Fields that are ignored with any value: an answer is the same without them."""


def _has_no_logprobs(include: Any) -> bool:
    """Return True for a list of parts of a response that never has them: those of OpenAI's own tools."""
    return isinstance(include, list) and all(isinstance(part, str) and "logprobs" not in part for part in include)


_SAMPLING = "sampling has temperature, top_p, frequency_penalty and presence_penalty"
_PENALTIES = "OpenAI's Responses have none: send it to /v1/chat/completions, or in 'sampling' of POST /v1/jobs"
_TOOLS = "give 'tools' of type 'function' or 'python'"
_LOGPROBS = "send it to /v1/chat/completions, or 'logprobs' to POST /v1/jobs"
_HISTORY = "send the whole conversation, or 'previous_response_id'"

_COMMON: dict[str, Unsupported] = {
    "moderation": Unsupported((), "there is no moderation"),
}

CHAT: dict[str, Unsupported] = _COMMON | {
    "audio": Unsupported((), "answers are text"),
    "function_call": Unsupported(("auto", "none"), _TOOLS),
    "functions": Unsupported(([],), _TOOLS),
    "logit_bias": Unsupported(({},), _SAMPLING),
    "modalities": Unsupported((["text"],), "answers are text"),
    "verbosity": Unsupported(("medium",), "ask for it in a message"),
    "web_search_options": Unsupported((), _TOOLS),
}

RESPONSES: dict[str, Unsupported] = _COMMON | {
    "background_options": Unsupported((), "'priority' is 'interactive' or 'batch'"),
    "context_management": Unsupported(([],), _HISTORY),
    "conversation": Unsupported((), _HISTORY),
    "frequency_penalty": Unsupported((0,), _PENALTIES),
    "image": Unsupported((), "images are not supported"),
    "include": Unsupported((), _LOGPROBS, takes=_has_no_logprobs),
    "max_tool_calls": Unsupported((), "'calls' of the tool 'python' limits its calls"),
    "presence_penalty": Unsupported((0,), _PENALTIES),
    "prompt": Unsupported((), "there are no stored prompts: write 'instructions' and 'input'"),
    "top_logprobs": Unsupported((0,), _LOGPROBS),
    "truncation": Unsupported(("disabled", "auto"), "a conversation that is too long is refused, never truncated"),
}
