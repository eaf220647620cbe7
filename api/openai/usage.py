"""Token counts in OpenAI's terms."""

from __future__ import annotations

from pydantic import BaseModel


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int
