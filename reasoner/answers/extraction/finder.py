"""Extraction of a job's answers within its time limit; clients' patterns are matched in a worker process."""

from __future__ import annotations

import logging

from engine.protocol.types import InvalidRequest
from reasoner.answers.extraction.extract import MAX_CHARS, ExtractedAnswer, find_answer, strip_thinking
from reasoner.answers.extraction.phrases import ExtractionStopped
from reasoner.answers.spec import AnswerSpec, RegexExtract
from reasoner.deadline import SecondsLeft, run_within, unlimited
from reasoner.regex import find_pattern_error, search_last

MAX_LATE = 6
"""Maximum number of timeouts in one job. After that, its pattern is no longer used."""

log = logging.getLogger("reasoner.answers")


class AnswerFinder:
    """Extracts answers by the job's ``AnswerSpec``, with patterns matched in a worker process."""

    def __init__(self, spec: AnswerSpec, seconds_left: SecondsLeft = unlimited) -> None:
        self._spec = spec
        self._seconds_left = seconds_left
        self._late = 0

    async def check(self) -> None:
        """Compile the job's pattern. Raises ``InvalidRequest`` if that fails."""
        if isinstance(self._spec.extract, RegexExtract):
            pattern = self._spec.extract.regex
            if error := await run_within(self._seconds_left(), lambda: find_pattern_error(pattern)):
                raise InvalidRequest(error, "answer.extract.regex")

    async def find(
        self, text: str, stopped: ExtractionStopped = "end", *, has_thought: bool = True
    ) -> ExtractedAnswer | None:
        """Return the answer of a solution; ``None`` if it has none or the pattern timed out, which is logged once.

        ``has_thought``: False if a thought is no part of the text.
        """
        if not isinstance(self._spec.extract, RegexExtract):
            return find_answer(text, self._spec, stopped, has_thought=has_thought)
        stated = strip_thinking(text) if has_thought else text
        if stated is None or self._late >= MAX_LATE:
            return None
        pattern = self._spec.extract.regex
        found = await run_within(self._seconds_left(), lambda: search_last(pattern, stated))
        if found is None:
            if not self._late:
                log.warning("the search for the answer's pattern took too long: the solution counts as without answer")
            self._late += 1
            return None
        answer = found.group
        if answer is None or (stopped == "inside" and found.end == len(stated)) or len(answer) > MAX_CHARS:
            return None
        return ExtractedAnswer(answer.strip(), "strict") if answer.strip() else None
