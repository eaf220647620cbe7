"""``EngineClient`` over HTTP, for our server and for OpenAI-compatible ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from engine.protocol.dispatching import ForwardingEngine, ModelRequest
from engine.protocol.types import EngineClient, EngineUnavailable, Events, GenerateRequest, InvalidRequest, ModelInfo
from engine.remote.chat.engine import ChatEngine
from engine.remote.chat.options import ChatOptions
from engine.remote.connection import SILENCE_SECONDS, Connection
from engine.remote.http_clients import HttpClients
from engine.remote.native import NativeEngine
from engine.remote.openai.dialects import DIALECTS
from engine.remote.openai.engine import CompletionsEngine
from engine.remote.throttle import Throttle
from engine.remote.urls import hide_login

NATIVE = "reasoner"
"""``owned_by`` of the models of our server, and the name of its dialect."""

CHAT = "chat"
KINDS = (NATIVE, *DIALECTS, CHAT)

_T = TypeVar("_T")


class HttpEngine(ForwardingEngine):
    """An engine server at ``http://host:port`` or ``unix:///path/to/socket``.

    The first request detects the kind of server: ours, vLLM, SGLang, llama.cpp, or another with OpenAI's completions
    API. A call that the server does not support raises ``EngineError`` (``engine.remote.openai``).

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.protocol.types`` only.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tokenizer: Path | None = None,
        dialect: str | None = None,
        chat: ChatOptions | None = None,
        should_wait: bool = True,
        throttle: Throttle | None = None,
        kinds: MutableMapping[str, str] | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        clients: HttpClients | None = None,
        obeys_priorities: bool = False,
    ) -> None:
        """Create a client without connecting. Raises ``InvalidRequest`` for any other URL.

        ``api_key``: the server's key. ``tokenizer``: the folder of the server's model, if the server takes no token ids
        or cannot tokenise.
        ``dialect``: ``reasoner``, ``vllm``, ``sglang``, ``llamacpp`` or ``openai``, instead of detecting it, or
        ``chat`` for a server that only chats, with the properties ``chat``.
        ``should_wait``: retry for a second or two while the server cannot be reached; not needed if a replica exists.
        ``throttle``: the limits of the server.
        ``kinds``: the dialects that clients of this process have detected, by URL without a login.
        ``silence_seconds``: the time without any data after which an answer counts as lost.
        ``clients``: shares their open connections, and stays open.
        ``obeys_priorities``: a vLLM or SGLang that was started to order requests by ``priority``; ours always does.
        """
        if dialect is not None and dialect not in KINDS:
            raise InvalidRequest(f"dialect {dialect!r} must be one of {', '.join(KINDS)}", "dialect")
        self._chat = chat or ChatOptions()
        self._connection = Connection(
            url,
            api_key=api_key,
            should_wait=should_wait,
            throttle=throttle,
            silence_seconds=silence_seconds,
            clients=clients,
        )
        super().__init__(NativeEngine(self._connection))  # until another dialect is detected
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._name = hide_login(url)
        self._kinds = {} if kinds is None else kinds
        self._obeys_priorities = obeys_priorities
        self._is_ready = False
        self._lock = asyncio.Lock()

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        engine = await self._detect()
        async with aclosing(engine.generate(request, stream=stream)) as events:
            async for event in events:
                yield event

    async def models(self) -> list[ModelInfo]:
        return await (await self._detect(should_wait=False)).models()  # no wait: health probes call it

    async def _call_engine(self, request: ModelRequest, call: Callable[[EngineClient], Awaitable[_T]]) -> _T:  # noqa: ARG002
        return await call(await self._detect())

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await call(await self._detect())

    async def _detect(self, *, should_wait: bool = True) -> EngineClient:
        """Return the client of the server's kind, which the first call finds out."""
        async with self._lock:
            if not self._is_ready:
                dialect = self._dialect or await self._find_dialect(should_wait)
                if dialect == CHAT:
                    self._engine = ChatEngine(self._connection, self._chat)
                elif dialect != NATIVE:
                    self._engine = CompletionsEngine(
                        self._connection,
                        DIALECTS[dialect],
                        self._tokenizer,
                        obeys_priorities=self._obeys_priorities,
                    )
                self._is_ready = True
        return self._engine

    async def _find_dialect(self, should_wait: bool) -> str:
        if self._name in self._kinds:
            return self._kinds[self._name]
        answer = await self._connection.call("GET", "/v1/models", None, should_wait=should_wait)
        try:
            owners = {model.get("owned_by") for model in answer["data"]}
        except (AttributeError, KeyError, TypeError) as error:
            source = self._connection.source
            raise EngineUnavailable(f"{source} did not answer /v1/models with a list of models: {error!r}") from error
        dialect = next((name for name in (NATIVE, *DIALECTS) if name in owners), "openai")
        self._kinds[self._name] = dialect
        return dialect
