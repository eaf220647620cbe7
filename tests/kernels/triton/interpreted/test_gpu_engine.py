"""The engine with interpreted GPU kernels samples the same tokens as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.device import KV_DTYPES
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.models.interface import Batch
from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import Drafter
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.drafters.eagle import load_eagle
from kernels.common.quantization import Quantization
from kernels.linear import fp32
from kernels.triton import norm
from tests.engine.conftest import save_checkpoint
from tests.engine.exact import gap
from tests.engine.gpu import EMULATED_GPU, EmulatedGraph, emulate_gpu
from tests.engine.helpers import Harness, generate, qwen3_for
from tests.engine.quantization.models import ROUNDS, measure_rounding, quantised
from tests.engine.speculation.heads import Recorder, eagle_parts, save_head
from tests.engine.ties import count_same_tokens, count_up_to_tie
from tests.kernels.triton.device import DEVICE
from tests.long import mostly_long

PROMPT = tuple(range(3, 21))
LAWS: list[dict[str, object]] = [
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 3},
]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/runner/test_gpu_engine.py runs the engine as it is")
@pytest.mark.long  # the shorter test below covers W8A8 with the same attention and sampling
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        *((qwen3_for(kv_dtype), kv_dtype) for kv_dtype in KV_DTYPES),
        *(("gpt_oss", "auto"), ("gemma4_shared", "auto"), ("gemma4_moe", "int8")),
        *(("deepseek_v2", "auto"), ("deepseek_v3", "int4"), ("glm4_moe_lite", "fp8")),
    ],
)
def test_kernels_sample_the_tokens_that_the_cpu_samples(
    kind: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(kind, tmp_path)
    options = EngineOptions(kv_tokens=256, max_running=4, device="cpu", kv_dtype=kv_dtype)
    requests = [generate(PROMPT, [Branch(seed=1, key=key, max_tokens=4) for key in range(2)], **law) for law in LAWS]
    plain = Harness(tmp_path, options)
    expected = [plain.complete(request) for request in requests]
    # Distributions at temperatures above 1/2, of that many tokens.
    bound = 2 * 4 * gap(tmp_path, kv_dtype)
    emulate_gpu(monkeypatch)
    # Every kernel's public function now dispatches to the GPU kernel.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    harness = Harness(tmp_path, options)
    for request, theirs in zip(requests, expected, strict=True):
        ours = harness.complete(request)
        for branch, one, other in zip(request.branches, ours, theirs, strict=True):
            if count_same_tokens(tmp_path, request, branch, one.token_ids, other.token_ids, kv_dtype) == 4:
                assert one.logprob == pytest.approx(other.logprob, abs=bound)
    assert EmulatedGraph.replayed > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/quantization/test_gpu.py runs the engine as it is")
@pytest.mark.parametrize("method", mostly_long(["W8A8", "int8", "gptq", "fp8", "nf4"], every=5))
def test_quantized_weights_use_their_kernels_and_sample_the_same_tokens(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as with the references of the kernels, except at ties and for activations that round to other codes."""
    folder = quantised("Qwen2ForCausalLM", method, tmp_path, num_hidden_layers=1)
    options = EngineOptions(kv_tokens=256, max_running=4)
    request = generate(PROMPT, [Branch(seed=1, key=key, max_tokens=3) for key in range(2)], temperature=0.9)
    loss = gap(folder.with_name("original"))

    def next_logits(tokens: Sequence[int]) -> tuple[NDArray[np.float64], float]:
        logits = compute_text_logits(open_model(folder), tokens)[-1].double().numpy()
        return logits, loss + (measure_rounding(folder, tokens) if method in ROUNDS else 0.0)

    emulate_gpu(monkeypatch)
    expected = Harness(folder, options).complete(request)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    ours = Harness(folder, options).complete(request)
    monkeypatch.undo()
    for branch, one, other in zip(request.branches, ours, expected, strict=True):
        if count_up_to_tie(request, branch, one.token_ids, other.token_ids, set(), next_logits) == 3:
            # Distributions at temperatures above 1/2, of that many tokens.
            bound = 2 * 3 * next_logits((*PROMPT, *one.token_ids))[1]
            assert one.logprob == pytest.approx(other.logprob, abs=bound)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/runner/test_gpu_engine.py runs the engine as it is")
@pytest.mark.parametrize("kind", mostly_long(["draft_model", "eagle"], every=2))
def test_drafts_from_the_kernels_are_those_of_their_references(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint("qwen3", tmp_path)
    options = EngineOptions(kv_tokens=64, page_size=8, max_running=2, device="cpu")
    request = generate(PROMPT, [Branch(seed=1, key=key, max_tokens=5) for key in range(2)], temperature=0.9)
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    answers, drafts = [], []
    for is_cuda in (False, True):
        if is_cuda:
            monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        harness = Harness(tmp_path, options)
        model = harness.core.model.decoder
        if kind == "eagle":
            drafter: Drafter = load_eagle(save_head(tmp_path / "head", *eagle_parts()), model)
        else:
            drafter = DraftModel(load_model(tmp_path, lambda _: 64, model.device_config), context=64)
        recorder = Recorder(drafter)
        harness.core.start_speculation(recorder, FixedController(2, 5))
        answers.append([one.token_ids for one in harness.complete(request)])
        drafts.append([one.draft for one in recorder.asked])
    assert answers[0] == answers[1]
    assert [(draft.tokens, draft.parents) for draft in drafts[1]] == [(one.tokens, one.parents) for one in drafts[0]]
    assert sum(len(draft) for draft in drafts[0]) >= 10


class NoAttention:
    """Attention that returns each token's own queries, so that layers need no cache."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return qkv[:, : self._heads].flatten(1)


def hidden_states(model: Decoder) -> list[Tensor]:
    """Return the hidden states of some tokens after each layer."""
    kept: list[Tensor] = []
    tokens = torch.arange(5)
    attend: Any = NoAttention(model.config.attention[0].heads)
    kept.append(model.forward(Batch(tokens + 7, tokens), attend, lambda _, hidden: kept.append(hidden)))
    return kept


def add_then_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantization: Quantization | None = None
) -> tuple[Tensor, Tensor]:
    assert quantization is None
    total = residual + x
    return norm.rms_norm(total, weight, eps), total


@pytest.mark.skipif(DEVICE != "cpu", reason="compares kernels in the interpreter")
@pytest.mark.parametrize("kind", mostly_long(["gemma2", "qwen3", "qwen3_moe"], every=3))
def test_sums_fused_with_norms_change_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum is rounded to bfloat16 before it is normalised, as by a kernel for each."""
    save_checkpoint(kind, tmp_path)
    device_config = replace(EMULATED_GPU, dtype=torch.bfloat16)
    model = load_model(tmp_path, lambda config: config.max_context, device_config)
    assert isinstance(model, Decoder)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    # PyTorch's own product of bfloat16 in float32, of a router, exists on a GPU alone.
    monkeypatch.setattr(fp32, "multiply_to_float32", partial(fp32.multiply_in_float32, dtype=torch.float32))
    fused, add_rms_norm = [0], norm.add_rms_norm

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        fused[0] += 1
        return add_rms_norm(*arguments)

    monkeypatch.setattr(norm, "add_rms_norm", counted)
    with torch.inference_mode():
        found = hidden_states(model)
        monkeypatch.setattr(decoder, "add_rms_norm", add_then_norm)
        expected = hidden_states(model)
    # All norms of a layer's inputs but the first, and the last one, of rows that are read alone.
    assert fused == [2 * model.config.num_layers - 1]
    assert len(found) == len(expected) == model.config.num_layers
    assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/runner/test_gpu_engine.py runs the engine as it is")
@pytest.mark.long  # the tests of the kernels cover each of them
@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_h1_norm", "lfm2", "mamba2"])
def test_kernels_of_states_sample_the_tokens_that_the_cpu_samples(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request forks the state of the first one's prompt."""
    save_checkpoint(kind, tmp_path)
    options = EngineOptions(kv_tokens=256, max_running=4, device="cpu")
    requests = [generate(PROMPT, [Branch(seed=1, key=key, max_tokens=4) for key in range(2)], **law) for law in LAWS]
    plain = Harness(tmp_path, options)
    expected = [plain.complete(request) for request in requests]
    bound = 2 * 4 * gap(tmp_path)
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    harness = Harness(tmp_path, options)
    for request, theirs in zip(requests, expected, strict=True):
        ours = harness.complete(request)
        assert [one.cached_tokens for one in ours] == [one.cached_tokens for one in theirs]
        for branch, one, other in zip(request.branches, ours, theirs, strict=True):
            if count_same_tokens(tmp_path, request, branch, one.token_ids, other.token_ids) == 4:
                assert one.logprob == pytest.approx(other.logprob, abs=bound)
    assert EmulatedGraph.replayed > 0
