"""Kinds of OpenAI-compatible servers, and what each can do beyond OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.protocol.types import Capability
from engine.protocol.wire import Json

_COMPLETIONS = frozenset({Capability.CONTINUATION, Capability.LOGPROBS, Capability.PENALTIES})
"""The capabilities of every server of OpenAI's completions that tells which stop string ended a text."""
_PENALTIES = frozenset({"presence_penalty", "frequency_penalty"})
_OPENAI = frozenset({"temperature", "top_p", "stop", "logit_bias"}) | _PENALTIES
_MORE = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"})
_VLLM_FIELDS: Json = {"include_stop_str_in_output": True, "return_token_ids": True, "logprobs": 0}
_SGLANG_FIELDS: Json = {"no_stop_trim": True, "logprobs": 0}


@dataclass(frozen=True)
class Dialect:
    """Capabilities of a kind of server beyond OpenAI's API."""

    name: str
    capabilities: frozenset[Capability]
    settings: frozenset[str]
    """The supported fields of ``SamplingParams``, sent under the same names."""
    extensions: Json
    """Fields sent with every request, so that stop strings stay in the text and token ids are returned."""
    tokenizes: bool
    """True if the server has ``/tokenize``."""
    chats: bool
    """True if ``/tokenize`` accepts chat messages."""
    likeliest: int
    """The maximum number of log-probabilities reported per position."""
    salts: bool
    """True if ``cache_salt`` isolates cached prefixes: vLLM since its #20981 (2025), SGLang since its #23300 (2026).
    Older versions accept a salt and ignore it.
    """
    numbers_seeds: bool = False
    """True if sample ``i`` of ``n`` with seed ``s`` equals a single sample with seed ``s + i``, so that siblings can
    share a request. SGLang gives all of them the same seed.
    """
    reads_tokens: bool = False
    """True if the log-probabilities of named tokens can be asked for (``logprob_token_ids``)."""
    tells_health: bool = False
    """True if ``/health`` tells whether the server's engine lives; vLLM lists its models for seconds after its end."""
    constraint_form: Literal["structured_outputs", "fields"] = "structured_outputs"
    """Form in which the server takes a constraint, if it does: vLLM's object, or SGLang's fields. It holds from the
    first token of a request, so that a constrained text cannot be continued."""
    priority_sign: Literal[-1, 1] | None = None
    """The sign of ``priority`` on a server that was started to obey it; ``None`` where there is no such field. vLLM
    starts the lowest value first, SGLang the highest.
    """
    bundles_tokens: bool = False
    """True if ``stream_interval`` sets the number of tokens in an event of a stream."""


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "vllm",
            _COMPLETIONS | {Capability.PROMPT_LOGPROBS, Capability.CONSTRAINT},
            _OPENAI | _MORE | {"logprobs"},
            _VLLM_FIELDS,
            tokenizes=True,
            chats=True,
            likeliest=20,
            salts=True,
            numbers_seeds=True,
            reads_tokens=True,
            tells_health=True,
            priority_sign=-1,
            bundles_tokens=True,
        ),
        Dialect(
            "sglang",
            _COMPLETIONS | {Capability.CONSTRAINT},
            _OPENAI | _MORE,
            _SGLANG_FIELDS,
            tokenizes=True,
            chats=False,
            likeliest=20,
            salts=True,
            tells_health=True,
            priority_sign=1,
            constraint_form="fields",
        ),
        Dialect(
            "llamacpp",
            # It cuts a stop string off without telling which it was, so that no search can tell the end of a step from
            # the end of a solution, and its penalties also count tokens of the prompt.
            frozenset(),
            _OPENAI - _PENALTIES | {"top_k", "min_p", "ignore_eos"},
            {},
            tokenizes=False,
            chats=False,
            likeliest=0,
            salts=False,
        ),
        Dialect("openai", _COMPLETIONS, _OPENAI, {}, tokenizes=False, chats=False, likeliest=5, salts=False),
    )
}
