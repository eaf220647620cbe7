"""``EngineClient`` over HTTP, to our server or any that speaks OpenAI's completions. Imports no torch, so a worker that
uses it starts in an instant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from engine.client.connection import Connection
from engine.client.native import NativeEngine
from engine.client.openai_compatible import DIALECTS, OpenAICompatibleEngine
from engine.protocol.types import (
    Completion,
    Delta,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
)

NATIVE = "reasoner"
"""How our server signs its models, and what its dialect is called."""


class HttpEngine:
    """An engine server at ``http://host:port`` or ``unix:///path/to/socket``.

    It is asked once, before the first request, whose server it is: ours, vLLM, SGLang, or another that speaks OpenAI's
    completions API. What a foreign server cannot do raises ``EngineError`` that names it
    (``engine.client.openai_compatible``).

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.protocol.types`` only.
    """

    def __init__(
        self, url: str, *, tokenizer: Path | None = None, dialect: str | None = None, patient: bool = True
    ) -> None:
        """Does not connect yet. Raises ``InvalidRequest`` for a URL of another kind.

        ``tokenizer``: the folder of a foreign server's model, for one that takes no token ids or cannot tokenise.
        ``dialect``: ``reasoner``, ``vllm``, ``sglang`` or ``openai``, for a server that is not to be asked.
        ``patient``: waits a second or two for a server that cannot be reached; not needed where another can stand in.
        """
        if dialect is not None and dialect not in (NATIVE, *DIALECTS):
            raise InvalidRequest(f"dialect {dialect!r} must be one of {', '.join((NATIVE, *DIALECTS))}", "dialect")
        self._connection = Connection(url, patient=patient)
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._engine: NativeEngine | OpenAICompatibleEngine | None = None
        self._asking = asyncio.Lock()

    async def generate(
        self, request: GenerateRequest, *, stream: bool = False
    ) -> AsyncGenerator[Completion | Delta, None]:
        """See ``EngineClient``."""
        engine = await self._server()
        async with aclosing(engine.generate(request, stream=stream)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """See ``EngineClient``."""
        return await (await self._server()).score(request)

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient``."""
        await (await self._server()).abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """See ``EngineClient``."""
        await (await self._server()).release(lease, tokens)

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """See ``EngineClient``."""
        server = await self._server()
        return await server.tokenize(model, text, special=special, generation_prompt=generation_prompt)

    async def models(self) -> list[ModelInfo]:
        """See ``EngineClient``. A server that cannot be reached is not waited for: this is how its health is asked."""
        return await (await self._server(patient=False)).models()

    async def clear_cache(self) -> None:
        """See ``EngineClient``."""
        await (await self._server()).clear_cache()

    async def close(self) -> None:
        """Closes the connections."""
        await self._connection.close()

    async def _server(self, *, patient: bool = True) -> NativeEngine | OpenAICompatibleEngine:
        async with self._asking:
            if self._engine is None:
                dialect = self._dialect or await self._ask(patient)
                if dialect == NATIVE:
                    self._engine = NativeEngine(self._connection)
                else:
                    self._engine = OpenAICompatibleEngine(self._connection, DIALECTS[dialect], self._tokenizer)
            return self._engine

    async def _ask(self, patient: bool) -> str:
        answer = await self._connection.call("GET", "/v1/models", None, patient=patient)
        owners = {model.get("owned_by") for model in answer["data"]}
        return next((name for name in (NATIVE, *DIALECTS) if name in owners), "openai")
