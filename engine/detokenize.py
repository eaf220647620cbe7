"""Text of tokens that arrive one by one: stop strings across token borders, and streaming without half characters.

A character may be spread over several tokens, and a decoder may treat the first token of a text differently, so texts
of tokens cannot simply be joined. A reader decodes a small window twice, with and without the new tokens, and takes the
difference (the method of transformers' and vLLM's streamers).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.tokenizer import Tokenizer

_HALF = "\ufffd"
"""What a decoder shows for a character whose last bytes are still to come."""


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, without a character at its end that is not complete."""
    return tokenizer.decode(tokens).rstrip(_HALF)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that could be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class TextReader:
    """Follows one branch's growing list of tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[int]) -> None:
        """``tokens`` is read again at every call; whoever owns it appends to it."""
        self.text = ""
        """The text so far, complete characters only."""
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._window = 0
        self._read = 0

    def advance(self) -> None:
        """Brings ``text`` up to date with the tokens."""
        if self._read == len(self._tokens):
            return
        before = text_of(self._tokenizer, self._tokens[self._window : self._read])
        after = self._tokenizer.decode(self._tokens[self._window :])
        complete = after.rstrip(_HALF)
        if len(complete) == len(after):
            self.text += complete[len(before) :]
            self._window, self._read = self._read, len(self._tokens)


class StopStrings:
    """A list of stop strings, and which tokens can complete one of them."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._tokenizer = tokenizer
        self._last = "".join({stop[-1] for stop in stops})
        self._longest = max(map(len, stops), default=0)
        self._may_end: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Whether the token could complete a stop string; almost none can, and the others need no decoding.

        A token that is part of a character may, and so may any token when a stop string ends in a space, since some
        decoders add spaces between tokens.
        """
        known = self._may_end.get(token)
        if known is None:
            piece = self._tokenizer.decode([token])
            known = " " in self._last or any(mark in self._last + _HALF for mark in piece)
            self._may_end[token] = known
        return known

    def find(self, text: str, start: int) -> str | None:
        """The stop string that ends first among those ending after ``start``, or ``None``."""
        best, best_end = None, len(text) + 1
        for stop in self.stops:
            index = text.find(stop, max(0, start - len(stop) + 1))
            if index >= 0 and index + len(stop) < best_end:
                best, best_end = stop, index + len(stop)
        return best
