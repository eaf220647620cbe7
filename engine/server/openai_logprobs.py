"""Log-probabilities in the shapes that clients of OpenAI and vLLM read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.protocol.types import TokenLogprob
from engine.protocol.wire import Json

Name = Callable[[int], str]
"""Returns the name of a token in a response."""


def logprobs_object(name: Name, tokens: Sequence[int], found: Sequence[TokenLogprob | None], start: int = 0) -> Json:
    """Return OpenAI's ``logprobs`` of a choice. ``start``: the number of characters before the first of the tokens.

    ``top_logprobs`` includes the token itself besides the most likely ones. The first token of a prompt has ``null``
    for both.
    """
    names = [name(token) for token in tokens]
    offsets = []
    for text in names:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": names,
        "token_logprobs": [None if one is None else one.logprob for one in found],
        "top_logprobs": [None if one is None else _alternatives(name, one) for one in found],
        "text_offset": offsets,
    }


def prompt_logprobs(name: Name, found: Sequence[TokenLogprob | None]) -> list[Json | None]:
    """Return vLLM's ``prompt_logprobs``: for each token but the first, itself and the most likely ones by id."""
    return [
        None
        if one is None
        else {
            str(token): {"logprob": logprob, "decoded_token": name(token)}
            for token, logprob in ((one.token_id, one.logprob), *one.top)
        }
        for one in found
    ]


def _alternatives(name: Name, one: TokenLogprob) -> dict[str, float]:
    return {name(token): logprob for token, logprob in (*one.top, (one.token_id, one.logprob))}
