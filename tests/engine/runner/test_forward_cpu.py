"""Steps replayed from recorded kernels give the same bits as steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.runner import forward_cpu
from engine.runner.forward_cpu import CpuForward
from kernels.cpu import availability
from kernels.cpu.runtime import recorder
from kernels.cpu.runtime.recorder import Arena, Recording
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.models.test_models import random_tokens
from tests.long import mostly_long, mostly_long_grid

OPTIONS = EngineOptions(kv_tokens=8192, max_running=64, step_tokens=512)
REPEATED = ["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "lfm2", "gemma2", "olmo3", "ministral3"]
REPEATED += ["nemotron_h", "granite_hybrid_dense", "falcon_h1_norm", "mamba2"]
REPEATED += ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "gemma4", "gemma4_shared", "gemma4_plain"]
THREADS = [1, 2]
OTHERS = ["gemma4_moe", "phi3", "nemotron_h_moe"]


@pytest.mark.parametrize(("kind", "threads"), mostly_long_grid(REPEATED, THREADS, every=3))
def test_a_replayed_step_gives_the_same_bits(
    checkpoints: Checkpoints, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_repeated(checkpoints(kind), threads, monkeypatch)


@pytest.mark.parametrize(("bits", "size"), mostly_long([(8, None), (4, 16)], every=3))
@pytest.mark.parametrize("threads", THREADS)
def test_a_replayed_step_of_a_quantized_model_gives_the_same_bits(
    checkpoints: Checkpoints,
    bits: int,
    size: int | None,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not availability.HAS_BYTE_PRODUCTS:
        pytest.skip("needs a processor with AVX2 or ARM's dot products")
    quantize(checkpoints("qwen3"), tmp_path / "quantized", create_options("rtn", bits, size, None), lambda *_: None)
    assert_repeated(tmp_path / "quantized", threads, monkeypatch)


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_that_cannot_be_recorded_never_are(checkpoints: Checkpoints, kind: str) -> None:
    harness = Harness(checkpoints(kind), OPTIONS)
    answers(harness, 0)
    forward = harness.core.runner.forward
    assert isinstance(forward, CpuForward)
    assert not forward.graphs


def test_a_graph_that_outgrows_its_arena_is_recorded_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the arena grows, the recordings in the old one are dropped."""
    harness = Harness(checkpoints("qwen3"), OPTIONS)
    num_records, record = 0, recorder.record

    def counted(work: Callable[[], Tensor], arena: Arena) -> tuple[Recording, Tensor]:
        nonlocal num_records
        num_records += 1
        return record(work, arena)

    monkeypatch.setattr("kernels.cpu.runtime.kernel_graph.record", counted)
    first = answers(harness, 0)
    forward = harness.core.runner.forward
    assert isinstance(forward, CpuForward)
    assert num_records > len(forward.graphs)
    assert answers(harness, 0) == first


def assert_repeated(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the checkpoint's steps are recorded, and that the results are the same without recording."""
    torch.set_num_threads(threads)
    try:
        repeated = Harness(folder, OPTIONS)
        found = [answers(repeated, seed) for seed in range(3)]
        forward = repeated.core.runner.forward
        assert isinstance(forward, CpuForward)
        assert len(forward.graphs) > 5
        monkeypatch.setattr(forward_cpu, "_MAX_RECORDED_TOKENS", 0)
        plain = Harness(folder, OPTIONS)
        assert [answers(plain, seed) for seed in range(3)] == found
    finally:
        torch.set_num_threads(1)


def answers(harness: Harness, seed: int) -> list[tuple[tuple[int, ...], float]]:
    """Return tokens and log-probability of branches that end one after the other."""
    branches = [Branch(seed, key, 4 + 2 * key) for key in range(12)]
    events = harness.submit(generate(random_tokens(20, 5), branches, ignore_eos=True))
    harness.run()
    completions = sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)
    assert len(completions) == len(branches)
    return [(completion.token_ids, completion.logprob) for completion in completions]
