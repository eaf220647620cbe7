"""The engine with interpreted GPU kernels samples the same tokens as on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.device import KV_DTYPES
from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import Drafter
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.drafters.eagle import load_eagle
from tests.engine.conftest import save_checkpoint
from tests.engine.exact import gap
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import Harness, generate, qwen3_for
from tests.engine.quantization.models import ROUNDS, quantised
from tests.engine.speculation.heads import Recorder, eagle_parts, save_head
from tests.kernels.triton.device import DEVICE
from tests.long import mostly_long

PROMPT = tuple(range(3, 21))
LAWS: list[dict[str, object]] = [
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 3},
]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/runner/test_gpu_engine.py runs the engine as it is")
@pytest.mark.long  # the shorter test below covers W8A8 with the same attention and sampling
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kernels_sample_the_tokens_that_the_cpu_samples(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(qwen3_for(kv_dtype), tmp_path)
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
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=bound)
    assert EmulatedGraph.replayed > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/quantization/test_gpu.py runs the engine as it is")
@pytest.mark.parametrize("method", mostly_long(["W8A8", "int8", "gptq", "fp8", "nf4"], every=5))
def test_quantized_weights_use_their_kernels_and_sample_the_same_tokens(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as with the references of the kernels, except for a few activations that round to other codes."""
    folder = quantised("Qwen2ForCausalLM", method, tmp_path, num_hidden_layers=1)
    bound = 2 * 3 * gap(folder.with_name("original")) + ROUNDS.get(method, 0) / 10
    options = EngineOptions(kv_tokens=256, max_running=4)
    request = generate(PROMPT, [Branch(seed=1, key=key, max_tokens=3) for key in range(2)], temperature=0.9)
    emulate_gpu(monkeypatch)
    expected = Harness(folder, options).complete(request)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    ours = Harness(folder, options).complete(request)
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in expected], abs=bound)


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
