"""A language model as a verifier: the probability that a solution is right so far.

The prompt is ``TEMPLATE`` as one user message, and nothing is sampled: the score is the probability of "Yes" against
"No" as the next token, computed in one forward pass. Question and solution come before the request for a verdict, so
that for a longer solution only its new tokens and that request are computed, and all others are cached.

Source: Kadavath et al. 2022, "Language Models (Mostly) Know What They Know", section 3 (P(True)); as a verifier with
"Yes" and "No": Zhang et al. 2024, "Generative Verifiers: Reward Modeling as Next-Token Prediction", section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from engine.protocol.types import EngineClient, EngineError, ModelInfo, TokenizeRequest, Tokens
from prm.formats.base import Conversation, as_text, softmax
from prm.scorers.solutions import SolutionScorer

TEMPLATE = (
    "Check whether a solution is right so far.\n\n"
    "Problem:\n{question}\n\n"
    "Solution so far:\n{solution}\n\n"
    "Is every step of it right? Answer with Yes or No."
)


class Judge(SolutionScorer):
    """One question's judge on a served language model."""

    @classmethod
    async def open(
        cls, engine: EngineClient, info: ModelInfo, conversation: Conversation, pin_key: str | None = None
    ) -> Self:
        """Return a judge. Raises ``EngineError`` if "Yes" and "No" have the same first token."""
        yes, no = [(await engine.tokenize(TokenizeRequest(info.id, word, special=False)))[:1] for word in ("Yes", "No")]
        if not yes or not no or yes == no:
            raise EngineError(f"model {info.id!r} cannot judge: its tokenizer does not tell 'Yes' from 'No'")
        judge = cls(engine, info, conversation, pin_key)
        judge.token_ids = yes + no
        return judge

    async def encode(self, solution: str) -> Tokens:
        text = TEMPLATE.format(question=as_text(self.conversation), solution=solution)
        return await self.engine.tokenize(TokenizeRequest(self.info.id, [{"role": "user", "content": text}]))

    def probability(self, logits: Sequence[float]) -> float:
        return softmax(logits, 0)
