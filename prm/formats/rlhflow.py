"""RLHFlow's PRMs (Mistral and Llama-3.1): a chat in which the assistant answers ``+`` or ``-`` to each step.

Source: https://huggingface.co/RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and Xiong et al. 2024, "An Implementation of
Generative PRM" (https://github.com/RLHFlow/RLHF-Reward-Modeling). Each step is a user turn, the first with the question
before it, and every turn is answered with ``+``: the score of a step is read before that answer, so the chat of a
longer chain begins with the chat of the shorter one.
"""

from __future__ import annotations

from engine.protocol.types import TokenizeRequest, Tokens
from prm.formats.base import Conversation, Format, Pieces, Prompt, as_text


class RLHFlow(Format):
    name = "rlhflow"
    kind = "generate"
    verdicts = ("+", "-")
    positive_index = 0

    async def prepare(self) -> None:
        await super().prepare()
        self._before = await self._tokenize_chat("?")

    async def encode_question(self, conversation: Conversation) -> Prompt:
        question = as_text(conversation)
        return Prompt((), len(await self._tokenize_chat(question)), question)

    async def encode_step(self, prompt: Prompt, index: int, step: str) -> Pieces:
        if index == 0:
            return (await self._tokenize_chat(f"{prompt.question} {step}"),)
        # The answer to the previous turn, and this turn, as they are appended to any chat.
        tokens = await self._tokenize_chat("?", "+", step)
        if tokens[: len(self._before)] != self._before:
            raise self.refuse("its chat template writes a turn differently when another one follows")
        return (tokens[len(self._before) :],)

    async def _tokenize_chat(self, *turns: str) -> Tokens:
        """Return the tokens of a chat, user first, up to the assistant's next turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
        return await self.engine.tokenize(TokenizeRequest(self.info.id, messages))
