"""Token ids for servers that report none: numbers that hold the text itself.

A search identifies a branch by its token ids and counts them against budgets. Here an id is a piece of UTF-8 text, so
that ids alone, without any state, give back the conversation and the beginning of its answer. The number of ids of an
answer is the number of tokens that the server bills.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from engine.protocol.types import Prompt, Tokens

_MARK = b"\x01"
"""First byte of each id, so that leading zeros and empty pieces are kept."""
_ANSWER = b"\0"
"""Separates messages, whose JSON has no such byte, from the beginning of the answer."""
BYTES_PER_TOKEN = 4
"""The usual number in English text, by which the tokens of a prompt are estimated."""
MAX_BYTES_PER_TOKEN = 32
"""The most that are possible on the average of a text, whatever the server reports."""


def encode_prompt(text: Prompt) -> Tokens:
    """Return the ids of a plain text or of chat messages, to which an answer can be appended."""
    if isinstance(text, str):
        return encode_text(text)
    return _encode(json.dumps(list(text), ensure_ascii=False).encode() + _ANSWER, None)


def encode_text(text: str, count: int | None = None) -> Tokens:
    """Return the ids of a text: ``count`` of them, or one for each ``BYTES_PER_TOKEN`` bytes."""
    return _encode(text.encode(), count)


def count_tokens(text: str, reported: int | None) -> int:
    """Return the number of tokens to bill for a text: the reported one, if that is possible."""
    size = len(text.encode())
    if reported is None:
        return -(-size // BYTES_PER_TOKEN)
    return max(reported, -(-size // MAX_BYTES_PER_TOKEN))


def decode_text(tokens: Sequence[int]) -> str:
    """Return the text of ids."""
    return _decode(tokens).decode(errors="replace")


def decode_prompt(tokens: Sequence[int]) -> tuple[list[dict[str, str]], str]:
    """Return the messages of a conversation and the beginning of its answer.

    A plain text counts as one message of the user.
    """
    head, separator, answer = _decode(tokens).partition(_ANSWER)
    if not separator:
        return [{"role": "user", "content": head.decode(errors="replace")}], ""
    messages: list[dict[str, str]] = json.loads(head)
    return messages, answer.decode(errors="replace")


def _encode(data: bytes, count: int | None) -> Tokens:
    """Return ids of pieces of equal size; where there are fewer bytes than ids, the first ones are empty."""
    if count is None:
        count = -(-len(data) // BYTES_PER_TOKEN)
    ends = [len(data) * index // count for index in range(count + 1)] if count else []
    return tuple(int.from_bytes(_MARK + data[start:end], "big") for start, end in itertools.pairwise(ends))


def _decode(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes((token.bit_length() + 7) // 8, "big")[1:] for token in tokens)
