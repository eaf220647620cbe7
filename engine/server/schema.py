"""Request bodies of the engine server. Unknown fields are refused, since ignoring one would give a wrong result."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.protocol.constraint import Constraint
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
from engine.protocol.types import (
    Branch,
    GenerateRequest,
    KeyBound,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    TokenIds,
)

MAX_BRANCHES = 4096
"""The maximum number of branches of one prompt."""
MAX_CHOICES = 1024
"""The maximum number of choices of one request: prompts times branches."""
MAX_ITEMS = 4096
"""The maximum number of items of one score request."""

MAX_CONSTRAINT_CHOICES = 4096
MAX_TOKENS = (1 << 31) - 1
"""The maximum of any token count; the model's context is the actual limit."""

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


def _check_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message, of which the template reads what it knows."""
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a 'role', which is a string")
    if not isinstance(message.get("content"), str | None):
        raise ValueError("the 'content' of a message must be a string")
    _whole_characters(json.dumps(message, ensure_ascii=False))
    return message


_Message = Annotated[dict[str, Any], AfterValidator(_check_message)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class BranchBody(_Body):
    """One branch with its own seed (extension)."""

    seed: _Word
    key: _Word
    max_tokens: _Count
    generated: list[int] = []
    constraint_start: _Count | None = None


class StructuredOutputs(_Body):
    """vLLM's ``structured_outputs``: the language of the text, in one of these forms."""

    json_schema: dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: _Text | None = None
    choice: Annotated[list[_Text], Field(min_length=1, max_length=MAX_CONSTRAINT_CHOICES)] | None = None
    grammar: _Text | None = None
    """A Lark grammar whose rule ``start`` is the text."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) != 1 or None in self.model_dump(exclude_unset=True).values():
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        return self

    def to_constraint(self) -> Constraint:
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("grammar", self.grammar)
        if self.choice is not None:
            return Constraint("choice", json.dumps(self.choice))
        return Constraint("json", json.dumps({"type": "object"} if self.json_object else self.json_schema))


class StreamOptions(_Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    """True to send the usage in a last event without choices."""


class CompletionBody(_Body):
    """``POST /v1/completions``: OpenAI's fields; vLLM's ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``stop_token_ids``, ``ignore_eos``, ``prompt_logprobs``, ``return_token_ids``, ``return_tokens_as_token_ids`` and
    ``include_stop_str_in_output`` and ``structured_outputs``; and ours. ``null`` means the default."""

    model: str
    prompt: _Text | list[int] | list[_Text] | list[list[int]]
    """One prompt or a list of them. The choices are ordered by prompt."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: _Count = 16
    """The maximum number of tokens per choice; 0 only with ``echo`` or ``prompt_logprobs``."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] = 0
    """0, or -1 as in vLLM, disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    penalty_start: _Count | None = None
    """As in ``SamplingParams`` (extension)."""
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIASES),
    ] = {}
    """The bias by token id."""
    min_tokens: _Count = 0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    kv_budget: _Count | None = None
    """As in ``SamplingParams`` (extension), like the next two."""
    kv_start: _Count | None = None
    kv_end: Annotated[list[_Count], Field(max_length=64)] = []
    echo: bool = False
    """True to begin each text with its prompt, and with the prompt's log-probabilities if ``logprobs`` is set."""
    stop: _Text | Annotated[list[_Text], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool | None = None
    """By default true only with ``stream_choices``."""
    seed: _Word | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """True to name tokens in log-probabilities as ``token_id:`` and the id, not by their text."""
    user: str | None = None
    """Accepted, and ignored."""

    request_id: _Id | None = None
    """The name for ``/v1/abort``; generated by the server if missing."""
    branches: Annotated[list[BranchBody], Field(min_length=1, max_length=MAX_BRANCHES)] | None = None
    """Replaces ``n``, ``max_tokens`` and ``seed``."""
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    """This and the following four fields are those of ``GenerateRequest``."""
    priority: _Priority = 0
    lease: _Id | None = None
    cache_salt: _Id | None = None
    draft: bool = True
    probe: bool = False
    """True to report the score of the model's probe with each choice, as ``probe``."""
    structured_outputs: StructuredOutputs | None = None
    """The language of each text."""
    lifts_constraint: Annotated[list[_Count], Field(max_length=64)] = []
    """As in ``GenerateRequest``."""
    stream_choices: bool = False
    """True to send one event per finished choice, and with ``stream`` also its text as it is generated."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
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
        if isinstance(self.prompt, str):
            return [self.prompt]
        lone = [token for token in self.prompt if isinstance(token, int)]
        if lone or not self.prompt:
            return [lone]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def width(self) -> int:
        """The number of choices per prompt."""
        return self.n if self.branches is None else len(self.branches)

    @property
    def sampling(self) -> SamplingParams:
        prompt_logprobs = self.prompt_logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            prompt_logprobs = max(prompt_logprobs or 0, self.logprobs or 0)
        stop_stays = self.include_stop_str_in_output
        values = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        return SamplingParams(
            **values
            | {
                "top_k": max(self.top_k, 0),
                "logit_bias": tuple((int(token), bias) for token, bias in self.logit_bias.items()),
                "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                "include_stop_str_in_output": self.stream_choices if stop_stays is None else stop_stays,
                "stop_token_ids": tuple(self.stop_token_ids),
                "kv_end": tuple(self.kv_end),
                "prompt_logprobs": prompt_logprobs,
            }
        )

    def to_requests(self, prompts: Sequence[TokenIds]) -> list[GenerateRequest]:
        """Return one request per tokenized prompt, all with one id. Without a seed, each call samples differently."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        request_id = self.request_id or f"cmpl-{secrets.token_hex(12)}"
        return [self._to_request(request_id, seed, index, prompt) for index, prompt in enumerate(prompts)]

    def _to_request(self, request_id: str, seed: int, index: int, prompt: TokenIds) -> GenerateRequest:
        keys = range(index * self.width, (index + 1) * self.width)
        branches = [Branch(seed, key, self.max_tokens) for key in keys]
        if self.branches is not None:
            branches = [
                Branch(
                    body.seed,
                    body.key,
                    body.max_tokens,
                    tuple(body.generated),
                    constraint_start=body.constraint_start,
                )
                for body in self.branches
            ]
        return GenerateRequest(
            request_id,
            self.model,
            prompt=prompt,
            branches=tuple(branches),
            sampling=self.sampling,
            timeout=self.timeout,
            priority=self.priority,
            pin_key=self.lease,
            cache_salt=self.cache_salt,
            draft=self.draft,
            probe=self.probe,
            constraint=None if self.structured_outputs is None else self.structured_outputs.to_constraint(),
            constraint_escape_tokens=tuple(self.lifts_constraint),
        )


class KeyBoundBody(_Body):
    """The bound on the keys of a branch that an item goes on with: its `kv_budget`, `kv_start`, `kv_end` and `seed`."""

    budget: _Count
    start: _Count
    end: Annotated[list[_Count], Field(max_length=64)] = []
    seed: _Word

    def to_bound(self) -> KeyBound:
        return KeyBound(self.budget, self.start, tuple(self.end), self.seed)


class ItemBody(_Body):
    """One sequence to score: parts as text or token ids, and the indices of the parts at whose ends to read."""

    parts: list[_Text | list[int]]
    read: Annotated[list[int], Field(min_length=1)]
    key_bound: KeyBoundBody | None = None
    """By default the keys of all tokens are kept."""

    def to_item(self) -> ScoreItem:
        parts = tuple(part if isinstance(part, str) else tuple(part) for part in self.parts)
        return ScoreItem(parts, tuple(self.read), None if self.key_bound is None else self.key_bound.to_bound())


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
    probe: bool = False
    normalized: bool = False

    def to_request(self) -> ScoreRequest:
        request_id = self.request_id or f"score-{secrets.token_hex(12)}"
        return ScoreRequest(
            request_id,
            self.model,
            items=tuple(item.to_item() for item in self.items),
            token_ids=tuple(self.token_ids),
            max_compute=self.max_compute,
            priority=self.priority,
            pin_key=self.lease,
            cache_salt=self.cache_salt,
            probe=self.probe,
            normalized=self.normalized,
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
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    """True to add special tokens to a prompt; a chat template contains them itself."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
