"""gpt-oss with experts in MXFP4, in the published layout: exactly the weights that transformers dequantises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.core.check import check_model
from engine.models import gpt_oss
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.protocol.types import Branch, EngineError
from engine.weights.formats import mxfp4
from engine.weights.matrix import dense
from engine.weights.safetensors import Weights
from kernels.linear import blocks
from kernels.linear.blocks import BlockLinear
from tests.closeness import EPS
from tests.engine.conftest import save_random_model
from tests.engine.exact import exact_logits
from tests.engine.gpu import EMULATED_GPU
from tests.engine.helpers import Harness, generate
from tests.engine.models.test_models import random_tokens
from tests.engine.quantization.models import dense_product
from tests.long import mostly_long
from tests.seeds import shift

EXPERTS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CONFIG = SIZES | {
    # All experts compute each token, so that no rounding sends one to another expert.
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "sliding_window": 16, "num_hidden_layers": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
DOWN = "model.layers.1.mlp.experts.down_proj"


def random_stack(experts: int, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the blocks and scales of random weights, most of them less than 1."""
    groups = columns // 32
    codes = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(122, 125, (experts, rows, groups), dtype=torch.uint8, generator=generator)


def write_models(folder: Path, seed: int) -> tuple[Path, Path]:
    """Return the folders of a model with experts in MXFP4, and of the same model as transformers dequantises it."""
    ours, plain = folder / "mxfp4", folder / "plain"
    for made in (ours, plain):
        made.mkdir()
        save_random_model("GptOssForCausalLM", CONFIG, made)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    generator, packed = torch.Generator().manual_seed(shift(seed)), {}
    for name in [name for name in tensors if name.endswith("_proj")]:
        count, columns, rows = tensors[name].shape
        stack = random_stack(count, rows, columns, generator)
        tensors[name] = convert_moe_packed_tensors(*stack, dtype=torch.float32)
        packed |= dict(zip((f"{name}_blocks", f"{name}_scales"), stack, strict=True))
    metadata = {"format": "pt"}
    save_file(tensors, plain / "model.safetensors", metadata)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_proj")}
    save_file(kept | packed, ours / "model.safetensors", metadata)
    fields = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(fields | {"quantization_config": QUANTIZATION}))
    return ours, plain


class RoundedExperts(TorchFunctionMode):
    """Rounds the inputs of experts to 8 bits in groups of 32, as products with blocks do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.matmul, Tensor.__matmul__) and args[1].ndim == 2:
            groups = args[0].unflatten(-1, (-1, 32))
            step = groups.abs().amax(-1, keepdim=True) / 127
            args = ((groups / step).round().mul(step).flatten(-2), *args[1:])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_gpu_multiplies_by_all_experts_at_once(is_batch_invariant: bool, tmp_path: Path) -> None:
    """Its host waits for no router then, and the results are those of the dequantised experts."""
    device_config = replace(EMULATED_GPU, is_batch_invariant=is_batch_invariant)
    models = [
        load_model(folder, lambda config: config.max_context, device_config) for folder in write_models(tmp_path, 0)
    ]
    ours, plain = (model for model in models if isinstance(model, Decoder))
    assert (ours.is_capturable, plain.is_capturable) == (True, False)
    for one, other in zip(ours._layers, plain._layers, strict=True):
        x = torch.randn(9, ours.config.hidden_size, generator=torch.Generator().manual_seed(shift(1)))
        expected = other.mlp(x)
        bound = 64 * EPS * float(expected.abs().max())
        torch.testing.assert_close(one.mlp(x), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("seed", range(20))
def test_weights_equal_those_of_transformers_to_the_bit(seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(shift(seed))
    stack = random_stack(2, 24, 64, generator)
    stack[1].random_(0, 253, generator=generator)  # 2**126 times 6 is beyond float32
    expected = convert_moe_packed_tensors(*stack, dtype=torch.float32).transpose(1, 2)
    save_file(dict(zip(("m_blocks", "m_scales"), stack, strict=True)), tmp_path / "model.safetensors")
    order = torch.randperm(24, generator=generator)
    for chosen in (None, order):
        weights = Weights(tmp_path)
        found = mxfp4.take_stack(weights, "m", (2, 24, 64), chosen)
        weights.finish()
        for matrix, right in zip(found, expected, strict=True):
            assert torch.equal(matrix.dense(), right if chosen is None else right[chosen])
            on_gpu = matrix.to_gpu_matrix()
            assert torch.equal(dense(on_gpu), matrix.dense())


@pytest.mark.parametrize("seed", mostly_long(range(20), every=10))
def test_logits_are_those_of_the_dequantised_model(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit with products in float32; from the 4 bits as close as activations rounded to 8 bits allow."""
    ours, plain = write_models(tmp_path, seed)
    tokens = random_tokens(60, seed)
    logits, exact = compute_text_logits(open_model(ours), tokens), exact_logits(plain, tokens)
    with RoundedExperts():
        rounding = float((exact_logits(plain, tokens) - exact).abs().max())
    assert 0 < float((logits - exact).abs().max()) < 2 * rounding
    monkeypatch.setattr(gpt_oss, "create_product", dense_product)
    assert torch.equal(compute_text_logits(open_model(ours), tokens), compute_text_logits(open_model(plain), tokens))


@pytest.mark.skipif(not blocks.is_supported(), reason="this processor lacks products of bytes")
def test_experts_keep_their_bits_and_serve_branches_with_the_cache(tmp_path: Path) -> None:
    ours, _ = write_models(tmp_path, 0)
    model: Any = open_model(ours)
    assert {type(product) for product in model._layers[0].mlp.products} == {BlockLinear}
    request = generate(tuple(random_tokens(40, 1)), [Branch(1, 2, 20), Branch(2, 2, 20)], temperature=1.0)
    [first] = Harness(ours).complete(request)[:1]
    assert Harness(ours).complete(request)[0].token_ids == first.token_ids


def test_the_check_dequantises_for_transformers(tmp_path: Path) -> None:
    ours, _ = write_models(tmp_path, 0)
    result = check_model(ours, lambda done, total, next_part: None)
    assert result.is_close
    assert result.layouts is not None


def cut(name: str, shape: Sequence[slice]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][tuple(shape)].contiguous()

    return change


def remove(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (remove(f"{DOWN}_scales"), {}, f"lacks the tensor '{DOWN}_scales', which its config.json requires"),
        (remove(f"{DOWN}_blocks"), {}, f"lacks the tensor '{DOWN}_blocks', which its config.json requires"),
        (
            cut(f"{DOWN}_blocks", [slice(None), slice(None), slice(None), slice(15)]),
            {},
            f"'{DOWN}_blocks' has shape (3, 64, 3, 15), its config.json says (3, 64, 3, 16)",
        ),
        (
            cut(f"{DOWN}_scales", [slice(None), slice(60)]),
            {},
            f"'{DOWN}_scales' has shape (3, 60, 3), its config.json says (3, 64, 3)",
        ),
        (
            lambda tensors: None,
            {"intermediate_size": 80},
            "'model.layers.0.mlp.experts.gate_up_proj_blocks' has shape (3, 192, 2, 16), its config.json says (3, 160",
        ),
        (
            lambda tensors: None,
            {"hidden_size": 72},
            "'model.layers.0.mlp.experts.gate_up_proj': groups of 32, those of MXFP4, do not divide 72 columns",
        ),
    ],
)
def test_wrong_blocks_are_refused_in_one_line_before_weights_are_read(
    change: Callable[[dict[str, Tensor]], None],
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, _ = write_models(tmp_path, 0)
    tensors, config = load_file(ours / "model.safetensors"), json.loads((ours / "config.json").read_text())
    change(tensors)
    save_file(tensors, ours / "model.safetensors")
    (ours / "config.json").write_text(json.dumps(config | fields))
    monkeypatch.setattr(Weights, "_take_tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(EngineError, match=re.escape(message)) as error:
        open_model(ours)
    assert "\n" not in str(error.value)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    stack = random_stack(2, 24, 64, torch.Generator().manual_seed(shift(0)))
    stack[1][1, 3, 0] = 255
    save_file(dict(zip(("m_blocks", "m_scales"), stack, strict=True)), tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match="'m' is corrupt: 1 of 48 scales are not finite"):
        mxfp4.take_stack(Weights(tmp_path), "m", (2, 24, 64))


def test_a_setting_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="quantization_config: rotation is 'hadamard'"):
        mxfp4.create_reader(QUANTIZATION | {"rotation": "hadamard"})
