"""Skywork-o1-Open-PRM (1.5B, 7B): plain text, a line is a step, a value head's sigmoid at each line's end.

Source: https://github.com/SkyworkAI/skywork-o1-prm-inference. Its code scores an empty line like any other; here empty
lines are no steps, and the model does not read them.
"""

from __future__ import annotations

from collections.abc import Sequence

from prm.formats.base import Conversation, Format, Prompt, as_text, sigmoid


class Skywork(Format):
    name = "skywork"
    kind = "classify"
    separator = end = "\n"

    async def prepare(self) -> None:
        await super().prepare()
        if self.info.bos is None:
            raise self.refuse("a text begins with bos_token, which its tokenizer does not have")
        self._first = self.info.bos

    async def prompt(self, conversation: Conversation) -> Prompt:
        question = as_text(conversation)
        tokens = (self._first, *await self.tokens_of(question + "\n"))
        return Prompt(tokens, len(tokens), question)

    def probability(self, logits: Sequence[float]) -> float:
        return sigmoid(logits[0])
