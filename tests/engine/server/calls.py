"""Requests of the tests of the engine server."""

from __future__ import annotations

import random

from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    EngineClient,
    GenerateRequest,
)
from tests.engine.helpers import generate
from tests.seeds import shift

PROMPT = tuple(random.Random(shift(0)).choices(range(3, 360), k=37))
OPTIONS = EngineOptions(kv_tokens=4096, max_running=16, max_waiting=64, step_tokens=512, debug=True)


async def collect(engine: EngineClient, request: GenerateRequest) -> list[Completion]:
    events = [event async for event in engine.generate(request)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


def sampled(count: int = 4, max_tokens: int = 20) -> GenerateRequest:
    branches = [Branch(seed=3, key=key, max_tokens=max_tokens) for key in range(count)]
    return generate(PROMPT, branches, temperature=0.9, top_p=0.97, ignore_eos=True)


def openai_body() -> dict[str, object]:
    return {"model": "m", "prompt": "add 3", "max_tokens": 40, "seed": 8, "ignore_eos": True}
