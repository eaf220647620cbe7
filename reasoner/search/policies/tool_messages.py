"""Finds how a policy's chat template renders the output of a call, with its tokenizer alone.

The template renders short conversations that differ in the code of a call, or in its output. What all of them have in
common after the code, and around the output, are the tokens between a call and the model's next turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.protocol.types import EngineClient, InvalidRequest, TokenizeRequest, Tokens
from prm.scorers.next_turn import count_common
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import CODE, PYTHON

_FIRST, _SECOND = "one", "six"
"""Texts without a common beginning or end."""
_QUOTED = f'{_FIRST}"{_SECOND}'
_ID = "call00001"
"""An id of nine letters and digits: Mistral's templates take no other."""


@dataclass(frozen=True, slots=True)
class ToolMessages:
    """The tokens around the output of a call."""

    after_call: Tokens
    """Tokens between the delimiter that closes a call and the output."""
    at_turn_end: Tokens
    """Tokens from the end of the model's turn to the output."""
    after_turn: Tokens
    """The same without the token that ends the turn."""
    next_turn: Tokens
    """Tokens between the output and the model's next turn."""
    is_json: bool
    """True if the output is written as the inside of a JSON string."""

    def write(self, output: str) -> str:
        """Return the output as the template writes it."""
        return json.dumps(output, ensure_ascii=False)[1:-1] if self.is_json else output


async def find_tool_messages(
    engine: EngineClient, model: str, tool_format: ToolFormat, template_kwargs: Mapping[str, Any]
) -> ToolMessages:
    """Return the tokens around outputs. Raises ``InvalidRequest`` for a template that does not render them."""

    async def render(code: str, output: str) -> Tokens:
        arguments = {CODE: code}
        written = json.dumps(arguments) if tool_format.has_text_arguments else arguments
        call = {"id": _ID, "type": "function", "function": {"name": PYTHON, "arguments": written}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": PYTHON, "tool_call_id": _ID, "content": output},
        ]
        return await engine.tokenize(TokenizeRequest(model, messages, special=False, template_kwargs=template_kwargs))

    async def render_words(words: str) -> Tokens:
        messages = [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": words}]
        return await engine.tokenize(
            TokenizeRequest(model, messages, special=False, generation_prompt=False, template_kwargs=template_kwargs)
        )

    async def encode(text: str) -> Tokens:
        return await engine.tokenize(TokenizeRequest(model, text, special=False))

    first, other_output, other_code, quoted = await asyncio.gather(
        render(_FIRST, _FIRST), render(_FIRST, _SECOND), render(_SECOND, _FIRST), render(_FIRST, _QUOTED)
    )
    words, escaped = await asyncio.gather(
        asyncio.gather(render_words(_FIRST), render_words(_SECOND)), encode(json.dumps(_QUOTED)[1:-1])
    )
    begin, end = count_common(first, other_output), len(first) - count_common(first[::-1], other_output[::-1])
    call_end = len(first) - count_common(first[::-1], other_code[::-1])
    if not 0 < call_end <= begin < end < len(first):
        raise InvalidRequest(
            f"tools: the chat template of model {model!r} does not render the output of a call after it: give the tool "
            "'python' the 'call_format' 'blocks'",
            "tools",
        )
    between = first[call_end:begin]
    after_call = _find(between, await encode(tool_format.call_end)) if tool_format.call_end else 0
    turn_end = words[0][len(words[0]) - count_common(words[0][::-1], words[1][::-1]) :][:1]
    after_turn = _find(between[after_call:], turn_end) + after_call
    at_turn_end = after_turn - 1 if after_turn > after_call else after_call
    return ToolMessages(
        between[after_call or at_turn_end :],
        between[at_turn_end:],
        between[after_turn:],
        first[end:],
        is_json=quoted[begin : len(quoted) - (len(first) - end)] == escaped,
    )


def _find(tokens: Tokens, part: Tokens) -> int:
    """Return the index after the first occurrence of a part; 0 if there is none."""
    starts = range(len(tokens) - len(part) + 1)
    return next((start + len(part) for start in starts if part and tokens[start : start + len(part)] == part), 0)
