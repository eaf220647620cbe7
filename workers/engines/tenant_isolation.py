"""What the engine computed for one owner's jobs is used for no other owner's.

A job that finds a prefix in the cache is faster, and its bill says how much was cached. If owners shared what is
cached, each could find out the prompts of others by guessing them piece by piece (Song et al., "The Early Bird Catches
the Leak", 2024, https://arxiv.org/abs/2409.20002).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import TypeVar

from engine.protocol.forwarding import ForwardingEngine
from engine.protocol.types import Completion, Delta, EngineClient, GenerateRequest, ModelInfo, ScoreRequest, ScoreResult

_Request = TypeVar("_Request", GenerateRequest, ScoreRequest)


def owner_salt(owner: str) -> str:
    """The ``cache_salt`` of an owner's jobs, the same in every process and after every restart.

    A hash, so that owners' names, which may be addresses of people, are not told to engines and their logs, and that
    nobody who picks a salt for requests of his own picks an owner's by accident.
    """
    return sha256(owner.encode()).hexdigest()


class TenantEngine(ForwardingEngine):
    """The engine as the jobs of one owner see it. Models of servers that cannot keep caches apart (``ModelInfo``) are
    asked without a salt once ``models`` has told of them; before that they refuse, and nothing is shared unawares."""

    def __init__(self, engine: EngineClient, owner: str) -> None:
        super().__init__(engine)
        self._salt = owner_salt(owner)
        self._sharing: frozenset[str] = frozenset()

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        return super().generate(self._salted(request), stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await super().score(self._salted(request))

    async def models(self) -> list[ModelInfo]:
        models = await super().models()
        self._sharing = frozenset(info.id for info in models if not info.isolates)
        return models

    def _salted(self, request: _Request) -> _Request:
        return replace(request, cache_salt=None if request.model in self._sharing else self._salt)
