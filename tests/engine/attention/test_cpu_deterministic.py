"""Deterministic mode: the results of a request are bit-identical whatever else the engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError
from tests.engine.conftest import Checkpoints
from tests.engine.exact import gap
from tests.engine.helpers import Harness, generate
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.long import mostly_long

ROOMY = EngineOptions(kv_tokens=8192, max_running=64, step_tokens=512, deterministic=True)
KINDS = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3", "qwen3_classify"]
KINDS += ["granite", "smollm3", "olmo3", "ministral3", "gpt_oss", "gemma4_shared", "gemma4_moe"]
CASES = [
    *((kind, "auto") for kind in KINDS),
    ("qwen3", "int8"),
    ("mistral", "fp8"),
    ("qwen3_wide", "int4"),
    ("gemma4_shared", "int8"),
]
"""Models, and data types of keys and values."""
PROMPT = random_tokens(75, 1)
BRANCHES = [Branch(3, key, 24) for key in range(16)]


@pytest.fixture(autouse=True)
def _two_threads(_one_thread: None) -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kind", "kv_dtype"), mostly_long(CASES, every=3))
def test_logits_do_not_depend_on_chunks_or_on_the_cache(checkpoints: Checkpoints, kind: str, kv_dtype: str) -> None:
    text, roomy = random_tokens(110, 2), replace(ROOMY, kv_dtype=kv_dtype)
    whole = engine_logits(Harness(checkpoints(kind), roomy), text)
    chunked = Harness(checkpoints(kind), replace(roomy, step_tokens=13))
    assert torch.equal(engine_logits(chunked, text), whole)
    cached = Harness(checkpoints(kind), roomy)
    engine_logits(cached, text[:67])
    assert torch.equal(engine_logits(cached, text, start=70), whole[70:])


@pytest.mark.parametrize(
    ("kind", "kv_dtype"), mostly_long([case for case in CASES if "classify" not in case[0]], every=6)
)
def test_samples_do_not_depend_on_the_batch_the_cache_or_preemption(
    checkpoints: Checkpoints, kind: str, kv_dtype: str
) -> None:
    """Tokens and log-probabilities are bit-identical alone, in a batch of 16, cached, and with little memory."""
    roomy = replace(ROOMY, kv_dtype=kv_dtype)
    alone = [answers(Harness(checkpoints(kind), roomy), [branch])[0] for branch in BRANCHES[:3]]
    together = Harness(checkpoints(kind), roomy)
    for length in (3, 40, 90):
        together.submit(generate(random_tokens(length, length), [Branch(1, 1, 30)] * 2, ignore_eos=True))
    assert answers(together, BRANCHES)[:3] == alone
    assert answers(together, BRANCHES)[:3] == alone
    scarce = Harness(checkpoints(kind), replace(roomy, kv_tokens=192, max_running=8, step_tokens=24))
    assert answers(scarce, BRANCHES[:3]) == alone
    assert scarce.core.stats.preemptions > 0


def test_the_default_attention_depends_on_the_batch(checkpoints: Checkpoints) -> None:
    """By default the last bits of a log-probability change with the batch, which is why the mode exists."""
    fast = replace(ROOMY, deterministic=False)
    alone = [answers(Harness(checkpoints("qwen3"), fast), [branch])[0] for branch in BRANCHES[:3]]
    together = answers(Harness(checkpoints("qwen3"), fast), BRANCHES)[:3]
    assert together != alone
    # A temperature of 1.1 makes differences smaller, and the sum is over many tokens.
    bound = BRANCHES[0].max_tokens * gap(checkpoints("qwen3"))
    assert all(abs(one - other) < bound for (_, one), (_, other) in zip(alone, together, strict=True))


def test_deterministic_mode_refuses_a_model_of_the_transformers_backend(checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineError, match="deterministic mode is not supported"):
        Harness(checkpoints("gpt2"), ROOMY)


def answers(harness: Harness, branches: list[Branch]) -> list[tuple[tuple[int, ...], float]]:
    """Return the tokens and the log-probability of each branch."""
    events = harness.submit(generate(PROMPT, branches, temperature=1.1, top_k=60, ignore_eos=True))
    harness.run()
    completions = sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)
    return [(completion.token_ids, completion.logprob) for completion in completions]
