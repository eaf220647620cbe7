"""Languages without any text, which no branch could ever complete: they are refused before a token is sampled.

Whether a language has a text is looked for by its bytes, in a bounded number of steps, and derived from the rules of a
grammar or the references of a schema (``engine.protocol.finite_languages``).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.protocol.constraint import Constraint
from engine.protocol.finite_languages import can_schema_end, find_endless_start
from engine.protocol.grammar_text import refuse_panics, write_grammar
from engine.protocol.types import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_STEPS = 256
"""Maximum number of beginnings of texts that are tried; each takes some microseconds."""
_MAX_EXPRESSIONS = 64
"""Maximum number of a grammar's expressions that are compiled alone; each takes some milliseconds."""
_END = 256
NO_TEXT = "no text fulfils it: write a language with at least one text"


class _Bytes:
    """A tokenizer with a token for each byte, for checks that need no model."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def find_emptiness(constraint: Constraint) -> str | None:
    """Return the reason why no text fulfils a constraint that can be compiled; ``None`` if none is known.

    Special tokens are unknown here: a grammar that names some is not looked into.
    """
    try:
        matcher = _create_matcher(constraint)
    except InvalidRequest:
        return None
    if matcher.is_error():
        return None
    has_text = _find_text(matcher)
    return None if has_text else _find_endlessness(constraint) or (NO_TEXT if has_text is False else None)


def can_begin(constraint: Constraint) -> bool:
    """Return True if a text of the language has a first byte."""
    return any(_next_bytes(_create_matcher(constraint)))


def _create_matcher(constraint: Constraint) -> LLMatcher:
    from llguidance import LLMatcher

    with refuse_panics():
        return LLMatcher(_byte_tokenizer(), write_grammar(constraint), log_level=0)


def _next_bytes(matcher: LLMatcher) -> list[int]:
    """Return the bytes that may come next. A matcher of which none may, and whose text is not complete, has an error
    then."""
    mask = matcher.compute_bitmask()
    return [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]


def _find_text(matcher: LLMatcher) -> bool | None:
    """Return True if a complete text was found, False if there is none, and ``None`` after too many steps."""
    beginnings, num_steps = [matcher], 0
    while beginnings:
        num_steps += 1
        if num_steps > _MAX_STEPS:
            return None
        beginning = beginnings.pop()
        if beginning.is_accepting():
            return True
        for byte in reversed(_next_bytes(beginning)):
            longer = beginning.deep_copy()
            if longer.consume_token(byte):
                beginnings.append(longer)
        if len(beginnings) > _MAX_STEPS:
            return None
    return False


def _find_endlessness(constraint: Constraint) -> str | None:
    if constraint.kind == "json" and not can_schema_end(json.loads(constraint.value)):
        return "each value requires another one, so that no finite JSON is valid: leave one not required"
    if constraint.kind != "grammar":
        return None
    num_compiled = 0

    def is_empty(grammar: str) -> bool:
        nonlocal num_compiled
        num_compiled += 1
        if num_compiled > _MAX_EXPRESSIONS:
            return False
        try:
            matcher = _create_matcher(Constraint("grammar", grammar))
        except InvalidRequest:
            return False
        # Emptiness of an expression, unlike an error in it, shows only where its first byte is asked for.
        return not matcher.is_error() and not _next_bytes(matcher) and matcher.is_error()

    endless = find_endless_start(constraint.value, is_empty)
    if endless is None:
        return None
    return (
        f"no text of rule {endless!r} can end, since each alternative leads to it again or needs an expression that "
        "nothing matches: add one"
    )
