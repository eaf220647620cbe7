"""Kinds of OpenAI-compatible servers, and what each can do beyond OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.protocol.types import Capability
from engine.protocol.wire import Json

_PENALTIES = frozenset({"presence_penalty", "frequency_penalty"})
_OPENAI = frozenset({"temperature", "top_p", "stop", "logit_bias"}) | _PENALTIES
_MORE = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"})
_VLLM_FIELDS: Json = {"include_stop_str_in_output": True, "return_token_ids": True, "logprobs": 0}
_SGLANG_FIELDS: Json = {"no_stop_trim": True, "logprobs": 0}


@dataclass(frozen=True)
class Dialect:
    """Capabilities of a kind of server beyond OpenAI's API."""

    name: str
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
    penalizes: bool = True
    """True if its frequency and presence penalty are OpenAI's. llama.cpp's also count tokens of the prompt."""
    scores_prompts: bool = False
    """True if it reports the log-probabilities of a prompt's tokens (``prompt_logprobs``)."""
    tells_stops: bool = True
    """False if the server cuts a stop string off without telling which it was: no search can tell the end of a step
    from the end of a solution.
    """
    constrains: Literal["structured_outputs", "fields"] | None = None
    """Form in which the server takes a constraint, if it does: vLLM's object, or SGLang's fields. It holds from the
    first token of a request, so that a constrained text cannot be continued."""
    bundles_tokens: bool = False
    """True if ``stream_interval`` sets the number of tokens in an event of a stream."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of servers of this kind."""
        can_do = {
            Capability.CONTINUATION: self.tells_stops,
            Capability.LOGPROBS: self.tells_stops,
            Capability.PROMPT_LOGPROBS: self.scores_prompts,
            Capability.CONSTRAINT: self.constrains is not None,
            Capability.PENALTIES: self.penalizes,
        }
        return frozenset(capability for capability, is_there in can_do.items() if is_there)


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "vllm",
            _OPENAI | _MORE | {"logprobs"},
            _VLLM_FIELDS,
            tokenizes=True,
            chats=True,
            likeliest=20,
            salts=True,
            numbers_seeds=True,
            reads_tokens=True,
            scores_prompts=True,
            tells_health=True,
            constrains="structured_outputs",
            bundles_tokens=True,
        ),
        Dialect(
            "sglang",
            _OPENAI | _MORE,
            _SGLANG_FIELDS,
            tokenizes=True,
            chats=False,
            likeliest=20,
            salts=True,
            tells_health=True,
            constrains="fields",
        ),
        Dialect(
            "llamacpp",
            _OPENAI - _PENALTIES | {"top_k", "min_p", "ignore_eos"},
            {},
            tokenizes=False,
            chats=False,
            likeliest=0,
            salts=False,
            penalizes=False,
            tells_stops=False,
        ),
        Dialect("openai", _OPENAI, {}, tokenizes=False, chats=False, likeliest=5, salts=False),
    )
}
