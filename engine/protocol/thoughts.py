"""Thoughts in texts: the part between delimiters with which the solution of a thinking model begins.

One rule for all texts whose tokens are not known, of chat servers, of clients and of models without delimiters of their
own. A thought is found only where a text begins with its opening delimiter, or where the prompt has opened it, so that
the text has a closing delimiter alone. The first closing delimiter ends it; later ones are text of the answer, and so
are delimiters that an answer quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

Delimiters = tuple[str, str]
"""An opening and a closing delimiter."""

DELIMITERS: tuple[Delimiters, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Delimiters of public models: Qwen3, DeepSeek-R1 and GLM; Magistral; gpt-oss; Seed-OSS; Command A; Kimi; then those
that models are told or trained to write as plain text; Sky-T1; LongCat; Apertus."""

_HARMONY = DELIMITERS[2]
_HARMONY_PATTERNS = (
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
    r"(?:<\|end\|>\s*)?(?:<\|start\|>assistant\s*)?<\|channel\|>final[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>",
)
"""The message to the user may follow others, and a server may leave out delimiters of messages."""
_LEAD = re.compile(
    r"(?:\s|\ufeff|<s>|<\|begin_of_text\|>|<\|im_start\|>assistant|<\|assistant\|>"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>|<\uff5cAssistant\uff5c>)*",
    re.IGNORECASE,
)
"""Blanks, and the header of a message that a text may have kept."""
_QUOTES = {"`": "`", '"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "\u00ab": "\u00bb"}


@dataclass(frozen=True, slots=True)
class ThoughtSpan:
    """Place of a thought at the beginning of a text: its own words are ``text[start:stop]``, the answer follows at
    ``end``."""

    start: int
    stop: int
    end: int
    is_closed: bool


def find_thought(text: str, own: Delimiters | None = None, *, is_open: bool = False) -> ThoughtSpan | None:
    """Return the place of a text's thought; ``None`` if it has none.

    ``own``: delimiters of the model, besides those of public ones. ``is_open``: True if the text begins in a thought.
    """
    pairs = (*((own,) if own else ()), *DELIMITERS)
    lead = 0 if is_open else _match_end(_LEAD, text)
    for pair in () if is_open else pairs:
        opening, closing = _compile(pair)
        if begin := opening.match(text, lead):
            end = closing.search(text, begin.end())
            return _create_span(text, begin.end(), end)
    ends = sorted(_find_lone_ends(text, pairs, is_open=is_open), key=lambda end: end.start())
    if ends or is_open:
        return _create_span(text, 0, ends[0] if ends else None)
    return None


def split_thought(text: str, own: Delimiters | None = None) -> tuple[str, str]:
    """Return the words of a text's thought, without delimiters, and its answer; that of an open thought is empty."""
    span = find_thought(text, own)
    return ("", text) if span is None else (text[span.start : span.stop], text[span.end :])


def _find_lone_ends(text: str, pairs: Iterable[Delimiters], *, is_open: bool) -> Iterable[re.Match[str]]:
    """Yield for each pair the first closing delimiter that no opening one precedes and that is no quotation."""
    for pair in pairs:
        opening, closing = _compile(pair)
        begin = None if is_open else opening.search(text)
        for end in closing.finditer(text, 0, len(text) if begin is None else begin.start()):
            if is_open or not _is_quoted(text, end):
                yield end
                break


def _is_quoted(text: str, match: re.Match[str]) -> bool:
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    return match.start() > 0 and before in _QUOTES and after == _QUOTES[before]


def _create_span(text: str, start: int, end: re.Match[str] | None) -> ThoughtSpan:
    if end is None:
        return ThoughtSpan(start, len(text), len(text), is_closed=False)
    return ThoughtSpan(start, end.start(), end.end(), is_closed=True)


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return 0 if match is None else match.end()


@lru_cache(64)
def _compile(pair: Delimiters) -> tuple[re.Pattern[str], re.Pattern[str]]:
    patterns = _HARMONY_PATTERNS if pair == _HARMONY else tuple(map(re.escape, pair))
    opening, closing = (re.compile(pattern, re.IGNORECASE) for pattern in patterns)
    return opening, closing
