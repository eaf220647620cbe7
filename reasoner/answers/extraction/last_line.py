"""Extraction of a number from the last line, used if nothing else states an answer: "= 18", "So it is **$18**."."""

from __future__ import annotations

import re

from reasoner.answers import plain
from reasoner.answers.extraction.phrases import cut_sentence, strip_markup
from reasoner.answers.extraction.statement import extract_mathematics, find_only_number
from reasoner.answers.numbers import Number

_RESULT = re.compile(
    r"[\s*_>#-]{0,10}(?:(?:so|thus|therefore|hence|finally|and)\b[,\s]{0,3}){0,2}(?:(?:(?:the|our)\s)?(?:final\s|total\s|overall\s)?"
    r"(?:result|solution|total|output|value|sum|amount)[*_]{0,2}(?:\sis\b|\sequals\b|\s?[:=])|a\s?:|(?:=>?|⇒|∴|\\therefore\b|\\Rightarrow\b)"
    r"|(?<=[a-z,]\s)(?=[$\d]))",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"[\s*_>#-]{0,10}(?:so|thus|therefore|hence|consequently|finally|altogether|overall|in\s(?:total|all|conclusion))\b[,\s]{0,3}",
    re.IGNORECASE,
)
_GIVEN = re.compile(r"\b(?:the|these|those|this|its|her|his|their|our)\s[$*\\]{0,4}\d", re.IGNORECASE)
"""Pattern of a number mentioned before, as in "the 9 eggs"."""
_NEXT_SENTENCE = re.compile(r"[.!?]\s+(?=[A-Z*$\\])")
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")


def find_in_last_line(text: str) -> str | None:
    """Return the number that the last line of a solution states as its result.

    Otherwise the only number in bold type, not counting a label at the beginning of the line, or the only number of a
    concluding last sentence.
    """
    last = text.rstrip().rsplit("\n", 1)[-1][-2000:].partition("<|")[0].rstrip()
    result = _RESULT.match(last)
    if result is not None and (content := cut_sentence(last[result.end() :], whole=True)):
        answer = extract_mathematics(content)
        return answer if answer and isinstance(plain.parse_plain(answer), Number) else None
    bold = _BOLD.findall(last)
    if len(bold) == 1 and (not last.lstrip(" >-").startswith("**") or last.rstrip(" .").endswith("**")):
        content = bold[0].strip().rstrip(".")
        return content if isinstance(plain.parse_plain(content), Number) else None
    return _find_conclusion(_NEXT_SENTENCE.split(last)[-1])


def _find_conclusion(last: str) -> str | None:
    """Return the number of a concluding sentence: "So she earns $18 in total.", "Therefore, x = 18."."""
    concludes = _CONCLUDES.match(last)
    if concludes is None:
        return None
    conclusion = strip_markup(last[concludes.end() :])
    if _GIVEN.search(conclusion):
        return None
    return conclusion if isinstance(plain.parse_plain(conclusion), Number) else find_only_number(conclusion)
