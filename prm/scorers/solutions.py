"""The common part of verifiers that give a whole solution one score, read at the last token of a chat."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.protocol.types import EngineClient, ModelInfo, ScoreItem, ScoreRequest, Tokens
from prm.formats.base import Conversation
from prm.scorers.steps import VerifierScores, read_scores


class SolutionScorer(ABC):
    """Scores solutions of one conversation on a served model."""

    token_ids: Tokens = ()
    """Tokens whose logits are read; empty for a model with a classification head."""

    def __init__(
        self, engine: EngineClient, info: ModelInfo, conversation: Conversation, pin_key: str | None = None
    ) -> None:
        """``conversation``: the question as chat messages. ``pin_key`` as in ``ScoreRequest``."""
        self.engine = engine
        self.info = info
        self.conversation = conversation
        self._pin_key = pin_key

    async def score(self, solutions: Sequence[str], *, max_compute: int | None = None) -> list[VerifierScores]:
        """Return one score for each solution, in order. ``max_compute`` bounds the tokens computed for one of them."""
        items = tuple([ScoreItem((await self.encode(solution.strip()),), (0,)) for solution in solutions])
        request = ScoreRequest(
            uuid.uuid4().hex,
            self.info.id,
            items=items,
            token_ids=self.token_ids,
            max_compute=max_compute,
            pin_key=self._pin_key,
        )
        return await read_scores(self.engine, request, self.probability)

    async def head(self) -> int:
        """Return the approximate number of tokens beside the solution."""
        return len(await self.encode(""))

    @abstractmethod
    async def encode(self, solution: str) -> Tokens:
        """Return the tokens of the chat that asks for the score of a solution."""

    @abstractmethod
    def probability(self, logits: Sequence[float]) -> float:
        """Return the probability that the solution is right, from the logits at the last token."""
