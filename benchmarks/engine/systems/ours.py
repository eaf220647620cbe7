"""This repository's engine, in-process, with a user's default options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch

from benchmarks.engine.workloads import Generate, Outputs, Request
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams


class Ours:
    """The engine in a loop of its own."""

    def __init__(self, folder: Path, kv_dtype: str) -> None:
        self.loop = asyncio.Runner()
        self.engine = LocalEngine({"model": folder}, EngineOptions(kv_dtype=kv_dtype))

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        self.loop.run(self.engine.clear_cache())
        sampling = SamplingParams(temperature=0.0 if greedy else 1.0, ignore_eos=True)
        yield lambda requests: self.loop.run(self._all(requests, sampling, seed))

    async def _all(self, requests: Sequence[Request], sampling: SamplingParams, seed: int) -> Outputs:
        return list(await asyncio.gather(*(self._one(key, one, sampling, seed) for key, one in enumerate(requests))))

    async def _one(self, key: int, request: Request, sampling: SamplingParams, seed: int) -> list[list[int]]:
        branches = tuple(Branch(seed, key << 16 | sample, request.tokens) for sample in range(request.samples))
        wanted = GenerateRequest(f"request-{key}", "model", request.prompt, branches, sampling)
        samples: list[list[int]] = [[] for _ in branches]
        async for event in self.engine.generate(wanted):
            if isinstance(event, Completion):
                samples[event.index] = list(require_ids(event.token_ids))
        return samples


def load(folder: Path, threads: int, *, kv_dtype: str = "auto") -> Ours:
    """Return the engine with the checkpoint loaded."""
    torch.set_num_threads(threads)
    return Ours(folder, kv_dtype)
