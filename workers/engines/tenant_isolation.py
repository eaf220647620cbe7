"""Jobs apart from each other in the engines: owners by their prefix caches, and batches behind interactive jobs.

A cached prefix makes a job faster, and its usage reports how much was cached. If owners shared cached prefixes, each
could find out the prompts of others piece by piece (Song et al., "The Early Bird Catches the Leak", 2024,
https://arxiv.org/abs/2409.20002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final, TypeVar

from engine.protocol.dispatching import ForwardingEngine
from engine.protocol.types import (
    EngineClient,
    Events,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    SomeModelsAway,
)

_Request = TypeVar("_Request", GenerateRequest, ScoreRequest)


def owner_salt(owner: str) -> str:
    """Return the ``cache_salt`` of an owner's jobs, the same in each process and after a restart.

    It is a hash, so that names of owners, which may be e-mail addresses, reach neither engines nor their logs, and so
    that a salt chosen by a client never equals that of an owner.
    """
    return sha256(owner.encode()).hexdigest()


BACKGROUND_PRIORITY: Final = -1
"""The priority of requests of jobs of the batch queue: engines do them while there are no others."""


class TenantEngine(ForwardingEngine):
    """Engine that adds an owner's salt, and the priority of the job, to each request.

    Models of servers without salts (``ModelInfo.isolates``) get none after ``models`` has listed them. Before, they
    refuse the request, so that nothing is shared by accident.
    """

    def __init__(self, engine: EngineClient, owner: str, *, is_background: bool = False) -> None:
        super().__init__(engine)
        self._priority = BACKGROUND_PRIORITY if is_background else 0
        self._salt = owner_salt(owner)
        self._unsalted_models: frozenset[str] = frozenset()

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return super().generate(self._mark(request), stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await super().score(self._mark(request))

    async def models(self) -> list[ModelInfo]:
        try:
            models = await super().models()
        except SomeModelsAway as error:
            self._note_unsalted([*error.known, *error.away])
            raise
        self._note_unsalted(models)
        return models

    def _note_unsalted(self, models: Sequence[ModelInfo]) -> None:
        self._unsalted_models = frozenset(info.id for info in models if not info.isolates)

    def _mark(self, request: _Request) -> _Request:
        salt = None if request.model in self._unsalted_models else self._salt
        return replace(request, cache_salt=salt, priority=self._priority)
