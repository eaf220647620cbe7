"""``engine.core.check``: models as close to transformers as rounding allows, and models that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from engine.core import check
from engine.core.check import CheckResult, check_model
from engine.core.reference import Reference
from engine.gguf.folder import open_gguf_folder
from engine.gguf.metadata import Metadata
from engine.models.config import RawConfig, read_raw_config
from engine.protocol.types import EngineError
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from tests.engine.conftest import Checkpoints, save_random_model
from tests.engine.gguf.files import write_gguf
from tests.engine.gguf.test_models import CASES
from tests.engine.models.test_models import copy_checkpoint
from tests.long import mostly_long

WIDE = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 128, "initializer_range": 0.15}
"""Sizes in whole blocks and groups of 32."""


def run(folder: Path) -> CheckResult:
    return check_model(folder, lambda done, total, next_part: None)


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[[int, int | None], Path]:
    """``quantized(bits, group_size)`` returns a checkpoint in fewer bits."""

    def make(bits: int, group_size: int | None) -> Path:
        save_random_model("Qwen3ForCausalLM", WIDE, tmp_path / "model")
        chosen = create_options("rtn", bits, group_size, None)
        quantize(tmp_path / "model", tmp_path / "quantized", chosen, lambda done, total, next_part: None)
        return tmp_path / "quantized"

    return make


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe_mixed", "qwen2_classify", "granite", "olmo2"])
def test_a_model_in_float32_is_close(checkpoints: Checkpoints, kind: str) -> None:
    result = run(checkpoints(kind))
    assert result.is_close
    assert (result.layouts is None) == (kind == "olmo2")
    assert [text.name for text in result.texts] == list(check.TEXTS)
    for text in result.texts:
        assert 0 < text.difference < 1e-3
        assert text.top1_agreement > 0.9
        if kind == "qwen2_classify":
            assert text.perplexity is text.reference_perplexity is None
        else:
            assert text.perplexity == pytest.approx(text.reference_perplexity, rel=1e-4)


@pytest.mark.parametrize(("bits", "group_size", "layout"), [(8, None, "int8"), (4, 32, "int4")])
def test_a_quantised_model_is_as_close_as_its_layout_rounds(
    quantized: Callable[[int, int | None], Path], bits: int, group_size: int | None, layout: str
) -> None:
    result = run(quantized(bits, group_size))
    assert result.layouts is not None
    assert layout in result.layouts
    assert result.is_close
    assert result.expected[0] > 1e-3  # rounded activations, not float32


@pytest.mark.parametrize(
    ("architecture", "class_name", "kind"),
    mostly_long(
        [
            ("llama", "LlamaForCausalLM", GGMLQuantizationType.Q8_0),
            ("qwen3", "Qwen3ForCausalLM", GGMLQuantizationType.Q4_0),
            ("gemma3", "Gemma3ForCausalLM", GGMLQuantizationType.Q8_0),
            ("qwen3moe", "Qwen3MoeForCausalLM", GGMLQuantizationType.F32),
            ("granite", "GraniteForCausalLM", GGMLQuantizationType.MXFP4),
            ("smollm3", "SmolLM3ForCausalLM", GGMLQuantizationType.Q8_0),
            ("lfm2", "Lfm2ForCausalLM", GGMLQuantizationType.Q8_0),
        ],
        every=3,
    ),
)
def test_a_gguf_file_is_compared_with_its_dequantised_weights(
    tmp_path: Path, architecture: str, class_name: str, kind: GGMLQuantizationType
) -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    own = {
        "qwen3moe": experts,
        "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
        "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    }
    save_random_model(class_name, WIDE | own.get(architecture, {}), tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", architecture, kind)
    assert run(open_gguf_folder(tmp_path / "model.gguf")).is_close


NEW = {
    **dict.fromkeys(("olmo3", "gpt-oss", "deepseek_v2", "qwen3next", "gemma4, shared keys"), GGMLQuantizationType.F32),
    **dict.fromkeys(("nemotron_h_moe", "granitehybrid, dense", "falcon-h1"), GGMLQuantizationType.F32),
    **dict.fromkeys(("ministral3", "deepseek_v3", "qwen35", "qwen35moe", "gemma4"), GGMLQuantizationType.Q8_0),
    **dict.fromkeys(("gemma4, experts", "granitehybrid", "nemotron_h", "mamba2"), GGMLQuantizationType.Q8_0),
}
"""This year's architectures, whose weights lie in files in another form than in checkpoints."""


@pytest.mark.parametrize("case", mostly_long(NEW, every=8))
def test_files_of_this_years_architectures_are_compared(tmp_path: Path, case: str) -> None:
    architecture, class_name, options = CASES[case]
    own = {"initializer_range": 0.15} | ({"linear_num_key_heads": 2} if case.startswith("qwen35") else {})
    save_random_model(class_name, WIDE | options | own, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", architecture, NEW[case])
    assert run(open_gguf_folder(tmp_path / "model.gguf")).is_close


@pytest.mark.parametrize(
    ("case", "key"),
    mostly_long(
        [
            ("gemma4", "rope.freq_base_swa"),
            ("deepseek_v3", "expert_weights_scale"),
            ("granitehybrid", "residual_scale"),
            ("nemotron_h_moe", "expert_weights_scale"),
            ("qwen3next", "rope.dimension_count"),
            ("gpt-oss", "attention.sliding_window"),
        ],
        every=6,
    ),
)
def test_a_key_of_theirs_that_is_misread_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, key: str
) -> None:
    """Both sides of the check would compute the same, if both read the same translation."""
    architecture, class_name, options = CASES[case]
    save_random_model(class_name, WIDE | options, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", architecture)
    read = Metadata.get

    def misread(metadata: Metadata, name: str, default: Any = None) -> Any:
        value = read(metadata, name, default)
        return value / 2 if name == key and isinstance(value, float) else value // 2 if name == key else value

    monkeypatch.setattr(Metadata, "get", misread)
    assert not run(open_gguf_folder(tmp_path / "model.gguf")).is_close


def change_angles(folder: Path, target: Path, factor: float) -> RawConfig:
    """Return the config of a copy with other rotary angles."""
    copy_checkpoint(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= factor
    (target / "config.json").write_text(json.dumps(config))
    return read_raw_config(target)


@pytest.mark.parametrize(("bits", "factor"), [(None, 1.0001), (8, 4.0)])
def test_a_mistake_is_found(
    checkpoints: Checkpoints,
    quantized: Callable[[int, int | None], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: int | None,
    factor: float,
) -> None:
    """The engine and transformers compute with different rotary angles."""
    folder = checkpoints("llama") if bits is None else quantized(bits, None)
    other = change_angles(folder, tmp_path / "other", factor)
    monkeypatch.setattr(check, "read_raw_config", lambda _: other)
    assert not run(folder).is_close


def test_an_architecture_that_transformers_does_not_have_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    raw = RawConfig(folder, config | {"architectures": ["Qwen2ForPrmModel"]}, {})
    with pytest.raises(EngineError, match="transformers has no Qwen2ForPrmModel to compare with"):
        Reference(raw, 256)
