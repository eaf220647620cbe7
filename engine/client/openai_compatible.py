"""Client of OpenAI-compatible servers: plain completions, with one request per branch.

Differences from our own server: each branch is sampled with a seed derived from its own, so a server that honours seeds
is reproducible, but its tokens are not those of our engine. Leases and priorities affect speed only and are not sent.
Log-probabilities are the reported ones, under the distribution that the server reports. If a server reports text only,
its token ids come from the local tokenizer and may be more than the server sampled. Clearing the cache is not supported
and raises ``EngineError``.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.client.connection import Connection
from engine.client.local_tokenizer import LocalTokenizer
from engine.client.openai_scoring import OpenAIScorer
from engine.protocol.streams import merge_streams
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineError,
    EngineUnavailable,
    Events,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    Prompt,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TemplateKwargs,
    Tokens,
)
from engine.protocol.wire import Json, error_from_json

_DEFAULTS = asdict(SamplingParams())
_OPENAI = frozenset({"temperature", "top_p", "stop", "presence_penalty", "frequency_penalty", "logit_bias"})
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


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("vllm", _OPENAI | _MORE, _VLLM_FIELDS, tokenizes=True, chats=True, likeliest=20, salts=True),
        Dialect("sglang", _OPENAI | _MORE, _SGLANG_FIELDS, tokenizes=True, chats=False, likeliest=20, salts=True),
        Dialect("openai", _OPENAI, {}, tokenizes=False, chats=False, likeliest=5, salts=False),
    )
}


class OpenAICompatibleEngine:
    """``EngineClient`` for a vLLM, SGLang or other OpenAI-compatible server."""

    def __init__(self, connection: Connection, dialect: Dialect, tokenizer: Path | None) -> None:
        """``tokenizer``: the model's folder; a server of the plain dialect is then sent prompts as text."""
        self._connection = connection
        self._dialect = dialect
        self._text = None if tokenizer is None else LocalTokenizer(tokenizer)
        self._speaks_text = self._text is not None and dialect.name == "openai"
        extensions = {"return_tokens_as_token_ids": True} if dialect.name == "vllm" else {}
        self._scores = OpenAIScorer(connection, extensions, dialect.likeliest)
        self._running: list[_TimeLimit] = []

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        self._check(request)
        limit = _TimeLimit(request)
        self._running.append(limit)
        try:
            branches = [self._continue(request, branch, limit) for branch in request.branches]
            async with aclosing(merge_streams(branches, 1)) as events:
                async for event in events:
                    if stream or isinstance(event, Completion):
                        yield event
        finally:
            self._running.remove(limit)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Score items (``engine.client.openai_scoring``); ``max_compute`` limits the whole item, cached or not."""
        self._check_probe(request)
        salt = self._salt(request)
        return list(await asyncio.gather(*(self._score(request, salt, *item) for item in enumerate(request.items))))

    async def _score(self, request: ScoreRequest, salt: Json, index: int, item: ScoreItem) -> ScoreResult:
        tokens: list[int] = []
        ends: list[int] = []
        for part in item.parts:
            tokens += await self.tokenize(request.model, part, special=False) if isinstance(part, str) else part
            ends.append(len(tokens) - 1)
        reads = [ends[part] for part in item.read]
        prompts = [tokens[: position + 1] for position in reads]
        # For a causal model, one token is sampled after each position.
        needed = sum(len(prompt) + 1 for prompt in prompts) if request.token_ids else max(reads) + 1
        if request.max_compute is not None and needed > request.max_compute:
            return ScoreResult(index, None, needed, 0)
        if request.token_ids:
            names = [self._name(token) for token in request.token_ids]
            texts = [self._prompt(prompt) for prompt in prompts]
            result = await self._scores.logits(index, request.model, texts, names, salt)
        else:
            result = await self._scores.rows(index, request.model, tokens[: max(reads) + 1], reads, salt)
        if request.max_compute is not None and result.computed_tokens > request.max_compute:
            raise self._cannot(f"be held to a budget: it reports {result.computed_tokens} tokens for {needed}")
        return result

    def _name(self, token: int) -> str:
        """Return the server's name for a token in lists of log-probabilities."""
        if self._dialect.name == "vllm":
            return f"token_id:{token}"
        if self._text is None:
            raise self._cannot("tell tokens apart; name the folder of its model's tokenizer")
        return self._text.piece(token)

    def _prompt(self, tokens: list[int]) -> str | list[int]:
        return self._text.decode(tokens) if self._speaks_text and self._text is not None else tokens

    async def abort(self, request_id: str) -> None:
        """Cancel the branches that this client has in flight; they end with the tokens received so far."""
        for limit in self._running:
            if limit.request_id == request_id:
                limit.abort()

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Do nothing, since these servers have no leases."""

    async def tokenize(
        self,
        model: str,
        text: Prompt,
        *,
        special: bool = True,
        generation_prompt: bool = True,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Tokens:
        """Tokenize with the local tokenizer if there is one, otherwise on the server."""
        if self._text is not None:
            if isinstance(text, str):
                return self._text.encode(text, special=special)
            chat = self._text.chat(text, generation_prompt=generation_prompt, template_kwargs=template_kwargs)
            return self._text.encode(chat)
        if not self._dialect.tokenizes:
            raise self._cannot("tokenise; name the folder of its model's tokenizer")
        if not isinstance(text, str) and not self._dialect.chats:
            raise self._cannot("tokenise chat messages; name the folder of its model's tokenizer")
        return await self._connection.tokenize(
            model, text, special=special, generation_prompt=generation_prompt, template_kwargs=template_kwargs
        )

    async def models(self) -> list[ModelInfo]:
        """List the served models. Sizes that the server does not report are 0."""
        listed: list[Json] = (await self._connection.call("GET", "/v1/models", None, should_wait=False))["data"]
        if not listed and self._text is not None:  # ``transformers serve`` on a folder
            listed = [{"id": str(self._text.folder)}]
        return [self._info(entry) for entry in listed]

    async def clear_cache(self) -> None:
        raise self._cannot("empty its cache on request")

    async def close(self) -> None:
        await self._connection.close()

    def _info(self, entry: Json) -> ModelInfo:
        context = entry.get("max_model_len") or (self._text and self._text.context)
        if not context:
            raise self._cannot(f"tell the context of {entry['id']!r}; name the folder of its tokenizer and config")
        extra: dict[str, object] = {"server": self._dialect.name}
        info = ModelInfo(entry["id"], "generate", int(context), 0, 0, extra, isolates=self._dialect.salts)
        if (text := self._text) is None:
            return info
        return replace(
            info,
            kind=text.kind,
            vocab_size=text.vocab_size,
            extra=extra | text.notes,
            architecture=text.architecture,
            bos=text.bos,
            sampling=text.sampling,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        for name, value in asdict(request.sampling).items():
            if value != _DEFAULTS[name] and name not in self._dialect.settings:
                raise self._cannot(f"honour {name}")
        if not self._dialect.tokenizes and self._text is None:
            raise self._cannot("tell token ids; name the folder of its model's tokenizer")
        self._check_probe(request)
        for branch in request.branches:
            if branch.max_tokens < 1:
                raise InvalidRequest(f"max_tokens is {branch.max_tokens}; it must be at least 1", "max_tokens")

    def _check_probe(self, request: GenerateRequest | ScoreRequest) -> None:
        if request.probe:
            raise self._cannot("read a probe, which needs the model's hidden states: serve the model on our engine")

    def _salt(self, request: GenerateRequest | ScoreRequest) -> Json:
        """Return the fields that isolate cached prefixes. Raises ``EngineError`` if the server has no such field."""
        if request.cache_salt is None:
            return {}
        if not self._dialect.salts:
            raise self._cannot("keep caches apart by cache_salt")
        return {"cache_salt": request.cache_salt}

    def _cannot(self, what: str) -> EngineError:
        return EngineError(f"the server at {self._connection.url} ({self._dialect.name}) cannot {what}")

    def _body(self, request: GenerateRequest, branch: Branch) -> Json:
        tokens = [*request.prompt, *branch.generated]
        settings = {name: value for name, value in asdict(request.sampling).items() if value != _DEFAULTS[name]}
        if "logit_bias" in settings:
            settings["logit_bias"] = {str(token): bias for token, bias in request.sampling.logit_bias}
        return {
            "model": request.model,
            "prompt": self._prompt(tokens),
            "max_tokens": branch.max_tokens,
            "seed": branch_seed(branch),
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._dialect.extensions,
            **settings,
            **self._salt(request),
        }

    async def _continue(self, request: GenerateRequest, branch: Branch, limit: _TimeLimit) -> Events:
        """Generate one branch, with index 0."""
        answer = _Answer()
        async with aclosing(self._connection.events("/v1/completions", self._body(request, branch))) as chunks:
            try:
                while (chunk := await limit.next_chunk(chunks)) is not None:
                    if text := answer.take(chunk):
                        # Token ids are sent once, at the end: servers split texts and tokens at different places.
                        yield Delta(0, text, ())
            except TimeoutError:
                answer.reason = "cancelled" if limit.is_aborted else "timeout"
        if answer.reason is None:
            raise EngineUnavailable(f"the engine at {self._connection.url} ended its answer in the middle of a branch")
        yield await self._completion(request, branch, answer, answer.reason)

    async def _completion(
        self, request: GenerateRequest, branch: Branch, answer: _Answer, reason: FinishReason
    ) -> Completion:
        ids = tuple(answer.ids)
        if not ids and answer.text:
            ids = await self.tokenize(request.model, answer.text, special=False)
        stop = answer.stop
        if stop is None and reason == "stop":
            stop = next((string for string in request.sampling.stop if answer.text.endswith(string)), None)
        logprob = answer.logprob
        if logprob is None:
            # Without a reported log-probability, all tokens get the same.
            vocab = 0 if self._text is None else self._text.vocab_size
            logprob = -len(ids) * math.log(max(vocab, 2))
        return Completion(
            index=0,
            token_ids=ids,
            text=answer.text,
            finish_reason=reason,
            stop=stop,
            logprob=logprob,
            prompt_tokens=len(request.prompt) + len(branch.generated),
            cached_tokens=answer.cached,
            drafted_tokens=answer.accepted + answer.rejected,
            accepted_tokens=answer.accepted,
        )


@dataclass
class _Answer:
    """The response received so far for one branch."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop: str | int | None = None
    logprob: float | None = None
    cached: int = 0
    accepted: int = 0
    rejected: int = 0

    def take(self, chunk: Json) -> str:
        """Add a chunk of the stream and return its text. Raises ``EngineError`` if the chunk reports an error."""
        if "error" in chunk:
            raise error_from_json(500, chunk)
        usage = chunk.get("usage") or {}
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self.cached
        details = usage.get("completion_tokens_details") or {}
        self.accepted = details.get("accepted_prediction_tokens") or self.accepted
        self.rejected = details.get("rejected_prediction_tokens") or self.rejected
        if not chunk.get("choices"):
            return ""
        choice = chunk["choices"][0]
        text: str = choice.get("text") or ""
        self.text += text
        self.ids += choice.get("token_ids") or ()
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if logprobs is not None:
            self.logprob = (self.logprob or 0.0) + math.fsum(value for value in logprobs if value is not None)
        finish = choice.get("finish_reason")
        if finish is not None:
            if finish not in ("stop", "length"):
                raise EngineUnavailable(f"the server ended a branch with {finish!r}")
            self.reason = finish
            self.stop = choice.get("stop_reason", choice.get("matched_stop"))
        return text


class _TimeLimit:
    """The end of a request at its timeout, or as soon as it is aborted."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.is_aborted = False
        self._deadline = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
        self._waits: set[asyncio.Timeout] = set()

    def abort(self) -> None:
        self.is_aborted = True
        self._deadline = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._deadline)

    async def next_chunk(self, chunks: AsyncGenerator[Json, None]) -> Json | None:
        """Return the next chunk, ``None`` at the end. Raises ``TimeoutError`` at the end of the request's time."""
        async with asyncio.timeout_at(self._deadline) as wait:
            self._waits.add(wait)
            try:
                return await anext(chunks, None)
            finally:
                self._waits.discard(wait)


def branch_seed(branch: Branch) -> int:
    """Return a seed of 31 bits, which every server accepts, from a branch's seed, key and number of generated tokens.

    The number is included because servers count noise from the start of a request: a continuation must not repeat the
    noise of its beginning.
    """
    words = f"{branch.seed}/{branch.key}/{len(branch.generated)}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1
