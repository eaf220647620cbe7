"""Qwen2.5-Math-PRM (7B, 72B, PRM800K; ReasonFlux-PRM): ``<extra_0>`` ends each step, two labels, bad and good.

Source: https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B and Zhang et al. 2025, "The Lessons of Developing Process Reward
Models in Mathematical Reasoning". One chat: system prompt, question, and all steps as the assistant's message.
"""

from __future__ import annotations

from prm.formats.base import Conversation, Format, Prompt

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


class QwenMath(Format):
    name = "qwen_math"
    kind = "classify"
    end = "<extra_0>"
    positive_index = 1

    async def encode_question(self, conversation: Conversation) -> Prompt:
        if conversation[0]["role"] != "system":
            conversation = [{"role": "system", "content": SYSTEM}, *conversation]
        return await super().encode_question(conversation)
