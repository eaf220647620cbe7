"""Checkpoints written by ``quantize``: their quality, the products that compute them, and refused input."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_rel
from torch.nn.functional import kl_div

from benchmarks.quantization.quality import compare, compute_text_logits, open_model
from benchmarks.quantization.texts import Text
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.protocol.types import EngineError
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.text.tokenizer import Tokenizer
from engine.weights.matrix import dense
from kernels.cpu import availability
from kernels.linear.fp32 import Linear
from kernels.linear.int4 import Int4Linear
from kernels.linear.int8 import Int8Linear
from tests.engine.conftest import CORPUS, Checkpoints, save_random_model
from tests.engine.exact import float32_loss
from tests.engine.quantization.conftest import POLICY
from tests.rounding import MARGIN, RUNS
from tests.seeds import shift

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def made(folder: Path, out: Path, method: str, bits: int | None, size: int | None, file: Path | None = None) -> Path:
    quantize(folder, out, create_options(method, bits, size, file), lambda *_: None)
    return out


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(shift(seed)).choices(range(3, 360), k=count)


def divergences(original: Path, model: Path, texts: Sequence[tuple[Sequence[int], int]]) -> np.ndarray:
    """Return the divergence from the original for each text."""
    models = open_model(original), open_model(model)
    return np.array([compare(*models, [text]).divergence for text in texts])


def surely_less(ours: np.ndarray, others: np.ndarray, part: float) -> bool:
    """Return True if the mean is below ``part`` of the others' mean, and significantly less (paired t-test, 1 %)."""
    return ours.mean() < part * others.mean() and ttest_rel(ours, others, alternative="less").pvalue < 0.01


def test_gptq_and_awq_beat_rounding_to_the_nearest_on_the_bundled_model(
    unseen: list[Text], calibration: Path, tmp_path: Path
) -> None:
    found = {}
    for method in ("rtn", "gptq", "awq"):
        folder = made(POLICY, tmp_path / method, method, 4, 128, calibration)
        found[method] = divergences(POLICY, folder, [(one.tokens, one.prompt) for one in unseen])
    assert surely_less(found["gptq"], found["rtn"], 0.5)
    assert surely_less(found["awq"], found["rtn"], 0.85)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model in which four channels after each norm are twenty times as large as the others."""
    folder = tmp_path_factory.mktemp("outliers")
    save_random_model("LlamaForCausalLM", WIDE | {"initializer_range": 0.05}, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "layernorm" in name:
            weight[[3, 17, 40, 58]] *= 20
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_gptq_and_awq_beat_rounding_to_the_nearest_where_channels_have_outliers(outliers: Path, tmp_path: Path) -> None:
    dice, words, file = random.Random(shift(0)), " ".join(CORPUS).split(), tmp_path / "text.txt"
    file.write_text(" ".join(dice.choices(words, k=2000)))
    tokenizer = Tokenizer(outliers, 400)
    texts = [(tokenizer.encode(" ".join(dice.choices(words, k=40))), 1) for _ in range(8)]
    found = {}
    for method in ("rtn", "gptq", "awq"):
        found[method] = divergences(outliers, made(outliers, tmp_path / method, method, 4, 32, file), texts)
    assert surely_less(found["gptq"], found["rtn"], 0.4)
    assert surely_less(found["awq"], found["rtn"], 0.4)


def with_noise(original: Path, quantized: Path, out: Path, seed: int) -> Path:
    """Write a copy whose weights err at random by up to half a step of 8 bits, where those of ``quantized`` have."""
    rounded = {name for file in quantized.glob("*.safetensors") for name in load_file(file)}
    generator = torch.Generator().manual_seed(shift(seed))
    shutil.copytree(original, out)
    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        if f"{name}_scale" in rounded or name not in rounded:
            step = weight.abs().amax(-1, keepdim=True) / 127
            weight += step * (torch.rand(weight.shape, generator=generator) - 0.5)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3_window",
        "qwen3_moe",
        "phi3",
        "gemma2",
        "gemma3",
        "granite",
        "smollm3",
        "olmo3",
        "ministral3",
    ],
)
def test_every_family_is_close_to_the_original_in_8_bits(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    """The median divergence is about twice that of weights that err at random by half a step: activations are rounded
    too. The mean is that of the few tokens which go to other experts.
    """
    folder = made(checkpoints(kind), tmp_path / "out", "rtn", 8, None)
    original, model = open_model(checkpoints(kind)), open_model(folder)
    assert model.parameters == original.parameters
    exact = compute_text_logits(original, tokens(100)).log_softmax(-1)

    def divergence(other: Decoder) -> float:
        found = compute_text_logits(other, tokens(100)).log_softmax(-1)
        return float(kl_div(found, exact, reduction="none", log_target=True).sum(-1).median())

    noisy = [open_model(with_noise(checkpoints(kind), folder, tmp_path / str(run), run)) for run in range(4)]
    assert divergence(model) < MARGIN * max(map(divergence, noisy))


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "granite"])
def test_awq_folds_its_factors_into_norms_heads_and_biases(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounding too fine to change anything, factors far from 1 must cancel exactly."""
    from engine.quantization import awq
    from engine.weights.matrices.grouped import GroupedMatrix

    def fine(weight: torch.Tensor, bits: int, size: int, gram: torch.Tensor) -> GroupedMatrix:
        scales = torch.ones(len(weight), weight.shape[1] // size)
        kept.append(weight.clone())
        return GroupedMatrix(torch.zeros_like(weight, dtype=torch.uint8), scales, torch.zeros_like(scales), 4)

    kept: list[torch.Tensor] = []
    monkeypatch.setattr(awq, "round_clipped", fine)
    monkeypatch.setattr("engine.quantization.awq.awq.pack_matrix", lambda name, matrix: {f"{name}.weight": kept.pop()})
    monkeypatch.setattr(
        awq, "search_scales", lambda weights, gram, magnitudes, **_: torch.exp(magnitudes - magnitudes.mean())
    )
    file = tmp_path / "text.txt"
    file.write_text("a slow river and an old stone bridge " * 200)
    folder = made(checkpoints(kind), tmp_path / "out", "awq", 4, 8, file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    found, expected = (compute_text_logits(open_model(one), tokens(60)) for one in (folder, checkpoints(kind)))
    torch.testing.assert_close(found, expected, atol=2 * float32_loss(checkpoints(kind)).logit, rtol=0)


@pytest.mark.parametrize(
    ("kind", "method", "reason"),
    [
        ("gpt_oss", "rtn", "models with attention sinks are not supported for quantisation"),
        ("gemma4", "rtn", "models with heads that differ by layer are not supported for quantisation"),
        ("olmo3", "awq", "awq is not supported for Olmo3ForCausalLM; gptq is"),
    ],
)
def test_families_that_a_method_does_not_support_are_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, method: str, reason: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a slow river and an old stone bridge " * 200)
    with pytest.raises(EngineError, match=reason):
        made(checkpoints(kind), tmp_path / "out", method, 4, 8, file if method == "awq" else None)


@pytest.mark.parametrize(
    ("method", "bits", "size", "kind"),
    [
        ("rtn", 8, None, Int8Linear),
        ("rtn", 4, 32, Int4Linear),
        ("gptq", 4, 32, Int4Linear),
        ("awq", 4, 32, Int4Linear),
        ("gptq", 4, 8, Linear),
    ],
)
def test_each_layout_is_computed_by_its_own_kind_of_product(
    outliers: Path,
    tmp_path: Path,
    method: str,
    bits: int,
    size: int | None,
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results err no more than where each activation errs at random by up to half a step: of 8 bits, or of bfloat16."""
    file = tmp_path / "text.txt"
    file.write_text("a slow river and an old stone bridge " * 200)
    folder = made(outliers, tmp_path / "out", method, bits, size, file)
    model = open_model(folder)
    assert isinstance(model._layers[0].qkv, kind)  # type: ignore[attr-defined]
    generator, noise = torch.Generator().manual_seed(shift(0)), 0.0

    def add_noise(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.unflatten(-1, (-1, size if kind is Int4Linear and size else rows.shape[-1]))
        in_8_bits = kind is Int8Linear or (kind is Int4Linear and availability.HAS_BYTE_PRODUCTS)
        step = groups.abs().amax(-1, keepdim=True) / 127 if in_8_bits else groups.abs() * 2**-8
        moved = groups + noise * step * (torch.rand(groups.shape, generator=generator) - 0.5)
        return moved.flatten(-2)

    class Noisy(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(add_noise(x))

        def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return super().add(add_noise(x), residual)

    monkeypatch.setattr(
        decoder, "create_product", lambda parts, bias, device_config: Noisy(torch.cat([*map(dense, parts)]), bias)
    )
    assert isinstance(model._head[0], Int8Linear if method == "rtn" else Linear)  # type: ignore[attr-defined]
    exact = compute_text_logits(open_model(folder), tokens(60))
    noise = 1.0
    errors = [(compute_text_logits(open_model(folder), tokens(60)) - exact).norm() for _ in range(RUNS)]
    assert 0 < max(errors) < 0.5 * exact.norm()
    assert (compute_text_logits(model, tokens(60)) - exact).norm() < MARGIN * max(errors)


@pytest.mark.parametrize(
    ("method", "bits", "size", "message"),
    [
        ("rtn", 4, 24, "'model.layers.0.self_attn.q_proj': a group size of 24 does not divide its 64 columns"),
        ("gptq", 4, 128, "a group size of 128 does not divide its 64 columns"),
        ("rtn", 3, None, r"rtn in 3 bits is not supported; supported: \(8, 4\)"),
        ("awq", 8, None, r"awq in 8 bits is not supported; supported: \(4,\)"),
        ("fp8", None, 64, "fp8 has blocks of its own"),
        ("rtn", 4, 0, "the group size is 0"),
        ("quip", None, None, "method 'quip' is not supported; choose one of rtn, gptq, awq, fp8, nf4"),
    ],
)
def test_unsupported_options_are_refused_before_anything_is_read(
    outliers: Path, tmp_path: Path, method: str, bits: int | None, size: int | None, message: str
) -> None:
    heard: list[str] = []
    with pytest.raises(EngineError, match=message):
        quantize(
            outliers,
            tmp_path / "out",
            create_options(method, bits, size, tmp_path / "not needed yet"),
            lambda done, total, following: heard.append(following),
        )
    assert not heard
    assert not list(tmp_path.iterdir())


def test_a_missing_malformed_or_too_short_calibration_file_is_refused(outliers: Path, tmp_path: Path) -> None:
    short, broken = tmp_path / "short.txt", tmp_path / "broken.jsonl"
    short.write_text("a b c")
    broken.write_text('{"txt": "a"}\n')
    for path, message in ((short, r"has \d tokens; calibration needs 2048 or more"), (broken, "no calibration file")):
        with pytest.raises(EngineError, match=message):
            made(outliers, tmp_path / "out", "gptq", 4, 32, path)
    with pytest.raises(EngineError, match="no calibration file"):
        made(outliers, tmp_path / "out", "gptq", 4, 32, tmp_path / "missing.txt")
    with pytest.raises(EngineError, match="gptq needs a calibration file"):
        made(outliers, tmp_path / "out", "gptq", 4, 32)


def test_an_existing_folder_or_an_already_quantized_model_is_refused(outliers: Path, tmp_path: Path) -> None:
    folder = made(outliers, tmp_path / "out", "rtn", 8, None)
    with pytest.raises(EngineError, match="out exists already"):
        made(outliers, folder, "rtn", 8, None)
    with pytest.raises(EngineError, match="is already quantised"):
        made(folder, tmp_path / "again", "rtn", 8, None)


def test_a_corrupt_scale_is_refused_with_its_folder_and_its_name(outliers: Path, tmp_path: Path) -> None:
    folder = made(outliers, tmp_path / "out", "rtn", 4, 32)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        if (name := "model.layers.1.mlp.down_proj.weight_scale") in weights:
            weights[name][0, 0] = torch.nan
            save_file(weights, path, {"format": "pt"})
    with pytest.raises(EngineError, match=rf"{folder}: 'model.layers.1.mlp.down_proj' is corrupt: 1 of \d+ scales"):
        open_model(folder)


def test_a_failed_run_leaves_no_files(outliers: Path, tmp_path: Path) -> None:
    source = shutil.copytree(outliers, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = weights["model.layers.1.mlp.down_proj.weight"].to(torch.int8)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match="int8"):
        made(source, tmp_path / "out", "rtn", 8, None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
