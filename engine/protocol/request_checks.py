"""Validation of requests against the limits of a model and of the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import TypeGuard

from engine.protocol.refusal import Refusal
from engine.protocol.types import (
    Capability,
    ConversationToken,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    KeyBound,
    ModelInfo,
    SamplingParams,
    ScoreRequest,
    TextToken,
    TokenIds,
    Tokens,
)

_MAX_NAME_LENGTH = 256
"""Maximum length of a pin key or a cache salt."""
_TEXTS = {TextToken, ConversationToken}
"""Tokens without ids."""
_WORD = range(-(1 << 63), 1 << 64)
"""Valid seeds and keys: 64-bit words, signed or not."""
MAX_TOP_K = (1 << 31) - 1
"""The kernels hold it in a signed 32-bit word. A value above the size of the vocabulary has no effect."""
MAX_TEMPERATURE = 1000
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 1000
"""Outside of these bounds logits would overflow float32."""
MAX_LOGIT_BIASES = 1024
MAX_SECONDS = 1e9
MAX_COMPUTE = (1 << 63) - 1
MAX_PRIORITY = (1 << 31) - 1
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 256
MIN_THOUGHT_PAGES = 4
"""Pages of a thought that a bound on its keys must have room for."""

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "raise_exception"),
    }
)
"""Names that the engine itself passes to a chat template or to what renders it."""

_SAMPLING_LIMITS = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_k": (0, MAX_TOP_K),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


class PromptTooLong(InvalidRequest):
    """The question leaves no room for an answer in the context of a model."""

    kind = "too_long"


class ContentFiltered(EngineError):
    """The server withholds an answer for its content."""

    kind = "filtered"


def make_refusal(error: EngineError) -> Refusal:
    """Return what an error says about a branch that it ends."""
    return Refusal(str(error), error.field if isinstance(error, InvalidRequest) else None, error.kind)


def check_template_kwargs(names: Iterable[str]) -> None:
    """Raise ``InvalidRequest`` for a name that is no variable of a chat template that a client may set."""
    reserved = sorted(RESERVED_TEMPLATE_NAMES.intersection(names))
    if reserved:
        raise InvalidRequest(
            f"{reserved[0]!r} is set by the engine: give variables of the model's chat template, such as "
            "enable_thinking",
            "chat_template_kwargs",
        )


def check_generate(request: GenerateRequest, model: ModelInfo, max_branches: int) -> None:
    """Raise ``InvalidRequest`` unless an idle engine could serve the request."""
    if model.kind != "generate":
        raise InvalidRequest(f"model {model.id!r} classifies tokens and cannot generate; use a score request", "model")
    _check_probe(request.probe, model)
    check_no_thinking_limit(request)
    if not request.prompt:
        raise InvalidRequest("the prompt must have at least one token", "prompt")
    check_tokens(request.prompt, model, "prompt")
    if not 1 <= len(request.branches) <= max_branches:
        raise InvalidRequest(f"{len(request.branches)} branches; there may be 1 to {max_branches}", "branches")
    min_tokens = 1 if request.sampling.prompt_logprobs is None else 0
    for branch in request.branches:
        check_tokens(branch.generated, model, "branches.generated")
        if branch.max_tokens < min_tokens:
            hint = " (0 is for prompt_logprobs)" if min_tokens else ""
            raise InvalidRequest(
                f"max_tokens is {branch.max_tokens}; it must be at least {min_tokens}{hint}", "max_tokens"
            )
        if branch.max_tokens > model.context:
            raise InvalidRequest(
                f"max_tokens is {branch.max_tokens}; the context has {model.context} tokens", "max_tokens"
            )
        if branch.seed not in _WORD or branch.key not in _WORD:
            raise InvalidRequest("seed and key must fit into 64 bits", "seed" if branch.seed not in _WORD else "key")
        length = len(request.prompt) + len(branch.generated)
        if length + min(branch.max_tokens, 1) > model.context:
            raise PromptTooLong(
                f"prompt and generated tokens are {length}; at most {model.context - 1} leave room for a new one",
                "prompt",
            )
    _check_sampling(request.sampling, model)
    _check_range("penalty_start", request.sampling.penalty_start, 0, len(request.prompt))
    _check_kv_budget(request, model)
    _check_constraint(request)
    check_tokens(request.constraint_escape_tokens, model, "lifts_constraint")
    if request.timeout is not None and not 0 < request.timeout <= MAX_SECONDS:
        raise InvalidRequest(
            f"timeout is {request.timeout}; it must be more than 0 and at most {MAX_SECONDS:g} seconds", "timeout"
        )
    _check_service(request)


def _check_kv_budget(request: GenerateRequest, model: ModelInfo) -> None:
    """Raise ``InvalidRequest`` for a bound on keys that the model cannot keep. Its size is checked where pages are."""
    sampling = request.sampling
    if sampling.kv_budget is None:
        if sampling.kv_start is not None or sampling.kv_end:
            raise InvalidRequest("kv_start and kv_end need a kv_budget", "kv_budget")
        return
    _check_drops_keys(model, "kv_budget")
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest("kv_budget drops keys that prompt_logprobs are about: leave one of them out", "kv_budget")
    _check_range("kv_budget", sampling.kv_budget, 1, MAX_COMPUTE)
    _check_range("kv_start", sampling.kv_start, 0, len(request.prompt))
    check_tokens(sampling.kv_end, model, "kv_end")


def _check_drops_keys(model: ModelInfo, field: str) -> None:
    if Capability.KV_BUDGET not in model.capabilities:
        raise InvalidRequest(
            f"model {model.id!r} cannot drop keys of a thought: it has layers with states, windows or indexers, or is "
            f"run by transformers: leave {field} out",
            field,
        )


def _check_key_bound(bound: KeyBound, model: ModelInfo) -> None:
    _check_drops_keys(model, "items.key_bound")
    _check_range("items.key_bound.budget", bound.budget, 1, MAX_COMPUTE)
    _check_range("items.key_bound.start", bound.start, 0, model.context)
    check_tokens(bound.end, model, "items.key_bound.end")
    _check_range("items.key_bound.seed", bound.seed, _WORD.start, _WORD.stop - 1)


def count_thought_pages(budget: int, prompt_len: int, page_size: int) -> int:
    """Return the number of pages that a budget has room for behind a prompt.

    Raises ``InvalidRequest`` if that is too few.
    """
    first = -(-prompt_len // page_size)
    count = budget // page_size - first
    if count < MIN_THOUGHT_PAGES:
        least = (first + MIN_THOUGHT_PAGES) * page_size
        raise InvalidRequest(
            f"kv_budget is {budget}, and the prompt has {prompt_len} tokens, which stay: give {least} at least, so "
            f"that a thought has {MIN_THOUGHT_PAGES} pages of {page_size} tokens",
            "kv_budget",
        )
    return count


def _check_constraint(request: GenerateRequest) -> None:
    for branch in request.branches:
        if branch.constraint_start is not None and request.constraint is None:
            raise InvalidRequest("constraint_start needs a constraint", "branches.constraint_start")
        length = len(request.prompt) + len(branch.generated)
        _check_range("constraint_start", branch.constraint_start, 0, length)
    if request.constraint is None:
        return
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request.sampling, name):
            raise InvalidRequest(
                f"{name} cannot be kept where a constraint decides when the text may end: leave it out", name
            )


def check_branches(request: GenerateRequest) -> None:
    """Raise ``InvalidRequest`` if a branch could get no token. For servers that check all else themselves."""
    for branch in request.branches:
        if branch.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {branch.max_tokens}; it must be at least 1", "max_tokens")


def find_setting_outside(sampling: SamplingParams, supported: Collection[str]) -> str | None:
    """Return the first setting that differs from its default and is not among the supported ones."""
    values, defaults = asdict(sampling), asdict(SamplingParams())
    return next((name for name in values if name not in supported and values[name] != defaults[name]), None)


def check_no_thinking_limit(request: GenerateRequest) -> None:
    """Raise ``InvalidRequest`` for a limit of thoughts, on servers on which the search closes them itself."""
    if request.thinking_limit is not None:
        raise InvalidRequest(
            "thinking_limit is for servers that only chat: end the branch at the limit and continue it after the "
            "closing delimiter",
            "thinking_limit",
        )


def check_score(request: ScoreRequest, model: ModelInfo, max_items: int) -> None:
    """Raise ``InvalidRequest`` unless an idle engine could serve the request, as far as known before tokenization."""
    if model.kind == "classify" and request.token_ids:
        raise InvalidRequest(f"model {model.id!r} classifies tokens; token_ids must be empty", "token_ids")
    _check_probe(request.probe, model)
    if request.probe and request.token_ids:
        raise InvalidRequest("a probe has one score at each position; token_ids must be empty", "token_ids")
    if model.kind == "generate" and not request.token_ids and not request.probe:
        raise InvalidRequest(
            f"model {model.id!r} is a language model; token_ids must name the logits to read", "token_ids"
        )
    if request.normalized and not request.token_ids:
        raise InvalidRequest("normalized: these are log-probabilities of tokens; give token_ids", "normalized")
    check_tokens(request.token_ids, model, "token_ids")
    _check_count("items", len(request.items), max_items)
    _check_range("max_compute", request.max_compute, 0, MAX_COMPUTE)
    _check_service(request)
    for item in request.items:
        if not item.read:
            raise InvalidRequest("an item must name at least one part to read", "items.read")
        if not all(0 <= part < len(item.parts) for part in item.read):
            raise InvalidRequest(
                f"read is {item.read}; its parts must be in the range 0 to {len(item.parts) - 1}", "items.read"
            )
        if item.key_bound is not None:
            _check_key_bound(item.key_bound, model)


def has_ids(tokens: Tokens) -> TypeGuard[TokenIds]:
    """Return True unless these are texts of a server that only chats."""
    return _TEXTS.isdisjoint(map(type, tokens))


def require_ids(tokens: Tokens, field: str = "token_ids") -> TokenIds:
    """Return tokens as ids. Raises ``InvalidRequest`` for texts of a server that only chats."""
    if not has_ids(tokens):
        raise InvalidRequest(
            f"{field} has texts of a server that only chats instead of token ids: tokenize it with this model", field
        )
    return tokens


def check_tokens(tokens: Tokens, model: ModelInfo, field: str) -> TokenIds:
    """Return tokens as ids. Raises ``InvalidRequest`` unless the model has an embedding for each token."""
    ids = require_ids(tokens, field)
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise InvalidRequest(f"{field} has a token id outside 0 to {model.vocab_size - 1}", field)
    return ids


def _check_probe(is_requested: bool, model: ModelInfo) -> None:
    if is_requested and model.probe is None:
        raise InvalidRequest(
            f"model {model.id!r} has no probe; fit one with 'reasoner prm train --probe' and serve it with --probe",
            "probe",
        )


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}; it must be between {low} and {high}", field)


def _check_count(field: str, count: int, max_count: int) -> None:
    if count > max_count:
        raise InvalidRequest(f"{field} has {count} entries; there may be at most {max_count}", field)


def _check_service(request: GenerateRequest | ScoreRequest) -> None:
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for field, name in (("lease", request.pin_key), ("cache_salt", request.cache_salt)):
        if name is not None and not 1 <= len(name) <= _MAX_NAME_LENGTH:
            raise InvalidRequest(f"{field} has {len(name)} characters; it must have 1 to {_MAX_NAME_LENGTH}", field)


def _check_sampling(sampling: SamplingParams, model: ModelInfo) -> None:
    for name, limits in _SAMPLING_LIMITS.items():
        _check_range(name, getattr(sampling, name), *limits)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}; it must be above 0 and at most 1", "top_p")
    _check_range("min_tokens", sampling.min_tokens, 0, model.context)
    for name in ("logprobs", "prompt_logprobs"):
        _check_range(name, getattr(sampling, name), 0, min(MAX_LOGPROBS, model.vocab_size))
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    check_tokens(tuple(token for token, _ in sampling.logit_bias), model, "logit_bias")
    if not all(-100 <= bias <= 100 for _, bias in sampling.logit_bias):
        raise InvalidRequest("a bias must be between -100 and 100", "logit_bias")
    _check_count("stop", len(sampling.stop), MAX_STOPS)
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in sampling.stop):
        raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    _check_count("stop_token_ids", len(sampling.stop_token_ids), model.vocab_size)
    check_tokens(sampling.stop_token_ids, model, "stop_token_ids")
