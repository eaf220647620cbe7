"""Servers of models: where each is, of which kind, and with which key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from engine.remote.chat.options import DEFAULT_CONTEXT, ChatOptions, Prefill, ThinkingLimit
from engine.remote.connection import SILENCE_SECONDS
from engine.remote.http import CHAT, KINDS
from engine.remote.throttle import RateLimits
from workers.config.api_key import WithApiKey
from workers.config.types import check_url

_CHAT_ONLY = ("context", "omit", "prefill", "thinking_limit", "verdict_tokens")


class EngineProfile(WithApiKey):
    """One server, or several interchangeable ones, and the models that it serves."""

    url: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="The URL of the server, or several of interchangeable ones."
    )
    models: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="The names of its models, as it lists them in /v1/models."
    )
    kind: str | None = Field(
        None,
        description="The kind of the server: reasoner, vllm, sglang, llamacpp, openai (completions) or chat (chat "
        "completions alone, as of OpenAI's own API and most gateways); without it, asked of the server.",
    )
    tokenizer: Path | None = Field(
        None, description="The folder of its model, if the server takes no token ids or cannot tokenise."
    )
    context: Annotated[int, Field(ge=64)] = Field(
        DEFAULT_CONTEXT, description="The tokens of a conversation, if a chat server does not report them."
    )
    prefill: Prefill = Field(
        "none",
        description="How a chat server goes on after the beginning of an answer: last_message (Anthropic), prefix "
        "(Mistral, DeepSeek), continue_final_message (vLLM, SGLang; alone allows search by steps), or none.",
    )
    thinking_limit: ThinkingLimit = Field(
        "none",
        description="The field with which a chat server limits thoughts to a job's budget.thinking_tokens: thinking "
        "(Anthropic, 1024 tokens at least), reasoning (OpenRouter) or thinking_budget (Qwen's API, SiliconFlow); with "
        "none it is refused.",
    )
    verdict_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="The most tokens of a judge's verdict on a chat server, its thought included; by default 16, and "
        "4,096 (a quarter of the context at most) once the model was seen to think.",
    )
    silence_seconds: Annotated[float, Field(gt=0)] = Field(
        SILENCE_SECONDS, description="The time without any data after which an answer counts as lost."
    )
    obeys_priorities: bool = Field(
        False,
        description="True for a vLLM that was started with --scheduling-policy priority, or an SGLang with "
        "--enable-priority-scheduling: what jobs of the batch queue ask of it then waits for interactive ones.",
    )
    prices: str | None = Field(
        None,
        description="The provider whose list prices its models have, such as openai or anthropic, in US dollars, from "
        "the catalogue of the package genai-prices; [models.NAME.prices] takes precedence.",
    )
    omit: tuple[str, ...] = Field((), description="The fields of a request that a chat server refuses, such as seed.")

    concurrency: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The maximum number of open requests of all workers together."
    )
    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The maximum number of requests of all workers in 60 seconds."
    )
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="The number of tokens, prompts and answers, after which all workers wait for 60 seconds to pass.",
    )

    @field_validator("url", "models", "omit", mode="before")
    @classmethod
    def _wrap_single(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_url(url, ("http://", "https://", "unix://")) for url in value)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: str | None) -> str | None:
        if value is not None and value not in KINDS:
            raise ValueError(f"must be one of {', '.join(KINDS)}")
        return value

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.kind == CHAT and self.tokenizer is not None:
            raise ValueError("a chat server needs no 'tokenizer': leave it out")
        if self.obeys_priorities and self.kind not in (None, "vllm", "sglang"):
            raise ValueError(
                "'obeys_priorities' is for a vLLM or SGLang that was started with priorities: leave it out (our engine "
                "needs no setting)"
            )
        for name in _CHAT_ONLY if self.kind != CHAT else ():
            if name in self.list_given():
                raise ValueError(f"{name!r} belongs to servers of kind 'chat': leave it out")
        if self.thinking_limit != "none" and self.prefill == "continue_final_message":
            raise ValueError(
                "'thinking_limit' is for hosted servers: reach a vLLM or SGLang by kind = 'vllm' or 'sglang', where "
                "the search itself limits thoughts"
            )
        return self

    @property
    def limits(self) -> RateLimits:
        """The limits on the rate of requests."""
        return RateLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)

    @property
    def chat(self) -> ChatOptions:
        """The properties of a chat server."""
        return ChatOptions(
            self.models,
            self.context,
            omit=frozenset(self.omit),
            prefill=self.prefill,
            thinking_limit=self.thinking_limit,
            verdict_tokens=self.verdict_tokens,
        )
