"""The number of a model's weights, without loading them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine.remote.model_size import count_parameters, estimate_parameters

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"


@pytest.mark.parametrize("name", ["policy", "policy-large"])
def test_weights_are_counted_in_the_files_and_estimated_from_the_config(name: str) -> None:
    folder = BUNDLED / name
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    exact = sum(weight.numel() for weight in model.parameters())
    assert count_parameters(folder) == exact
    assert estimate_parameters(json.loads((folder / "config.json").read_text())) == pytest.approx(exact, rel=0.01)


def test_a_folder_without_weights_is_estimated(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) == 0
    config = (BUNDLED / "policy" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert count_parameters(tmp_path) == estimate_parameters(json.loads(config)) > 0
    assert estimate_parameters({"model_type": "other"}) == 0
