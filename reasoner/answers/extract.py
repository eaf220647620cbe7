"""The answer that a solution states. Where there are several the last one counts.

A text may be half of one: a step, or what a budget left. An answer that the text does not close itself (by a brace, a
fence, the end of a line) is taken only where the text was not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from reasoner.answer_spec import AnswerSpec, CodeExtract, RegexExtract
from reasoner.patterns import last_match

MAX_CHARS = 64_000
"""Longest answer; what is longer is none."""

Ended = Literal["inside", "step", "end"]
"""Where a text ends: in the middle of something, where a step does, or where the solution does."""

_S = r"\s{0,20}"  # bounded: a model that has lost its thread may write thousands of spaces
_BOLD = r"(?:\*\*|__)?"
_PHRASE = re.compile(
    rf"(?:\b(?:the|my|our)\s{{1,20}}(?:(?:final|correct|right)\s{{1,20}})?answer{_S}(?:is\b|must be\b|=)"
    rf"|\bfinal\s{{1,20}}answer{_BOLD}{_S}(?:is\b|:|=)"
    rf"|^[ \t*_#]{{0,20}}answer{_BOLD}{_S}:"
    rf"|^[ \t*_#]{{0,20}}final answer[ \t*_]{{0,20}}$)"
    rf"{_S}:?{_BOLD}{_S}"
    rf"(?:(?:therefore|thus|then|hence|simply|just|exactly|equal to|approximately|about)\b{_S})?",
    re.IGNORECASE | re.MULTILINE,
)
_PHRASE_REACH = 2000
"""Characters behind a phrase that are looked at."""
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|,?\s{1,20}(?:because|since|which|as|so)\b|\n")
_FORMULA_SIGNS = (("\\[", "\\]"), ("$$", "$$"), ("\\(", "\\)"), ("$", "$"))
_HASH = re.compile(r"^[ \t]{0,20}####[ \t]*(.*)$", re.MULTILINE)

_MATHEMATICS = re.compile(r"[+\-\u2212±]?\s{0,20}(?:[\d\\(\[{π√∞$€£]|\.\d|[A-Za-z](?![A-Za-z]|\s+[A-Za-z]))")
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:and|or|to|sin|cos|tan|log|ln|exp|sqrt|pi|mod|max|min)\b)[A-Za-z]{2,}")
_NUMBER_AFTER_WORD = re.compile(r"(?<![\^_\d.])\d")
_UNIT_WORDS = 3

_LETTER = (
    rf"(?:\({_S}(?P<in_parens>[A-J]){_S}\)|(?P<bare>[A-J])(?=[).:,;*\]}}$]|{_S}$|\s{{1,20}}(?:because|since|as)\b))"
)
_CHOICE_PHRASE = re.compile(
    rf"\b(?:(?:answer|(?:correct|right|best)\s{{1,20}}(?:option|choice)){_BOLD}{_S}(?:is\b|must be\b|:|=)"
    rf"|(?:choose|select|pick)\b){_S}:?{_S}{_BOLD}\$?{_S}(?:(?:option|choice)\s{{1,20}})?(?:\\text(?:bf)?\{{)?{_S}{_LETTER}",
    re.IGNORECASE | re.MULTILINE,
)
_CHOICE_IS_RIGHT = re.compile(
    rf"\({_S}(?P<in_parens>[A-J]){_S}\){_BOLD}\s{{1,20}}is\s{{1,20}}(?:the\s{{1,20}})?(?:right|correct)\b(?P<bare>)"
)
_CHOICE_ALONE = re.compile(r"[\s*_$(\[]*([A-J])[\s*_$).\]]*")
_CHOICE_BOX = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\{)?[^\w\\]{0,20}([A-Ja-j])(?![A-Za-z])")

_BOX_OR_BRACE = re.compile(r"\\boxed ?\{|(?<!\\)\\[{}]|[{}]")  # a brace behind one backslash is a character
_FENCE = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*")
_ALIASES = {"py": "python", "python3": "python", "js": "javascript", "ts": "typescript", "c++": "cpp"}


def extract_answer(text: str, how: AnswerSpec | None = None, ended: Ended = "end") -> str | None:
    """The answer of a solution, or of what there is of it; ``None`` when it states none."""
    how = how or AnswerSpec()
    stated = without_thought(text)
    answer = None if stated is None else _extract(how, stated, ended)
    return answer if answer and len(answer) <= MAX_CHARS else None


def without_thought(text: str) -> str | None:
    """What a solution states: all that comes after its thoughts, ``None`` while it is still thinking. What a thought
    tries out is not stated."""
    thought = text.rfind("</think>")
    if thought >= 0:
        return text[thought + len("</think>") :]
    return None if "<think>" in text else text


def _extract(how: AnswerSpec, text: str, ended: Ended) -> str | None:
    match how.compare if how.extract == "auto" else how.extract:
        case RegexExtract(regex=pattern):
            return _by_pattern(pattern, text, ended)
        case CodeExtract(code=language):
            return _code(text, language)
        case "code":
            return _code(text, None)
        case "choice":
            return _choice(text, ended)
        case "boxed":
            return _boxed(text)
        case "phrase":
            return next(_phrases(text, ended), None)
        case "hash":
            return next(_hashes(text, ended), None)
        case "text":
            return _boxed(text) or next(_hashes(text, ended), None) or next(_phrases(text, ended), None)
        case "math":
            return _mathematics(text, ended)


def _mathematics(text: str, ended: Ended) -> str | None:
    """Boxed, hash, phrase; of the last two what looks like mathematics: "the answer is not obvious" states none."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    found = (answer for form in (_hashes, _phrases) for answer in form(text, ended))
    return next((answer for answer in found if looks_like_mathematics(answer)), None)


def looks_like_mathematics(answer: str) -> bool:
    """Begins like a number or formula, with at most a few words behind it: units, and no more numbers after them."""
    words = list(_WORD.finditer(answer))
    if not _MATHEMATICS.match(answer) or len(words) > _UNIT_WORDS:
        return False
    return not words or not _NUMBER_AFTER_WORD.search(answer, words[0].end())


def _boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{…}`` that is closed; ``None`` without one or when it is empty."""
    opened: list[int | None] = []  # for each open brace where the box begins that it opened, if it did
    begin, content = -1, ""
    for match in _BOX_OR_BRACE.finditer(text):
        if match.group() == "{":
            opened.append(None)
        elif match.group().startswith("\\boxed"):
            opened.append(match.end())
        elif match.group() == "}" and opened:
            box = opened.pop()
            if box is not None and box > begin:
                begin, content = box, text[box : match.start()]
    return content.strip() or None


def _hashes(text: str, ended: Ended) -> Iterator[str]:
    """GSM8K's form, last first."""
    for match in reversed(list(_HASH.finditer(text))):
        if (ended != "inside" or match.end() < len(text)) and (content := _bare(match.group(1))):
            yield content


def _phrases(text: str, ended: Ended) -> Iterator[str]:
    """What phrases such as "the answer is" say, last first."""
    for match in reversed(list(_PHRASE.finditer(text))):
        rest = text[match.end() : match.end() + _PHRASE_REACH]
        whole = ended != "inside" and match.end() + _PHRASE_REACH >= len(text)
        if content := _sentence(rest, whole):
            yield content


def _sentence(rest: str, whole: bool) -> str | None:
    """A formula up to its closing sign, or else the rest of the sentence. ``whole``: the text is not cut off."""
    for opening, closing in _FORMULA_SIGNS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) >= 0:
            return rest[len(opening) : end].strip()
    found = _SENTENCE_END.search(rest)
    if found is None:
        return _bare(rest) if whole else None
    if not whole and found.end() == len(rest) and found.group() != "\n":
        return None  # "3." may go on as "3.5"
    return _bare(rest[: found.start()])


def _bare(content: str) -> str:
    """Without markdown's signs, a formula's signs around all of it, and the full stop."""
    content = content.strip().strip("*_").strip().rstrip(".").strip()
    for opening, closing in _FORMULA_SIGNS:
        inner = content[len(opening) : -len(closing)]
        if content == f"{opening}{inner}{closing}" and inner and closing not in inner:
            return inner.strip()
    return content


def _choice(text: str, ended: Ended) -> str | None:
    """A letter: in a box, in a phrase, or alone on the last line of a solution."""
    boxed = _boxed(text)
    if boxed is not None and (match := _CHOICE_BOX.match(boxed)):
        return match.group(1).upper()
    for form in (_CHOICE_PHRASE, _CHOICE_IS_RIGHT):
        for match in reversed(list(form.finditer(text))):
            bare = match.group("bare")
            if not bare:
                return str(match.group("in_parens")).upper()
            if bare.isupper() and (ended != "inside" or match.end() < len(text)):  # else the first letter of a word
                return str(bare)
    lines = text.rstrip().rsplit("\n", 1)
    alone = _CHOICE_ALONE.fullmatch(lines[-1][:100]) if ended == "end" else None
    return None if alone is None else alone.group(1)


def _code(text: str, language: str | None) -> str | None:
    """The last closed fenced block; if a language is asked for, of those that name it or none."""
    wanted = None if language is None else _ALIASES.get(language.lower(), language.lower())
    last: str | None = None
    fence, label = "", ""
    body: list[str] = []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence and match:
            fence, label, body = match.group(1), match.group(2).lower(), []
            label = _ALIASES.get(label, label)
        elif fence and match and match.group(1).startswith(fence) and line.strip() == match.group(1):
            if wanted is None or label in ("", wanted):
                last = "\n".join(body)
            fence = ""
        elif fence:
            body.append(line)
    return last if last and last.strip() else None


def _by_pattern(pattern: str, text: str, ended: Ended) -> str | None:
    match = last_match(pattern, text)
    if match is None or match.group(1) is None or (ended == "inside" and match.end() == len(text)):
        return None
    return str(match.group(1)).strip()
