"""Skywork-o1-Open-PRM (1.5B, 7B): plain text with one step per line, scored by a value head's sigmoid at line ends.

Source: https://github.com/SkyworkAI/skywork-o1-prm-inference. Its code also scores empty lines; here they are no steps
and are left out.
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

    async def encode_question(self, conversation: Conversation) -> Prompt:
        question = as_text(conversation)
        tokens = (self._first, *await self.tokenize(question + "\n"))
        return Prompt(tokens, len(tokens), question)

    def probability(self, logits: Sequence[float]) -> float:
        return sigmoid(logits[0])
