r"""Answers that a solution marks: ``\boxed{18}``, ``<answer>18</answer>``, ``{"answer": 18}``, ``#### 18``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from reasoner.answers.extraction.phrases import ExtractionStopped, iter_announcements, iter_last_matches, strip_markup
from reasoner.answers.extraction.placeholders import is_placeholder

_BOX_OR_BRACE = re.compile(r"\\(?:f?boxed|fbox|framebox)\s?\{|(?<!\\)\\[{}]|[{}]")  # an escaped brace is a literal
_BOX = re.compile(r"\\(?:f?boxed|fbox|framebox)(?![A-Za-z])")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(-?\\?\$?\d(?:[\d,.]{0,30}\d)?%?|[A-Z](?![A-Za-z]))")
_MAX_BOXES = 64
"""Maximum number of boxes that are examined, from the end of the text."""
_LISTED = re.compile(
    r"(?:\s|\$|\\[()\[\],;]|\\q?quad|\\text\{\s?(?:,?\s?(?:and|or))\s?\}|,|;|and\b|or\b){1,40}+", re.IGNORECASE
)
_TAG = re.compile(r"<(?:final[_ ]?)?answer>|\[answer\]", re.IGNORECASE)
_TAG_END = re.compile(r"</|<\||\[/")
_HASH = re.compile(r"^[ \t]{0,20}####[ \t]*(.*)$", re.MULTILINE)
_HASH_END = re.compile(r"\s#{1,6}\s*$")
_JSON = re.compile(
    r"""answers?\\?["']\s{0,20}[:\uff1a]\s{0,20}(?:
        (?P<string>"(?:[^"\\\n]|\\.){0,2000}+")|'(?P<single>[^'\n]{0,2000}+)'|(?P<plain>-?\d[\d.,eE+]{0,40}|\[[^\[\]\n]{0,500}+\]))""",
    re.IGNORECASE | re.VERBOSE,
)


def find_boxed(text: str) -> str | None:
    """Return only the content that ``find_box`` finds."""
    box = find_box(text)
    return None if box is None else box[0]


def find_box(text: str) -> tuple[str, int] | None:
    r"""Return the content of the last closed ``\boxed{…}`` and of boxes listed with it, and the index at which it ends.

    ``None`` if there is no box with an answer.
    """
    boxes = [match.start() for match in _BOX.finditer(text)]
    if not boxes:
        return None
    found: list[tuple[int, int, str]] = []  # (start, end, content) of the last outermost boxes
    opened: list[tuple[int, int] | None] = []  # for each open brace, the box that it opened, if any
    for match in _BOX_OR_BRACE.finditer(text, boxes[-_MAX_BOXES:][0]):
        if match.group() == "{":
            opened.append(None)
        elif match.group().startswith("\\") and len(match.group()) > 2:
            opened.append((match.start(), match.end()))
        elif match.group() == "}" and opened:
            box = opened.pop()
            content = text[box[1] : match.start()].strip() if box is not None else ""
            if box is not None and not is_placeholder(content) and not _BOX.search(content):  # the innermost counts
                found.append((box[0], match.end(), content))
    without_braces = [(m.start(), m.end(), m.group(1)) for m in _BARE_BOX.finditer(text, boxes[-1])]
    found += [box for box in without_braces if not found or box[0] > found[-1][0]]
    if not found:
        return None
    begin, end, content = found[-1]
    contents = [content]
    for earlier in reversed(found[:-1]):
        between = text[earlier[1] : begin]
        if len(between) > 80 or not _LISTED.fullmatch(between) or not re.search(r",|;|and|or", between):
            break
        contents.insert(0, earlier[2])
        begin = earlier[0]
    return ", ".join(dict.fromkeys(contents)), end


def iter_hashes(text: str, stopped: ExtractionStopped) -> Iterator[str]:
    """Yield the texts after ``####`` (GSM8K's format), last first."""
    if "####" not in text:
        return
    for match in iter_last_matches(_HASH, text):
        if (stopped != "inside" or match.end() < len(text)) and (
            content := strip_markup(_HASH_END.sub("", match.group(1)))
        ):
            yield content


def iter_tagged(text: str, stopped: ExtractionStopped) -> Iterator[str]:
    """Yield the contents of answer tags, last first. An unclosed tag ends with the solution."""
    if "<" not in text and "[" not in text:
        return
    for match in iter_last_matches(_TAG, text):
        close = _TAG_END.search(text, match.end(), match.end() + 70_000)
        if close is None and stopped != "end":
            continue
        content = text[match.end() : close.start() if close else None].strip()
        if content:
            yield find_boxed(content) or strip_markup(content)


def iter_json_answers(text: str) -> Iterator[str]:
    """Yield the values of JSON fields named "answer", last first."""
    for word in iter_announcements(text):
        match = _JSON.match(text, word)
        if match is None:
            continue
        string, single, number = match.group("string", "single", "plain")
        value = _decode_json_string(string) if string is not None else single or number or ""
        if value.strip():
            yield value.strip().rstrip(",").strip()


def _decode_json_string(string: str) -> str:
    r"""Decode a JSON string; return it unchanged if it is invalid, such as LaTeX with single backslashes."""
    if re.search(r'(?<!\\)\\[^"\\/nu]', string):
        return string[1:-1].replace("\\\\", "\\")
    try:
        return str(json.loads(string))
    except ValueError:
        return string[1:-1]
