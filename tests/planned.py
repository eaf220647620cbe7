"""Scripted engine whose branches have texts, scores and probabilities planned by a test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from engine.protocol.types import Completion, Delta, GenerateRequest, ScoreRequest, ScoreResult
from reasoner.tree import make_branch_key
from tests.scripted import ScriptedEngine

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned branch: its text (a step ends with the separator), its verifier score and its probability."""

    text: str
    score: float = 0.5
    probability: float = 0.1


NOWHERE = Planned("and so on", 0.01, 0.001)


class PlannedEngine(ScriptedEngine):
    """Engine with planned branches.

    ``plan`` holds branches by their paths; any other child has no continuation. Branches in ``slow`` wait for their
    event.
    """

    def __init__(self, plan: Mapping[Path, Planned], slow: Mapping[Path, asyncio.Event] | None = None) -> None:
        super().__init__()
        self.asked: list[Path] = []
        """Paths of the requested branches, in order."""
        self._plan = plan
        known = [(*parent, index) for parent in {(), *plan} for index in range(64)]
        self._paths = {make_branch_key(path): path for path in known}
        self._slow = slow or {}
        self._scores = {planned.text.strip(): planned.score for planned in plan.values()}

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        paths = [self._paths[branch.key] for branch in request.branches]
        self.asked += paths
        for index in sorted(range(len(paths)), key=lambda index: paths[index] in self._slow):
            if paths[index] in self._slow:
                await self._slow[paths[index]].wait()
            planned = self._plan.get(paths[index], NOWHERE)
            stop: str | int = "\n\n" if planned.text.endswith("\n\n") else 0
            length = len(request.prompt)
            yield Completion(index, (3,), planned.text, "stop", stop, math.log(planned.probability), length, 0)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        results = []
        for index, item in enumerate(request.items):
            scores = [self._scores.get(str(item.parts[read - 1]), NOWHERE.score) for read in item.read]
            values = tuple((0.0, math.log(score / (1 - score))) for score in scores)
            results.append(ScoreResult(index, values, len(item.read), 0))
        return results
