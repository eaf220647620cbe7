"""The JSON that the engine server reads. Unknown fields are refused: a setting that is silently ignored is a wrong
answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.protocol.request_checks import (
    MAX_COMPUTE,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SECONDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
)
from engine.protocol.types import Branch, GenerateRequest, SamplingParams, ScoreItem, ScoreRequest

MAX_BRANCHES = 256
"""Branches of one prompt at most, as ``n`` or as ``branches``."""
MAX_CHOICES = 1024
"""Choices of one request at most: prompts times branches."""
MAX_ITEMS = 4096
"""Items of one score request at most."""

MAX_TOKENS = (1 << 31) - 1
"""Bound on any count of tokens; the model's context is the real limit."""

_Word = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
_Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_Id = Annotated[str, Field(min_length=1, max_length=256)]


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which no tokenizer takes") from None
    return text


_Text = Annotated[str, AfterValidator(_whole_characters)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class BranchBody(_Body):
    """One branch with a seed of its own (extension)."""

    seed: _Word
    key: _Word
    max_tokens: _Count
    generated: list[int] = []


class StreamOptions(_Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    """A last event carries the usage, and no choice."""


class CompletionBody(_Body):
    """``POST /v1/completions``: OpenAI's fields; vLLM's ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``stop_token_ids``, ``ignore_eos``, ``prompt_logprobs``, ``return_token_ids``, ``return_tokens_as_token_ids`` and
    ``include_stop_str_in_output``; and ours. ``null`` means the default."""

    model: str
    prompt: _Text | list[int] | list[_Text] | list[list[int]]
    """One prompt or a list of them. The choices of the first come first, then those of the second."""
    n: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] = 1
    max_tokens: _Count = 16
    """0 only with ``echo`` or ``prompt_logprobs``."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] = 0
    """0, and as in vLLM -1, switch it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIASES),
    ] = {}
    """By token id."""
    min_tokens: _Count = 0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    """The prompt is part of the answer, with its log-probabilities if ``logprobs`` asks for any."""
    stop: _Text | Annotated[list[_Text], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool | None = None
    """By default only with ``stream_choices``."""
    seed: _Word | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens as ``token_id:`` and the id, not by their text."""
    user: str | None = None
    """Accepted, and not used."""

    request_id: _Id | None = None
    """Name for ``/v1/abort``; the server makes one up."""
    branches: Annotated[list[BranchBody], Field(min_length=1, max_length=MAX_BRANCHES)] | None = None
    """Instead of ``n``, ``max_tokens`` and ``seed``."""
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    """Seconds."""
    priority: _Priority = 0
    """Higher goes first."""
    lease: _Id | None = None
    """What the request computes stays cached until ``/v1/leases/release``."""
    cache_salt: _Id | None = None
    """As in vLLM: cached prefixes are shared only among requests with the same salt."""
    draft: bool = True
    """Whether tokens may be guessed; guessing changes none."""
    stream_choices: bool = False
    """One event for each finished choice, and with ``stream`` also its text as it grows."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        clash = {"n", "max_tokens", "seed"} & self.model_fields_set
        if self.branches is not None and clash:
            raise ValueError(f"branches already say {', '.join(sorted(clash))}; give one or the other")
        choices = len(self.prompts) * self.width
        if choices > MAX_CHOICES:
            raise ValueError(f"prompt and n ask for {choices} choices; there may be at most {MAX_CHOICES}")
        if self.branches is None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.stream and self.sampling.prompt_logprobs is not None and not self.stream_choices:
            raise ValueError("log-probabilities of the prompt are not streamed; leave stream out")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        lone = [token for token in self.prompt if isinstance(token, int)]
        if lone or not self.prompt:
            return [lone]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def width(self) -> int:
        """Choices for each prompt."""
        return self.n if self.branches is None else len(self.branches)

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn, and what is reported of them."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            prompt_logprobs = max(prompt_logprobs or 0, self.logprobs or 0)
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            include_stop_str_in_output=(
                self.stream_choices if self.include_stop_str_in_output is None else self.include_stop_str_in_output
            ),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def to_requests(self, prompts: Sequence[tuple[int, ...]]) -> list[GenerateRequest]:
        """One request for each of the tokenised prompts, all under one id. Without a seed every call draws
        differently."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        request_id = self.request_id or f"cmpl-{secrets.token_hex(12)}"
        return [self._to_request(request_id, seed, place, prompt) for place, prompt in enumerate(prompts)]

    def _to_request(self, request_id: str, seed: int, place: int, prompt: tuple[int, ...]) -> GenerateRequest:
        keys = range(place * self.width, (place + 1) * self.width)
        branches = [Branch(seed=seed, key=key, max_tokens=self.max_tokens) for key in keys]
        if self.branches is not None:
            branches = [
                Branch(seed=body.seed, key=body.key, max_tokens=body.max_tokens, generated=tuple(body.generated))
                for body in self.branches
            ]
        return GenerateRequest(
            request_id,
            self.model,
            prompt,
            tuple(branches),
            self.sampling,
            self.timeout,
            priority=self.priority,
            lease=self.lease,
            cache_salt=self.cache_salt,
            draft=self.draft,
        )


class ItemBody(_Body):
    """One sequence to score: parts as texts or token ids, and the parts at whose ends to read."""

    parts: list[_Text | list[int]]
    read: Annotated[list[int], Field(min_length=1)]


class ScoreBody(_Body):
    """``POST /v1/score``."""

    model: str
    items: Annotated[list[ItemBody], Field(max_length=MAX_ITEMS)]
    token_ids: list[int] = []
    max_compute: Annotated[int, Field(ge=0, le=MAX_COMPUTE)] | None = None
    request_id: _Id | None = None
    priority: _Priority = 0
    lease: _Id | None = None
    cache_salt: _Id | None = None

    def to_request(self) -> ScoreRequest:
        """The request as the engine knows it."""
        items = [
            ScoreItem(
                parts=tuple(part if isinstance(part, str) else tuple(part) for part in item.parts),
                read=tuple(item.read),
            )
            for item in self.items
        ]
        request_id = self.request_id or f"score-{secrets.token_hex(12)}"
        return ScoreRequest(
            request_id,
            self.model,
            tuple(items),
            tuple(self.token_ids),
            self.max_compute,
            priority=self.priority,
            lease=self.lease,
            cache_salt=self.cache_salt,
        )


class ReleaseBody(_Body):
    """``POST /v1/leases/release``: a lease, or with ``tokens`` one branch of it."""

    lease: _Id
    tokens: list[int] | None = None


class AbortBody(_Body):
    """``POST /v1/abort``."""

    request_id: _Id


class TokenizeBody(_Body):
    """``POST /tokenize``: a text or chat messages."""

    model: str
    prompt: _Text | None = None
    messages: Annotated[list[dict[str, _Text]], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    """Of a prompt; a chat's template writes them itself."""
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
