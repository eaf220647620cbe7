"""Scores for reasoning steps from a process reward model that an engine serves.

The verifier reads prompt, step, separator, step, separator, …; a step's score is read at its separator. Every part is
tokenised by itself, so a longer chain begins with exactly the token ids of the shorter one, and the engine's prefix
cache leaves only the new step to compute.

Source of the format: token-classification PRMs as trained by TRL (``PRMTrainer``), one label per step separator.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import EngineClient, EngineError, ModelInfo, ScoreItem, ScoreRequest


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps of one solution; the first ``scored`` of them have their scores already."""

    steps: tuple[str, ...]
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a verifier answered. ``scores``: one probability of being right for each step that was asked about; ``None``
    when the bound on computation was too small, and ``computed`` then says how many tokens it takes."""

    scores: tuple[float, ...] | None
    computed: int
    cached: int


class StepScorer:
    """Speaks to a served token-classification PRM. Keep one per model: it remembers the format."""

    def __init__(self, engine: EngineClient, info: ModelInfo, lease: str | None = None) -> None:
        """``lease``: see ``ScoreRequest``."""
        notes = info.extra.get("reasoner_prm")
        if info.kind != "classify" or not isinstance(notes, dict):
            raise EngineError(
                f"model {info.id!r} is not a process reward model: its config.json needs a token-classification "
                "architecture and a 'reasoner_prm' entry with 'separator' and 'positive_label'"
            )
        self.info = info
        self.separator = str(notes["separator"])
        self._positive = int(notes["positive_label"])
        self._engine = engine
        self._lease = lease

    async def prompt(self, conversation: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of the question in the verifier's own vocabulary."""
        return await self._engine.tokenize(self.info.id, conversation)

    def steps(self, text: str, *, complete: bool) -> tuple[str, ...]:
        """The steps of a text. Empty ones never count, and the last one only if it is ``complete`` or a separator
        follows it: a score for half a step, or for nothing, would decide pruning by accident."""
        pieces = text.split(self.separator)
        if not complete:
            pieces.pop()
        return tuple(piece.strip() for piece in pieces if piece.strip())

    async def score(
        self, prompt: tuple[int, ...], chains: Sequence[Chain], *, max_compute: int | None = None
    ) -> list[Reading]:
        """Scores all steps after ``Chain.scored`` of every chain, in the order given.

        ``max_compute`` bounds the tokens that the engine may forward for one chain.
        """
        items = []
        for chain in chains:
            parts: list[str | tuple[int, ...]] = [prompt]
            for step in chain.steps:
                parts += [step, self.separator]
            read = tuple(2 * i + 2 for i in range(chain.scored, len(chain.steps)))
            items.append(ScoreItem(tuple(parts), read))
        results = await self._engine.score(
            ScoreRequest(uuid.uuid4().hex, self.info.id, tuple(items), max_compute=max_compute, lease=self._lease)
        )
        return [
            Reading(
                None if result.values is None else tuple(self._probability(row) for row in result.values),
                result.computed_tokens,
                result.cached_tokens,
            )
            for result in results
        ]

    def _probability(self, logits: Sequence[float]) -> float:
        top = max(logits)
        weights = [math.exp(value - top) for value in logits]
        return weights[self._positive] / sum(weights)
