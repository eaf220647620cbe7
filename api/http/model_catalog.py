"""Models that the engines serve, cached briefly so that a slow or absent engine never slows the API, and their room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence

from engine.protocol.request_checks import PromptTooLong
from engine.protocol.types import (
    EngineClient,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelInfo,
    SomeModelsAway,
)
from engine.remote.health import Health, ReplicaHealth
from reasoner.jobs.spec import JobSpec
from reasoner.search.policies.policy import render_problem, tokenize_problem
from reasoner.search.policies.selection import policy_selectors
from reasoner.search.policies.thoughts import find_own_thoughts

CACHE_SECONDS = 5.0
TIMEOUT_SECONDS = 2.0
"""More than a client that reports health takes to say which servers do not answer."""
TOKENIZE_SECONDS = 10.0
"""Time in which the long questions of one submission are tokenized; those that are left wait for the worker."""
_TEMPLATE_SHARE = 2
"""A chat template with its own texts takes at most this fraction of a context, as its reciprocal."""


class ModelCatalog:
    """Lists the models of the engines. ``health`` is the health record of the client ``engine``."""

    def __init__(self, engine: EngineClient, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._refreshed_at = float("-inf")
        self._refresh_task: asyncio.Task[None] | None = None
        self._result: list[ModelInfo] | EngineError = EngineUnavailable("the engine was not queried yet")
        self._last: dict[str, ModelInfo] = {}
        """The models by id, those of servers that are away as they were when these last answered."""

    async def models(self) -> list[ModelInfo]:
        """Return the served models.

        Raises ``SomeModelsAway`` if some servers do not answer in time, and ``EngineError`` if none does.
        """
        if time.monotonic() - self._refreshed_at > CACHE_SECONDS:
            await self.refresh()
        if isinstance(self._result, EngineError):
            raise self._result
        return self._result

    async def list_answering(self) -> list[ModelInfo]:
        """Return the models of the engines that answer. Raises ``EngineError`` if none does in time."""
        try:
            return await self.models()
        except SomeModelsAway as error:
            if not error.known:
                raise
            return error.known

    async def list_known(self) -> list[ModelInfo]:
        """Return the models of all engines, with those that a server which is away had when it last answered."""
        with contextlib.suppress(EngineError):
            await self.models()
        return list(self._last.values())

    async def find_too_long(self, specs: Sequence[JobSpec]) -> dict[int, PromptTooLong]:
        """Return the errors of questions that leave no room in a policy's context, by the index of their resolved jobs.

        A question is not known to be too long as long as no engine answers.
        """
        found: dict[int, PromptTooLong] = {}
        with contextlib.suppress(EngineError, TimeoutError):
            served = {info.id: info for info in await self.list_answering()}
            async with asyncio.timeout(TOKENIZE_SECONDS):
                for index, spec in enumerate(specs):
                    for selector, _ in policy_selectors(spec):
                        error = await self._find_excess(spec, served.get(selector.name or ""))
                        if error is not None:
                            found.setdefault(index, error)
        return found

    async def _find_excess(self, spec: JobSpec, policy: ModelInfo | None) -> PromptTooLong | None:
        if policy is None or spec.candidates is not None:  # not served now, or nothing is written behind it
            return None
        num_bytes = len(json.dumps([spec.to_messages(), spec.template_kwargs], ensure_ascii=False).encode())
        if num_bytes <= policy.context // _TEMPLATE_SHARE:  # a token has at least one byte
            return None
        try:
            await tokenize_problem(spec, self._engine, policy)
        except PromptTooLong as error:
            return error
        except InvalidRequest:
            return None  # another fault, which the worker reports
        return None

    async def count_prompt_tokens(self, spec: JobSpec) -> int:
        """Return the number of tokens of a resolved job's question, as its first model gets it.

        Raises ``InvalidRequest`` if its server counts no tokens, and ``EngineError`` if it does not answer in time.
        """
        served = {info.id: info for info in await self.list_answering()}
        selector, _ = policy_selectors(spec)[0]
        policy = served.get(selector.name or "")
        if policy is None:
            raise EngineUnavailable(f"no engine serves {selector.name!r} now")
        if not policy.counts_exactly:
            raise InvalidRequest(f"the server of model {policy.id!r} only chats, and counts no tokens of a prompt")
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):
                return len(await render_problem(spec, self._engine, policy))
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not count within {TOKENIZE_SECONDS} s") from None

    async def has_known_thoughts(self, spec: JobSpec) -> bool:
        """Return True if all models of a resolved job think, as far as is known.

        A model thinks if the delimiters of its thoughts are known, or its server limits thoughts. Raises
        ``EngineError`` if no engine answers.
        """
        served = {info.id: info for info in await self.list_answering()}
        policies = [served[selector.name] for selector, _ in policy_selectors(spec) if selector.name in served]
        for policy in policies:
            if not policy.limits_thoughts and await find_own_thoughts(spec, self._engine, policy) is None:
                return False
        return True

    def find_absence(self) -> str | None:
        """Return which engines do not answer, where others do; ``None`` if all answered the last query."""
        return str(self._result) if isinstance(self._result, SomeModelsAway) else None

    def engines(self) -> list[ReplicaHealth]:
        """Return the health of each engine."""
        return self._health.snapshot()

    async def is_engine_available(self) -> bool:
        """Query the engines now, and return True if one answers."""
        await self.refresh()
        return isinstance(self._result, list) or bool(isinstance(self._result, SomeModelsAway) and self._result.known)

    async def refresh(self) -> None:
        """Query the engines now. Concurrent callers share one query, which goes on when a caller is cancelled."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._query())
        await asyncio.shield(self._refresh_task)

    async def _query(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                models = await self._engine.models()
            self._result, self._last = models, {info.id: info for info in models}
        except TimeoutError:
            self._result = self._remember(f"the engine did not answer within {TIMEOUT_SECONDS:g} s", [])
        except SomeModelsAway as error:
            self._last |= {info.id: info for info in error.away if info.id not in self._last}
            self._result = self._remember(str(error), error.known)
        except EngineUnavailable as error:
            self._result = self._remember(str(error), []) if self._last else error
        except EngineError as error:
            self._result = error
        self._refreshed_at = time.monotonic()

    def _remember(self, message: str, answering: list[ModelInfo]) -> SomeModelsAway:
        """Return the error of servers that do not answer, with the models that they had."""
        self._last |= {info.id: info for info in answering}
        ids = {info.id for info in answering}
        return SomeModelsAway(message, answering, [info for info in self._last.values() if info.id not in ids])
