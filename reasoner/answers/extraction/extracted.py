"""An answer with the level at which it was extracted, as in the GSM8K task of lm-evaluation-harness."""

from __future__ import annotations

from typing import NamedTuple

from reasoner.tree import AnswerLevel


class ExtractedAnswer(NamedTuple):
    """An answer extracted from a solution."""

    text: str
    level: AnswerLevel
