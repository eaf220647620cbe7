"""Client of servers with ``/v1/chat/completions`` alone, one request per branch.

Token ids hold the text itself (``engine.client.chat.encoding``), as many as the server bills, hidden reasoning
included. A thought is the beginning of a branch's text (``Completion.thought``) and is not sent again. A branch goes on
after a given beginning only where the server has prefill. There are no log-probabilities of a branch, no leases and no
salts; a seed is sent, and most servers treat it as a wish. Only vLLM and SGLang tell which stop string ended an answer,
so that only they can search step by step.

Scores are those of a judge: the log-probabilities of the verdicts as first token where the server lists the likeliest
tokens, or else what it writes, which is certain of itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.client.chat.answer import ChatAnswer
from engine.client.chat.encoding import (
    CLOSING,
    count_tokens,
    decode_prompt,
    decode_text,
    encode_prompt,
    measure_thought,
)
from engine.client.chat.options import PENALTIES, ChatOptions
from engine.client.connection import Connection
from engine.client.openai.request import branch_seed, routing_headers
from engine.client.retries import Retries
from engine.client.running import RunningRequest, RunningRequests, unsupported
from engine.protocol.constraint import Constraint
from engine.protocol.request_checks import check_branches, find_setting_outside
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
    Prompt,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TemplateKwargs,
    Tokens,
)
from engine.protocol.wire import Json

_EFFORT, _TOOLS, _CHOICE = "reasoning_effort", "tools", "tool_choice"
"""The variables of chat templates that are fields of OpenAI's requests, too."""
_SETTINGS = ("temperature", "top_p", *PENALTIES, "stop")
_VERDICT_TOKENS = 16
_UNLIKELY = -30.0
"""Log-probability of a verdict that is not among the likeliest."""
_SCORES_AT_ONCE = 16
_LIST_SECONDS = 300.0
_TOO_LONG = re.compile(r"context (length|window|size)|prompt is too long|too many tokens", re.IGNORECASE)
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
        self._limit_field = "max_completion_tokens"
        self._lists_likeliest = True
        """False once the server has refused to list the likeliest tokens."""
        self._slots = asyncio.Semaphore(_SCORES_AT_ONCE)

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
        return list(await asyncio.gather(*(self._judge(request, *item) for item in enumerate(request.items))))

    async def abort(self, request_id: str) -> None:
        """Cancel the branches that this client has in flight; they end with the text received so far."""
        self._running.abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """Do nothing, since these servers have no leases."""

    async def tokenize(
        self,
        model: str,  # noqa: ARG002
        text: Prompt,
        *,
        special: bool = True,  # noqa: ARG002
        generation_prompt: bool = True,  # noqa: ARG002
        template_kwargs: TemplateKwargs | None = None,
    ) -> Tokens:
        names = set() if self._is_literal else set(template_kwargs or ()) - {_EFFORT, _TOOLS, _CHOICE}
        if names:
            raise InvalidRequest(
                f"the server at {self._connection.url} (chat) has no field for {min(names)!r}: of chat_template_kwargs "
                f"give {_EFFORT} alone; a vLLM or SGLang takes all of them if its table in reasoner.toml says "
                "prefill = 'continue_final_message'",
                "chat_template_kwargs",
            )
        return encode_prompt(text, template_kwargs)

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
            listed = _LISTS[self._place] = _List({entry["id"]: entry for entry in answer["data"]})
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
            lacks=self._options.lacks,
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
        is_in_thought = self._is_literal and conversation.has_open_thought and CLOSING not in conversation.answer
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
                if _TOO_LONG.search(str(error)) and _has_answers(running.request.prompt):
                    yield self._completion(running.request, answer, "context")
                    return
                running.fail(error)
                break
            except EngineError as error:
                running.fail(error)
                break
        if answer.token_ids or running.failure is None:
            yield self._completion(running.request, answer, running.end_reason)

    async def _stream(self, running: RunningRequest, answer: ChatAnswer) -> Events:
        request = running.request
        left = answer.branch.max_tokens - len(answer.earlier)
        if left < 1:
            yield self._completion(request, answer, "length")
            return
        body = self._messages([*request.prompt, *answer.branch.generated, *answer.earlier]) | {
            "model": request.model,
            "seed": branch_seed(answer.branch),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: getattr(request.sampling, name) for name in _SETTINGS if name != "stop" or request.sampling.stop},
            **({} if request.thinking_limit is None else self._options.limit_thought(request.thinking_limit, left)),
            **_response_format(request.constraint),
        }
        body = {name: value for name, value in body.items() if name not in self._options.omit}
        headers = routing_headers(request.request_id, request.lease)
        while True:
            try:
                async with aclosing(
                    self._connection.events("/v1/chat/completions", body | {self._limit_field: left}, headers)
                ) as chunks:
                    while (chunk := await running.next(chunks)) is not None:
                        if text := answer.take(chunk):
                            yield Delta(answer.index, text, ())
                break
            except TimeoutError:
                answer.reason = answer.reason or running.end_reason
                break
            except InvalidRequest as error:
                if answer.num_events or not self._understands_other_limit(error):
                    raise
        if answer.reason is None:
            raise EngineUnavailable(f"the server at {self._connection.url} ended its answer in the middle of a text")
        yield self._completion(request, answer, answer.reason)

    def _understands_other_limit(self, error: InvalidRequest) -> bool:
        """Return True once, if the server refuses the newer name of the limit, which older servers do not know."""
        if self._limit_field != "max_completion_tokens" or self._limit_field not in f"{error} {error.field}":
            return False
        self._limit_field = "max_tokens"
        return True

    def _messages(self, tokens: Sequence[int]) -> Json:
        """Return the fields that hold the conversation and its template's variables. The thought is left out, unless
        its end was not sent by the server, which goes on there.

        Raises ``EngineError`` if the conversation ends in the middle of an answer and the server has no prefill.
        """
        conversation = decode_prompt(tokens)
        messages: list[Json] = [*conversation.messages]
        fields: Json = {"messages": messages}
        if kwargs := conversation.template_kwargs:
            kwargs = dict(kwargs)
            if _TOOLS in kwargs:  # a server that continues texts leaves calls in the text, as its model writes them
                fields |= {_TOOLS: kwargs.pop(_TOOLS)} | ({_CHOICE: "none"} if self._is_literal else {})
            fields |= {"chat_template_kwargs": kwargs} if self._is_literal else kwargs
        is_whole = self._is_literal and conversation.has_open_thought
        answer = conversation.written if is_whole else conversation.answer
        if not answer:
            return fields
        messages.append({"role": "assistant", "content": answer})
        match self._options.prefill:
            case "none":
                raise self._cannot("go on after the beginning of an answer")
            case "prefix":
                messages[-1]["prefix"] = True
            case "continue_final_message":
                fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

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
        )

    def _check(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        if (name := find_setting_outside(request.sampling, _SETTINGS)) is not None:
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
        return unsupported(self._connection.url, "chat", what)

    # Scores.

    async def _judge(self, request: ScoreRequest, index: int, item: ScoreItem) -> ScoreResult:
        """Return the log-probabilities of verdicts after a conversation."""
        tokens = [token for part in item.parts for token in (encode_prompt(part) if isinstance(part, str) else part)]
        verdicts = [decode_text((token,)) for token in request.token_ids]
        if request.max_compute is not None and len(tokens) + _VERDICT_TOKENS > request.max_compute:
            return ScoreResult(index, None, len(tokens) + _VERDICT_TOKENS, 0)
        async with self._slots:
            answer = await self._ask_verdict(request.model, tokens)
        try:
            choice = answer["choices"][0]
            text = str(choice["message"].get("content") or "").strip()
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the answer of {self._connection.url} is not understood: {error!r}") from error
        likeliest: dict[str, float] = {}
        for entry in ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or ():
            likeliest.setdefault(str(entry["token"]).strip(), float(entry["logprob"]))
        values = [likeliest.get(verdict, _UNLIKELY) for verdict in verdicts]
        if max(values) == _UNLIKELY:
            values = [0.0 if text.startswith(verdict) else _UNLIKELY for verdict in verdicts]
        if max(values) == _UNLIKELY:
            values = [0.0] * len(verdicts)  # no verdict: as likely as not
        usage = answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        computed = (usage.get("prompt_tokens") or len(tokens)) - cached
        computed += count_tokens(text, usage.get("completion_tokens"))
        return ScoreResult(index, (tuple(values),), computed, cached)

    async def _ask_verdict(self, model: str, tokens: Sequence[int]) -> Json:
        body = self._messages(tokens) | {"model": model, "temperature": 0.0, self._limit_field: _VERDICT_TOKENS}
        retries = Retries(should_wait=self._connection.should_wait)
        while True:
            more = {"logprobs": True, "top_logprobs": 20} if self._lists_likeliest else {}
            try:
                answer: Json = await self._connection.call("POST", "/v1/chat/completions", body | more)
                return answer
            except InvalidRequest as error:
                if self._lists_likeliest and "logprobs" in f"{error} {error.field}":
                    self._lists_likeliest = False
                elif self._understands_other_limit(error):
                    body["max_tokens"] = body.pop("max_completion_tokens")
                else:
                    raise
            except EngineUnavailable as error:
                _LISTS.pop(self._place, None)
                wait = retries.next_wait(error, has_progress=False)
                if wait is None:
                    raise
                await asyncio.sleep(wait)


def _response_format(constraint: Constraint | None) -> Json:
    """Return OpenAI's field that holds an answer to a JSON Schema."""
    if constraint is None:
        return {}
    schema = {"name": "answer", "schema": json.loads(constraint.value), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _has_answers(prompt: Sequence[int]) -> bool:
    """Return True for a conversation that has grown by the model's own answers, not only by its user's question."""
    return any(message["role"] == "assistant" for message in decode_prompt(prompt).messages)
