"""Names and text offsets of tokens in the log-probabilities of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import TokenLogprob
from engine.text.detokenizer import TextReader
from engine.text.tokenizer import Tokenizer

_HALF = "\ufffd"
"""Text of bytes that are no whole character."""


class TokenNamer:
    """Names tokens by their text, with the space that they have within a text, or by their ids."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        self._tokenizer, self._by_id = tokenizer, by_id

    def name(self, token: int, *, is_first: bool = False) -> str:
        """Return the name of a token. ``is_first``: it is the first one of a text, where decoders may leave out a
        space."""
        if self._by_id:
            return f"token_id:{token}"
        return self._tokenizer.piece(token) if is_first else self._tokenizer.inner_piece(token)

    def name_top(self, own: TokenLogprob, name: str) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and of the token itself, which has this ``name``.

        There is an entry for each: of several tokens with one text all but the first are named by their ids.
        """
        named = {name: own.token_id}
        result: dict[str, float] = {}
        for token, logprob in (*own.top, (own.token_id, own.logprob)):
            text = name if token == own.token_id else self.name(token)
            result[text if named.setdefault(text, token) == token else f"token_id:{token}"] = logprob
        return result


class TextOffsets:
    """Offsets of tokens in a text that grows: the place of the first character that needs the token."""

    def __init__(self, tokenizer: Tokenizer, start: int, before: Sequence[int] = (), *, special: bool = False) -> None:
        """``start``: the length of the text before. ``before``: the tokens before if they end inside a character.
        ``special``: special tokens are part of the text.
        """
        self._tokens: list[int] = []
        self._reader = TextReader(tokenizer, self._tokens, before, special=special)
        self._start = start

    @property
    def end(self) -> int:
        return self._start + len(self._reader.text)

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offset = self.end
            self._tokens.append(token)
            self._reader.advance()
            piece = self._reader.decode([token])
            # Invalid bytes before it may have become text only now.
            if piece and _HALF not in piece and self._reader.text.endswith(piece):
                offset = max(offset, self.end - len(piece))
            offsets.append(offset)
        return offsets


def place_prompt(
    namer: TokenNamer, tokenizer: Tokenizer, prompt: Sequence[int], echo: str
) -> tuple[list[str], list[int]]:
    """Return the names of a prompt's tokens and their offsets in the ``echo`` with which a choice's text begins.

    A beginning-of-sequence token that the tokenizer has added to a text is not in it.
    """
    places = TextOffsets(tokenizer, 0, special=True)
    offsets = places.add(prompt)
    shift = len(echo) - places.end
    names = [
        namer.name(token, is_first=index == 0 or offset + shift < 0)
        for index, (token, offset) in enumerate(zip(prompt, offsets, strict=True))
    ]
    return names, [max(0, offset + shift) for offset in offsets]
