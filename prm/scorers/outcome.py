"""Outcome reward models: sequence classifiers that give a finished solution one score.

The conversation is rendered with the model's chat template, with the solution as the assistant's message, and the head
is read at its last token. A head with one label gives a reward, whose sigmoid is the score; of two labels, the second
is that of right solutions.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", section 4.2 (verifiers of solutions); read
as transformers' ``ForSequenceClassification`` and TRL's ``RewardTrainer`` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import EngineError, ModelInfo, TokenizeRequest, Tokens
from prm.formats.base import sigmoid, softmax
from prm.scorers.solutions import SolutionScorer


def is_outcome_model(info: ModelInfo) -> bool:
    return info.architecture.endswith("ForSequenceClassification")


class OutcomeScorer(SolutionScorer):
    async def encode(self, solution: str) -> Tokens:
        messages = [*self.conversation, {"role": "assistant", "content": solution}]
        return await self.engine.tokenize(TokenizeRequest(self.info.id, messages, generation_prompt=False))

    def probability(self, logits: Sequence[float]) -> float:
        if len(logits) > 2:
            raise EngineError(
                f"model {self.info.id!r} has {len(logits)} labels; an outcome reward model has one (a reward) or two "
                "(wrong, right)"
            )
        return sigmoid(logits[0]) if len(logits) == 1 else softmax(logits, 1)
