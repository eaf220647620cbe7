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
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from engine.client.connection import Connection
from engine.client.local_tokenizer import LocalTokenizer
from engine.client.openai_scoring import OpenAIScorer
from engine.protocol.streams import Events, merge_streams
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineError,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
)
from engine.protocol.wire import Json, error_from_json

_T = TypeVar("_T")
_DEFAULTS = asdict(SamplingParams())
_OPENAI = frozenset({"temperature", "top_p", "stop", "presence_penalty", "frequency_penalty", "logit_bias"})
_MORE = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"})


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
        Dialect(
            "vllm",
            _OPENAI | _MORE,
            {"include_stop_str_in_output": True, "return_token_ids": True, "logprobs": 0},
            tokenizes=True,
            chats=True,
            likeliest=20,
            salts=True,
        ),
        Dialect(
            "sglang",
            _OPENAI | _MORE,
            {"no_stop_trim": True, "logprobs": 0},
            tokenizes=True,
            chats=False,
            likeliest=20,
            salts=True,
        ),
        Dialect("openai", _OPENAI, {}, tokenizes=False, chats=False, likeliest=5, salts=False),
    )
}


class OpenAICompatibleEngine:
    """``EngineClient`` for a vLLM, SGLang or other OpenAI-compatible server."""

    def __init__(self, connection: Connection, dialect: Dialect, tokenizer: Path | None) -> None:
        """``tokenizer``: the model's folder; a server of the plain dialect is then sent prompts as text. Raises
        ``EngineError`` if the folder has no tokenizer.
        """
        self._connection = connection
        self._dialect = dialect
        self._text = None if tokenizer is None else LocalTokenizer(tokenizer)
        self._speaks_text = self._text is not None and dialect.name == "openai"
        extensions = {"return_tokens_as_token_ids": True} if dialect.name == "vllm" else {}
        self._scores = OpenAIScorer(connection, extensions, dialect.likeliest)
        self._running: dict[str, set[asyncio.Event]] = {}

    async def generate(
        self, request: GenerateRequest, *, stream: bool = False
    ) -> AsyncGenerator[Completion | Delta, None]:
        self._check(request)
        aborted = asyncio.Event()
        self._running.setdefault(request.request_id, set()).add(aborted)
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        branches = [self._continue(request, branch, aborted, deadline) for branch in request.branches]
        try:
            async with aclosing(merge_streams(branches, 1)) as events:
                async for event in events:
                    if stream or isinstance(event, Completion):
                        yield event
        finally:
            self._running[request.request_id].discard(aborted)
            if not self._running[request.request_id]:
                del self._running[request.request_id]

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Score items (``engine.client.openai_scoring``). Servers compute whole items and may report how much was
        cached; ``max_compute`` limits the whole item.
        """
        salt = self._salt(request)
        return list(await asyncio.gather(*(self._score(request, salt, *one) for one in enumerate(request.items))))

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
        for aborted in self._running.get(request_id, ()):
            aborted.set()

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Do nothing, since these servers have no leases."""

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Tokenize with the local tokenizer if there is one, otherwise on the server."""
        if self._text is not None:
            if isinstance(text, str):
                return self._text.encode(text, special=special)
            return self._text.encode(self._text.chat(text, generation_prompt=generation_prompt))
        if not self._dialect.tokenizes:
            raise self._cannot("tokenise; name the folder of its model's tokenizer")
        if not isinstance(text, str) and not self._dialect.chats:
            raise self._cannot("tokenise chat messages; name the folder of its model's tokenizer")
        content: Json = {"messages": list(text), "add_generation_prompt": generation_prompt}
        if isinstance(text, str):
            content = {"prompt": text, "add_special_tokens": special}
        answer = await self._connection.call("POST", "/tokenize", {"model": model, **content})
        return tuple(answer["tokens"])

    async def models(self) -> list[ModelInfo]:
        """List the served models. Sizes that the server does not report are 0.

        A server that lists no model (``transformers serve`` on a folder) is assumed to serve the tokenizer's folder.
        """
        answer = await self._connection.call("GET", "/v1/models", None, should_wait=False)
        listed: list[Json] = answer["data"]
        if not listed and self._text is not None:
            listed = [{"id": str(self._text.folder)}]
        return [self._info(entry) for entry in listed]

    async def clear_cache(self) -> None:
        """Raise ``EngineError``, since these servers cannot clear their cache."""
        raise self._cannot("empty its cache on request")

    def _info(self, entry: Json) -> ModelInfo:
        context = entry.get("max_model_len") or (self._text and self._text.context)
        if not context:
            raise self._cannot(
                f"tell the context of model {entry['id']!r}; name the folder of its tokenizer and config"
            )
        server: dict[str, object] = {"server": self._dialect.name}
        isolates = self._dialect.salts
        if self._text is None:
            return ModelInfo(entry["id"], "generate", int(context), 0, 0, server, isolates=isolates)
        text = self._text
        return ModelInfo(
            entry["id"],
            text.kind,
            int(context),
            text.vocab_size,
            0,
            server | text.notes,
            text.architecture,
            text.bos,
            isolates=isolates,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        for name, value in asdict(request.sampling).items():
            if value != _DEFAULTS[name] and name not in self._dialect.settings:
                raise self._cannot(f"honour {name}")
        if not self._dialect.tokenizes and self._text is None:
            raise self._cannot("tell token ids; name the folder of its model's tokenizer")
        for branch in request.branches:
            if branch.max_tokens < 1:
                raise InvalidRequest(f"max_tokens is {branch.max_tokens}; it must be at least 1", "max_tokens")

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

    async def _continue(
        self, request: GenerateRequest, branch: Branch, aborted: asyncio.Event, deadline: float | None
    ) -> Events:
        """Generate one branch, with index 0."""
        answer = _Answer()
        reason: FinishReason | None = None
        body = self._body(request, branch)
        async with aclosing(self._connection.events("/v1/completions", body)) as chunks, _Stop(aborted) as stop:
            while reason is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                chunk = await stop.unless(anext(chunks, None), left)
                if chunk == "cancelled" or chunk == "timeout":
                    reason = chunk
                elif chunk is None:
                    break
                elif text := answer.take(chunk):
                    # Token ids are sent once, at the end: servers split texts and tokens at different places.
                    yield Delta(0, text, ())
        reason = reason or answer.reason
        if reason is None:
            raise EngineUnavailable(f"the engine at {self._connection.url} ended its answer in the middle of a branch")
        yield await self._completion(request, branch, answer, reason)

    async def _completion(
        self, request: GenerateRequest, branch: Branch, answer: _Answer, reason: FinishReason
    ) -> Completion:
        ids = tuple(answer.ids)
        if not ids and answer.text:
            ids = await self.tokenize(request.model, answer.text, special=False)
        stop = answer.stop
        if stop is None and reason == "stop":
            stop = next((one for one in request.sampling.stop if answer.text.endswith(one)), None)
        logprob = answer.logprob
        if logprob is None:
            # No log-probability is known, so all tokens get the same.
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


class _Stop:
    """Context manager whose waits end early if the request is aborted."""

    def __init__(self, aborted: asyncio.Event) -> None:
        self._aborted = aborted

    async def __aenter__(self) -> Self:
        self._waiting = asyncio.ensure_future(self._aborted.wait())
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancelled(self._waiting)

    async def unless(self, work: Awaitable[_T], seconds: float | None) -> _T | Literal["cancelled", "timeout"]:
        """Return the result of ``work``, or the reason why it was cancelled."""
        working = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({working, self._waiting}, timeout=seconds, return_when=FIRST_COMPLETED)
            if self._waiting in done:
                return "cancelled"
            return working.result() if done else "timeout"
        finally:
            await _cancelled(working)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def branch_seed(branch: Branch) -> int:
    """Return a seed of 31 bits, which every server accepts, from a branch's seed, key and number of generated tokens.

    The number is included because servers count noise from the start of a request: a continuation must not repeat the
    noise of its beginning.
    """
    words = f"{branch.seed}/{branch.key}/{len(branch.generated)}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1
