"""The JSON that the engine server reads. Unknown fields are refused: a setting that is silently ignored is a wrong
answer."""

from __future__ import annotations

import secrets
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.types import Branch, GenerateRequest, SamplingParams, ScoreItem, ScoreRequest

MAX_BRANCHES = 256
"""Branches of one request at most, as ``n`` or as ``branches``."""
MAX_ITEMS = 4096
"""Items of one score request at most."""

_Word = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
_Id = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class BranchBody(_Body):
    """One branch with a seed of its own (extension)."""

    seed: _Word
    key: _Word
    max_tokens: Annotated[int, Field(ge=1)]
    generated: list[int] = []


class StreamOptions(_Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    """A last event carries the usage, and no choice."""


class CompletionBody(_Body):
    """``POST /v1/completions``: OpenAI's fields, vLLM's ``top_k``, ``min_p``, ``stop_token_ids``, ``ignore_eos``,
    ``return_token_ids`` and ``include_stop_str_in_output``, and ours."""

    model: str
    prompt: str | list[int]
    n: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0, and as in vLLM -1, switch it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: str | Annotated[list[str], Field(max_length=64)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: _Word | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    request_id: _Id | None = None
    """Name for ``/v1/abort``; the server makes one up."""
    branches: Annotated[list[BranchBody], Field(min_length=1, max_length=MAX_BRANCHES)] | None = None
    """Instead of ``n``, ``max_tokens`` and ``seed``."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds."""
    priority: int = 0
    """Higher goes first."""
    lease: _Id | None = None
    """What the request computes stays cached until ``/v1/leases/release``."""
    cache_salt: _Id | None = None
    """As in vLLM: cached prefixes are shared only among requests with the same salt."""
    stream_choices: bool = False
    """One event for each finished choice, and with ``stream`` also its text as it grows."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        clash = {"n", "max_tokens", "seed"} & self.model_fields_set
        if self.branches is not None and clash:
            raise ValueError(f"branches already say {', '.join(sorted(clash))}; give one or the other")
        return self

    def to_request(self, prompt: tuple[int, ...]) -> GenerateRequest:
        """The request with its prompt tokenised. Without a seed every call draws differently."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        branches = [Branch(seed=seed, key=index, max_tokens=self.max_tokens) for index in range(self.n)]
        if self.branches is not None:
            branches = [
                Branch(seed=body.seed, key=body.key, max_tokens=body.max_tokens, generated=tuple(body.generated))
                for body in self.branches
            ]
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )
        request_id = self.request_id or f"cmpl-{secrets.token_hex(12)}"
        return GenerateRequest(
            request_id,
            self.model,
            prompt,
            tuple(branches),
            sampling,
            self.timeout,
            priority=self.priority,
            lease=self.lease,
            cache_salt=self.cache_salt,
        )


class ItemBody(_Body):
    """One sequence to score: parts as texts or token ids, and the parts at whose ends to read."""

    parts: list[str | list[int]]
    read: Annotated[list[int], Field(min_length=1)]


class ScoreBody(_Body):
    """``POST /v1/score``."""

    model: str
    items: Annotated[list[ItemBody], Field(max_length=MAX_ITEMS)]
    token_ids: list[int] = []
    max_compute: Annotated[int, Field(ge=0)] | None = None
    request_id: _Id | None = None
    priority: int = 0
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
    prompt: str | None = None
    messages: Annotated[list[dict[str, str]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
