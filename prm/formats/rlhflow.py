"""RLHFlow's PRMs (Mistral and Llama-3.1): a chat in which the assistant answers ``+`` or ``-`` to each step.

Source: https://huggingface.co/RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and Xiong et al. 2024, "An Implementation of
Generative PRM" (https://github.com/RLHFlow/RLHF-Reward-Modeling). Each step is a user turn, the first with the question
before it, and every turn is answered with ``+``: the score of a step is read before that answer, so the chat of a
longer chain begins with the chat of the shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence

from prm.formats.base import Conversation, Format, Pieces, Prompt, as_text, softmax


class RLHFlow(Format):
    name = "rlhflow"
    kind = "generate"

    async def prepare(self) -> None:
        self.token_ids = (await self.token("+", "the verdict"), await self.token("-", "the verdict"))
        self._before = await self._chat("?")

    async def prompt(self, conversation: Conversation) -> Prompt:
        question = as_text(conversation)
        return Prompt((), len(await self._chat(question)), question)

    async def increment(self, prompt: Prompt, index: int, step: str) -> Pieces:
        if index == 0:
            return (await self._chat(f"{prompt.question} {step}"),)
        # The answer to the previous turn, and this turn, as they are appended to any chat.
        tokens = await self._chat("?", "+", step)
        if tokens[: len(self._before)] != self._before:
            raise self.refuse("its chat template writes a turn differently when another one follows")
        return (tokens[len(self._before) :],)

    def probability(self, logits: Sequence[float]) -> float:
        return softmax(logits, 0)

    async def _chat(self, *turns: str) -> tuple[int, ...]:
        """Return the tokens of a chat, user first, up to the assistant's next turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
        return await self.engine.tokenize(self.info.id, messages)
