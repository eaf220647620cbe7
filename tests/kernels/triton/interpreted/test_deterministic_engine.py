"""Deterministic mode on an emulated GPU, its kernels interpreted: results are bit-identical whatever else is computed.

Weights, hidden states, keys and values are bfloat16, as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from engine.device import DeviceConfig
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, ScoreItem
from tests.engine.conftest import save_checkpoint
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import Harness, generate, score
from tests.engine.quantization.models import quantised
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter emulates a GPU")

PROMPT = tuple(range(3, 21))
BRANCHES = [Branch(seed=1, key=key, max_tokens=3) for key in range(6)]
ROOMY = EngineOptions(kv_tokens=1024, max_running=16, step_tokens=64, deterministic=True)
BFLOAT16 = DeviceConfig(torch.device("cpu"), torch.bfloat16, uses_gpu_kernels=True)
KINDS = ["fp8", "qwen3", "gemma2", "qwen3_moe", "W8A8", "gptq", "qwen3_5", "falcon_h1_norm", "lfm2", "mamba2"]
KINDS += ["gpt_oss", "gemma4_shared", "deepseek_v3"]
NUM_SAMPLES = 256


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch, BFLOAT16)
    # Few multiprocessors, so that small products are cut, too.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


def model(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if kind in ("W8A8", "gptq", "fp8"):
        folder = quantised("Qwen2ForCausalLM", kind, folder, num_hidden_layers=1)
    else:
        save_checkpoint(kind, folder)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return folder


def answers(harness: Harness, branches: list[Branch], **sampling: object) -> list[tuple[tuple[int, ...], float]]:
    """Return the tokens and the log-probability of each branch."""
    sampling = sampling or {"temperature": 1.1, "top_k": 60}
    events = harness.submit(generate(PROMPT, branches, ignore_eos=True, **sampling))
    harness.run()
    completions = sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)
    return [(completion.token_ids, completion.logprob) for completion in completions]


@pytest.mark.long  # the tests of products and attention cover each kernel
@pytest.mark.parametrize("kind", KINDS)
def test_samples_do_not_depend_on_the_batch_the_cache_or_chunks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(kind, tmp_path, monkeypatch)
    alone = answers(Harness(folder, ROOMY), BRANCHES[:1])
    together = Harness(folder, ROOMY)
    together.submit(generate(PROMPT[:7], [Branch(1, 1, 4)] * 2, ignore_eos=True))
    assert answers(together, BRANCHES)[:1] == alone
    assert answers(together, BRANCHES[:3])[:1] == alone
    # The host waits for the router, as experts are multiplied one by one.
    assert EmulatedGraph.replayed > 0


@pytest.mark.long
def test_sampled_tokens_follow_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pearson's chi-squared of the first tokens of many branches against the softmax of the engine's own logits."""
    folder = model("fp8", tmp_path, monkeypatch)
    harness = Harness(folder, replace(ROOMY, max_running=NUM_SAMPLES))
    item = ScoreItem((PROMPT,), (0,))
    [result] = harness.score(score(item, token_ids=range(harness.core.model.info.vocab_size)))
    probabilities = torch.tensor(result.values, dtype=torch.float64).squeeze(0).softmax(0)
    branches = [Branch(seed=2, key=key, max_tokens=1) for key in range(NUM_SAMPLES)]
    found = Counter(tokens[0] for tokens, _ in answers(harness, branches, temperature=1.0))
    expected = NUM_SAMPLES * probabilities
    common = (expected >= 5).nonzero().flatten().tolist()
    counts = [found[token] for token in common]
    rates = [float(expected[token]) for token in common]
    p_value = chisquare([*counts, NUM_SAMPLES - sum(counts)], [*rates, NUM_SAMPLES - sum(rates)]).pvalue
    assert len(common) >= 5
    assert p_value > 1e-3
