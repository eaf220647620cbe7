"""Properties of a chat server that it does not report itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Prefill = Literal["none", "last_message", "prefix", "continue_final_message"]

DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Properties of a chat server.

    ``models``: the names that it serves; empty for all that it lists. ``context``: the tokens of a conversation, where
    the server does not report them. ``omit``: fields that it refuses, such as ``seed``. ``prefill``: how an answer goes
    on after a given beginning: a last message of the assistant (Anthropic), the same with ``prefix`` (Mistral,
    DeepSeek) or with ``continue_final_message`` (vLLM, SGLang). With the first two only an answer whose stream was cut
    goes on: a search by steps needs a server that tells which stop string ended one.
    """

    models: tuple[str, ...] = ()
    context: int = DEFAULT_CONTEXT
    omit: frozenset[str] = frozenset()
    prefill: Prefill = "none"
