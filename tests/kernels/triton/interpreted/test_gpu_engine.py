"""The engine on the kernels themselves, interpreted: the same tokens as the engine of the CPU draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core import CoreOptions
from engine.types import Branch
from tests.engine.conftest import save_checkpoint
from tests.engine.gpu import Replay, pretend
from tests.engine.helpers import Harness, generate
from tests.kernels.triton.device import DEVICE

PROMPT = tuple(range(3, 21))
LAWS: list[dict[str, object]] = [
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 3},
]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU tests/engine/test_gpu_engine.py runs the engine as it is")
def test_the_kernels_draw_the_tokens_that_the_cpu_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("qwen3", tmp_path)
    options = CoreOptions(kv_tokens=256, max_running=4, device="cpu")
    requests = [generate(PROMPT, [Branch(seed=1, key=key, max_tokens=4) for key in range(2)], **law) for law in LAWS]
    plain = Harness(tmp_path, options)
    expected = [plain.complete(request) for request in requests]
    pretend(monkeypatch)
    # Every kernel's public function now takes the way of a GPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    harness = Harness(tmp_path, options)
    for request, theirs in zip(requests, expected, strict=True):
        ours = harness.complete(request)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-3)
    assert Replay.replayed > 0
