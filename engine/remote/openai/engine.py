"""Client of OpenAI-compatible servers: plain completions.

Differences from our own server:

- Each branch is sampled with a seed derived from its own, so a server that honours seeds is reproducible, but its
  tokens are not those of our engine, and a branch that was cut and continued gets others than one that was not.
- Siblings are one request where the server seeds its samples one by one (vLLM), with the same tokens as single ones.
- Pins and priorities affect speed only and are not sent; the pin key is, as the session of a router.
- Log-probabilities are those that the server reports. By default they are of the model's own distribution at
  temperature 1, which underrates how often a branch is sampled at a lower one; vLLM reports those of the sampling
  distribution if it is started with ``--logprobs-mode processed_logprobs``.
- If a server reports text only, its token ids come from the local tokenizer and may be more than the server sampled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from engine.protocol.request_checks import check_no_thinking_limit, require_ids
from engine.protocol.types import (
    Capability,
    Events,
    GenerateRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TokenIds,
    TokenizeRequest,
)
from engine.protocol.wire import Json
from engine.remote.branches.engine import OpenAICompatibleEngine
from engine.remote.branches.running import RunningRequest
from engine.remote.connection import Connection
from engine.remote.local_tokenizer import load_tokenizer
from engine.remote.openai.dialects import Dialect
from engine.remote.openai.request import CompletionRequests, group_siblings
from engine.remote.openai.scoring import OpenAIScorer
from engine.remote.openai.stream import CompletionStream


class CompletionsEngine(OpenAICompatibleEngine):
    """``EngineClient`` for a vLLM, SGLang or other server that completes texts."""

    def __init__(
        self, connection: Connection, dialect: Dialect, tokenizer: Path | None, *, obeys_priorities: bool = False
    ) -> None:
        """``tokenizer``: the model's folder; a server of the plain dialect is then sent prompts as text.

        ``obeys_priorities``: it was started so that it orders requests by ``priority``, which others refuse.
        """
        super().__init__(connection, dialect.name, dialect.settings)
        self._dialect = dialect
        self._text = None if tokenizer is None else load_tokenizer(tokenizer)
        self._requests = CompletionRequests(connection, dialect, self._text, obeys_priorities=obeys_priorities)
        self._scores = OpenAIScorer(connection, dialect)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Score items (``engine.remote.openai.scoring``); ``max_compute`` limits the whole item, cached or not."""
        self._check_probe(request)
        self._check_items(request)
        salt = self._requests.make_shared_fields(request)
        return list(await asyncio.gather(*(self._score(request, salt, *item) for item in enumerate(request.items))))

    async def _score(self, request: ScoreRequest, salt: Json, index: int, item: ScoreItem) -> ScoreResult:
        tokens: list[int] = []
        ends: list[int] = []
        for part in item.parts:
            if isinstance(part, str):
                part = await self.tokenize(TokenizeRequest(request.model, part, special=False))
            tokens += require_ids(part, "items.parts")
            ends.append(len(tokens) - 1)
        reads = [ends[part] for part in item.read]
        prompts = [tokens[: position + 1] for position in reads]
        # For a causal model, one token is sampled after each position.
        needed = sum(len(prompt) + 1 for prompt in prompts) if request.token_ids else max(reads) + 1
        if not request.token_ids and self._scores.pooling != "rows":  # a request for each position
            needed = sum(map(len, prompts))
        if request.max_compute is not None and needed > request.max_compute:
            return ScoreResult(index, None, needed, 0)
        if request.token_ids:
            wanted = {token: self._requests.name_token(token) for token in require_ids(request.token_ids)}
            texts = [self._requests.make_prompt(prompt) for prompt in prompts]
            result = await self._scores.logits(
                index,
                request.model,
                prompts=texts,
                wanted=wanted,
                salt=salt,
                is_normalized=request.normalized,
            )
        else:
            end = max(reads) + 1
            result = await self._scores.rows(index, request.model, tokens=tokens[:end], reads=reads, salt=salt)
        if request.max_compute is not None and result.computed_tokens > request.max_compute:
            raise self._build_refusal(f"be held to a budget: it reports {result.computed_tokens} tokens for {needed}")
        return result

    async def _score_prompt(self, request: GenerateRequest) -> Events:
        """Yield the log-probabilities of the prompt, of a request that generates nothing."""
        count, salt = request.sampling.prompt_logprobs or 0, self._requests.make_shared_fields(request)
        yield await self._scores.score_prompt(request.model, require_ids(request.prompt, "prompt"), count, salt)

    async def tokenize(self, request: TokenizeRequest) -> TokenIds:
        return await self._requests.tokenize(request)

    async def models(self) -> list[ModelInfo]:
        """List the served models. Sizes that the server does not report are 0.

        Raises ``EngineUnavailable`` if the server answers and its engine does not live.
        """
        if self._dialect.tells_health:
            await self._connection.check("/health")
        listed: list[Json] = (await self._connection.call("GET", "/v1/models", None, should_wait=False))["data"]
        if not listed and self._text is not None:  # ``transformers serve`` on a folder
            listed = [{"id": str(self._text.folder)}]
        return [self._describe_model(entry) for entry in listed]

    async def clear_cache(self) -> None:
        if not self._dialect.salts:
            raise self._build_refusal("empty its cache on request")
        self._requests.forget_cache()

    def _describe_model(self, entry: Json) -> ModelInfo:
        context = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")  # vLLM's name, and llama.cpp's
        context = context or (self._text and self._text.context)
        if not context:
            raise self._build_refusal(
                f"tell the context of {entry['id']!r}; name the folder of its tokenizer and config"
            )
        extra: dict[str, object] = {"server": self._dialect.name}
        if entry.get("root") not in (None, entry["id"]):  # tells checkpoints under one name apart
            extra["root"] = entry["root"]
        info = ModelInfo(
            entry["id"],
            "generate",
            context=int(context),
            vocab_size=0,
            parameters=0 if self._text is None else self._text.parameters,
            extra=extra,
            isolates=self._dialect.salts,
            capabilities=self._dialect.capabilities,
        )
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
            chat_template=text.template or "",
        )

    def _start_streams(self, running: RunningRequest, *, is_watched: bool) -> list[Events]:
        request = running.request
        if request.sampling.prompt_logprobs is not None:
            return [self._score_prompt(request)]
        groups = group_siblings(request.branches, self._dialect)
        answers = [[self._requests.begin_answer(request, index) for index in group] for group in groups]
        return [CompletionStream(self._requests, running, group, is_watched=is_watched).run() for group in answers]

    def _check_request(self, request: GenerateRequest) -> None:
        if request.sampling.prompt_logprobs is not None:
            if Capability.PROMPT_LOGPROBS not in self._dialect.capabilities:
                raise self._build_refusal("honour prompt_logprobs")
            if [branch.max_tokens for branch in request.branches] != [0]:
                raise self._build_refusal("score a prompt and generate at once: give one branch with max_tokens 0")
            return
        super()._check_request(request)
        if not self._dialect.tokenizes and self._text is None:
            raise self._build_refusal("tell token ids; name the folder of its model's tokenizer")
        check_no_thinking_limit(request)
        if request.constraint is None:
            return
        if Capability.CONSTRAINT not in self._dialect.capabilities:
            raise self._build_refusal("hold a text to a constraint")
        starts = [(len(request.prompt) + len(b.generated), b.constraint_start) for b in request.branches]
        if request.constraint_escape_tokens or any(start not in (None, end) for end, start in starts):
            raise self._build_refusal("begin a constraint elsewhere than at the first token of a request")
