"""Scores for reasoning steps from a process reward model that an engine serves.

Only the new steps of a chain are computed, on the cached prefix, and all chains of a call are one batch.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.protocol.types import EngineClient, ModelInfo, ScoreItem, ScoreRequest, Tokens
from prm.formats.base import Conversation, Pieces, Prompt
from prm.formats.registry import open_format

_MAX_CACHED_INCREMENTS = 16384
"""Maximum number of cached increments, since a tree search scores the same steps many times."""

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "max": max,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}
"""Functions from step scores to the score of a solution."""


@dataclass(frozen=True, slots=True)
class StepChain:
    """Steps of one solution, of which the first ``scored`` already have scores."""

    steps: tuple[str, ...]
    scored: int = 0


@dataclass(frozen=True, slots=True)
class VerifierScores:
    """A verifier's result.

    ``scores`` is the probability of being right for each requested step; ``None`` if the bound on computation was too
    small, and ``computed`` is then the number of tokens required.
    """

    scores: tuple[float, ...] | None
    computed: int
    cached: int
    unread: str | None = None
    """The verifier's text that is no verdict, or the words with which its server refused."""


async def read_scores(
    engine: EngineClient, request: ScoreRequest, probability: Callable[[Sequence[float]], float]
) -> list[VerifierScores]:
    """Score a request's items. ``probability``: the score from the logits at a position."""
    return [
        VerifierScores(
            None if result.values is None else tuple(map(probability, result.values)),
            result.computed_tokens,
            result.cached_tokens,
            result.unread,
        )
        for result in await engine.score(request)
    ]


class StepScorer:
    """Scores steps on a served process reward model. Keep one for each model and pin key: it caches tokenised steps."""

    def __init__(self, engine: EngineClient, info: ModelInfo, pin_key: str | None = None) -> None:
        """Raises ``EngineError`` for a model of no known format. ``pin_key`` as in ``ScoreRequest``."""
        self.info = info
        self._format = open_format(engine, info)
        self.separator = self._format.separator
        self._engine = engine
        self._pin_key = pin_key
        self._prepared = False
        self._increments: dict[tuple[str, int, str], Pieces] = {}

    async def encode_question(self, conversation: Conversation) -> Prompt:
        """Return the question encoded for the verifier.

        Raises ``EngineError`` if the verifier's tokenizer lacks a token that its format needs.
        """
        if not self._prepared:
            await self._format.prepare()
            self._prepared = True
        return await self._format.encode_question(conversation)

    def steps(self, text: str, *, complete: bool) -> tuple[str, ...]:
        """Return the steps of a text.

        Empty ones are left out, and the last one unless it is ``complete`` or a separator follows it, since the score
        of a partial or empty step is meaningless for pruning.
        """
        pieces = unify_line_ends(text).split(self.separator)
        if not complete:
            pieces.pop()
        return tuple(piece.strip() for piece in pieces if piece.strip())

    async def score(
        self, prompt: Prompt, chains: Sequence[StepChain], *, max_compute: int | None = None
    ) -> list[VerifierScores]:
        """Score all steps after ``StepChain.scored`` of every chain, in order.

        ``max_compute`` bounds the tokens computed for one chain.
        """
        items = [await self._build_item(prompt, chain) for chain in chains]
        request = ScoreRequest(
            uuid.uuid4().hex,
            self.info.id,
            items=tuple(items),
            token_ids=self._format.token_ids,
            max_compute=max_compute,
            pin_key=self._pin_key,
        )
        return await read_scores(self._engine, request, self._format.probability)

    async def _build_item(self, prompt: Prompt, chain: StepChain) -> ScoreItem:
        parts: list[str | Tokens] = [prompt.tokens] if prompt.tokens else []
        read = []
        for index, step in enumerate(chain.steps):
            parts += await self._build_increment(prompt, index, step)
            if index >= chain.scored:
                read.append(len(parts) - 1)
        return ScoreItem(tuple(parts), tuple(read))

    async def _build_increment(self, prompt: Prompt, index: int, step: str) -> Pieces:
        key = (prompt.question if index == 0 else "", index, step)
        pieces = self._increments.get(key)
        if pieces is None:
            pieces = self._increments[key] = await self._format.encode_step(prompt, index, step)
            if len(self._increments) > _MAX_CACHED_INCREMENTS:
                del self._increments[next(iter(self._increments))]
        return pieces


def unify_line_ends(text: str) -> str:
    """Return the text with a line feed at the end of each line, however its writer ends them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def aggregate(scores: Sequence[float], how: str) -> float:
    return AGGREGATIONS[how](scores)
