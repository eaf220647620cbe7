"""Outcome reward models: sequence classifiers that give a finished solution one score.

The conversation is rendered with the model's chat template, with the solution as the assistant's message, and the head
is read at its last token. A head with one label gives a reward, whose sigmoid is the score; of two labels, the second
is that of right solutions.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", section 4.2 (verifiers of solutions); read
as transformers' ``ForSequenceClassification`` and TRL's ``RewardTrainer`` do.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from engine.protocol.types import EngineClient, EngineError, ModelInfo, ScoreItem, ScoreRequest
from prm.formats.base import Conversation, sigmoid, softmax
from prm.scorers.steps import Reading


def is_outcome_model(info: ModelInfo) -> bool:
    """Return True if a served model is an outcome reward model."""
    return info.architecture.endswith("ForSequenceClassification")


class OutcomeScorer:
    """Scores solutions of one conversation on a served outcome reward model."""

    def __init__(
        self, engine: EngineClient, info: ModelInfo, conversation: Conversation, lease: str | None = None
    ) -> None:
        """``lease`` as in ``ScoreRequest``."""
        self.info = info
        self._engine = engine
        self._conversation = list(conversation)
        self._lease = lease

    async def head(self) -> int:
        """Return the approximate number of tokens beside the solution."""
        return len(await self._tokens(""))

    async def score(self, solutions: Sequence[str], *, max_compute: int | None = None) -> list[Reading]:
        """Return one score for each solution, in order. ``max_compute`` bounds the tokens computed for one of them."""
        items = [ScoreItem((await self._tokens(solution),), (0,)) for solution in solutions]
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

    async def _tokens(self, solution: str) -> tuple[int, ...]:
        messages = [*self._conversation, {"role": "assistant", "content": solution.strip()}]
        return await self._engine.tokenize(self.info.id, messages, generation_prompt=False)

    def _probability(self, logits: Sequence[float]) -> float:
        if len(logits) > 2:
            raise EngineError(
                f"model {self.info.id!r} has {len(logits)} labels; an outcome reward model has one (a reward) or two "
                "(wrong, right)"
            )
        return sigmoid(logits[0]) if len(logits) == 1 else softmax(logits, 1)
