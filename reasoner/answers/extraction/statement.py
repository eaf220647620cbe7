"""Mathematics within a stated answer: "18 dollars a day, 2 more than before", "Janet makes 9 * $2 = $18"."""

from __future__ import annotations

import re

from reasoner.answers import plain
from reasoner.answers.normalize import MAX_CHARS
from reasoner.answers.notation.codes import read_written_date
from reasoner.answers.notation.number_words import find_number
from reasoner.answers.numbers import Number, take_result

_MATHEMATICS = re.compile(
    r"[~\u2248]?\s{0,20}[+\-\u2212\u2013±]?\s{0,20}"
    r"(?:[\d\\(\[{π√∞$€£¥₹½⅓⅔¼¾]|\](?=\s?[-\d\\(])|\.\d|(?:USD|EUR|Rs\.?)\s?\d|[A-Za-z](?![A-Za-z]|\s+[A-Za-z]))"
)
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:and|or|to|sin|cos|tan|log|ln|exp|sqrt|pi|mod|max|min)\b)[A-Za-z]{2,}")
_NUMBER_AFTER_WORD = re.compile(r"(?<![\^_\d.])\d")
_UNIT_WORDS = 3
_ONE_NUMBER = re.compile(r"[-\u2212]?\\?[$€£¥]?(?<![\w.^{])\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?(?![\d(^])")
_NO_ANSWER = re.compile(
    r"\b(?:not|no|more|less|fewer|least|most|than|step|part|question|problem|equation|case|method|option|choice|see|"
    r"above|below|figure|first|we|let|need|subtract|add|multiply|divide|if|or|and|between|cannot|can't|times|half|"
    r"twice)\b|[=<>+*^]",
    re.IGNORECASE,
)
_OPERATION = re.compile(r"(?:[-+*/x×÷]|\\times|\\cdot)\s?[$€£¥(\\]{0,2}\d")
_VARIABLE = re.compile(
    r"(?<![A-Za-z])[A-Za-z]\s?[-+*/^=]|[-+*/^]\s?[A-Za-z](?![A-Za-z])|\d[A-Za-z](?![A-Za-z])|(?<![A-Za-z])[A-Za-z]$"
)
_COMPARES = re.compile(r"(?:more|less|fewer|greater|smaller|larger|than)\b", re.IGNORECASE)
_LABEL = re.compile(r"\(?[A-J]\)\s{1,3}")
_ASIDE = re.compile(
    r"\s+[(\[](?=[^()\[\]]{0,200}(?<![\\A-Za-z])[A-Za-z]{2,})|,\s|[;:]\s|\s(?:and|but)\s(?=[A-Za-z]{2})|\s[-–—]\s(?=[A-Za-z]{2})"
)


_ASSIGNMENT = re.compile(r"\$?\s*([A-Za-z](?:_\{?\w{1,9}\}?)?|\\[A-Za-z]{2,10})\s*=[^=]+")
_VERDICT = re.compile(
    r"(?:that\s+)?(?:there\s+(?:is|are|exists?)\s+)?(yes|no|true|false|undefined|indeterminate|impossible|none(?:\sof\sthe\sabove)?"
    r"|no\s(?:real\s|such\s|integer\s)?solutions?|(?:does|do)\snot\sexist|doesn't\sexist|DNE|(?:negative\s|minus\s)?infinity"
    r"|infinitely\smany(?:\ssolutions)?)(?=\s*(?:[,;:(.]|\bfor\s|\bbecause\b|\bsince\b|\bas\b|$))",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"(?:(?:no|not)\s(?:more|less|fewer|greater|smaller|larger)\sthan|at\s(?:the\s)?(?:least|most|minimum|maximum)"
    r"|(?:strictly\s)?(?:more|less|fewer|greater|smaller|larger)\sthan(?:\sor\sequal\sto)?"
    r"|up\sto|a\s(?:minimum|maximum)\sof|over|under|above|below|not)\s(?=[-+\d$\\(.\u20ac\u00a3])",
    re.IGNORECASE,
)
_BOUND_BEHIND = re.compile(
    r"(.{1,40}?)\s(?:or|and)\s(?:more|less|fewer|greater|above|below|higher|lower)\b", re.IGNORECASE
)
_RANGE = re.compile(r"(?:between|from)\s(.{1,40}?)\s(?:and|to)\s(.{1,40})", re.IGNORECASE)
_RELATIVE = re.compile(r"\b(?:of|more|less|fewer|than|other|another|which|that)\b", re.IGNORECASE)


def _find_words(content: str) -> str | None:
    """Return a number in words, "yes", "no solution" and the like with which a stated answer begins."""
    verdict = _VERDICT.match(content)
    if verdict is not None:
        return verdict.group(1)
    if read_written_date(content) is not None:
        return content
    if (bound := _find_bound(content)) is not None:
        return bound
    number = find_number(content)
    if number is None:
        return None
    words = content[: number[1]]
    rest = _ASIDE.split(content[number[1] :], maxsplit=1)[0].rstrip()
    digits = f"{number[0]}{rest}"
    if _RELATIVE.search(rest) or len(_WORD.findall(rest)) > _UNIT_WORDS:
        return None
    if not number[0].strip("-"):  # negative 5
        return extract_mathematics(digits)
    return f"{words}{rest}" if isinstance(plain.parse_plain(digits), Number) else None


def _find_bound(content: str) -> str | None:
    """Return a bound that an answer states, such as "at least 5" and "5 or more", which is not its number."""
    before = _BOUND.match(content)
    if before is not None:
        value = extract_mathematics(content[before.end() :])
        return None if value is None else f"{before.group()}{value}"
    behind = _BOUND_BEHIND.match(content)
    if behind is not None and isinstance(plain.parse_plain(behind.group(1)), Number):
        return behind.group()
    between = _RANGE.fullmatch(content.partition(", ")[0])
    if between is not None and all(isinstance(plain.parse_plain(end), Number) for end in between.groups()):
        return between.group()
    return None


def extract_mathematics(content: str) -> str | None:
    """Return the mathematical part of a stated answer; ``None`` for "5 more than 3" and "not obvious".

    "18 dollars a day, 2 more than before" gives 18 dollars a day.
    """
    if len(content) <= MAX_CHARS and (words := _find_words(content)):
        return words
    if not _MATHEMATICS.match(content) or len(content) > MAX_CHARS:
        return content if _MATHEMATICS.match(content) and not _WORD.search(content) else None
    label = _LABEL.match(content)
    if label is not None and isinstance(plain.parse_plain(content[label.end() :]), Number):
        return content[label.end() :]
    *_, last = steps = content.split(", ")
    names = [match.group(1) for match in map(_ASSIGNMENT.fullmatch, steps) if match]
    if len(names) == len(steps) > 1 and len(set(names)) == len(names):
        return content  # x = 1, y = 2
    if len(steps) > 1 and all(take_result(step) != step for step in steps):
        return last  # 16 - 7 = 9, 9 * 2 = 18
    if not _WORD.search(content):
        return _ASIDE.split(content, maxsplit=1)[0] if ": " in content else content
    read = plain.parse_plain(content)
    if isinstance(read, Number):
        return content
    if isinstance(read, plain.Items) and len(_WORD.findall(content)) <= len(read.items):
        return content
    if result := _read_result(content):
        return result
    head = _ASIDE.split(content, maxsplit=1)[0].strip()
    if head != content and (isinstance(plain.parse_plain(head), Number) or not _WORD.search(head)):
        return head
    number, unit, following = [*content.split(" ", 2), "", ""][:3]
    if _COMPARES.match(unit) or _COMPARES.match(following):
        return None
    if looks_like_mathematics(content):
        return content
    measured = plain.parse_plain(f"{number} {unit}")
    if following[:1].isdigit() or not isinstance(measured, Number) or not measured.unit.above:
        return None
    return f"{number} {unit}"


def _read_result(content: str) -> str | None:
    """Return the result of a calculation such as "9 eggs * $2 = $18 per day"; ``None`` if it has variables."""
    calculation, _, result = (side.strip() for side in content.rpartition("="))
    if not _OPERATION.search(calculation) or _VARIABLE.search(calculation):
        return None
    return result if isinstance(plain.parse_plain(result), Number) else None


def find_only_number(content: str) -> str | None:
    """Return the only number in a sentence ("Janet makes $18 every day"), with its unit, or the result of its
    calculation."""
    content = content.replace("**", "")
    if result := _read_result(content):
        return result
    numbers = list(_ONE_NUMBER.finditer(content[:MAX_CHARS]))
    if len(numbers) != 1 or _NO_ANSWER.search(content):
        return None
    tail = _ASIDE.split(content[numbers[0].start() :].strip(" *_$\\()[]"), maxsplit=1)[0]
    for candidate in (tail, numbers[0].group()):
        if isinstance(plain.parse_plain(candidate), Number):
            return candidate
    return None


def looks_like_mathematics(answer: str) -> bool:
    """Return True if a text begins like a number or formula, with at most a few words after it: units, and no further
    numbers."""
    words = list(_WORD.finditer(answer))
    if not _MATHEMATICS.match(answer) or len(words) > _UNIT_WORDS:
        return False
    return not words or not _NUMBER_AFTER_WORD.search(answer, words[0].end())
