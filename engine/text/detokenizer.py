"""Incremental detokenization: stop strings across token borders, and streaming without incomplete characters.

A character may be spread over several tokens, and a decoder may treat the first token of a text differently, so the
texts of single tokens cannot simply be joined. A reader decodes a small window twice, with and without the new tokens,
and takes the difference (the method of the streamers of transformers and vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import InvalidRequest, TokenIds
from engine.text.tokenizer import Tokenizer

_HALF = "\ufffd"
"""Replacement character that a decoder outputs for an incomplete character and for invalid bytes."""
_BYTES = 4
"""The maximum number of bytes of a character."""
_HELD = 2 * _BYTES
"""The minimum number of tokens held back before they count as invalid bytes."""


def decode_complete_text(tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
    """Return the text of generated tokens without an incomplete character or invalid bytes at its end.

    ``before``: the end of the prompt if it is inside a character (``find_incomplete_end``).
    """
    complete = _decode_complete(tokenizer, [*before, *tokens])
    return complete[_count_prompt_chars(complete, tokenizer.decode_inner(before)) :] if before else complete


def _count_prompt_chars(text: str, prompt: str) -> int:
    """Return how many characters of a text are the prompt's, whose last bytes may have become a character or not."""
    pairs = zip(text, prompt, strict=False)
    return next((count for count, (own, other) in enumerate(pairs) if own != other), min(len(text), len(prompt)))


def find_incomplete_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> TokenIds:
    """Return the last tokens of a prompt that ends inside a character, which generated tokens complete; else none."""
    if not prompt or not tokenizer.decode_token(prompt[-1]).endswith(_HALF):
        return ()
    replacement = tokenizer.encode("a" + _HALF)[len(tokenizer.encode("a")) :]
    if replacement and tuple(prompt[-len(replacement) :]) == replacement:
        return ()  # a replacement character is part of the prompt
    for start in range(len(prompt) - 1, max(-1, len(prompt) - _BYTES - 1), -1):
        ends = (prompt[max(0, start - length) : start] for length in range(1, _BYTES + 1))
        if start == 0 or any(not tokenizer.decode_inner(end).endswith(_HALF) for end in ends):
            is_complete = not tokenizer.decode_inner(prompt[start:]).endswith(_HALF)
            return () if is_complete else tuple(prompt[start:])
    return tuple(prompt[-_BYTES:])


def _decode_complete(tokenizer: Tokenizer, tokens: Sequence[int], *, special: bool = False) -> str:
    text = tokenizer.decode_inner(tokens, special=special)
    complete = text.rstrip(_HALF)
    if len(complete) == len(text) or not tokenizer.has_byte_tokens:
        return complete
    cuts = range(1, min(_BYTES, len(tokens) + 1))
    shorter = [tokenizer.decode_inner(tokens[:-cut], special=special).rstrip(_HALF) for cut in cuts]
    return max([complete, *shorter], key=len)


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

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[int], before: Sequence[int] = (), *, special: bool = False
    ) -> None:
        """``tokens``: read again at every call; the owner appends to it. ``before``: as of ``decode_complete_text``.
        ``special``: special tokens are part of the text.
        """
        self.text = ""
        """The text so far, complete characters only."""
        self.tokenizer = tokenizer
        self._tokens = tokens
        self._before, self._special = before, special
        self._lead = ""
        """The decoded text of tokens before the window that is not all in ``text`` yet."""
        self._window = 0
        self._prompt = tokenizer.decode_inner(before, special=special) if before else ""
        """The text of ``before``, which the text of the first window begins with."""
        self._shown = 0
        """The number of characters of the lead and the window's text that are in ``text``."""
        self._read = 0
        """The start of the next window: the text of the tokens before it is complete."""

    def advance(self) -> None:
        """Update ``text`` with new tokens."""
        if self._read == len(self._tokens):
            return
        end, after = self._find_complete_end()
        complete = after.rstrip(_HALF)
        self.text += complete[self._count_shown(complete) :]
        self._shown = max(self._shown, len(complete))
        if len(complete) == len(after):
            self._lead, self._window, self._read = "", self._read, end
            self._shown = len(self.decode(self._read_window(end)).rstrip(_HALF))
        elif len(self._tokens) - self._read > _HELD:
            self._let_go()

    def final(self, end: int) -> str:
        """Return the text of the first ``end`` tokens, after which no more follow."""
        rest = self._lead + _decode_complete(self.tokenizer, self._read_window(end), special=self._special)
        complete = rest.rstrip(_HALF)
        return self.text + complete[self._count_shown(complete) :]

    def _count_shown(self, complete: str) -> int:
        if self._prompt and not self._window:
            return max(self._shown, _count_prompt_chars(complete, self._prompt))
        return self._shown

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens within the text."""
        if len(tokens) == 1 and not self._special:
            return self.tokenizer.decode_token(tokens[0])
        return self.tokenizer.decode_inner(tokens, special=self._special)

    def _find_complete_end(self) -> tuple[int, str]:
        """Return the number of tokens to read, and the text of the lead and the window up to there.

        They are all tokens, unless these end inside a character and the decoder loses those before it.
        """
        last = len(self._tokens)
        after = self._lead + self.decode(self._read_window(last))
        if self.tokenizer.has_byte_tokens and after.endswith(_HALF):
            for end in range(last - 1, max(self._read, last - _BYTES), -1):
                shorter = self._lead + self.decode(self._read_window(end))
                if not shorter.endswith(_HALF):
                    return end, shorter
        return last, after

    def _read_window(self, end: int) -> Sequence[int]:
        tokens = self._tokens[self._window : end]
        return [*self._before, *tokens] if self._before and not self._window else tokens

    def _let_go(self) -> None:
        """Move the window behind bytes that can no longer become a character.

        Otherwise each token of a branch that keeps generating such bytes would decode all of them again.
        """
        end = len(self._tokens)
        window = self.decode(self._read_window(end))
        for cut in range(end - 1, max(self._read, end - _BYTES - 1), -1):
            before = self.decode(self._read_window(cut))
            after = self.decode(self._tokens[cut:])
            # Tokens without text do not complete the preceding character.
            if after and before + after == window:
                left = self._lead + before
                self._lead, self._shown = left[self._shown :], max(0, self._shown - len(left))
                self._window = self._read = cut
                return


class StopStrings:
    """A list of stop strings, and the tokens that can complete one of them."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        """Raises ``InvalidRequest`` for a stop string that contains a special token among other text."""
        self.stops = tuple(stops)
        self.tokenizer = tokenizer
        self._last = "".join({stop[-1] for stop in stops})
        self._unseen = " " in self._last or _HALF in self._last
        self._may_end: dict[int, bool] = {}
        self.special = {tokenizer.hidden[stop]: stop for stop in stops if stop in tokenizer.hidden}
        """Special tokens that are a stop string, which never occurs in the text."""
        for stop in stops:
            _check_special(tokenizer, stop)
        encoded = [(stop, tokenizer.encode(stop)) for stop in self.stops]
        whole = (ids[0] for stop, ids in encoded if len(ids) == 1 and tokenizer.decode(ids) == stop)
        self.tokens = frozenset(whole).union(self.special)
        """Tokens whose text is a whole stop string."""

    def may_end(self, token: int) -> bool:
        """Return True if the token could complete a stop string; almost none can, and the others need no decoding.

        True for tokens that are part of a character. True for all tokens if a stop string ends in a space, since some
        decoders add spaces between tokens, or in the replacement character, which counts once something follows it.
        """
        may_end = self._may_end.get(token)
        if may_end is None:
            piece = self.tokenizer.decode_inner([token])
            is_possible = self._unseen or token in self.special or any(mark in self._last + _HALF for mark in piece)
            may_end = self._may_end[token] = is_possible
        return may_end

    def find(self, text: str, start: int) -> str | None:
        """Return the stop string that ends first among those ending after ``start``, or ``None``."""
        best, best_end = None, len(text) + 1
        for stop in self.stops:
            index = text.find(stop, earliest_stop_start(stop, start))
            if index >= 0 and index + len(stop) < best_end:
                best, best_end = stop, index + len(stop)
        return best


def _check_special(tokenizer: Tokenizer, stop: str) -> None:
    if stop in tokenizer.hidden:
        return
    token = next((text for text in tokenizer.hidden if text and text in stop), None)
    if token is not None:
        raise InvalidRequest(
            f"the stop string {stop!r} contains the special token {token!r}, which is no part of the text, so that it "
            f"could never end a branch: give {token!r} alone, or its id {tokenizer.hidden[token]} in stop_token_ids",
            "stop",
        )
