"""Adapters over quantised weights (QLoRA): the base's product stays as it is, and the update is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.adapters.products import AdaptedProduct, AdapterRows
from engine.device import CPU, DeviceConfig
from engine.models.decoder import Decoder
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.weights.matmul import create_product
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.int8 import Int8Matrix
from engine.weights.matrix import dense
from kernels.common.quantization import Quantization, QuantizedRows
from kernels.linear.low_rank import NO_ADAPTER, LowRankUpdate, LowRankUpdates
from tests.closeness import EPS, assert_rounded
from tests.engine.adapters.lora import create_harness, save_adapter
from tests.engine.adapters.test_adapters import EXACT, complete, tokens_of
from tests.engine.conftest import save_random_model
from tests.engine.helpers import Harness
from tests.long import mostly_long
from tests.seeds import shift

ROWS, INTO = 11, 64
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
METHODS = [("gptq", 4), ("rtn", 8), ("awq", 4), ("rtn", 4), ("fp8", None), ("nf4", None)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shift(seed)))


def updates() -> list[LowRankUpdate]:
    """Return the updates of three adapters, of different ranks, for parts of 90 outputs."""
    parts = [(0, 0, 40, 3), (0, 40, 50, 16), (1, 0, 40, 17), (2, 40, 50, 5)]
    return [
        LowRankUpdate(adapter, first, draw(rank, INTO, seed=9 + index), draw(count, rank, seed=20 + index))
        for index, (adapter, first, count, rank) in enumerate(parts)
    ]


def indices() -> Tensor:
    return torch.tensor([0, 0, 1, NO_ADAPTER, 2, 0, 0, 0, 0, 0, NO_ADAPTER])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_kernel", [True, False])
def test_updates_are_those_of_each_rows_adapter(*, is_kernel: bool, dtype: torch.dtype) -> None:
    if is_kernel and dtype != torch.float32:
        pytest.skip("kernels take float32")
    low_rank = LowRankUpdates(updates(), 90, device=torch.device("cpu"), dtype=dtype, is_kernel=is_kernel)
    x, base = draw(ROWS, INTO).to(dtype), draw(ROWS, 90, seed=1).to(dtype)
    base[3, 5] = -0.0
    out = low_rank.add(x, base.clone(), indices())
    exact, size = base.double(), base.double().abs()
    for update in updates():
        own = indices() == update.adapter
        columns = slice(update.first, update.first + len(update.up))
        narrow = x.double() @ update.down.T.double()
        exact[own, columns] += (narrow @ update.up.T.double())[own]
        size[own, columns] += (narrow.abs() @ update.up.T.double().abs())[own]
    unit = EPS if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_rounded(out, exact, 40 * unit * size)
    alone = indices() == NO_ADAPTER
    assert torch.equal(out[alone].view(torch.int16), base[alone].view(torch.int16))


def test_a_rows_update_does_not_depend_on_the_other_rows() -> None:
    low_rank = LowRankUpdates(updates(), 90, device=torch.device("cpu"), dtype=torch.float32, is_kernel=True)
    x, base = draw(ROWS, INTO), draw(ROWS, 90, seed=1)
    together = low_rank.add(x, base.clone(), indices())
    for row in range(ROWS):
        alone = low_rank.add(x[row : row + 1], base[row : row + 1].clone(), indices()[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("block", [None, 16])
def test_inputs_that_were_quantized_for_the_base_are_read_as_their_codes_mean(block: int | None) -> None:
    low_rank = LowRankUpdates(updates(), 90, device=torch.device("cpu"), dtype=torch.float32, is_kernel=False)
    x, size = draw(ROWS, INTO), block or INTO
    blocks = x.view(ROWS, -1, size)
    scales = blocks.abs().amax(-1) / 127
    codes = (blocks / scales[..., None]).round().to(torch.int8)
    rows = QuantizedRows(codes.view(ROWS, INTO), scales if block else scales[:, 0], torch.float32)
    assert Quantization(torch.int8, block).block == block
    widened = (codes * scales[..., None]).view(ROWS, INTO)
    assert torch.equal(low_rank.add(rows, draw(ROWS, 90), indices()), low_rank.add(widened, draw(ROWS, 90), indices()))


def test_the_product_with_quantised_weights_is_not_touched() -> None:
    codes = torch.randint(-127, 128, (90, INTO), dtype=torch.int8)
    int8 = Int8Matrix(codes, draw(90, seed=4).abs())
    int4 = GroupedMatrix((codes.to(torch.int16) & 15).to(torch.uint8), draw(90, 2).abs(), torch.full((90, 2), 8.0), 4)
    gpu = DeviceConfig(torch.device("cpu"), torch.float32, uses_gpu_kernels=True)
    for matrix in (int8, int4, dense(int8)):
        for config in (CPU, gpu):
            base = create_product([matrix], None, config)
            low_rank = LowRankUpdates(
                updates(), 90, device=config.device, dtype=config.dtype, is_kernel=not config.uses_gpu_kernels
            )
            product = AdaptedProduct(base, low_rank, AdapterRows(indices()))
            x = draw(ROWS, INTO)
            plain = base(x)
            assert torch.equal(product(x), low_rank.add(x, plain.clone(), indices()))
            residual = draw(ROWS, 90, seed=2)
            assert torch.equal(product.add(x, residual), low_rank.add(x, base.add(x, residual), indices()))


@pytest.mark.parametrize(("method", "bits"), mostly_long(METHODS, every=3))
def test_a_quantised_model_answers_with_an_adapter_and_without_it_as_before(
    method: str, bits: int | None, tmp_path: Path
) -> None:
    base, small = tmp_path / "base", tmp_path / "small"
    save_random_model("LlamaForCausalLM", WIDE, base)
    size = 32 if method in {"gptq", "awq"} or (method, bits) == ("rtn", 4) else None
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "step one: add 3 and 4 to get 7. step two: add 3 and 4 to get 7."}\n' * 200)
    file = texts if method in {"gptq", "awq"} else None
    quantize(base, small, create_options(method, bits, size, file), lambda *_: None)
    adapter = save_adapter(tmp_path / "a", base)
    harness = create_harness(small, {"a": adapter}, EXACT)
    assert isinstance(harness.core.model.decoder, Decoder)
    mixed = tokens_of(complete(harness, ["m", "a"]))
    assert mixed["m"] == tokens_of(complete(Harness(small, EXACT), ["m"]))["m"]
    assert mixed["a"] != mixed["m"]
    assert mixed["a"] == tokens_of(complete(create_harness(small, {"a": adapter}, EXACT), ["a"]))["a"]
