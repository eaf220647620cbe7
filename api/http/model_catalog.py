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
TIMEOUT_SECONDS = 0.8
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

    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``EngineError`` when no engine answers in time."""
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
            return error.known

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

    def engines(self) -> list[ReplicaHealth]:
        """Return the health of each engine."""
        return self._health.snapshot()

    async def is_engine_available(self) -> bool:
        """Query the engines now, and return True if one answers."""
        await self.refresh()
        return not isinstance(self._result, EngineError)

    async def refresh(self) -> None:
        """Query the engines now. Concurrent callers share one query, which goes on when a caller is cancelled."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._query())
        await asyncio.shield(self._refresh_task)

    async def _query(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._result = await self._engine.models()
        except TimeoutError:
            self._result = EngineUnavailable(f"the engine did not answer within {TIMEOUT_SECONDS} s")
        except EngineError as error:
            self._result = error
        self._refreshed_at = time.monotonic()
