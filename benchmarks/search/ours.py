"""The search on this repository's engine, in-process, with both models in one engine and a user's default options."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch

from benchmarks.search.workload import SEPARATOR_ID, Beam, Seen, Shape, check, prompt, survivors
from engine.core.local_engine import LocalEngine
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, ScoreItem, ScoreRequest
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import StrategySpec
from reasoner.run import run_job

_SAMPLING = SamplingParams(temperature=1.0, ignore_eos=True)


class _Ours:
    def __init__(self, folder: Path, prm: Path, *, rescoring: bool) -> None:
        self._loop = asyncio.Runner()
        self._engine = LocalEngine({"policy": folder, "prm": prm})
        self._rescoring = rescoring
        self._requests = 0

    def scored_search(self, shape: dict[str, int], seed: int) -> dict[str, Any]:
        """Run one search from a cold cache."""
        self._loop.run(self._engine.clear_cache())
        start = time.perf_counter()
        seen = self._loop.run(self._search(Shape(**shape), seed))
        seen.seconds = time.perf_counter() - start
        return asdict(seen)

    def beam_jobs(self, problems: Sequence[str], temperature: float, seed: int) -> dict[str, Any]:
        """Run the strategy ``beam`` with 16 beams and 8 steps on one problem after the other, and return the sums of
        all.
        """
        strategy = StrategySpec.model_validate({"name": "beam", "n": 16, "expansions": 4, "max_steps": 8})
        total = Seen()
        for place, problem in enumerate(problems):
            self._loop.run(self._engine.clear_cache())
            request = JobRequest(
                problem=problem, strategy=strategy, sampling={"temperature": temperature}, seed=seed + place
            )
            usage = self._loop.run(run_job(resolve_program_job(request), self._engine, MemoryJournal())).usage
            total.seconds += usage.seconds
            total.generated += usage.generated
            total.computed += usage.verifier_computed
            total.cached += usage.verifier_cached
        return asdict(total)

    async def _search(self, shape: Shape, seed: int) -> Seen:
        seen, beams = Seen(), [Beam(prompt(shape, seed), ())]
        for turn in range(shape.rounds):
            each = shape.beams // len(beams)
            keys = [range(start, start + each) for start in range(turn << 8, (turn << 8) + shape.beams, each)]
            grown = await asyncio.gather(
                *(self._grow(*one, shape.tokens, seed) for one in zip(beams, keys, strict=True))
            )
            beams = list(chain.from_iterable(grown))
            begun = time.perf_counter()
            scores = await self._score(beams, shape, seen)
            seen.scoring += time.perf_counter() - begun
            seen.generated += sum(len(beam.steps[-1]) for beam in beams)
            check(shape, beams, scores)
            beams = survivors(shape, beams, scores)
        return seen

    async def _grow(self, beam: Beam, keys: range, tokens: int, seed: int) -> list[Beam]:
        branches = tuple(Branch(seed, key, tokens) for key in keys)
        request = GenerateRequest(self._name(), "policy", beam.path, branches, _SAMPLING)
        steps: dict[int, tuple[int, ...]] = {}
        async for event in self._engine.generate(request):
            if isinstance(event, Completion):
                steps[event.index] = require_ids(event.token_ids)
        return [beam.grown(steps[index]) for index in sorted(steps)]

    async def _score(self, beams: Sequence[Beam], shape: Shape, seen: Seen) -> list[float]:
        """Return the probability of the label ``good`` at each beam's last separator."""
        items = []
        for beam in beams:
            parts: list[str | tuple[int, ...]] = [beam.path[: shape.prompt]]
            for step in beam.steps:
                parts += [step, (SEPARATOR_ID,)]
            items.append(ScoreItem(tuple(parts), (len(parts) - 1,)))
        # With its own salt the cache holds only the tokens of this request's beams.
        salt = self._name() if self._rescoring else None
        if salt is None:
            results = await self._engine.score(ScoreRequest(self._name(), "prm", tuple(items)))
        else:
            alone = (
                ScoreRequest(self._name(), "prm", (item,), cache_salt=f"{salt} {i}") for i, item in enumerate(items)
            )
            results = [one for some in await asyncio.gather(*map(self._engine.score, alone)) for one in some]
        scores = []
        for result in results:
            seen.computed += result.computed_tokens
            seen.cached += result.cached_tokens
            assert result.values is not None  # no bound was given
            scores.append(torch.tensor(result.values[0]).softmax(0)[1].item())
        return scores

    def _name(self) -> str:
        self._requests += 1
        return f"request {self._requests}"


def load(folder: Path, threads: int, *, prm: str, rescoring: bool = False) -> _Ours:
    """Return the engine with both checkpoints loaded. ``rescoring``: the verifier computes every solution from its
    start.
    """
    torch.set_num_threads(threads)
    return _Ours(folder, Path(prm), rescoring=rescoring)
