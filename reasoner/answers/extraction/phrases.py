r"""Answers that a solution states in words: "The answer is 18.", "**Answer**: 18", a heading and the answer below it.

A text is examined around the words that announce an answer, last first and at most ``MAX_TRIES`` of them, so that
extraction from a repetitive text takes linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Literal

from reasoner.answers import plain
from reasoner.answers.normalize import WIDE, is_formula

ExtractionStopped = Literal["inside", "step", "end"]
"""Position at which a text ends: inside a step, at the end of a step, or at the end of the solution."""

MAX_TRIES = 32
"""Maximum number of announcements that are examined in one text."""
MAX_DISTANCE = 2000
"""Maximum number of characters that are examined after an announcement."""
_REACH_BEFORE = 60

ANNOUNCES = re.compile(r"answer|ans(?![a-z])|答案", re.IGNORECASE)
_S = r"\s{0,20}"  # bounded, since a degenerate text may contain thousands of spaces
_MARKS = r"[*_`]{0,4}"
_IS = (
    r"(?:is\b(?!\s{1,3}not\b)|(?:should|would|will|must|can\sonly|has\sto)\s(?:be|equal)\b|equals\b"
    r"|comes\sout\s(?:to\sbe|to|as)\b|turns\sout\sto\sbe\b|becomes\b|was\b"
    r"|(?:comes|works\sout|amounts)\sto\b)"
)
_SIGN = r"(?::=|=>|[:=|\uff1a]|->|\u2192|[-\u2013\u2014](?=\s))"
_STATES = re.compile(
    rf"""(?:answers?|ans\.?|答案){_MARKS}(?:
        {_S}{_MARKS}(?:{_IS}|{_SIGN}|是|为|為)
        |\sof\s(?=[\d$€£\\])
        |(?<=ans\.)\s(?=[-\d$€£\\])
        |,?\s(?:to|for|of|in|we|that|you|I|she|he|it|here|therefore|then|thus|obtained|given)\b
            [^.:=\n\uff1a]{{0,80}}?(?:\b{_IS}|{_SIGN})
        |\s?\([^()\n]{{0,40}}\){_S}(?:{_IS}|{_SIGN})
    )(?:{_S}:)?""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADS = re.compile(
    rf"(?:answers?|ans\.?|答案){_MARKS}[ \t#:\uff1a*_`]{{0,10}}(?:\n[=-]{{3,80}}[ \t]{{0,10}})?\n", re.IGNORECASE
)
_LINE_START = re.compile(
    r"[\s>*_#`\[(\u3010\d.)•-]{0,20}"
    r"(?:(?:so|thus|hence|therefore|and|the|my|our|final|correct|short|numerical|最终)[\s*_,]{0,3}){0,4}",
    re.IGNORECASE,
)
_SOMEBODY_ELSES = re.compile(
    r"(?:\b(?:wrong|incorrect|previous|initial|first|another|no|any|every|each|possible|his|her|their|multiple)"
    r"|['\u2019]s)[ \t]{1,3}$",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    r"(?:(?:\$(?P<dollars>[^$\n]{1,50})\$|\\\((?P<parens>[^\n]{1,50}?)\\\))[*_]{0,2}"
    r"|(?<!\S)(?<![-+*/^<>\u2212×÷]\s)(?<![<>!]=\s)[*_]{0,2}(?P<number>(?:[$€£(-]|\\[$(])?\$?\d[^\s*_]{0,40})[*_]{0,2})"
    r"\s(?:is|as)\s(?:the|our|my|your)\s(?:(?:final|correct)\s)?$",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"""(?:\s|[:\uff1a>"\u201c\u300c\u3010]|\\"|\*\*|__|```[a-z]{0,10}\n|`(?!``)|\\boxed(?=\s*\d)
        |(?:therefore|thus|then|hence|simply|just|exactly|indeed|clearly|equal\ to|equals|approximately|about|roughly
            |around|a\ total\ of|in\ fact|be|as\ follows|the\ number)\b,?)*+""",
    re.IGNORECASE | re.VERBOSE,
)
_BULLET = re.compile(r"[^\S\n]*+\n\s*+[-*•]\s+")
_INTERVAL = re.compile(r"[\[\](][^\[\]()]*[,;][^\[\]()]*[\[\])]")
"""Pattern of an interval, whose brackets need not match: [2,5) and ]2,5["""
_END = re.compile(
    r"(?<!\bRs)[.!?]+(?=\s|$)|[。\uff01\uff1b]|,?\s{1,20}(?:because|since|which|where|so|as (?!follows))\b"
    r"|\n|</|<\||(?<=\S)\*\*(?![\d(])|__|`|\s\u2014\s|,(?=\s?[\u4e00-\u9fff])|\s\|",
    re.IGNORECASE,
)
_FORMULA_SIGNS = (("\\[", "\\]"), ("$$", "$$"), ("\\(", "\\)"), ("$", "$"))
_DECORATION = re.compile(r"(?:\s*(?::-?\)|[\u2600-\u27bf\U0001f300-\U0001faff\ufe0f]))+$")
_AND = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*(?=\$|\\[(\[])", re.IGNORECASE)
_PERCENT = re.compile(r"\s?(?:\\?%|percent\b)", re.IGNORECASE)


def iter_last_matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return a pattern's last matches, last first and at most ``MAX_TRIES``."""
    return list(deque(pattern.finditer(text), MAX_TRIES))[::-1]


def iter_announcements(text: str) -> list[int]:
    """Return the indices of the last words that may announce an answer, last first."""
    lower = text.lower()
    if len(lower) != len(text):  # lower() changes the length of some scripts' letters
        lower = text
    found: list[int] = []
    latin, chinese = lower.rfind("ans"), lower.rfind("答案")
    while len(found) < MAX_TRIES and (at := max(latin, chinese)) >= 0:
        if at == chinese:
            found.append(at)
            chinese = lower.rfind("答案", 0, at)
        else:
            if not "a" <= lower[at + 3 : at + 4] <= "z" or lower.startswith("answer", at):
                found.append(at)
            latin = lower.rfind("ans", 0, at)
    return found


def _named_before(text: str, word: int) -> str | None:
    """Return the number or formula before the announcement, as in "18 is the answer"."""
    found = _BEFORE.search(text, max(0, word - _REACH_BEFORE), word)
    if found is None:
        return None
    dollars = found.group("dollars")
    if dollars is None:
        return found.group("parens") or found.group("number")
    return dollars if is_formula(dollars, " ") else None


def iter_phrases(text: str, stopped: ExtractionStopped) -> Iterator[str]:
    """Yield the answers stated by phrases such as "the answer is" and by headings, last first."""
    seen = len(text) + 1
    for word in iter_announcements(text):
        begin = _stated_from(text, word)
        if begin is None:
            if named := _named_before(text, word):
                yield named
            continue
        if begin >= seen:
            continue
        seen = begin
        rest = text[begin : begin + MAX_DISTANCE]
        whole = stopped != "inside" and begin + MAX_DISTANCE >= len(text)
        if content := cut_sentence(rest, whole):
            yield content


def _stated_from(text: str, word: int) -> int | None:
    """Return the index at which the announced answer begins; ``None`` if none is announced."""
    before = text[max(0, word - _REACH_BEFORE) : word]
    if before[-1:].isalpha() and before[-1:].isascii():
        return None
    line = before.rpartition("\n")[2]
    heads = _HEADS.match(text, word)
    if heads is not None and _LINE_START.fullmatch(line):
        return heads.end() - 1
    states = _STATES.match(text, word)
    if states is None or _SOMEBODY_ELSES.search(before):
        return None
    return states.end()


def cut_sentence(rest: str, whole: bool) -> str | None:
    """Return a formula up to its closing delimiter, or the rest of the sentence. ``whole``: the text is complete."""
    bullet = _BULLET.match(rest)
    lead = _LEAD.match(rest, bullet.end() if bullet else 0)
    rest = rest[lead.end() if lead else 0 :].translate(WIDE)
    formula = _read_formulas(rest)
    if formula is not None:
        return formula
    found = _END.search(rest)
    if found is None:
        return strip_markup(rest) if whole else None
    if not whole and found.end() == len(rest) and found.group() != "\n":
        return None  # "3." may be the beginning of "3.5"
    content = strip_markup(rest[: found.start()])
    return (
        content + "%"
        if content and found.group() in ("**", "__", "`") and _PERCENT.match(rest, found.end())
        else content
    )


def _read_formulas(rest: str) -> str | None:
    """Return the formula that a text begins with and those listed after it; ``None`` if it begins with none."""
    found: list[str] = []
    at = 0
    while at < len(rest) and len(found) < plain.MAX_ITEMS:
        end = None
        for opening, closing in _FORMULA_SIGNS:
            if rest.startswith(opening, at):
                end = rest.find(closing, at + len(opening))
                while opening == "$" and end > 0 and rest[end - 1] == "\\":
                    end = rest.find(closing, end + 1)
                inner = rest[at + len(opening) : end]
                if end < 0 or (opening == "$" and not is_formula(inner, rest[end + 1 : end + 2])):
                    end = None
                    continue
                found.append(inner.strip())
                at = end + len(closing)
                break
        following = _AND.match(rest, at) if end is not None else None
        if following is None:
            break
        at = following.end()
    if not found:
        return None
    return ", ".join(found) + ("\\%" if _PERCENT.match(rest, at) and "%" not in found[-1] else "")


def strip_markup(content: str) -> str:
    """Remove Markdown emphasis, formula delimiters around the whole text, and the full stop."""
    content = _DECORATION.sub("", content.strip()).strip("*_`").strip().rstrip(".。").strip()
    if content[-1:] in ('"', "\u201d", "】", "\u300d"):
        content = content[:-1].strip()
    for opening, closing in _FORMULA_SIGNS:
        inner = content[len(opening) : -len(closing)]
        if content == f"{opening}{inner}{closing}" and inner and closing not in inner:
            return inner.strip()
    for opening, closing in () if _INTERVAL.fullmatch(content) else ("()", "[]", "{}"):
        if content.endswith(closing) and content.count(opening) < content.count(closing) and "(" not in content:
            content = content[:-1].strip()  # (Answer: 18)
    return content
