"""Client of OpenAI-compatible servers: plain completions.

Differences from our own server:

- Each branch is sampled with a seed derived from its own, so a server that honours seeds is reproducible, but its
  tokens are not those of our engine, and a branch that was cut and continued gets others than one that was not.
- Siblings are one request where the server seeds its samples one by one (vLLM), with the same tokens as single ones.
- Leases and priorities affect speed only and are not sent; the lease's name is, as the session of a router.
- Log-probabilities are those that the server reports. By default they are of the model's own distribution at
  temperature 1, which underrates how often a branch is sampled at a lower one; vLLM reports those of the sampling
  distribution if it is started with ``--logprobs-mode processed_logprobs``.
- If a server reports text only, its token ids come from the local tokenizer and may be more than the server sampled.
- A branch whose stream breaks off continues after what has arrived, in a request of its own. One with frequency or
  presence penalty begins again, since these servers count the tokens of one request alone.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from engine.protocol.request_checks import check_branches, check_no_thinking_limit, find_setting_outside, make_refusal
from engine.protocol.streams import merge_streams
from engine.protocol.types import (
    Completion,
    Delta,
    EngineError,
    EngineUnavailable,
    Events,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    NotSupported,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    Tokens,
)
from engine.protocol.wire import Json
from engine.remote.connection import Connection, not_a_completion
from engine.remote.health import warn_once
from engine.remote.local_tokenizer import load_tokenizer
from engine.remote.openai.answer import Answer, read_choices
from engine.remote.openai.dialects import Dialect
from engine.remote.openai.request import completion_body, group_siblings, routing_headers
from engine.remote.openai.scoring import OpenAIScorer
from engine.remote.retries import Retries
from engine.remote.running import RunningRequest, RunningRequests, unsupported

_CACHE_IS_UNCOUNTED = (
    "the vLLM at {} does not report cached tokens, so prompts are billed as if it had computed them all: start it with "
    "--enable-prompt-tokens-details"
)


class OpenAICompatibleEngine:
    """``EngineClient`` for a vLLM, SGLang or other OpenAI-compatible server."""

    def __init__(self, connection: Connection, dialect: Dialect, tokenizer: Path | None) -> None:
        """``tokenizer``: the model's folder; a server of the plain dialect is then sent prompts as text."""
        self._connection = connection
        self._dialect = dialect
        self._text = None if tokenizer is None else load_tokenizer(tokenizer)
        self._speaks_text = self._text is not None and dialect.name == "openai"
        self._scores = OpenAIScorer(connection, dialect)
        self._running = RunningRequests()
        self._epoch = ""
        """Added to the salt of requests after ``clear_cache``."""

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        if request.sampling.prompt_logprobs is not None:
            yield await self._score_prompt(request)
            return
        self._check(request)
        answers = [Answer(index, branch) for index, branch in enumerate(request.branches)]
        groups = [[answers[index] for index in group] for group in group_siblings(request.branches, self._dialect)]

        def streams(running: RunningRequest) -> list[Events]:
            return [self._run(running, group, stream) for group in groups]

        async with aclosing(self._running.generate(request, streams, stream=stream)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """Score items (``engine.remote.openai.scoring``); ``max_compute`` limits the whole item, cached or not."""
        self._check_probe(request)
        salt = self._salt(request)
        return list(await asyncio.gather(*(self._score(request, salt, *item) for item in enumerate(request.items))))

    async def _score(self, request: ScoreRequest, salt: Json, index: int, item: ScoreItem) -> ScoreResult:
        tokens: list[int] = []
        ends: list[int] = []
        for part in item.parts:
            if isinstance(part, str):
                part = await self.tokenize(TokenizeRequest(request.model, part, special=False))
            tokens += part
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
            wanted = {token: self._name(token) for token in request.token_ids}
            texts = [self._prompt(prompt) for prompt in prompts]
            result = await self._scores.logits(index, request.model, texts, wanted, salt)
        else:
            result = await self._scores.rows(index, request.model, tokens[: max(reads) + 1], reads, salt)
        if request.max_compute is not None and result.computed_tokens > request.max_compute:
            raise self._cannot(f"be held to a budget: it reports {result.computed_tokens} tokens for {needed}")
        return result

    async def _score_prompt(self, request: GenerateRequest) -> Completion:
        """Return the log-probabilities of the prompt, of a request that generates nothing."""
        if not self._dialect.scores_prompts:
            raise self._cannot("honour prompt_logprobs")
        if [branch.max_tokens for branch in request.branches] != [0]:
            raise self._cannot("score a prompt and generate at once: give one branch with max_tokens 0")
        count = request.sampling.prompt_logprobs or 0
        return await self._scores.score_prompt(request.model, request.prompt, count, self._salt(request))

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
        self._running.abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Do nothing, since these servers have no leases."""

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Tokenize with the local tokenizer if there is one, otherwise on the server."""
        if self._text is not None:
            return self._text.tokenize(request)
        if not self._dialect.tokenizes:
            raise self._cannot("tokenise; name the folder of its model's tokenizer")
        if not isinstance(request.text, str) and not self._dialect.chats:
            raise self._cannot("tokenise chat messages; name the folder of its model's tokenizer")
        return await self._connection.tokenize(request, functions_apart=True)

    async def models(self) -> list[ModelInfo]:
        """List the served models. Sizes that the server does not report are 0.

        Raises ``EngineUnavailable`` if the server answers and its engine does not live.
        """
        if self._dialect.tells_health:
            await self._connection.check("/health")
        listed: list[Json] = (await self._connection.call("GET", "/v1/models", None, should_wait=False))["data"]
        if not listed and self._text is not None:  # ``transformers serve`` on a folder
            listed = [{"id": str(self._text.folder)}]
        return [self._info(entry) for entry in listed]

    async def clear_cache(self) -> None:
        """Use no prefix any more that is cached by now: from here on, the salt of all requests is another one."""
        if not self._dialect.salts:
            raise self._cannot("empty its cache on request")
        self._epoch = uuid.uuid4().hex

    async def close(self) -> None:
        await self._connection.close()

    def _info(self, entry: Json) -> ModelInfo:
        context = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")  # vLLM's name, and llama.cpp's
        context = context or (self._text and self._text.context)
        if not context:
            raise self._cannot(f"tell the context of {entry['id']!r}; name the folder of its tokenizer and config")
        extra: dict[str, object] = {"server": self._dialect.name}
        if entry.get("root") not in (None, entry["id"]):  # tells checkpoints under one name apart
            extra["root"] = entry["root"]
        info = ModelInfo(
            entry["id"],
            "generate",
            int(context),
            0,
            0 if self._text is None else self._text.parameters,
            extra,
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

    def _check(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        if (name := find_setting_outside(request.sampling, self._dialect.settings)) is not None:
            raise self._cannot(f"honour {name}")
        if not self._dialect.tokenizes and self._text is None:
            raise self._cannot("tell token ids; name the folder of its model's tokenizer")
        self._check_probe(request)
        check_no_thinking_limit(request)
        check_branches(request)
        if request.sampling.counts_tokens and any(branch.generated for branch in request.branches):
            raise self._cannot("count tokens of an earlier request for frequency_penalty and presence_penalty")
        if request.constraint is None:
            return
        if self._dialect.constrains is None:
            raise self._cannot("hold a text to a constraint")
        starts = [(len(request.prompt) + len(b.generated), b.constraint_start) for b in request.branches]
        if request.lifts_constraint or any(start not in (None, end) for end, start in starts):
            raise self._cannot("begin a constraint elsewhere than at the first token of a request")

    def _explain(self, error: EngineError, request: GenerateRequest) -> EngineError:
        """Return the error, in other words if a vLLM refuses the number of stop strings, of which it takes few."""
        count = len(request.sampling.stop)
        if not isinstance(error, InvalidRequest) or count <= 4 or "body.stop" not in str(error):
            return error
        return InvalidRequest(
            f"the vLLM at {self._connection.url} takes fewer than {count} stop strings: start it with "
            f"VLLM_MAX_STOP_STRINGS={count}, or choose 'steps' with fewer of them (two for a separator, two for each "
            "word of markers, nine for sentences), or fewer strings in 'stop'",
            "steps",
        )

    def _check_probe(self, request: GenerateRequest | ScoreRequest) -> None:
        if request.probe:
            raise self._cannot("read a probe, which needs the model's hidden states: serve the model on our engine")

    def _salt(self, request: GenerateRequest | ScoreRequest) -> Json:
        """Return the fields that isolate cached prefixes. Raises ``EngineError`` if the server has no such field."""
        if request.cache_salt is None and not self._epoch:
            return {}
        if not self._dialect.salts:
            raise self._cannot("keep caches apart by cache_salt")
        return {"cache_salt": f"{request.cache_salt or ''}{self._epoch}"}

    def _cannot(self, what: str) -> NotSupported:
        return unsupported(self._connection.url, self._dialect.name, what)

    async def _run(self, running: RunningRequest, answers: list[Answer], stream: bool) -> Events:
        """Generate siblings. A stream that breaks off goes on after what has arrived.

        If that fails for good, what has arrived is yielded, so that no other branch is lost.
        """
        request = running.request
        retries = Retries(should_wait=self._connection.should_wait)
        while True:
            received = sum(len(answer.ids) for answer in answers)
            try:
                async with aclosing(self._stream(running, answers, stream)) as events:
                    async for event in events:
                        yield event
                return
            except EngineUnavailable as error:
                answers = [answer for answer in answers if answer.reason is None]
                if request.sampling.counts_tokens:
                    answers = [Answer(answer.index, answer.branch) for answer in answers]
                for answer in answers:
                    await self._find_tokens(request.model, answer)
                has_progress = sum(len(answer.ids) for answer in answers) > received
                if not await running.wait_to_retry(error, retries, has_progress=has_progress):
                    break
                if len(answers) > 1 and has_progress:  # their prompts differ now
                    streams = [self._run(running, [answer], stream) for answer in answers]
                    async with aclosing(merge_streams(streams, 0)) as events:
                        async for event in events:
                            yield event
                    return
            except EngineError as error:
                answers = [answer for answer in answers if answer.reason is None]
                if not isinstance(error, InvalidRequest):
                    running.fail(error)
                    break
                error = self._explain(error, request)
                running.refuse(error)
                for answer in answers:
                    answer.refusal = make_refusal(error)
                    yield self._completion(request, answer, "refused")
                return
        for answer in answers:
            if answer.ids or running.failure is None:
                yield self._completion(request, answer, running.end_reason)

    async def _stream(self, running: RunningRequest, answers: Sequence[Answer], stream: bool) -> Events:
        """Yield the events of one request for siblings that have the same tokens so far."""
        request = running.request
        rests = [answer.rest for answer in answers]
        if rests[0].max_tokens < 1:  # all was received before the stream broke off
            yield self._completion(request, answers[0], "length")
            return
        prompt = self._prompt([*request.prompt, *rests[0].generated])
        body = completion_body(request, rests, prompt, self._dialect, stream=stream) | self._salt(request)
        headers = routing_headers(request.request_id, request.lease)
        left = dict(enumerate(answers))
        has_choices, source = False, self._connection.source
        events = self._connection.events("/v1/completions", body, headers, counts_keep_alives=False)
        async with aclosing(events) as chunks:
            try:
                while (chunk := await running.next(chunks)) is not None:
                    for choice in read_choices(chunk, source):
                        has_choices = True
                        answer = left.get(choice.get("index", 0))
                        if answer is None:
                            raise EngineError(f"the server sent a sample with the index {choice.get('index')}")
                        text = answer.take(choice, request.sampling.stop, source)
                        if text:
                            # Token ids are sent once, at the end: servers split texts and tokens at different places.
                            yield Delta(answer.index, text, ())
                        if answer.reason is not None and len(left) > 1:
                            # The prompt is computed once, and billed with the last branch: usage comes at the end.
                            del left[choice.get("index", 0)]
                            answer.cached = len(request.prompt) + len(rests[0].generated) - 1
                            await self._find_tokens(request.model, answer)
                            yield self._completion(request, answer, answer.reason)
                    for answer in left.values() if chunk.get("usage") and len(left) == 1 else ():
                        answer.take_usage(chunk["usage"])
                        if self._dialect.name == "vllm" and chunk["usage"].get("prompt_tokens_details") is None:
                            warn_once(_CACHE_IS_UNCOUNTED.format(self._connection.url))
            except TimeoutError:
                for answer in left.values():
                    answer.reason = answer.reason or running.end_reason
        for answer in left.values():
            if answer.reason is None and not has_choices:
                raise not_a_completion(source, "it has no 'choices'")
            if answer.reason is None:
                raise EngineUnavailable(f"{source} ended its answer in the middle of a branch")
            await self._find_tokens(request.model, answer)
            yield self._completion(request, answer, answer.reason)

    async def _find_tokens(self, model: str, answer: Answer) -> None:
        """Tokenize the text for which the server reported no token ids."""
        if answer.untokenized:
            answer.ids += await self.tokenize(TokenizeRequest(model, answer.untokenized, special=False))
            answer.untokenized = ""

    def _completion(self, request: GenerateRequest, answer: Answer, reason: FinishReason) -> Completion:
        logprob = answer.logprob
        if logprob is None:
            # Without a reported log-probability, all tokens get the same.
            vocab = 0 if self._text is None else self._text.vocab_size
            logprob = -len(answer.ids) * math.log(max(vocab, 2))
        return Completion(
            index=answer.index,
            token_ids=tuple(answer.ids),
            text=answer.text,
            finish_reason=reason,
            stop=answer.stop,
            logprob=logprob,
            prompt_tokens=len(request.prompt) + len(answer.branch.generated),
            cached_tokens=answer.cached,
            logprobs=None if request.sampling.logprobs is None else tuple(answer.logprobs),
            drafted_tokens=answer.accepted + answer.rejected,
            accepted_tokens=answer.accepted,
            refusal=answer.refusal,
        )
