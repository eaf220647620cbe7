"""Client of servers with ``/v1/chat/completions`` alone, one request per branch.

Tokens are shares of the text (``engine.remote.chat.encoding``), as many as the server bills, hidden reasoning included.
A thought is the beginning of a branch's text (``Completion.thought``) and is not sent again. A branch goes on after a
given beginning only where the server has prefill. There are no log-probabilities of a branch, no pins and no salts; a
seed is sent, and most servers treat it as a wish. Only vLLM and SGLang tell which stop string ended an answer, so that
only they can search step by step.

Scores are those of a judge: the log-probabilities of the verdicts as first token where the server lists the likeliest
tokens, or else what it writes, which is certain of itself.
"""

from __future__ import annotations

import asyncio

from engine.protocol.types import (
    EngineUnavailable,
    Events,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    Tokens,
)
from engine.remote.branches.engine import OpenAICompatibleEngine
from engine.remote.branches.running import RunningRequest
from engine.remote.chat.encoding import encode_prompt
from engine.remote.chat.judge import ChatJudge
from engine.remote.chat.model_list import ModelList
from engine.remote.chat.options import SETTINGS, ChatOptions
from engine.remote.chat.requests import CHOICE, EFFORT, TOOLS, ChatRequests
from engine.remote.chat.stream import ChatStream
from engine.remote.connection import Connection


class ChatEngine(OpenAICompatibleEngine):
    """``EngineClient`` for a server that only chats."""

    def __init__(self, connection: Connection, options: ChatOptions) -> None:
        super().__init__(connection, "chat", SETTINGS)
        self._options = options
        self._models = ModelList(connection, options)
        self._requests = ChatRequests(connection, options)
        self._judge = ChatJudge(self._requests)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        if request.probe or len(request.token_ids) < 2:
            raise self._build_refusal("score with a head; it can be a judge")
        self._check_items(request)
        try:
            return list(await asyncio.gather(*(self._judge.judge(request, *item) for item in enumerate(request.items))))
        except EngineUnavailable:
            self._models.forget()
            raise

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        names = set() if self._options.is_literal else set(request.template_kwargs) - {EFFORT, TOOLS, CHOICE}
        if names:
            raise InvalidRequest(
                f"the server at {self._connection.url} (chat) has no field for {min(names)!r}: of chat_template_kwargs "
                f"give {EFFORT} alone; a vLLM or SGLang takes all of them if its table in reasoner.toml says "
                "prefill = 'continue_final_message'",
                "chat_template_kwargs",
            )
        return encode_prompt(request.text, request.template_kwargs)

    async def models(self) -> list[ModelInfo]:
        return await self._models.read()

    async def clear_cache(self) -> None:
        raise self._build_refusal("empty its cache on request")

    def _start_streams(self, running: RunningRequest, *, is_watched: bool) -> list[Events]:  # noqa: ARG002
        indices = range(len(running.request.branches))
        return [ChatStream(self._requests, self._models, running, index).run() for index in indices]

    def _check_request(self, request: GenerateRequest) -> None:
        super()._check_request(request)
        if request.cache_salt is not None:
            raise self._build_refusal("keep caches apart by cache_salt")
        if request.thinking_limit is not None and self._options.thinking_limit == "none":
            raise self._build_refusal(
                "limit thoughts, unless thinking_limit in its table of reasoner.toml names a field"
            )
        if request.constraint is not None and request.constraint.kind != "json":
            raise self._build_refusal(f"hold an answer to a {request.constraint.kind}: give a JSON Schema")
