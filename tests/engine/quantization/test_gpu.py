"""The GPU code for quantized checkpoints, run on the CPU with the kernels' references."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.device import DeviceConfig
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.models.feed_forward import GatedMlp
from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineError, ScoreItem
from engine.weights.matmul import ConcatenatedProducts, QuantizedLinear, create_product
from engine.weights.matrices.float8 import Float8Matrix
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.int8 import Int8Matrix
from engine.weights.matrices.nf4 import Nf4Matrix
from engine.weights.matrix import Matrix, dense
from kernels.linear.fp32 import Linear, Product
from kernels.linear.nf4 import Nf4
from tests.closeness import EPS, assert_rounded, product_bound
from tests.engine.conftest import save_random_model
from tests.engine.exact import float32_loss, float32_share
from tests.engine.gpu import EMULATED_GPU, EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.quantization.models import METHODS, ROUNDS, SIZES, dense_product, measure_rounding, quantised
from tests.long import mostly_long
from tests.seeds import shift

INTO = 256


def groups(
    rows: int, size: int = 32, *, bits: int = 4, shuffled: int | None = None, zero: int | None = None
) -> GroupedMatrix:
    rng = torch.Generator().manual_seed(shift(rows))
    codes = torch.randint(0, 1 << bits, (rows, INTO), generator=rng).byte()
    scales = torch.rand(rows, INTO // size, generator=rng) + 0.1
    zeros = torch.randint(0, (1 << bits) + 1, scales.shape, generator=rng).float()
    if zero is not None:
        zeros = torch.full_like(zeros, float(zero))
    order = None
    if shuffled is not None:
        order = torch.randperm(INTO, generator=torch.Generator().manual_seed(shift(shuffled))) // size
    return GroupedMatrix(codes, scales, zeros, bits, order)


def ints(rows: int) -> Matrix:
    rng = torch.Generator().manual_seed(shift(rows))
    return Int8Matrix(torch.randint(-127, 128, (rows, INTO), generator=rng).to(torch.int8), torch.rand(rows) + 0.1)


def floats(rows: int, block: tuple[int, int] | None = None, *, rounds: bool = True) -> Matrix:
    """Return float8 codes and scales; without a block there is one scale for all."""
    block = (rows, INTO) if block is None else block
    scales = torch.rand(-(-rows // block[0]), -(-INTO // block[1])) + 0.1
    return Float8Matrix(torch.randn(rows, INTO).to(torch.float8_e4m3fn), scales, block, rounds)


def fours(rows: int, size: int = 64) -> Matrix:
    packed = torch.randint(0, 256, (rows, INTO // 2)).byte()
    return Nf4Matrix(Nf4(packed, torch.rand(INTO // size, rows) + 0.1))


def whole(rows: int) -> Matrix:
    return torch.randn(rows, INTO)


EXACT, ROUNDED = 0.0, 0.05
"""Bounds of the error; formats that round activations to float8 or int8 change results by some hundredths."""
CASES: dict[str, tuple[list[Matrix], type, float]] = {
    "4 bits": ([groups(64), groups(32), groups(24)], QuantizedLinear, EXACT),
    "4 bits, act-order": ([groups(64, shuffled=1), groups(32, shuffled=1)], QuantizedLinear, EXACT),
    "4 bits, two act-orders": ([groups(64, shuffled=1), groups(32, shuffled=2)], ConcatenatedProducts, EXACT),
    "4 bits, two sizes of groups": ([groups(64, 32), groups(32, 64)], ConcatenatedProducts, EXACT),
    "4 and 8 bits": ([groups(64), groups(32, bits=8)], ConcatenatedProducts, EXACT),
    "8 bits, symmetric": ([groups(64, bits=8, zero=128), groups(32, bits=8, zero=128)], QuantizedLinear, EXACT),
    "8 bits, whole rows": ([groups(64, INTO, bits=8, zero=128)], QuantizedLinear, EXACT),
    "8 bits, zeros": ([groups(64, bits=8), groups(32, bits=8, zero=128)], QuantizedLinear, EXACT),
    "8 bits, act-order": ([groups(64, bits=8, shuffled=1)], QuantizedLinear, EXACT),
    "W8A8": ([ints(64), ints(32)], QuantizedLinear, ROUNDED),
    "float8 by tensor": ([floats(64), floats(32)], QuantizedLinear, ROUNDED),
    "float8 by channel": ([floats(64, (1, INTO)), floats(32, (1, INTO))], QuantizedLinear, ROUNDED),
    "float8 by tensor and channel": ([floats(64, (1, INTO)), floats(32)], QuantizedLinear, ROUNDED),
    "float8 by block": ([floats(256, (128, 128)), floats(40, (128, 128))], QuantizedLinear, ROUNDED),
    "float8 by block, blocks of two parts": (
        [floats(40, (128, 128)), floats(256, (128, 128))],
        ConcatenatedProducts,
        ROUNDED,
    ),
    "float8 weights alone": ([floats(64, rounds=False), floats(32, rounds=False)], QuantizedLinear, EXACT),
    "float8 weights alone, by block": (
        [floats(64, (48, 64), rounds=False), floats(32, (48, 64), rounds=False)], QuantizedLinear, EXACT,
    ),
    "NF4": ([fours(64), fours(32)], QuantizedLinear, EXACT),
    "NF4, two sizes of groups": ([fours(64), fours(32, 128)], ConcatenatedProducts, EXACT),
    "one part is left as it was": ([groups(64), whole(32)], ConcatenatedProducts, EXACT),
    "all are": ([whole(64), whole(32)], Linear, EXACT),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_are_fused_as_far_as_possible_and_exact(name: str) -> None:
    """Results are exact up to the rounding of activations that a format asks for."""
    parts, kind, tolerance = CASES[name]
    weight = torch.cat([dense(part) for part in parts]).double()
    torch.manual_seed(shift(0))
    x, bias, residual = torch.randn(5, INTO), torch.randn(len(weight)), torch.randn(5, len(weight))
    for added in (None, bias):
        product = create_product(parts, added, EMULATED_GPU)
        assert type(product) is kind
        assert product.parameters == weight.numel() + (0 if added is None else len(added))
        expected = x.double() @ weight.T + (0 if added is None else added)
        for found, right in ((product(x), expected), (product.add(x, residual), expected + residual)):
            assert found.dtype == torch.float32
            if tolerance == EXACT:
                assert_rounded(found, right, product_bound(x, weight) + 2 * EPS * right.abs())
            assert (found.double() - right).norm() / right.norm() < ROUNDED
        if tolerance == ROUNDED:
            assert (product(x).double() - expected).norm() / expected.norm() > 1e-4


@pytest.mark.parametrize("name", [name for name, (*_, tolerance) in CASES.items() if tolerance == EXACT])
def test_heads_return_float32_without_a_rounding_to_the_activations_dtype(name: str) -> None:
    parts, *_ = CASES[name]
    weight = torch.cat([dense(part) for part in parts]).bfloat16()
    x = torch.randn(5, INTO, generator=torch.Generator().manual_seed(shift(0))).bfloat16()
    head = create_product(parts, None, replace(EMULATED_GPU, dtype=torch.bfloat16))
    found = head.to_float32(x)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    if type(head) is Linear:
        assert_rounded(found, x.double() @ weight.double().T, product_bound(x, weight))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (groups(64, 8), "256 inputs in 32 groups, each of which must be a multiple of 16"),
        (replace(groups(64, shuffled=1), group_of=torch.arange(INTO) // 40), "groups of different sizes"),
        (floats(64, (48, 80)), "blocks of 48 by 80; 128 by 128 and whole rows are supported"),
        (floats(64, (48, 40), rounds=False), "blocks of 40 inputs"),
        (Int8Matrix(torch.zeros(64, 48, dtype=torch.int8), torch.ones(64)), "48 inputs by activations of 8 bits"),
    ],
)
def test_weights_without_a_kernel_are_refused_and_not_widened(part: Matrix, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        create_product([groups(64), part], None, EMULATED_GPU)


FP8_BY = {
    "tensor": {"quant_method": "fp8"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    **{
        name: {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": rounded}},
        }
        for name, rounded in (
            ("channel", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
            ("channel, weights alone", None),
        )
    },
}


@pytest.mark.parametrize(
    ("config", "first"),
    [
        *[pytest.param(config, (8, 9), id=f"fp8 by {name}") for name, config in FP8_BY.items()],
        pytest.param({"quant_method": "gptq", "bits": 4}, (8, 0), id="gptq"),
        pytest.param({"quant_method": "awq", "bits": 4}, (8, 0), id="awq"),
        pytest.param(
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, (8, 0), id="nf4"
        ),
    ],
)
def test_a_format_is_refused_before_weights_are_read_on_a_gpu_that_lacks_it(
    config: dict[str, object], first: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every GPU from the first with the format on, loading goes on; the checkpoint's weights are plain."""
    save_random_model(QWEN2, SIZES, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(described))
    cuda = DeviceConfig(torch.device("cuda"), torch.bfloat16, uses_gpu_kernels=True)
    monkeypatch.setattr("engine.models.load.Decoder", lambda *_: "weights are read")
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        if capability >= first:
            assert load_model(tmp_path, lambda _: 8, cuda) == "weights are read"
            continue
        with pytest.raises(EngineError, match=r"needs a GPU of compute capability 8\.9 .*serve a checkpoint") as caught:
            load_model(tmp_path, lambda _: 8, cuda)
        assert "\n" not in str(caught.value)


def packed(product: Product) -> bool:
    parts = product.products if isinstance(product, ConcatenatedProducts) else [product]
    return all(isinstance(part, QuantizedLinear) for part in parts)


QWEN2, PHI3 = "Qwen2ForCausalLM", "Phi3ForCausalLM"
KINDS = [(QWEN2, method) for method in METHODS] + [(PHI3, method) for method in METHODS if method != "awq"]


@pytest.mark.parametrize(("kind", "method"), mostly_long(KINDS, every=2))
def test_weights_stay_quantized_and_logits_equal_those_of_dequantized_weights(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused (not possible for awq) and unfused products, with biases and without."""
    folder = quantised(kind, method, tmp_path)
    model = load_model(folder, lambda config: config.max_context, EMULATED_GPU)
    assert isinstance(model, Decoder)
    for layer in model._layers:
        assert isinstance(layer.mlp, GatedMlp)
        assert all(map(packed, (layer.qkv, layer.output, *layer.mlp.products)))
    assert packed(model._head[0]) == (method in ("W8A8", "int4"))
    assert model.parameters == open_model(folder.with_name("original")).parameters
    tokens = random.Random(shift(0)).choices(range(3, 360), k=40)
    found = compute_text_logits(model, tokens)
    monkeypatch.setattr(decoder, "create_product", dense_product)
    expected = compute_text_logits(open_model(folder), tokens)
    assert (found - expected).norm() / expected.norm() < ROUNDS.get(method, float32_share(folder.with_name("original")))


@pytest.mark.parametrize("method", mostly_long(METHODS, every=3))
def test_the_engine_samples_the_same_tokens_as_the_plain_model(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paged, padded engine with CUDA graphs is compared with a plain forward pass."""
    folder = quantised(QWEN2, method, tmp_path)
    emulate_gpu(monkeypatch)
    prompt, generated, gap = generate_greedily(folder, SMALL)
    rounding = measure_rounding(folder, prompt + generated) if method in ROUNDS else 0.0
    # The largest of thousands of changes is about four standard deviations; the difference of two logits of two runs
    # has twice the standard deviation of one change.
    assert gap < 2 * rounding + 2 * float32_loss(folder.with_name("original")).logit
    assert EmulatedGraph.replayed > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_quantized_models_run_on_a_gpu(method: str, dtype: str, tmp_path: Path) -> None:
    """Logits of up to 5 differ from the CPU's by a few units of bfloat16 (2^-8)."""
    folder = quantised(QWEN2, method, tmp_path)
    *_, gap = generate_greedily(folder, replace(SMALL, device="cuda", dtype=dtype))
    assert gap < (0.02 if dtype == "float32" else 0.5)


def generate_greedily(folder: Path, options: EngineOptions) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Return a prompt, what the engine wrote, and by how much a token's logit is below the highest at most."""
    prompt = tuple(random.Random(shift(1)).choices(range(3, 360), k=20))
    [found] = Harness(folder, options).complete(
        generate(prompt, [Branch(seed=1, key=0, max_tokens=12)], temperature=0.0)
    )
    model = load_model(folder, lambda config: config.max_context, EMULATED_GPU)
    laws = compute_text_logits(model, [*prompt, *found.token_ids])[len(prompt) - 1 : -1]
    gap = max(float(law.max() - law[token]) for law, token in zip(laws, found.token_ids, strict=True))
    return prompt, found.token_ids, gap


def test_a_quantized_reward_model_gives_the_values_of_its_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tuple(random.Random(shift(1)).choices(range(3, 360), k=30))
    folder = quantised("Qwen3ForTokenClassification", "int4", tmp_path, num_labels=2)
    asked = score(ScoreItem((text, text[:7]), (0, 1)))
    bound = 2 * float32_loss(folder.with_name("original")).logit
    monkeypatch.setattr(decoder, "create_product", dense_product)
    expected = Harness(folder, replace(SMALL, device="cpu")).score(asked)
    monkeypatch.undo()
    emulate_gpu(monkeypatch)
    for ours, theirs in zip(Harness(folder).score(asked), expected, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=bound, rtol=0)
