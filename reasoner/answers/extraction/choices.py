"""Extraction of a multiple-choice letter: from a box, a tag, JSON, a phrase, or the last line."""

from __future__ import annotations

import re

from reasoner.answers.extraction.marked import find_boxed, iter_json_answers, iter_tagged
from reasoner.answers.extraction.phrases import ExtractionStopped, iter_last_matches
from reasoner.answers.normalize import WIDE

_S = r"\s{0,20}"
_MARKS = r"[*_]{0,3}"
_OPENING = (
    r"(?P<opening>(?:[\s*_`\"'\u201c]|\\[(\[]|\$|\\(?:text|mathrm|textbf|mathbf|boxed)\s?\{|[(\[{\u3010])"
    r"{0,8})"
)
_LETTER = (
    rf"(?:(?:option|choice|answer)\s{{1,20}})?{_OPENING}(?P<letter>[A-J])"
    rf"(?:(?P<closed>{_S}(?:[)\]}}\u3011*_`\"'\u201d$]|\\[)\]]))|(?=[.:,;]|{_S}$|\s{{1,20}}(?:because|since|as|is)\b))"
)
_PHRASE = re.compile(
    rf"(?:(?:answer|(?:correct|right|best)\s{{1,20}}(?:option|choice|one)){_MARKS}{_S}"
    rf"(?:(?:is|must be|should be|would be)\b|[:=\u2192-]|->)|\b(?:choose|select|pick)\b|答案(?:是|为|:)?)"
    rf"{_S}:?{_MARKS}{_S}{_LETTER}",
    re.IGNORECASE | re.MULTILINE,
)
_IS_RIGHT = re.compile(
    rf"(?:\(\s?(?P<in_parens>[A-J])\s?\)|(?:[Oo]ption|[Cc]hoice){_S}{_MARKS}\(?(?P<option>[A-J])\)?"
    rf"|^{_MARKS}(?P<bare>[B-HJ])){_MARKS}"
    rf"\s{{1,20}}is\s{{1,20}}(?:the\s{{1,20}})?(?:right|correct|best)\b",
    re.MULTILINE,
)
_CUES = re.compile(r"answer|correct|right|best|choose|select|pick|答案", re.IGNORECASE)
_ALONE = re.compile(r"[\s*_$(\[\\{]*([A-J])[\s*_$).\]\\}]*")
_BEGINS = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\{)?[^\w\\]{0,20}([A-Ja-j])(?![A-Za-z])")
_REACH = 120


def find_choice(text: str, stopped: ExtractionStopped) -> str | None:
    """Return the stated letter, A to J, in upper case; ``None`` if the text states none."""
    text = text.translate(WIDE) if not text.isascii() else text
    for marked in (find_boxed(text), *iter_tagged(text, stopped), *iter_json_answers(text)):
        if marked is not None and (match := _BEGINS.match(marked)):
            return match.group(1).upper()
    for cue in iter_last_matches(_CUES, text):
        letter = _find_stated_letter(text, cue.start(), stopped)
        if letter is not None:
            return letter
    lines = text.rstrip().rsplit("\n", 1)
    alone = _ALONE.fullmatch(lines[-1][:100]) if stopped == "end" else None
    return None if alone is None else alone.group(1)


def _find_stated_letter(text: str, at: int, stopped: ExtractionStopped) -> str | None:
    begin = max(0, at - _REACH)
    for right in _IS_RIGHT.finditer(text, begin, at + 10):
        if right.end() > at:
            return next(letter for letter in right.groups() if letter)
    stated = _PHRASE.match(text, at)
    if stated is None:
        return None
    letter, closed = stated.group("letter"), bool(stated.group("closed"))
    if closed and re.search(r"[(\[{\u3010*`\"']", stated.group("opening")):
        return letter.upper()
    if letter.isupper() and (stopped != "inside" or stated.end() < len(text)):  # or it may begin a word
        return letter
    return None
