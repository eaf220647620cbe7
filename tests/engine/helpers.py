"""Short constructors of requests, and an engine core that tests step by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from engine.core.engine_core import EngineCore
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    GenerateRequest,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
)
from engine.scheduler.sequence import Event, Request


def qwen3_for(kv_dtype: str) -> str:
    """Return the kind of a small Qwen3 checkpoint whose heads can be stored in a dtype: those of 4 bits are wider."""
    return "qwen3_wide" if kv_dtype == "int4" else "qwen3"


SMALL = EngineOptions(kv_tokens=4096, max_running=32, step_tokens=512)


def generate(
    prompt: Sequence[int],
    branches: Sequence[Branch],
    *,
    model: str = "m",
    request_id: str = "r",
    timeout: float | None = None,
    priority: int = 0,
    pin_key: str | None = None,
    cache_salt: str | None = None,
    **sampling: object,
) -> GenerateRequest:
    return GenerateRequest(
        request_id,
        model,
        tuple(prompt),
        tuple(branches),
        SamplingParams(**sampling),  # type: ignore[arg-type]
        timeout,
        priority,
        pin_key,
        cache_salt,
    )


def score(
    *items: ScoreItem,
    model: str = "m",
    token_ids: Sequence[int] = (),
    max_compute: int | None = None,
    pin_key: str | None = None,
) -> ScoreRequest:
    return ScoreRequest("s", model, tuple(items), tuple(token_ids), max_compute, pin_key=pin_key)


class Harness:
    """An engine core without a thread: tests step it and receive every event."""

    def __init__(self, folder: Path, options: EngineOptions = SMALL) -> None:
        self.core = EngineCore("m", folder, options)

    def submit(
        self, request: GenerateRequest | ScoreRequest, *, stream: bool = False, deadline: float = math.inf
    ) -> list[Event]:
        events: list[Event] = []
        in_flight = Request(
            request.request_id,
            events.append,
            deadline=deadline,
            stream=stream,
            priority=request.priority,
            namespace=request.cache_salt,
            pin_key=request.pin_key,
            allow_draft=isinstance(request, GenerateRequest) and request.draft,
        )
        if isinstance(request, GenerateRequest):
            self.core.model.add_branches(request, in_flight)
        else:
            self.core.model.add_items(request, in_flight)
        self.core.submit(in_flight)
        return events

    def run(self) -> None:
        """Step until no work is left, checking the cache's invariants at every step."""
        while self.core.has_work:
            self.core.step()
            self.core.check_invariants()

    def complete(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions of one request, in the order of its branches."""
        events = self.submit(request)
        self.run()
        return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)

    def score(self, request: ScoreRequest) -> list[ScoreResult]:
        events = self.submit(request)
        self.run()
        return sorted((event for event in events if isinstance(event, ScoreResult)), key=lambda one: one.index)
