"""A language model as a verifier: the probability that a solution is right so far.

The prompt is ``TEMPLATE`` as one user message, and nothing is sampled: the score is the probability of "Yes" against
"No" as the next token, computed in one forward pass. Question and solution come before the request for a verdict, so
that for a longer solution only its new tokens and that request are computed, and all others are cached.

Source: Kadavath et al. 2022, "Language Models (Mostly) Know What They Know", section 3 (P(True)); as a verifier with
"Yes" and "No": Zhang et al. 2024, "Generative Verifiers: Reward Modeling as Next-Token Prediction", section 3.1.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from engine.protocol.types import EngineClient, EngineError, ModelInfo, ScoreItem, ScoreRequest
from prm.formats.base import Conversation, as_text, softmax
from prm.scorers.steps import Reading

TEMPLATE = (
    "Check whether a solution is right so far.\n\n"
    "Problem:\n{question}\n\n"
    "Solution so far:\n{solution}\n\n"
    "Is every step of it right? Answer with Yes or No."
)


class Judge:
    """One question's judge on a served language model."""

    def __init__(
        self, engine: EngineClient, info: ModelInfo, question: str, verdicts: tuple[int, int], lease: str | None
    ) -> None:
        """Use ``open``. ``verdicts`` are the tokens of "Yes" and "No"."""
        self.info = info
        self.head = 0
        """Number of tokens beside the solution."""
        self._engine = engine
        self._question = question
        self._verdicts = verdicts
        self._lease = lease

    @classmethod
    async def open(
        cls, engine: EngineClient, info: ModelInfo, conversation: Conversation, lease: str | None = None
    ) -> Judge:
        """Return a judge. Raises ``EngineError`` if "Yes" and "No" have the same first token.

        ``conversation`` is the question as chat messages, ``lease`` as in ``ScoreRequest``.
        """
        yes, no = [(await engine.tokenize(info.id, word, special=False))[:1] for word in ("Yes", "No")]
        if not yes or not no or yes == no:
            raise EngineError(f"model {info.id!r} cannot judge: its tokenizer does not tell 'Yes' from 'No'")
        judge = cls(engine, info, as_text(conversation), (yes[0], no[0]), lease)
        judge.head = len(await judge._prompt(""))
        return judge

    async def judge(self, solutions: Sequence[str], *, max_compute: int | None = None) -> list[Reading]:
        """Return one score for each solution, in order. ``max_compute`` bounds the tokens computed for one of them."""
        items = []
        for solution in solutions:
            items.append(ScoreItem((await self._prompt(solution),), (0,)))
        results = await self._engine.score(
            ScoreRequest(
                uuid.uuid4().hex,
                self.info.id,
                tuple(items),
                token_ids=self._verdicts,
                max_compute=max_compute,
                lease=self._lease,
            )
        )
        return [
            Reading(
                None if result.values is None else tuple(softmax(row, 0) for row in result.values),
                result.computed_tokens,
                result.cached_tokens,
            )
            for result in results
        ]

    async def _prompt(self, solution: str) -> tuple[int, ...]:
        text = TEMPLATE.format(question=self._question, solution=solution.strip())
        return await self._engine.tokenize(self.info.id, [{"role": "user", "content": text}])
