"""A config field that is not computed here leaves the model to transformers' code, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.core.model_setup import select_model_device
from engine.models.by_transformers.model import TransformersModel
from engine.models.config_fields import UnsupportedField
from engine.models.decoder import Decoder
from engine.protocol.types import EngineError
from tests.engine.conftest import Checkpoints, save_random_model
from tests.engine.exact import assert_equal_logits
from tests.engine.helpers import SMALL, Harness
from tests.engine.models.test_models import copy_checkpoint, engine_logits, random_tokens

STRICT = replace(SMALL, strict_config=True)
UNSUPPORTED = [
    ({"some_new_feature": {"size": 3}}, "some_new_feature"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"num_experts": 4}, "num_experts"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4]}}, "mrope_section"),
]
"""Changes to the config of a Qwen3, and what the warning names."""


def change_config(source: Path, target: Path, change: dict[str, object]) -> Path:
    folder = copy_checkpoint(source, target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder


@pytest.mark.parametrize(("change", "named"), UNSUPPORTED, ids=[named for _, named in UNSUPPORTED])
def test_an_unsupported_field_is_computed_as_transformers_computes_it_with_one_warning(
    checkpoints: Checkpoints,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
    named: str,
) -> None:
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", change)
    harness = Harness(folder)
    assert isinstance(harness.core.model.decoder, TransformersModel)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("engine.")]
    assert named in warning
    assert "\n" not in warning
    tokens = random_tokens(70, 1)
    ours = engine_logits(harness, tokens)
    assert_equal_logits(ours, folder, tokens)
    # The second half again, over cached keys and values.
    assert_equal_logits(engine_logits(harness, tokens, start=35), folder, tokens, start=35)


@pytest.mark.parametrize(("change", "named"), UNSUPPORTED, ids=[named for _, named in UNSUPPORTED])
def test_strict_config_refuses_an_unsupported_field(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", change)
    with pytest.raises(UnsupportedField, match=named):
        Harness(folder, STRICT)


def test_strict_config_accepts_known_fields_and_architectures_that_transformers_runs(checkpoints: Checkpoints) -> None:
    assert isinstance(Harness(checkpoints("qwen3"), STRICT).core.model.decoder, Decoder)
    assert isinstance(Harness(checkpoints("olmo2"), STRICT).core.model.decoder, TransformersModel)


def test_tensors_that_neither_implementation_has_are_refused_with_the_field(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", {"some_new_feature": 1})
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.mlp.new_gate.weight": weights["model.norm.weight"].clone()}
    save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"some_new_feature is not supported .*unexpected tensors: .*new_gate"):
        Harness(folder)


def test_an_unsupported_field_of_quantised_weights_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """transformers would need the quantiser's own package for them."""
    change = {"some_new_feature": 1, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", change)
    with pytest.raises(UnsupportedField, match="some_new_feature"):
        Harness(folder)


def test_an_unsupported_field_of_a_classifier_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = change_config(checkpoints("qwen3_classify"), tmp_path / "model", {"some_new_feature": 1})
    with pytest.raises(UnsupportedField, match="some_new_feature"):
        Harness(folder)


def test_a_gpu_is_refused_by_name_for_a_model_that_transformers_runs(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", {"some_new_feature": 1})
    with pytest.raises(EngineError, match=r"'cuda' was requested, but .*some_new_feature .* on the CPU alone"):
        select_model_device(folder, replace(SMALL, device="cuda"))


def test_a_config_without_architectures_is_loaded_by_its_model_type(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = change_config(checkpoints("qwen3"), tmp_path / "model", {"architectures": None})
    assert Harness(folder).core.model.info.architecture == "Qwen3ForCausalLM"
    folder = change_config(checkpoints("qwen3"), tmp_path / "other", {"architectures": None, "model_type": "t5"})
    with pytest.raises(EngineError, match="has no architectures, and model_type 't5' is no causal language model"):
        Harness(folder)


def test_code_named_by_auto_map_is_never_run(tmp_path: Path) -> None:
    """For an architecture that is computed here and for one that transformers runs."""
    for number, architecture in enumerate(("LlamaForCausalLM", "Olmo2ForCausalLM")):
        source = tmp_path / f"{number}"
        save_random_model(architecture, {}, source)
        names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        folder = change_config(source, tmp_path / f"{number}-mapped", {"auto_map": names})
        (folder / "evil.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
        )
        assert Harness(folder).core.model.info.architecture == architecture
    assert not (tmp_path / "ran").exists()
