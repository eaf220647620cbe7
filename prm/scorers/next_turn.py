"""A question as the next turn of a conversation: its tokens behind those of an answer, found with the chat template.

The template renders two conversations that differ in the assistant's answer alone. What both end with are the tokens
that close the assistant's turn, ask the question and begin the next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from engine.protocol.types import EngineClient, TokenizeRequest, Tokens

_FIRST, _SECOND = "one", "six"
"""Texts without a common beginning or end."""


async def encode_next_turn(
    engine: EngineClient, model: str, question: str, template_kwargs: Mapping[str, Any]
) -> Tokens:
    """Return the tokens that ask a question behind an answer; an answer's own end-of-sequence token is left out there.

    Raises ``InvalidRequest`` for a template that refuses the conversation.
    """

    async def render(answer: str) -> Tokens:
        messages = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
        return await engine.tokenize(TokenizeRequest(model, messages, special=False, template_kwargs=template_kwargs))

    first, second = await asyncio.gather(render(_FIRST), render(_SECOND))
    size = count_common(first[::-1], second[::-1])
    plain = await engine.tokenize(TokenizeRequest(model, question, special=False))
    if size <= len(plain):  # plain continuation: the template puts nothing around a message
        return await engine.tokenize(TokenizeRequest(model, f"\n\n{question}\n", special=False))
    return first[len(first) - size :]


def count_common(first: Tokens, second: Tokens) -> int:
    """Return the length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (own, other) in enumerate(pairs) if own != other), min(len(first), len(second)))
