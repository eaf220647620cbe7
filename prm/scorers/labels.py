"""The tokens of the labels among which a language model chooses where a verdict or a grade is due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.protocol.types import EngineClient, Token, TokenizeRequest, Tokens


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """The labels of a model behind a text.

    ``lead`` are the tokens of the text before a label. ``tokens`` has the labels that are one token each, different
    from those of the others; ``others`` are those that are not.
    """

    lead: Tokens
    tokens: dict[str, Token]
    others: tuple[str, ...]


async def find_label_tokens(engine: EngineClient, model: str, lead: str, labels: Iterable[str]) -> LabelTokens:
    """Return the tokens of labels behind the text ``lead``, which may end with a space that belongs to the labels."""
    spelled = {label: await _encode(engine, model, lead + label) for label in labels}
    unknown = await _encode(engine, model, lead + "\U0010fffd")
    heads = [tokens[:-1] for tokens in spelled.values()]
    head = max(heads, key=heads.count)
    found: dict[str, Token] = {}
    for label, tokens in spelled.items():
        if tokens[:-1] == head and tokens[-1:] != unknown[len(head) :] and tokens[-1] not in found.values():
            found[label] = tokens[-1]
    return LabelTokens(head, found, tuple(label for label in spelled if label not in found))


async def _encode(engine: EngineClient, model: str, text: str) -> Tokens:
    return await engine.tokenize(TokenizeRequest(model, text, special=False))
