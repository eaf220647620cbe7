"""Math-Shepherd (math-shepherd-mistral-7b-prm): a causal model predicts ``+`` or ``-`` at the tag after each step.

Source: https://huggingface.co/peiyi9979/math-shepherd-mistral-7b-prm and Wang et al. 2023, "Math-Shepherd: Verify and
Reinforce LLMs Step-by-step without Human Annotations". The text is the question and lines ``Step 1: … ки``; the score
is read at the tag itself, after which the model was trained to predict ``+`` or ``-``.
"""

from __future__ import annotations

import re

from engine.protocol.types import TokenizeRequest
from prm.formats.base import Conversation, Format, Pieces, Prompt, as_text

_NUMBERED = re.compile(r"Step \d+:")


class MathShepherd(Format):
    """Tokenises a step after the tag of the previous one, since Llama tokenizers put a space before a separate text."""

    name = "math_shepherd"
    kind = "generate"
    end = "ки"
    verdicts = ("+", "-")
    positive_index = 0

    async def encode_question(self, conversation: Conversation) -> Prompt:
        question = as_text(conversation).strip()
        tokens = await self.engine.tokenize(TokenizeRequest(self.info.id, question))
        return Prompt(tokens, len(tokens), question)

    async def encode_step(self, prompt: Prompt, index: int, step: str) -> Pieces:  # noqa: ARG002
        line = step if _NUMBERED.match(step) else f"Step {index + 1}: {step}"
        before = " " if index == 0 else "\n"
        tokens = await self.tokenize(f"{self.end}{before}{line} {self.end}")
        if tokens[0] != self.end_token or tokens[-1] != self.end_token:
            raise self.refuse(f"its tokenizer merges the separator {self.end!r} with the text around it")
        return (tokens[1:],)
