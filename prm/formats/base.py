"""Interface of a process reward model's format: the encoding of a solution, and the meaning of the logits.

A sequence begins with the question and grows by one increment per step; a step's score is read at its increment's last
token. Increments do not depend on later steps, so a longer chain begins with exactly the tokens of the shorter one, and
with the engine's prefix cache only the new step is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.protocol.types import EngineClient, EngineError, ModelInfo, Token, TokenizeRequest, Tokens

Conversation = Sequence[dict[str, Any]]
"""Chat messages, as chat templates take them: each has a text, and one of the assistant may have calls."""
Pieces = tuple[str | Tokens, ...]
"""Sequence of tokens and of texts, which the engine tokenises one by one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question encoded for a verifier."""

    tokens: Tokens
    """Common prefix of all sequences; empty if the question is part of the first step."""
    size: int
    """Approximate number of tokens of the question."""
    question: str


class Format:
    """Format of a public model. ``notes`` is the ``reasoner_prm`` object of its config.json, without ``format``."""

    name: ClassVar[str]
    kind: ClassVar[str]
    """Kind of the served model: ``generate`` or ``classify``."""
    separator: str = "\n\n"
    end: str | None = None
    """Token after each step."""
    verdicts: tuple[str, ...] = ()
    """Texts of one token each whose logits are read; empty for a model with a classification head."""
    positive_index: int
    """Index of the logit of right steps."""
    token_ids: Tokens = ()
    """Tokens of ``verdicts``."""

    def __init__(self, engine: EngineClient, info: ModelInfo, notes: Mapping[str, object]) -> None:
        if notes:
            raise self.refuse(f"'reasoner_prm' has fields that format {self.name!r} does not know: {', '.join(notes)}")
        self.engine = engine
        self.info = info

    async def prepare(self) -> None:
        """Look up the tokens that the format needs. Raises ``EngineError`` that names a missing one."""
        if self.end is not None:
            self.end_token = await self.find_token(self.end, "the separator")
        self.token_ids = tuple([await self.find_token(verdict, "the verdict") for verdict in self.verdicts])

    async def encode_question(self, conversation: Conversation) -> Prompt:
        """Return the question, by default rendered with the model's chat template."""
        tokens = await self.engine.tokenize(TokenizeRequest(self.info.id, conversation))
        return Prompt(tokens, len(tokens), as_text(conversation))

    async def encode_step(self, prompt: Prompt, index: int, step: str) -> Pieces:  # noqa: ARG002
        """Return the increment of the step with this index (from 0). The score is read at its last token."""
        return step, (self.end_token,)

    def probability(self, logits: Sequence[float]) -> float:
        """Return the probability that the step is right, from the logits at its last token."""
        return softmax(logits, self.positive_index)

    async def tokenize(self, text: str) -> Tokens:
        """Return the tokens of a text, without special tokens."""
        return await self.engine.tokenize(TokenizeRequest(self.info.id, text, special=False))

    async def find_token(self, text: str, what: str) -> Token:
        """Return the token of a text that is one token. Raises ``EngineError`` if it is not."""
        tokens = await self.tokenize(text)
        # A character outside of every vocabulary gives the unknown token.
        if len(tokens) != 1 or tokens == await self.tokenize("\U0010fffd"):
            raise self.refuse(
                f"{what} {text!r} is not a token of the tokenizer of model {self.info.id!r}"
                + (f", which cuts it into {len(tokens)}" if len(tokens) > 1 else "")
            )
        return tokens[0]

    def refuse(self, why: str) -> EngineError:
        """Return the error for a checkpoint that does not have this format."""
        return EngineError(f"model {self.info.id!r} cannot score steps as {self.name!r}: {why}")


def as_text(conversation: Conversation) -> str:
    """Return chat messages as one text; a single message is its content, and a call is a line of JSON."""
    if len(conversation) == 1:
        return str(conversation[0]["content"])
    return "\n\n".join(f"{message['role'].capitalize()}: {render_message(message)}" for message in conversation)


def render_message(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message; a call is a line of JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])


def softmax(logits: Sequence[float], index: int) -> float:
    """Return the softmax probability of the logit at ``index``."""
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return weights[index] / sum(weights)


def sigmoid(logit: float) -> float:
    """Return ``1 / (1 + exp(-logit))`` without overflow."""
    odds = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else odds) / (1.0 + odds)
