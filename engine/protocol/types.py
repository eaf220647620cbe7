"""Types of the engine's interface: requests, results and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, Self

from engine.protocol.constraint import Constraint
from engine.protocol.refusal import Refusal, RefusalKind

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextToken:
    """The share of a text for which a server without token ids bills one token; it may be empty."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class ConversationToken:
    """The messages of a prompt for such a server, with the variables of their template, as JSON."""

    json: str


Token = int | TextToken | ConversationToken
Tokens = tuple[Token, ...]
"""Tokens by which a text is sent, identified and counted: ids, or texts of a server that only chats."""

Prompt = str | Sequence[dict[str, Any]]
"""A text, or chat messages to render with the model's template."""

TemplateKwargs = Mapping[str, object]
"""Variables of a chat template, such as ``enable_thinking``."""


class Capability(StrEnum):
    """A thing that the server of a model may be able to do; our own engine can do all of them."""

    description: str
    """The ability in words: what such a server does, with no subject."""

    def __new__(cls, name: str, description: str) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.description = description
        return member

    CONTINUATION = "continuation", "goes on after the beginning of an answer"
    LOGPROBS = "logprobs", "reports the log-probabilities of the likeliest tokens"
    PROMPT_LOGPROBS = "prompt_logprobs", "reports those of a given text"
    CONSTRAINT = "constraint", "holds a whole answer to a language"
    CONSTRAINT_CONTINUATION = "constraint_continuation", "also goes on within such an answer"
    PENALTIES = "penalties", "has OpenAI's frequency and presence penalty, which count generated tokens alone"
    PENALTY_CONTINUATION = "penalty_continuation", "also counts the tokens of an answer that it goes on with"
    KV_BUDGET = "kv_budget", "bounds the keys of a thought"


FinishReason = Literal["stop", "length", "context", "timeout", "cancelled", "refused"]
"""``stop``: end of sequence, a stop token or a stop string. ``length``: ``max_tokens``. ``context``: the model's
context is full. ``timeout``: ``GenerateRequest.timeout`` passed. ``cancelled``: ``abort`` was called. ``refused``: the
server refuses this branch for good, while others go on (``Completion.refusal``)."""


class EngineError(Exception):
    """The engine refused or failed a request; the message names a valid alternative."""

    kind: ClassVar[RefusalKind] = "failed"


class InvalidRequest(EngineError):
    """The request can never be served. ``field``: the name of the invalid field."""

    kind: ClassVar[RefusalKind] = "invalid"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotSupported(EngineError):
    """The server has no such function."""


class EngineUnavailable(EngineError):
    """The engine could not be reached or returned an error that may pass. ``retry_after``: seconds until then."""

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnreachable(EngineUnavailable):
    """No connection to the engine could be made, also not after several attempts."""


class SomeModelsAway(EngineUnavailable):
    """Some servers do not answer; of others, or of what these had before, the models are known.

    ``known``: the models of those that answer. ``away``: those that the others had when they last answered.
    """

    def __init__(self, message: str, known: list[ModelInfo], away: Sequence[ModelInfo] = ()) -> None:
        super().__init__(message)
        self.known = known
        self.away = list(away)


class EngineBusy(EngineUnavailable):
    """The engine's waiting queue is full, or the client has used up a rate limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    The logits are modified by ``logit_bias``, the penalties and ``min_tokens`` (``logits_processors``), divided
    by ``temperature`` (0 means greedy: argmax) and filtered by ``top_k`` (0 is off), ``top_p`` (1 is off) and ``min_p``
    (0 is off), in this order. ``stop`` strings end a branch as soon as the generated text contains one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applied to the tokens of the prompt and to generated ones; 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Applied, like ``presence_penalty``, to generated tokens including ``Branch.generated``; 0 is off."""
    penalty_start: int | None = None
    """The position in the prompt from which its tokens count as generated for both; by default its end. A search sends
    the beginning of a solution as a part of the prompt."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the bias added to its logit."""
    min_tokens: int = 0
    """The minimum number of generated tokens, ``Branch.generated`` included, before a branch may stop."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = True
    """True to keep in the text the stop string that ended it and the rest of its last token, which a search sends
    again. Does not affect the tokens."""
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """The number of most likely tokens whose log-probabilities are reported besides that of each new token."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, all of which are then computed. Reported with the first branch."""
    kv_budget: int | None = None
    """The maximum number of tokens of a branch, prompt included, whose keys are kept while it thinks: beyond it pages
    of the thought are dropped at random. The answer's keys stay. See ``engine.cache.page_drops``."""
    kv_start: int | None = None
    """The position in the prompt at which the thought begins; by default its end."""
    kv_end: TokenIds = ()
    """The tokens that end a thought; without any the whole text is one."""

    @property
    def counts_tokens(self) -> bool:
        """True if the distribution of a token depends on the number of times that it was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of a request's prompt.

    The noise of a token is a function of (``seed``, ``key``, position, purpose) alone, so the same branch samples the
    same tokens in any batch. ``generated``: tokens that the branch already has after the prompt. They count for stop
    strings and positions, and continuing an interrupted branch gives exactly the tokens of the uninterrupted one.
    """

    seed: int
    key: int
    max_tokens: int
    """The maximum number of new tokens, besides ``generated``. 0 only computes the prompt, for ``prompt_logprobs``."""
    generated: Tokens = ()
    sibling: tuple[int, int] | None = None
    """The key of the parent and the place among its branches. Servers that seed the samples of one request one after
    the other get siblings as one request; it changes nothing on our engine."""
    constraint_start: int | None = None
    """The position in the prompt and ``generated`` together from which the request's constraint holds; by default the
    end of the prompt."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request to continue one prompt along several branches. The prompt's tokens identify its cached KV."""

    request_id: str
    model: str
    prompt: Tokens
    branches: tuple[Branch, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float | None = None
    """The time in seconds after which unfinished branches end with ``timeout`` and the tokens generated so far."""
    priority: int = 0
    """The higher, the earlier the request starts and the later it is preempted when memory runs out."""
    pin_key: str | None = None
    """The name under which the engine keeps the request's KV cached until ``EngineClient.release``: the job's id.
    Affects speed only, never results."""
    cache_salt: str | None = None
    """The salt of cached prefixes, which are shared only among requests with the same salt."""
    draft: bool = True
    """True to allow speculative decoding, which changes no token but also computes rejected draft tokens."""
    probe: bool = False
    """True to report the score of the model's probe (``ModelInfo.probe``) in each completion."""
    thinking_limit: int | None = None
    """The maximum number of tokens of a thought, on servers that limit them (``ModelInfo.limits_thoughts``) alone."""
    constraint: Constraint | None = None
    """The language to which the branches are held, from ``Branch.constraint_start`` to their end."""
    skip_special_tokens: bool = True
    """False to keep special tokens in the text, because some models delimit tool calls with them. Our engine always
    keeps those delimiters."""
    constraint_escape_tokens: Tokens = ()
    """Tokens that lift the constraint for the rest of the request if a branch begins its constrained text with one of
    them, such as the token that opens a thought.
    """


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model's own distribution: temperature 1, before bias, penalties and
    filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at this position with their log-probabilities, most likely first; may include the token
    itself.
    """


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a running branch (streaming only). Ends at a complete character."""

    index: int
    text: str
    token_ids: Tokens
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each of ``token_ids``, if ``SamplingParams.logprobs`` is set."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished branch. ``token_ids`` and ``text``: the output of this request, without ``Branch.generated``.

    An end-of-sequence token is part of ``token_ids`` (it was generated and is billed) but not of ``text``.
    """

    index: int
    token_ids: Tokens
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended the branch, if ``finish_reason`` is ``stop``."""
    logprob: float
    """The sum of the log-probabilities of ``token_ids`` under their sampling distribution (greedy tokens: under the
    model's own distribution at temperature 1, since the greedy one has a single outcome). Servers other than ours may
    report the model's own distribution for all of them, which underrates a branch at temperatures below 1.
    """
    prompt_tokens: int
    cached_tokens: int
    """The number of prompt tokens (``generated`` included) whose KV came from the prefix cache."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each of ``token_ids``, if ``SamplingParams.logprobs`` is set."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry for each token of the prompt, ``None`` for the first, if this is the first branch and they were
    requested; fewer if the branch ended before the prompt was computed.
    """
    token_texts: dict[int, str] = field(default_factory=dict)
    """The text of each token in ``prompt_logprobs``; one that is no whole character is ``token_id:`` and its id."""
    drafted_tokens: int = 0
    """The number of draft tokens verified (speculative decoding)."""
    accepted_tokens: int = 0
    """The number of accepted draft tokens among ``token_ids``."""
    probe: float | None = None
    """The probe's estimate that the solution ends right, read from the state that predicted the last of ``token_ids``;
    ``None`` if it was not requested or no token was sampled.
    """
    dropped_tokens: int = 0
    """The number of tokens whose keys were dropped for ``SamplingParams.kv_budget``."""
    thought: tuple[int, int] | None = None
    """The numbers of characters and of tokens at the beginning that are a thought, which has tokens alone if the server
    hides it; ``None`` if the server does not tell.
    """
    refusal: Refusal | None = None
    """The reason of a branch that is ``refused``."""


Events = AsyncGenerator[Completion | Delta, None]
"""The results of a generate request as they arrive."""


@dataclass(frozen=True, slots=True)
class KeyBound:
    """Bound on the keys of one branch's thought: fields of its ``SamplingParams`` and the seed of its ``Branch``.

    A request with the same bound goes on from the keys that the branch has left.
    """

    budget: int
    """``SamplingParams.kv_budget``."""
    start: int
    """``SamplingParams.kv_start``, or the end of the prompt."""
    end: TokenIds = ()
    """``SamplingParams.kv_end``."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One sequence to score. ``parts`` are tokenized one by one and concatenated, so that a shared prefix of parts is a
    shared prefix of token ids. The model is read at the last token of each part in ``read`` (indices).
    """

    parts: tuple[str | Tokens, ...]
    read: tuple[int, ...]
    key_bound: KeyBound | None = None
    """The bound of the branch that the item goes on with."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request to compute sequences and read the model at chosen positions, reusing the prefix cache.

    A causal model returns the logits of ``token_ids`` at each position; a classifier or reward model the logits of its
    labels (``token_ids`` must be empty). With ``normalized`` a causal model returns the log-probabilities of
    ``token_ids`` among all tokens instead; servers other than ours return those in any case. ``max_compute``: the
    maximum number of tokens to compute per item; an item that needs more is not computed and has ``values=None`` and
    the number needed. With ``probe`` a causal model returns its probe's estimate at each position, which is
    ``Completion.probe`` for a branch that goes on with one token.
    """

    request_id: str
    model: str
    items: tuple[ScoreItem, ...]
    token_ids: Tokens = ()
    max_compute: int | None = None
    priority: int = 0
    """This and the following fields are those of ``GenerateRequest``."""
    pin_key: str | None = None
    cache_salt: str | None = None
    probe: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """``values``: a row of logits for each index in ``ScoreItem.read``; ``None`` if ``max_compute`` was too small."""

    index: int
    values: tuple[tuple[float, ...], ...] | None
    computed_tokens: int
    """The number of tokens computed or, if ``values`` is ``None``, the number needed."""
    cached_tokens: int
    unread: str | None = None
    """A judge's text that is no verdict, or the words with which its server refused; ``values`` is then empty."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Request for the tokens of a text or of chat messages."""

    model: str
    text: Prompt
    _: KW_ONLY
    special: bool = True
    """True to add the tokenizer's special tokens to a text (Llama and Gemma: BOS); otherwise the text is a part of a
    longer one.
    """
    generation_prompt: bool = True
    """True to add the template's generation prompt after the messages."""
    template_kwargs: TemplateKwargs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """Properties of a model's probe (``engine.runner.probe``)."""

    id: str
    """Hash of its weights."""
    layers: tuple[int, ...]
    """The layers that it reads, from 1."""
    parameters: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a served model."""

    id: str
    kind: Literal["generate", "classify"]
    context: int
    """The maximum sequence length in tokens, prompt and output together."""
    vocab_size: int
    parameters: int
    """The number of weights, for FLOP estimates (2 per weight and token)."""
    extra: dict[str, object] = field(default_factory=dict)
    """Additional entries of the checkpoint's config.json, such as ``reasoner_prm``."""
    architecture: str = ""
    """The class that the checkpoint was saved from, such as ``Qwen2ForProcessRewardModel``; empty if unknown."""
    bos: int | None = None
    """The tokenizer's ``bos_token``, whether or not the tokenizer adds it to a text by default."""
    sampling: dict[str, float] = field(default_factory=dict)
    """The model's own sampling parameters by their names in ``SamplingParams`` (``engine.protocol.own_sampling``)."""
    fingerprint: str = ""
    """Fingerprint of the checkpoint (``engine.fingerprint``); empty if the server does not report one."""
    counts_exactly: bool = True
    """False if the number of a prompt's tokens is known only after a request, since the server has no token ids. The
    last requests of a job may then cost more than its budget had left.
    """
    capabilities: frozenset[Capability] = frozenset(Capability)
    """The capabilities of the model's server."""
    isolates: bool = True
    """True if the server isolates cached prefixes by ``cache_salt``. Otherwise a request with a salt is refused."""
    probe: ProbeInfo | None = None
    """The head that scores the model's own solutions; ``None`` if there is none."""
    tells_thoughts: bool = False
    """True if ``Completion.thought`` tells which part of an answer is a thought."""
    limits_thoughts: bool = False
    """True if the server limits thoughts by ``GenerateRequest.thinking_limit``."""
    chat_template: str = ""
    """The model's chat template, which shows the format of its calls of functions; empty if it is not known."""
    parent: str = ""
    """The model whose adapter this is; empty for a model with weights of its own."""
    invocation: TokenIds = ()
    """The tokens from whose last occurrence in a prompt the adapter is active; empty if it always is."""
    page_size: int = 16
    """The number of tokens of a page of keys, on our engine."""
    tells_calls: bool = False
    """True if the server takes functions in a field of its own, and its client writes calls in Hermes's format."""


class EngineClient(Protocol):
    """Interface of an engine, in-process (``LocalEngine``) or over HTTP (``HttpEngine``)."""

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        """Yield each branch's ``Completion`` when it finishes, in order of arrival; with ``stream`` also ``Delta``
        events.

        Raises ``InvalidRequest``, ``EngineBusy``, ``EngineUnavailable``. Closing the iterator cancels unfinished
        branches.
        """
        ...

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Return one result per item, in the order of the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Cancel the branches of a request at the next step; each returns a ``Completion`` with the reason
        ``cancelled`` and the tokens generated so far. An unknown id is not an error, since the request may have just
        finished.
        """
        ...

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:
        """Drop the pins of a key, whose cached prefixes may then be evicted like others.

        With ``tokens`` (all tokens of one branch), only that branch is released, up to where another branch of the
        pin key diverges. An unknown key is not an error, since unused pins expire.
        """
        ...

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Return the tokens of a text or of chat messages."""
        ...

    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``SomeModelsAway`` if some of several servers do not answer."""
        ...

    async def clear_cache(self) -> None:
        """Drop all cached prefixes that no running request uses, for measurements with a cold cache.

        Raises ``NotSupported`` for a server that cannot.
        """
        ...

    async def close(self) -> None:
        """Close connections; an in-process engine also frees its models."""
        ...


async def list_answering(engine: EngineClient) -> list[ModelInfo]:
    """Return the models of the servers that answer. Raises ``EngineError`` if none does."""
    try:
        return await engine.models()
    except SomeModelsAway as error:
        if not error.known:
            raise
        return error.known
