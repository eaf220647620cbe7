"""Incremental detokenization: stop strings across token borders, and streaming without incomplete characters.

A character may be spread over several tokens, and a decoder may treat the first token of a text differently, so the
texts of single tokens cannot simply be joined. A reader decodes a small window twice, with and without the new tokens,
and takes the difference (the method of the streamers of transformers and vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_HALF = "\ufffd"
"""Replacement character that a decoder outputs for an incomplete character and for invalid bytes."""
_BYTES = 4
"""The maximum number of bytes of a character."""
_HELD = 2 * _BYTES
"""The minimum number of tokens held back before they count as invalid bytes."""


def decode_complete_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens without an incomplete character or invalid bytes at its end."""
    return tokenizer.decode(tokens).rstrip(_HALF)


def num_chars_to_hold(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that could be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and len(text) - start > longest:
            if stop.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(stop[0], start + 1)
    return longest


def earliest_stop_start(stop: str, start: int) -> int:
    """Return the lowest possible start of a stop string that ends after the first ``start`` characters of a text."""
    return max(0, start - len(stop) + 1)


class TextReader:
    """Incremental detokenizer of one branch's growing list of tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[int]) -> None:
        """``tokens``: read again at every call; the owner appends to it."""
        self.text = ""
        """The text so far, complete characters only."""
        self.tokenizer = tokenizer
        self._tokens = tokens
        self._lead = ""
        """The decoded text of tokens before the window that is not all in ``text`` yet."""
        self._window = 0
        self._shown = 0
        """The number of characters of the lead and the window's text that are in ``text``."""
        self._read = 0
        """The start of the next window: the text of the tokens before it is complete."""

    def advance(self) -> None:
        """Update ``text`` with new tokens."""
        if self._read == len(self._tokens):
            return
        after = self._lead + self.tokenizer.decode(self._tokens[self._window :])
        complete = after.rstrip(_HALF)
        self.text += complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if len(complete) == len(after):
            self._lead, self._window, self._read = "", self._read, len(self._tokens)
            window = self._tokens[self._window :]
            after = self.tokenizer.decode_token(window[0]) if len(window) == 1 else self.tokenizer.decode(window)
            self._shown = len(after.rstrip(_HALF))
        elif len(self._tokens) - self._read > _HELD:
            self._let_go()

    def final(self, end: int) -> str:
        """Return the text of the first ``end`` tokens, after which no more follow."""
        rest = self._lead + self.tokenizer.decode(self._tokens[self._window : end])
        return self.text + rest.rstrip(_HALF)[self._shown :]

    def _let_go(self) -> None:
        """Move the window behind bytes that can no longer become a character.

        Otherwise each token of a branch that keeps generating such bytes would decode all of them again.
        """
        end = len(self._tokens)
        window = self.tokenizer.decode(self._tokens[self._window :])
        for cut in range(end - 1, max(self._read, end - _BYTES - 1), -1):
            before = self.tokenizer.decode(self._tokens[self._window : cut])
            after = self.tokenizer.decode(self._tokens[cut:])
            # Tokens without text do not complete the preceding character.
            if after and before + after == window:
                left = self._lead + before
                self._lead, self._shown = left[self._shown :], max(0, self._shown - len(left))
                self._window = self._read = cut
                return


class StopStrings:
    """A list of stop strings, and the tokens that can complete one of them."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.tokenizer = tokenizer
        self._last = "".join({stop[-1] for stop in stops})
        self._unseen = " " in self._last or _HALF in self._last
        self._may_end: dict[int, bool] = {}
        encoded = [(stop, tokenizer.encode(stop)) for stop in self.stops]
        self.tokens = frozenset(ids[0] for stop, ids in encoded if len(ids) == 1 and tokenizer.decode(ids) == stop)
        """Tokens whose text is a whole stop string."""

    def may_end(self, token: int) -> bool:
        """Return True if the token could complete a stop string; almost none can, and the others need no decoding.

        True for tokens that are part of a character. True for all tokens if a stop string ends in a space, since some
        decoders add spaces between tokens, or in the replacement character, which counts once something follows it.
        """
        may_end = self._may_end.get(token)
        if may_end is None:
            piece = self.tokenizer.decode([token])
            may_end = self._may_end[token] = self._unseen or any(mark in self._last + _HALF for mark in piece)
        return may_end

    def find(self, text: str, start: int) -> str | None:
        """Return the stop string that ends first among those ending after ``start``, or ``None``."""
        best, best_end = None, len(text) + 1
        for stop in self.stops:
            index = text.find(stop, earliest_stop_start(stop, start))
            if index >= 0 and index + len(stop) < best_end:
                best, best_end = stop, index + len(stop)
        return best
