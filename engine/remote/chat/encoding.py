"""Tokens for servers that report none: a text is split into as many as the server bills.

A search identifies a branch by its tokens and counts them against budgets. The first token of a prompt is its
conversation, and the others have only a number, so that tokens alone, without any state, give back the conversation and
the beginning of its answer. Those of a thought are marked, so that it is not sent again, whatever it quotes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.protocol.thoughts import DELIMITERS, find_thought
from engine.protocol.types import (
    ConversationToken,
    InvalidRequest,
    Prompt,
    TemplateKwargs,
    TextToken,
    Token,
    Tokens,
)

OPENING, CLOSING = DELIMITERS[0]
"""The delimiters of thoughts that a server sends apart from its content."""
BYTES_PER_TOKEN = 4
"""The usual number in English text, by which the tokens of a prompt are estimated."""
MAX_BYTES_PER_TOKEN = 32
"""The most that are possible on the average of a text, whatever the server reports."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the beginning of its answer."""

    messages: list[dict[str, Any]]
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    written: str = ""
    """All that is written of the answer, its thought included."""
    answer: str = ""
    """The same after the thought."""

    @property
    def has_open_thought(self) -> bool:
        """True if there is a thought whose end the server has not sent."""
        thought = self.written.removesuffix(self.answer)
        span = find_thought(thought)
        return bool(thought) and not (span is not None and span.is_closed)


def encode_prompt(text: Prompt, template_kwargs: TemplateKwargs | None = None) -> Tokens:
    """Return the tokens of a plain text or of chat messages, to which an answer can be appended."""
    if isinstance(text, str):
        return encode_text(text)
    value = {"messages": list(text), "chat_template_kwargs": template_kwargs} if template_kwargs else list(text)
    head = ConversationToken(json.dumps(value, ensure_ascii=False))
    return head, *encode_text("", len(head.json.encode()) // BYTES_PER_TOKEN)


def encode_text(text: str, count: int | None = None, *, is_thought: bool = False) -> Tokens:
    """Return tokens of shares of equal size: ``count`` of them, or one for each ``BYTES_PER_TOKEN`` bytes."""
    if count is None:
        count = count_tokens(text, None)
    ends = [len(text) * index // count for index in range(count + 1)] if count else []
    return tuple(TextToken(text[start:end], is_thought) for start, end in itertools.pairwise(ends))


def measure_thought(tokens: Sequence[Token]) -> tuple[int, int]:
    """Return the number of characters and of tokens of the thought with which an answer begins."""
    thought = [token for token in _require_texts(tokens) if token.is_thought]
    return sum(len(token.text) for token in thought), len(thought)


def count_tokens(text: str, reported: int | None) -> int:
    """Return the number of tokens to bill for a text: the reported one, if that is possible."""
    if reported is None:
        return -(-len(text.encode()) // BYTES_PER_TOKEN)
    return max(reported, _least_tokens(text))


def encode_answer(thought: str, answer: str, reported: int | None, reported_thought: int | None = None) -> Tokens:
    """Return the tokens of an answer after its thought: as many as the server bills, if that is possible.

    ``reported_thought``: those of the thought among them, by the server; otherwise their share is that of the text.
    """
    least_thought, least_answer = _least_tokens(thought), _least_tokens(answer)
    total = max(count_tokens(thought + answer, reported), least_thought + least_answer)
    size = len(thought.encode())
    if not reported_thought:  # some servers report none whatever the model thinks
        reported_thought = round(total * size / max(1, size + len(answer.encode())))
    num_thought = max(least_thought, min(reported_thought, total - least_answer))
    return encode_text(thought, num_thought, is_thought=True) + encode_text(answer, total - num_thought)


def decode_text(tokens: Sequence[Token]) -> str:
    """Return the text of tokens."""
    return "".join(token.text for token in _require_texts(tokens))


def decode_prompt(tokens: Sequence[Token]) -> Conversation:
    """Return the conversation that tokens hold. A plain text counts as one message of the user."""
    if not tokens or not isinstance(tokens[0], ConversationToken):
        return Conversation([{"role": "user", "content": decode_text(tokens)}])
    value = json.loads(tokens[0].json)
    if isinstance(value, list):
        value = {"messages": value, "chat_template_kwargs": {}}
    texts = _require_texts(tokens[1:])
    ends = [index for index, token in enumerate(texts, 1) if token.is_thought and token.text]
    answer = texts[ends[-1] :] if ends else texts
    return Conversation(value["messages"], value["chat_template_kwargs"], decode_text(texts), decode_text(answer))


def _least_tokens(text: str) -> int:
    """Return the smallest number of tokens that a text can have."""
    return -(-len(text.encode()) // MAX_BYTES_PER_TOKEN)


def _require_texts(tokens: Sequence[Token]) -> list[TextToken]:
    """Return tokens that are texts. Raises ``InvalidRequest`` for others, which another server has made."""
    texts = [token for token in tokens if isinstance(token, TextToken)]
    if len(texts) < len(tokens):
        raise InvalidRequest("a server that only chats takes no token ids: tokenize the text with its own client")
    return texts
