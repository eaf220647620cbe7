"""The engine on the models that ship with Reasoner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import reasoner
from engine.protocol.types import Branch
from reasoner.evaluation.suites.registry import POLICY_SUITES, load_problems
from tests.engine.helpers import Harness, generate
from tests.long import mostly_long

POLICY = Path(reasoner.__file__).parent / "bundled" / "policy"
NEW_TOKENS = 128


@pytest.mark.skipif(not (POLICY / "config.json").exists(), reason="the bundled policy is not trained yet")
@pytest.mark.parametrize("suite", mostly_long(POLICY_SUITES, every=2))
def test_greedy_tokens_equal_transformers_generate_on_the_bundled_policy(suite: str) -> None:
    """50 prompts of each of the two suites: one at a time in transformers, in one batch here."""
    harness = Harness(POLICY)
    tokenizer = harness.core.model.tokenizer
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": problem.text}]) for problem in load_problems(suite, limit=50)
    ]
    theirs = transformers_greedy(prompts)
    events = [harness.submit(generate(prompt, [Branch(0, 0, NEW_TOKENS)], temperature=0.0)) for prompt in prompts]
    harness.run()
    ours = [event.token_ids for [event] in events]  # type: ignore[union-attr]
    assert ours == theirs


def transformers_greedy(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return tokens up to and including the end of sequence, from prompts padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generated = model.generate(padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    eos = model.config.eos_token_id
    rows = [row[width:].tolist() for row in generated]
    return [tuple(row[: row.index(eos) + 1] if eos in row else row) for row in rows]
