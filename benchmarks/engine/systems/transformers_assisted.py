"""transformers' assisted generation, by a smaller model or by prompt lookup, which supports one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from benchmarks.engine.problems import Prompt, Solved

_LOOKUP = 10
"""Draft tokens of prompt lookup, as in its documentation."""


class _Assisted:
    def __init__(self, folder: Path, assistant: Path | None) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = _load(folder)
        self._how: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP}
        if assistant is not None:
            self._how = {"assistant_model": _load(assistant)}

    def tokenize(self, problem: str) -> list[int]:
        messages = [{"role": "user", "content": problem}]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def solve(self, prompts: Sequence[Prompt], batch: int, seed: int) -> Solved:
        if batch != 1:
            raise ValueError("assisted generation is for one sequence at a time")
        set_seed(seed)
        start = time.perf_counter()
        texts = [self._one(prompt) for prompt in prompts]
        return Solved(time.perf_counter() - start, texts)

    def _one(self, prompt: Prompt) -> list[int]:
        config = GenerationConfig(
            do_sample=True,
            temperature=prompt.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=prompt.tokens,
            eos_token_id=self._tokenizer.eos_token_id if prompt.ends else None,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        ids = torch.tensor([prompt.ids])
        rows = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **self._how)
        new: list[int] = rows[0, len(prompt.ids) :].tolist()
        return new


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def load(folder: Path, threads: int, *, assistant: str | None) -> _Assisted:
    """Return the checkpoint with an assistant model, or with prompt lookup."""
    torch.set_num_threads(threads)
    return _Assisted(folder, None if assistant is None else Path(assistant))
