"""Quantized keys and values: accuracy, memory, and refusals of unsupported types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reasoner
from engine.attention.cpu_torch import TorchAttention
from engine.cache.key_pool import kv_bytes_per_token
from engine.device import KV_DTYPES, DeviceConfig, select_kv_dtype
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError
from engine.runner.forward_cpu import CpuForward
from kernels.common.int4 import INT4
from reasoner.evaluation.suites.registry import load_problems
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness, generate, qwen3_for
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.engine.ties import assert_same_tokens

POLICY = Path(reasoner.__file__).parent / "bundled" / "policy"
EIGHT = ["int8", "fp8"]
CUDA = DeviceConfig(torch.device("cuda"), torch.bfloat16, uses_gpu_kernels=True)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.06), ("fp8", 0.25)])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gemma3", "phi3", "gpt2", "starcoder2"])
def test_logits_are_close_to_those_of_float32_keys_and_values(
    checkpoints: Checkpoints, kind: str, kv_dtype: str, bound: float
) -> None:
    """The weights are random, so attention is far sharper than a trained model's. The transformers backend runs the
    last two.
    """
    text = random_tokens(90, 4)
    exact = engine_logits(Harness(checkpoints(kind)), text)
    ours = engine_logits(Harness(checkpoints(kind), replace(SMALL, kv_dtype=kv_dtype)), text)
    assert 0 < (ours - exact).std() < bound * exact.std()


@pytest.mark.parametrize(
    ("kv_dtype", "same", "usual", "most"),
    [("int8", 0.85, 0.01, 0.2), ("fp8", 0.6, 0.05, 0.8), ("int4", 0.2, 0.12, 2.0)],
)
def test_the_bundled_policy_generates_nearly_the_same_texts(
    kv_dtype: str, same: float, usual: float, most: float
) -> None:
    """``same``: share of 40 problems whose greedy text is identical. ``usual`` and ``most``: bounds of the difference
    of the logits along the texts, in standard deviations of the logits.
    """
    exact, ours = (Harness(POLICY, EngineOptions(kv_tokens=32768, kv_dtype=dtype)) for dtype in ("auto", kv_dtype))
    tokenizer = exact.core.model.tokenizer
    problems = load_problems("countdown", limit=40)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": problem.text}]) for problem in problems]
    texts = [greedy(harness, prompts) for harness in (exact, ours)]
    assert sum(one == other for one, other in zip(*texts, strict=True)) >= same * len(prompts)
    for prompt, text in list(zip(prompts, texts[0], strict=True))[:6]:
        right, found = (engine_logits(harness, (*prompt, *text)) for harness in (exact, ours))
        assert (found - right).std() < usual * right.std()
        assert (found - right).abs().max() < most * right.std()


def greedy(harness: Harness, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    events = [harness.submit(generate(prompt, [Branch(0, 0, 128)], temperature=0.0)) for prompt in prompts]
    harness.run()
    return [one.token_ids for some in events for one in some if isinstance(one, Completion)]


@pytest.mark.parametrize("page_size", [16, 5])
def test_logits_are_near_those_of_float32_with_4_bits(checkpoints: Checkpoints, page_size: int) -> None:
    """The weights are random, so attention is far sharper than a trained model's."""
    text, options = random_tokens(90, 4), replace(SMALL, page_size=page_size)
    exact = engine_logits(Harness(checkpoints("qwen3_wide"), options), text)
    ours = engine_logits(Harness(checkpoints("qwen3_wide"), replace(options, kv_dtype="int4")), text)
    assert 0 < (ours - exact).std() < 0.5 * exact.std()


def test_8_bit_caches_hold_more_tokens_in_the_same_memory(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector of 16 numbers takes 64 bytes in float32, or 16 bytes and a scale of 4; one of 32 takes 128 bytes, or in
    4 bits 16 and a scale of 2."""
    monkeypatch.setattr("engine.core.model_setup._DEFAULT_KV_BYTES", 1 << 20)
    capacities = {}
    for kv_dtype in KV_DTYPES:
        engine = Harness(checkpoints(qwen3_for(kv_dtype)), EngineOptions(kv_dtype=kv_dtype)).core
        tensors = [engine.cache.data] + ([] if engine.cache.scales is None else [engine.cache.scales])
        size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        capacities[kv_dtype] = engine.stats.kv_capacity
        # The remaining bytes are less than a page.
        assert 0 <= (1 << 20) - size < size // capacities[kv_dtype] * 16
    assert capacities["int8"] == capacities["fp8"]
    page = 16 / capacities["auto"]  # relative size of a page: each capacity may be up to one page too small
    assert capacities["int8"] / capacities["auto"] == pytest.approx(64 / 20, rel=page)
    assert capacities["int4"] / capacities["auto"] == pytest.approx(64 / 18, rel=page)


def test_a_vector_of_64_numbers_takes_little_more_than_its_bits(checkpoints: Checkpoints) -> None:
    about = replace(Harness(checkpoints("qwen3")).core.model.config.attention[0], head_dim=64)
    sizes = [kv_bytes_per_token(about.shape, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8, INT4)]
    assert sizes == [2 * about.kv_heads * size for size in (256, 128, 68, 36)]


def test_an_unsupported_kv_dtype_is_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="kv_dtype 'int2' is not supported; choose one of auto, int8, fp8, int4"):
        Harness(checkpoints("qwen3"), EngineOptions(kv_dtype="int2"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert select_kv_dtype("int8", CUDA) is torch.int8
    with pytest.raises(
        EngineError, match=r"kv_dtype 'fp8': needs .* 8\.9 or later; this one has 8\.0: use --kv-dtype int8"
    ):
        select_kv_dtype("fp8", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert select_kv_dtype("fp8", CUDA) is torch.float8_e4m3fn
    assert select_kv_dtype("auto", CUDA) is torch.bfloat16


def test_heads_that_are_no_multiple_of_32_are_refused_with_4_bits(checkpoints: Checkpoints) -> None:
    message = "kv_dtype 'int4' needs heads whose size is a multiple of 32; those of this model have 16 numbers"
    with pytest.raises(EngineError, match=message):
        Harness(checkpoints("qwen3"), EngineOptions(kv_dtype="int4"))


def test_a_draft_model_whose_heads_are_no_multiple_of_32_is_refused_before_weights_are_read(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = checkpoints("qwen3")
    monkeypatch.setattr("engine.models.load.open_weights", lambda _: pytest.fail("weights were read"))
    message = (
        f"{draft}, the draft model: kv_dtype 'int4' needs heads whose size is a multiple of 32; those of this model"
    )
    with pytest.raises(EngineError, match=message):
        Harness(checkpoints("qwen3_wide"), EngineOptions(kv_dtype="int4", draft=f"draft_model={draft}"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "kv_dtype"), [*(("mistral", name) for name in EIGHT), ("qwen3_wide", "int4")])
def test_without_compiled_kernels_the_tokens_are_the_same(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, kind: str, kv_dtype: str, deterministic: bool
) -> None:
    options = replace(SMALL, kv_dtype=kv_dtype, deterministic=deterministic)
    asked = generate(random_tokens(60, 3), [Branch(2, key, 30) for key in range(6)], temperature=0.9, ignore_eos=True)
    expected = Harness(checkpoints(kind), options).complete(asked)
    for module in ("engine.attention.select", "engine.runner.batch", "engine.runner.forward"):
        monkeypatch.setattr(f"{module}.has_compiled_kernel", lambda *_: False)
    plain = Harness(checkpoints(kind), options)
    assert isinstance(plain.core.runner.forward, CpuForward)
    assert isinstance(plain.core.runner.forward._attend, TorchAttention)
    ours = plain.complete(asked)
    tokens = ([one.token_ids for one in some] for some in (ours, expected))
    assert_same_tokens(checkpoints(kind), [asked], *tokens, kv_dtype)
