"""Extraction of the last answer that a solution states, and of the last number or letter if it states none.

A text may be partial: a step, or cut off by a budget. An answer without a closing delimiter (a brace, a fence, the end
of a line) is extracted only if the text was not cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from engine.protocol.thoughts import find_thought
from reasoner.answers import plain
from reasoner.answers.extraction.choices import find_choice
from reasoner.answers.extraction.flexible import find_last_choice, find_last_number
from reasoner.answers.extraction.last_line import find_in_last_line
from reasoner.answers.extraction.marked import find_box, find_boxed, iter_hashes, iter_json_answers, iter_tagged
from reasoner.answers.extraction.phrases import ANNOUNCES, ExtractionStopped, iter_phrases
from reasoner.answers.extraction.placeholders import is_placeholder
from reasoner.answers.extraction.statement import extract_mathematics, find_only_number
from reasoner.answers.normalize import WIDE, normalize, strip_text_command
from reasoner.answers.spec import AnswerSpec, CodeExtract, RegexExtract
from reasoner.tree import AnswerLevel

MAX_CHARS = 64_000
"""Maximum length of an answer in characters; longer text is not an answer."""

_FENCE = re.compile(r"([ \t]{0,40}(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,4}){0,4})(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*")
_ALIASES = {"py": "python", "python3": "python", "js": "javascript", "ts": "typescript", "c++": "cpp"}
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_NEXT_QUESTION = re.compile(
    r"^[ \t#*]{0,8}(?:Q|Question|Problem|Human|User|Instruction)[ \t]?\d{0,3}[*_]{0,2}:", re.MULTILINE
)
_HTML = re.compile(r"</?(?:b|strong|i|em|u|p|br|span|code|mark|center|h[1-6])\s?/?>", re.IGNORECASE)


class ExtractedAnswer(NamedTuple):
    """An answer with the level at which it was extracted, as in the GSM8K task of lm-evaluation-harness."""

    text: str
    level: AnswerLevel


def find_answer(
    text: str, spec: AnswerSpec | None = None, stopped: ExtractionStopped = "end", *, has_thought: bool = True
) -> ExtractedAnswer | None:
    """Return the answer that a solution states, or else, at the flexible level, the last number or choice letter.

    Only ``auto`` extraction of mathematics and choices from a finished solution has a flexible level.
    ``has_thought``: False if the text is known to be without a thought, whatever it quotes.
    """
    spec = spec or AnswerSpec()
    stated = (strip_thinking(text) or "") if has_thought else text
    strict = _extract(spec, stated, stopped)
    if strict and len(strict) <= MAX_CHARS:
        return ExtractedAnswer(strict, "strict")
    if stopped != "end" or spec.extract != "auto" or spec.compare not in ("math", "choice"):
        return None
    question = _NEXT_QUESTION.search(stated)
    before = "" if question is None else stated[: question.start()]
    solution = before if before.strip() else stated
    last = find_last_number(solution) if spec.compare == "math" else find_last_choice(solution)
    return None if last is None else ExtractedAnswer(last, "flexible")


def extract_answer(text: str, spec: AnswerSpec | None = None, stopped: ExtractionStopped = "end") -> str | None:
    """Return the answer that a complete or partial solution states; ``None`` if it states none."""
    spec = spec or AnswerSpec()
    stated = strip_thinking(text)
    answer = None if stated is None else _extract(spec, stated, stopped)
    return answer if answer and len(answer) <= MAX_CHARS else None


def strip_thinking(text: str) -> str | None:
    """Return the text after the thinking part, which is never searched; ``None`` while it is unfinished."""
    thought = find_thought(text)
    if thought is None:
        return text
    return text[thought.end :] if thought.is_closed else None


def _extract(spec: AnswerSpec, text: str, stopped: ExtractionStopped) -> str | None:
    match spec.compare if spec.extract == "auto" else spec.extract:
        case RegexExtract():
            raise ValueError(
                "a client's pattern may run forever: use AnswerFinder, which matches it in a worker process"
            )
        case CodeExtract(code=language):
            return _find_code_block(text, language)
        case "code":
            return _find_code_block(text, None)
        case "json" | "all":
            return text.strip() if stopped == "end" else None
        case "choice":
            return find_choice(text, stopped)
        case "boxed":
            return find_boxed(text)
        case "phrase":
            return next(_drop_placeholders(iter_phrases(text, stopped)), None)
        case "hash":
            return next(_drop_placeholders(iter_hashes(text, stopped)), None)
        case "text":
            stated = find_boxed(text) or next(_iterate_stated(text, stopped), None)
            return stated and strip_text_command(stated)
        case "math":
            return _find_mathematics(text, stopped)


def _iterate_stated(text: str, stopped: ExtractionStopped) -> Iterator[str]:
    """Yield the answers stated outside of boxes: in tags, after ####, as JSON, in phrases."""
    return _drop_placeholders(
        chain(
            iter_tagged(text, stopped), iter_hashes(text, stopped), iter_json_answers(text), iter_phrases(text, stopped)
        )
    )


def _drop_placeholders(stated: Iterator[str]) -> Iterator[str]:
    return (content for content in stated if not is_placeholder(content))


def _find_mathematics(text: str, stopped: ExtractionStopped) -> str | None:
    """Return the answer before the first further question that the model generates, or else that of the whole text."""
    text = text if text.isascii() else text.translate(WIDE)
    text = _HTML.sub("", text) if "</" in text or "<br" in text else text
    question = _NEXT_QUESTION.search(text)
    before = _stated_mathematics(text[: question.start()], "step") if question is not None else None
    return before or _stated_mathematics(text, stopped)


def _stated_mathematics(text: str, stopped: ExtractionStopped) -> str | None:
    """Return the last box if no final answer follows it, or else the mathematics in another statement.

    "The answer is not obvious" states none.
    """
    box = find_box(text)
    if box is not None:
        return _final_behind(text[box[1] :], stopped) or _without_announcement(box[0])
    answer = _first_mathematical(_iterate_stated(text, stopped))
    if answer is None and stopped == "end":
        said = map(find_only_number, chain(iter_tagged(text, stopped), iter_phrases(text, stopped)))
        return next(filter(None, said), None) or find_in_last_line(text)
    return answer


def _final_behind(rest: str, stopped: ExtractionStopped) -> str | None:
    """Return the answer that is marked or called final after the last box, which then was an intermediate result."""
    stated = chain(iter_tagged(rest, stopped), iter_hashes(rest, stopped), iter_json_answers(rest))
    final = rest.lower().find("final answer")
    said = iter_phrases(rest[final:], stopped) if final >= 0 else iter(())
    return _first_mathematical(_drop_placeholders(chain(stated, said)))


def _first_mathematical(stated: Iterator[str]) -> str | None:
    found = (_reduce_to_mathematics(content) for content in stated)
    return next((answer for answer in found if answer), None)


def _reduce_to_mathematics(content: str) -> str | None:
    """Return the mathematics in a marked or stated answer, which may itself contain a phrase."""
    answer = extract_mathematics(content)
    if answer is None and ANNOUNCES.search(content):
        return next((answer for said in iter_phrases(content, "end") if (answer := extract_mathematics(said))), None)
    return answer


def _without_announcement(content: str) -> str:
    r"""Return a box's content without a leading "The answer is"."""
    if not ANNOUNCES.search(content):
        return (
            (find_only_number(normalize(content)) or content)
            if isinstance(plain.parse_plain(content), plain.Words)
            else content
        )
    return next(iter_phrases(_TEXT_COMMAND.sub(r"\1", content), "end"), content)


def _find_code_block(text: str, language: str | None) -> str | None:
    """Return the last closed fenced block; with a ``language``, the last one that names it or no language."""
    wanted = None if language is None else _ALIASES.get(language.lower(), language.lower())
    last: str | None = None
    fence, label, indent = "", "", 0
    body: list[str] = []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence and match:
            fence, label, body = match.group(2), match.group(3).lower(), []
            indent = len(match.group(1).expandtabs(4))
            label = _ALIASES.get(label, label)
        elif fence and match and _closes_fence(match, fence, indent) and line.strip() == match.group(2):
            if wanted is None or label in ("", wanted):
                last = "\n".join(_dedent(part, indent) for part in body)
            fence = ""
        elif fence:
            body.append(line)
    return last if last and last.strip() else None


def _closes_fence(match: re.Match[str], fence: str, indent: int) -> bool:
    """Return True if a fence closes the one that was opened with an indent: it may have three columns more."""
    return match.group(2).startswith(fence) and len(match.group(1).expandtabs(4)) <= indent + 3


def _dedent(line: str, indent: int) -> str:
    """Return a line of a block without the indent of its fence, which a list item gives to all of its lines."""
    columns = 0
    for index, char in enumerate(line):
        if columns >= indent or char not in " \t":
            return line[index:]
        columns += 4 if char == "\t" else 1
    return ""
