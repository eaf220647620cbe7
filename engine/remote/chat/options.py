"""Properties of a chat server that it does not report itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.protocol.types import Capability
from engine.protocol.wire import Json

Prefill = Literal["none", "last_message", "prefix", "continue_final_message"]
ThinkingLimit = Literal["none", "thinking", "reasoning", "thinking_budget"]

PENALTIES = ("presence_penalty", "frequency_penalty")
SETTINGS = ("temperature", "top_p", *PENALTIES, "stop")
"""Fields of ``SamplingParams`` that chat servers take."""
DEFAULT_CONTEXT = 32_768
_LEAST_BUDGET = 1024
"""The smallest limit of a thought that Anthropic accepts."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Properties of a chat server.

    ``models``: the names that it serves; empty for all that it lists. ``context``: the tokens of a conversation, where
    the server does not report them. ``omit``: fields that it refuses, such as ``seed``. ``prefill``: how an answer goes
    on after a given beginning: a last message of the assistant (Anthropic), the same with ``prefix`` (Mistral,
    DeepSeek) or with ``continue_final_message`` (vLLM, SGLang). With the first two only an answer whose stream was cut
    goes on: a search by steps needs a server that tells which stop string ended one. ``thinking_limit``: the field that
    limits a thought: ``thinking`` (Anthropic), ``reasoning`` (OpenRouter) or ``thinking_budget`` (Qwen, SiliconFlow).
    ``verdict_tokens``: the most tokens of a judge's verdict, with its thought; by default few, and room for a thought
    where the model was seen to think.
    """

    models: tuple[str, ...] = ()
    context: int = DEFAULT_CONTEXT
    omit: frozenset[str] = frozenset()
    prefill: Prefill = "none"
    thinking_limit: ThinkingLimit = "none"
    verdict_tokens: int | None = None

    @property
    def is_literal(self) -> bool:
        """True if the server goes on exactly where a given text ends (vLLM, SGLang)."""
        return self.prefill == "continue_final_message"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the server.

        Steps end at stop strings, which a search must tell from the end of a solution: only literal servers do.
        """
        can_do = {
            Capability.CONSTRAINT: True,
            Capability.CONTINUATION: self.is_literal,
            Capability.PENALTIES: self.omit.isdisjoint(PENALTIES),
        }
        return frozenset(capability for capability, is_there in can_do.items() if is_there)

    def limit_thought(self, limit: int, max_tokens: int) -> Json:
        """Return the field with which the server limits the thought of an answer of at most ``max_tokens``.

        Servers want the limit below that. Without a thought the field turns thinking off.
        """
        tokens = min(limit, max_tokens - 1)
        match self.thinking_limit:
            case "none":
                return {}
            case "thinking":
                # What is left for the last branches of a job may be less than the server accepts.
                if tokens == 0 or tokens < _LEAST_BUDGET <= limit:
                    return {"thinking": {"type": "disabled"}}
                return {"thinking": {"type": "enabled", "budget_tokens": tokens}}
            case "reasoning":
                return {"reasoning": {"max_tokens": tokens} if tokens else {"effort": "none"}}
            case "thinking_budget":
                return {"enable_thinking": True, "thinking_budget": tokens} if tokens else {"enable_thinking": False}
