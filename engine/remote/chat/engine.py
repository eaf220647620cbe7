"""Client of servers with ``/v1/chat/completions`` alone, one request per branch.

Token ids hold the text itself (``engine.remote.chat.encoding``), as many as the server bills, hidden reasoning
included. A thought is the beginning of a branch's text (``Completion.thought``) and is not sent again. A branch goes on
after a given beginning only where the server has prefill. There are no log-probabilities of a branch, no leases and no
salts; a seed is sent, and most servers treat it as a wish. Only vLLM and SGLang tell which stop string ended an answer,
so that only they can search step by step.

Scores are those of a judge: the log-probabilities of the verdicts as first token where the server lists the likeliest
tokens, or else what it writes, which is certain of itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.protocol.request_checks import PromptTooLong, check_branches, find_setting_outside, make_refusal
from engine.protocol.thoughts import find_thought
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
    NotSupported,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    Tokens,
)
from engine.protocol.wire import Json
from engine.remote.chat.answer import ChatAnswer
from engine.remote.chat.encoding import decode_prompt, decode_text, encode_prompt, measure_thought
from engine.remote.chat.judge import ChatJudge
from engine.remote.chat.options import SETTINGS, ChatOptions
from engine.remote.chat.requests import CHOICE, EFFORT, PATH, TOOLS, ChatRequests, format_response
from engine.remote.connection import Connection
from engine.remote.openai.request import branch_seed, routing_headers
from engine.remote.retries import Retries
from engine.remote.running import RunningRequest, RunningRequests

_LIST_SECONDS = 300.0
_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|(prompt|input|request) is too (long|large)|too many tokens"
    r"|maximum (number of tokens|allowed number of)|exceeds? .{0,40}(context|token limit)",
    re.IGNORECASE,
)
"""Words with which OpenAI, vLLM, llama.cpp, Anthropic and others refuse a conversation that exceeds the context."""


@dataclass(frozen=True, slots=True)
class _List:
    """The models that a server has listed, by id."""

    entries: dict[str, Json]
    read_at: float = field(default_factory=time.monotonic)


_LISTS: dict[tuple[str, str | None], _List] = {}
"""By the server's address and key, for all clients of a process. Dropped when the server fails."""


class ChatEngine:
    """``EngineClient`` for a server that only chats."""

    def __init__(self, connection: Connection, options: ChatOptions) -> None:
        self._connection = connection
        self._options = options
        self._running = RunningRequests()
        self._place = connection.url, connection.api_key
        self._requests = ChatRequests(connection, options)
        self._judge = ChatJudge(self._requests)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        self._check(request)

        def streams(running: RunningRequest) -> list[Events]:
            return [
                self._run(running, self._begin_answer(request, index, branch))
                for index, branch in enumerate(request.branches)
            ]

        async with aclosing(self._running.generate(request, streams, stream=stream)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        if request.probe or len(request.token_ids) < 2:
            raise self._cannot("score with a head; it can be a judge")
        try:
            return list(await asyncio.gather(*(self._judge.judge(request, *item) for item in enumerate(request.items))))
        except EngineUnavailable:
            _LISTS.pop(self._place, None)
            raise

    async def abort(self, request_id: str) -> None:
        """Cancel the branches that this client has in flight; they end with the text received so far."""
        self._running.abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Do nothing, since these servers have no leases."""

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        names = set() if self._is_literal else set(request.template_kwargs) - {EFFORT, TOOLS, CHOICE}
        if names:
            raise InvalidRequest(
                f"the server at {self._connection.url} (chat) has no field for {min(names)!r}: of chat_template_kwargs "
                f"give {EFFORT} alone; a vLLM or SGLang takes all of them if its table in reasoner.toml says "
                "prefill = 'continue_final_message'",
                "chat_template_kwargs",
            )
        return encode_prompt(request.text, request.template_kwargs)

    async def models(self) -> list[ModelInfo]:
        """List the configured models, or all that the server lists.

        The server is asked every few minutes, since hosted ones count it against a rate limit.
        """
        listed = _LISTS.get(self._place)
        if listed is None or time.monotonic() > listed.read_at + _LIST_SECONDS:
            try:
                answer = await self._connection.call("GET", "/v1/models", None, should_wait=False)
            except NotSupported:
                if not self._options.models:
                    raise
                answer = {"data": [{"id": name} for name in self._options.models]}
            listed = _LISTS[self._place] = _List(_read_list(answer, self._connection.source))
        known = listed.entries
        names = self._options.models or tuple(known)
        missing = [name for name in names if name not in known]
        if missing:
            raise EngineError(
                f"the server at {self._connection.url} does not list the model {missing[0]!r}; it lists "
                f"{', '.join(sorted(known)[:20]) or 'none'}"
            )
        return [self._info(known[name]) for name in names]

    async def clear_cache(self) -> None:
        raise self._cannot("empty its cache on request")

    async def close(self) -> None:
        await self._connection.close()

    def _info(self, entry: Json) -> ModelInfo:
        reported = entry.get("max_model_len") or entry.get("context_length") or (entry.get("meta") or {}).get("n_ctx")
        context = reported or self._options.context
        return ModelInfo(
            entry["id"],
            "generate",
            int(context),
            vocab_size=0,
            parameters=0,
            extra={"server": "chat"},
            counts_exactly=False,
            isolates=False,
            capabilities=self._options.capabilities,
            tells_thoughts=True,
            limits_thoughts=self._options.thinking_limit != "none",
            tells_calls=not self._is_literal,
        )

    @property
    def _is_literal(self) -> bool:
        """True if the server goes on exactly where a given text ends, and renders its template with given variables."""
        return self._options.is_literal

    # Generation.

    def _begin_answer(self, request: GenerateRequest, index: int, branch: Branch) -> ChatAnswer:
        conversation = decode_prompt([*request.prompt, *branch.generated])
        is_in_thought = self._is_literal and conversation.has_open_thought and find_thought(conversation.answer) is None
        has_begun = bool(conversation.answer) and not is_in_thought
        return ChatAnswer(index, branch, has_begun=has_begun, is_in_thought=is_in_thought, is_literal=self._is_literal)

    async def _run(self, running: RunningRequest, answer: ChatAnswer) -> Events:
        """Generate one branch. A stream that breaks off is continued, or begins again where the server cannot."""
        retries = Retries(should_wait=self._connection.should_wait)
        while True:
            try:
                async with aclosing(self._stream(running, answer)) as events:
                    async for event in events:
                        yield event
                return
            except EngineUnavailable as error:
                _LISTS.pop(self._place, None)
                can_go_on = self._options.prefill != "none" and not running.request.sampling.counts_tokens
                has_progress = can_go_on and bool(answer.split()[1])
                if not await running.wait_to_retry(error, retries, has_progress=has_progress):
                    break
                if has_progress or (can_go_on and answer.has_begun):
                    answer.keep()
                else:
                    answer.drop()
            except InvalidRequest as error:
                is_too_long = _TOO_LONG.search(str(error)) is not None
                if is_too_long and _has_answers(running.request.prompt):
                    yield self._completion(running.request, answer, "context")
                else:
                    refused = PromptTooLong(str(error), error.field) if is_too_long else error
                    yield self._refuse(running, answer, refused)
                return
            except EngineError as error:
                yield self._refuse(running, answer, error)
                return
        if answer.token_ids or running.failure is None:
            yield self._completion(running.request, answer, running.end_reason)

    def _refuse(self, running: RunningRequest, answer: ChatAnswer, error: EngineError) -> Completion:
        """Return the end of a branch that the server has refused for good, which says nothing about the others."""
        answer.refusal = make_refusal(error)
        running.refuse(error)
        return self._completion(running.request, answer, "refused")

    async def _stream(self, running: RunningRequest, answer: ChatAnswer) -> Events:
        request = running.request
        left = answer.branch.max_tokens - len(answer.earlier)
        if left < 1:
            yield self._completion(request, answer, "length")
            return
        fields = self._requests.make_messages([*request.prompt, *answer.branch.generated, *answer.earlier]) | {
            "model": request.model,
            "seed": branch_seed(answer.branch),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: getattr(request.sampling, name) for name in SETTINGS if name != "stop" or request.sampling.stop},
            **({} if request.thinking_limit is None else self._options.limit_thought(request.thinking_limit, left)),
            **format_response(request.constraint),
        }
        headers = routing_headers(request.request_id, request.lease)
        source = self._connection.source
        while True:
            body = self._requests.make_body(fields, left)
            try:
                events = self._connection.events(PATH, body, headers, counts_keep_alives=False)
                async with aclosing(events) as chunks:
                    while (chunk := await running.next(chunks)) is not None:
                        if text := answer.take(chunk, source):
                            yield Delta(answer.index, text, ())
                break
            except TimeoutError:
                answer.reason = answer.reason or running.end_reason
                break
            except InvalidRequest as error:
                if answer.num_events or not self._requests.understands_other_limit(error):
                    raise
        yield self._completion(request, answer, answer.check_end(source))

    def _completion(self, request: GenerateRequest, answer: ChatAnswer, reason: FinishReason) -> Completion:
        tokens = answer.token_ids
        return Completion(
            index=answer.index,
            token_ids=tokens,
            text=decode_text(tokens),
            finish_reason=reason,
            stop=answer.stop,
            logprob=0.0,
            prompt_tokens=answer.prompt or len(request.prompt) + len(answer.branch.generated),
            cached_tokens=answer.cached,
            thought=measure_thought(tokens),
            refusal=answer.refusal,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        if (name := find_setting_outside(request.sampling, SETTINGS)) is not None:
            raise self._cannot(f"honour {name}")
        if request.sampling.counts_tokens and any(branch.generated for branch in request.branches):
            raise self._cannot("count tokens of an earlier request for frequency_penalty and presence_penalty")
        if request.probe:
            raise self._cannot("read a probe, which needs the model's hidden states: serve the model on our engine")
        if request.cache_salt is not None:
            raise self._cannot("keep caches apart by cache_salt")
        if request.thinking_limit is not None and self._options.thinking_limit == "none":
            raise self._cannot("limit thoughts, unless thinking_limit in its table of reasoner.toml names a field")
        if request.constraint is not None and request.constraint.kind != "json":
            raise self._cannot(f"hold an answer to a {request.constraint.kind}: give a JSON Schema")
        check_branches(request)

    def _cannot(self, what: str) -> NotSupported:
        return self._requests.cannot(what)


def _read_list(answer: Json, source: str) -> dict[str, Json]:
    """Return the models that a server lists, by id. Raises ``EngineUnavailable`` for an answer of another form."""
    try:
        return {str(entry["id"]): entry for entry in answer["data"]}
    except (KeyError, TypeError) as error:
        raise EngineUnavailable(f"{source} did not answer /v1/models with a list of models: {error!r}") from error


def _has_answers(prompt: Sequence[int]) -> bool:
    """Return True for a conversation that has grown by the model's own answers, not only by its user's question."""
    return any(message["role"] == "assistant" for message in decode_prompt(prompt).messages)
