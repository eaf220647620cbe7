"""The verdict in what a judge writes: one of a few words, in any case and markup, after a thought, with its reasons.

A text that names no verdict, several, or the question itself has none: nothing is guessed.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.thoughts import split_thought

_MARKUP = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|operatorname|emph)\b|</?[A-Za-z][^<>\n]{0,80}>|```\w*|[*_`~#{}$|]+"
)
"""Commands of LaTeX, tags, fences, and the marks of Markdown."""
_ANNOUNCES = (
    r"(?:verdict|answer|grade|score|judge?ment|conclusion|decision|result|rating|assessment|evaluation|correct|response"
    r"|antwort|urteil|r[eé]ponse|respuesta|veredicto|\u7b54\u6848|\u7ed3\u8bba|\u5224\u65ad|\u043e\u0442\u0432\u0435\u0442)"
)
_IS = (
    r"(?:\s*\([^()]{0,60}\))?\??\s*(?:is|was|would be|ist|[:=\uff1a\u2192-]|->)+\s*"
    r"(?:that |a |clearly |definitely |a clear )*"
)
_REASONS = (
    r"because|since|as|for|so|but|the|this|that|it|its|all|every|each|both|there|i|we|you|they|he|she|in|given|step"
)
"""Words that go on after a verdict without a mark between them."""
_NEGATES = re.compile(r"\b(?:not|cannot|can't|could|unable|never|neither|if|whether|either)\b|n't\b")
_KEYS = (
    "verdict",
    "grade",
    "score",
    "answer",
    "judgement",
    "judgment",
    "decision",
    "result",
    "correct",
    "is_correct",
    "conclusion",
)
_TRUE, _FALSE = "yes", "no"
"""The verdicts of a JSON boolean."""


@dataclass(frozen=True, slots=True)
class FoundVerdict:
    """The index of a verdict among those that were asked for. ``is_first``: True if the text begins with it."""

    index: int
    is_first: bool


def find_verdict(text: str, labels: Sequence[str]) -> FoundVerdict | None:
    """Return the verdict of a text; ``None`` if it gives none, or is no clear one."""
    names = [label.strip().casefold() for label in labels]
    text = unicodedata.normalize("NFKC", split_thought(text)[1]).strip()
    if not text:
        return None
    value = _parse_json(text)
    if value is not None:
        index = _read_value(value, names)
        return None if index is None else FoundVerdict(index, is_first=False)
    return _find_in_words(" ".join(_MARKUP.sub(" ", text).split(" ")).casefold().strip(), names)


def _find_in_words(words: str, names: Sequence[str]) -> FoundVerdict | None:
    label = "|".join(map(re.escape, names))
    if re.search(rf"\b({label})\b\s*(?:/|,?\s*(?:or|and|nor)\b)\s*(?:a |an )?({label})\b", words):
        return None  # it repeats the question, or says both
    announced = re.findall(rf"{_ANNOUNCES}{_IS}[\W_]*({label})\b(?![ \t]+(?!{_REASONS}\b)\w)", words)
    if announced:
        return FoundVerdict(names.index(announced[-1]), is_first=False) if len(set(announced)) == 1 else None
    first = re.match(rf"[\W_]*({label})\b(?=\s*(?:[^\w\s'\u2019]|\n|$)|\s+(?:{_REASONS})\b)", words)
    alone = re.findall(
        rf"(?:^|[.!?:;\n]|\b(?:so|thus|hence|therefore|say|be|is an?),?\s)[^\w\n]*({label})[^\w\n]*(?=$|\n)", words
    )
    found = {*alone, *([first.group(1)] if first else [])}
    if len(found) == 1 and (first or not _NEGATES.search(words.splitlines()[-1])):
        return FoundVerdict(names.index(found.pop()), is_first=first is not None)
    return None


def _parse_json(text: str) -> Any:
    """Return the value of a text that is JSON, with or without a fence around it; ``None`` for another text."""
    fenced = re.fullmatch(r"```\w*\s*(.*?)\s*```", text, re.DOTALL)
    try:
        return json.loads(fenced.group(1) if fenced else text)
    except ValueError:
        return None


def _read_value(value: Any, names: Sequence[str]) -> int | None:
    match value:
        case bool():
            word = _TRUE if value else _FALSE
            return names.index(word) if word in names else None
        case str():
            found = find_verdict(value, names)
            return None if found is None else found.index
        case [only]:
            return _read_value(only, names)
        case dict():
            fields = {str(key).casefold(): each for key, each in value.items()}
            given = [fields[key] for key in _KEYS if key in fields] or [
                each for each in fields.values() if each is not None
            ]
            found_in = {index for each in given if (index := _read_value(each, names)) is not None}
            return found_in.pop() if len(found_in) == 1 else None
    return None
