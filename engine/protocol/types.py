"""What a client says to an engine and what it hears back. No torch: workers import this module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "context", "timeout", "cancelled"]
"""``stop``: end of sequence, a stop token or a stop string. ``length``: ``max_tokens``. ``context``: the model's
context is full. ``timeout``: ``GenerateRequest.timeout`` passed. ``cancelled``: somebody called ``abort``."""


class EngineError(Exception):
    """The engine refused or failed a request; the message says what would be right."""


class InvalidRequest(EngineError):
    """The request can never be served. ``field`` names the offending part."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineUnavailable(EngineError):
    """The engine could not be reached or answered with a server error; the same request may succeed later."""


class EngineBusy(EngineUnavailable):
    """The engine's waiting queue is full."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    The logits are changed by ``logit_bias``, the penalties and ``min_tokens`` (``engine.sampling.penalties`` says how),
    divided by ``temperature`` (0 means greedy: argmax) and filtered by ``top_k`` (0 is off), ``top_p`` (1 is off) and
    ``min_p`` (0 is off), in this order. ``stop`` strings end a branch as soon as the generated text contains one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over the prompt's tokens and the generated ones; 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both over generated tokens, ``Branch.generated`` included; 0 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with what is added to their logits."""
    min_tokens: int = 0
    """Before this many generated tokens (``Branch.generated`` included) nothing stops a branch."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = True
    """Whether the text keeps the stop string that ended it, and what its last token wrote behind it: a search re-sends
    them. The tokens are the same."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of every new token, and of this many of the likeliest at its place."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, which are then all forwarded. Reported with the first branch."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of a request's prompt.

    The noise of a token is a function of (``seed``, ``key``, position, purpose) alone, so the same branch draws the
    same tokens whatever else is in the batch. ``generated`` holds tokens that the branch already has beyond the prompt:
    they count for stop strings and positions, and continuing a cut branch gives exactly the tokens of the uncut one.
    """

    seed: int
    key: int
    max_tokens: int
    """New tokens at most, on top of ``generated``. 0 only reads the prompt, for ``prompt_logprobs``."""
    generated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue one prompt along several branches. The prompt's token ids are the handle to its KV."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    branches: tuple[Branch, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float | None = None
    """Seconds after which unfinished branches end with ``timeout`` and the tokens they have."""
    priority: int = 0
    """Higher starts first and is sent back last when memory runs out."""
    lease: str | None = None
    """Name under which the engine keeps what this request computes in its cache until ``EngineClient.release``: the
    job's id. It changes what is fast, never what is answered."""
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt."""
    draft: bool = True
    """Whether tokens may be guessed. Guessing changes no token, but computes wrong guesses too."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model's own law: temperature 1, before bias, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place with theirs, likeliest first; the token itself may be among them."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a branch while it is still running (streaming only). Never half a character."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of ``token_ids``, if ``SamplingParams.logprobs`` asked for them."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished branch. ``token_ids`` and ``text`` are what this request added (without ``Branch.generated``).

    An end-of-sequence token is part of ``token_ids`` (it was generated and is billed) but not of ``text``.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended the branch, when ``finish_reason`` is ``stop``."""
    logprob: float
    """Sum of the log-probabilities of ``token_ids`` under the law that they were sampled from (greedy tokens: under the
    model's own law, at temperature 1, since the greedy law has only one outcome)."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens (``generated`` included) whose KV came from the prefix cache."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of ``token_ids``, if ``SamplingParams.logprobs`` asked for them."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt but the first, which nothing precedes, if they were asked for and this is the
    first branch; fewer when the branch ended before the prompt was read."""
    drafted_tokens: int = 0
    """Guesses at its tokens that were computed (speculative decoding)."""
    accepted_tokens: int = 0
    """Those of them that are among ``token_ids``."""


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One sequence to forward. ``parts`` are tokenised one by one and concatenated, so that a shared prefix of parts is
    a shared prefix of token ids. Read-outs are taken at the last token of the parts in ``read`` (indices)."""

    parts: tuple[str | tuple[int, ...], ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Forward sequences through a model and read it at chosen positions, reusing the prefix cache.

    A causal model answers the logits of ``token_ids`` at each position; a classifier or reward model the logits of its
    labels (``token_ids`` must be empty). ``max_compute`` bounds the tokens that one item may forward: an item that
    would need more is not computed and answers ``values=None`` with the number it needs.
    """

    request_id: str
    model: str
    items: tuple[ScoreItem, ...]
    token_ids: tuple[int, ...] = ()
    max_compute: int | None = None
    priority: int = 0
    """This and the following as in ``GenerateRequest``."""
    lease: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """``values``: a row of logits for each index in ``ScoreItem.read``; ``None`` when ``max_compute`` was too small."""

    index: int
    values: tuple[tuple[float, ...], ...] | None
    computed_tokens: int
    """Tokens forwarded, or, when ``values`` is ``None``, the number that would have to be."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may know about a served model."""

    id: str
    kind: Literal["generate", "classify"]
    context: int
    """Longest sequence in tokens, prompt and generation together."""
    vocab_size: int
    parameters: int
    """Number of weights, for FLOP estimates (2 per weight and token)."""
    extra: dict[str, object] = field(default_factory=dict)
    """The checkpoint's own notes, such as ``reasoner_prm`` from its config.json."""
    architecture: str = ""
    """The class that the checkpoint was saved from, such as ``Qwen2ForProcessRewardModel``; empty if nobody knows."""
    bos: int | None = None
    """The tokenizer's ``bos_token``, whether or not it puts it before a text by itself."""
    fingerprint: str = ""
    """Tells checkpoints apart (``engine.fingerprint``); empty where the server does not say."""
    isolates: bool = True
    """Whether its server keeps what is cached under different ``cache_salt`` apart. One that cannot refuses a salt."""


class EngineClient(Protocol):
    """The one interface to an engine, in-process (``LocalEngine``) or over HTTP (``HttpEngine``)."""

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        """Yields each branch's ``Completion`` as it finishes, in order of arrival; with ``stream`` also ``Delta``s.

        Raises ``InvalidRequest``, ``EngineBusy``, ``EngineUnavailable``. Closing the iterator cancels what still runs.
        """
        ...

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Answers every item, in the order of the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends the branches of a request at the next step; their ``Completion``s say ``cancelled`` and what they got.
        An unknown id is not an error: the request may have just finished."""
        ...

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Ends a lease: what it kept in the cache may be evicted like anything else. With ``tokens``, all token ids of
        one branch, only that branch is given up, back to where another branch of the lease leaves it. An unknown lease
        is not an error: leases end by themselves when they are not used for long."""
        ...

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a plain text, or of chat messages through the model's template.

        ``special``: a plain text begins as the tokenizer begins one (Llama and Gemma: with a first token); without it
        the text is a piece of another one. ``generation_prompt``: what tells the model to speak follows the messages.
        """
        ...

    async def models(self) -> list[ModelInfo]:
        """What is served."""
        ...

    async def clear_cache(self) -> None:
        """Forgets every prefix that no running request uses: for measurements that must start cold."""
        ...

    async def close(self) -> None:
        """Frees connections, and the models where the engine is in-process."""
        ...
