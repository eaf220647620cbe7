"""Scores of steps by a language model that writes a critique of each beginning of a solution (``verdicts``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.protocol.types import EngineClient, ModelInfo, SamplingParams
from prm.scorers.templates import PromptTemplate
from prm.scorers.verdict_formats import open_check_format, parse_check_template
from prm.scorers.verdicts import VerdictOptions, VerdictWriter

CONTEXT_SHARE = 4
"""A critique takes at most this fraction of the context, as its reciprocal."""
SEPARATOR = "\n\n"


class WrittenStepScorer:
    """Scores the steps of solutions by verdicts on each of their beginnings, in the model's own format."""

    def __init__(self, writer: VerdictWriter, template: PromptTemplate) -> None:
        self._writer = writer
        self._template = template

    @classmethod
    async def open(cls, engine: EngineClient, info: ModelInfo, votes: int, max_tokens: int) -> WrittenStepScorer:
        """Open a served model.

        Raises ``InvalidRequest`` for labels that are not single tokens, ``TemplateRefused`` for the model's own prompt.
        """
        form = open_check_format(None, info)
        longest = min(max_tokens, info.context // CONTEXT_SHARE)
        sampling = SamplingParams(temperature=info.sampling.get("temperature", 1.0), stop=form.stops)
        writer = await VerdictWriter.open(engine, info, form, VerdictOptions(votes, longest, sampling))
        return cls(writer, parse_check_template(form.template, has_criteria=False))

    async def score(self, question: str, steps: Sequence[str]) -> list[float | None]:
        """Return the score of each step; ``None`` where the model gave no verdict or its context is too short."""
        return list(await asyncio.gather(*(self._score(question, steps[:end]) for end in range(1, len(steps) + 1))))

    async def _score(self, question: str, steps: Sequence[str]) -> float | None:
        values = {"question": question, "solution": SEPARATOR.join(steps), "steps": steps, "step": steps[-1]}
        prompt = await self._writer.encode(self._template.render({**values, "criterion": ""}))
        if not self._writer.fits(prompt):
            return None
        return (await self._writer.write(prompt, f"{question}:{len(steps)}")).score
