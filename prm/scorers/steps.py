"""Scores for reasoning steps from a process reward model that an engine serves.

Only what is new of a chain is computed (``prm.formats`` says why), and all chains of a call are one batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.types import EngineClient, ModelInfo, ScoreItem, ScoreRequest
from prm.formats.base import Conversation, Pieces, Prompt
from prm.formats.registry import open_format

_REMEMBERED = 16384
"""Increments that are remembered: a tree search asks for the same steps many times."""


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
    """Speaks to a served process reward model. Keep one for each model and lease: it remembers the latest steps."""

    def __init__(self, engine: EngineClient, info: ModelInfo, lease: str | None = None) -> None:
        """``lease``: see ``ScoreRequest``.

        Raises ``EngineError`` when the model is no process reward model, or its format is not known.
        """
        self.info = info
        self._format = open_format(engine, info)
        self.separator = self._format.separator
        self._engine = engine
        self._lease = lease
        self._prepared = False
        self._increments: dict[tuple[str, int, str], Pieces] = {}

    async def prompt(self, conversation: Conversation) -> Prompt:
        """The question as the verifier reads it.

        Raises ``EngineError`` when the verifier's tokenizer lacks a token that its format needs.
        """
        if not self._prepared:
            await self._format.prepare()
            self._prepared = True
        return await self._format.prompt(conversation)

    def steps(self, text: str, *, complete: bool) -> tuple[str, ...]:
        """The steps of a text. Empty ones never count, and the last one only if it is ``complete`` or a separator
        follows it: a score for half a step, or for nothing, would decide pruning by accident."""
        pieces = text.split(self.separator)
        if not complete:
            pieces.pop()
        return tuple(piece.strip() for piece in pieces if piece.strip())

    async def score(self, prompt: Prompt, chains: Sequence[Chain], *, max_compute: int | None = None) -> list[Reading]:
        """Scores all steps after ``Chain.scored`` of every chain, in the order given.

        ``max_compute`` bounds the tokens that the engine may forward for one chain.
        """
        items = [await self._item(prompt, chain) for chain in chains]
        results = await self._engine.score(
            ScoreRequest(
                uuid.uuid4().hex,
                self.info.id,
                tuple(items),
                token_ids=self._format.token_ids,
                max_compute=max_compute,
                lease=self._lease,
            )
        )
        return [
            Reading(
                None if result.values is None else tuple(self._format.probability(row) for row in result.values),
                result.computed_tokens,
                result.cached_tokens,
            )
            for result in results
        ]

    async def _item(self, prompt: Prompt, chain: Chain) -> ScoreItem:
        parts: list[str | tuple[int, ...]] = [prompt.tokens] if prompt.tokens else []
        read = []
        for index, step in enumerate(chain.steps):
            parts += await self._increment(prompt, index, step)
            if index >= chain.scored:
                read.append(len(parts) - 1)
        return ScoreItem(tuple(parts), tuple(read))

    async def _increment(self, prompt: Prompt, index: int, step: str) -> Pieces:
        key = (prompt.question if index == 0 else "", index, step)
        pieces = self._increments.get(key)
        if pieces is None:
            pieces = self._increments[key] = await self._format.increment(prompt, index, step)
            if len(self._increments) > _REMEMBERED:
                del self._increments[next(iter(self._increments))]
        return pieces
