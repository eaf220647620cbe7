"""Metadata of Gemma 4 and of models with Mamba-2 that does not fit is refused in one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from engine.gguf.folder import open_gguf_folder
from engine.protocol.types import EngineError
from tests.engine.gguf.files import write_gguf
from tests.engine.gguf.test_keys import add_keys
from tests.engine.gguf.test_models import CASES, make

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a scale": ("gemma4", {"attention.scale": 0.5}, "attention.scale is 0.5"),
    "values of another size": ("gemma4", {"attention.value_length": 16}, "attention.value_length is 16"),
    "a part of the pairs": ("gemma4", {"rope.dimension_count_swa": 8}, "rope.dimension_count_swa is 8"),
    "widths that differ": (
        "gemma4",
        {"feed_forward_length": [128, 64, 128, 128]},
        "twice it in layers without keys",
    ),
    "heads that differ": ("gemma4", {"attention.head_count_kv": [2, 2, 1, 2]}, "one number for each kind of layer"),
    "heads by kind": ("gemma4", {"attention.head_count_kv": [2, 1, 2, 1]}, "the same in all layers with values"),
    "heads of three layers": ("gemma4", {"attention.head_count_kv": [2, 2, 2]}, "one number for each kind of layer"),
    "windows of three layers": ("gemma4", {"attention.sliding_window_pattern": [True] * 3}, "a number, or 4 of them"),
    "a width of no heads": ("granitehybrid", {"ssm.inner_size": 190}, "12 heads (ssm.time_step_rank) do not divide"),
    "no heads": ("mamba2", {"ssm.time_step_rank": 0}, "0 heads (ssm.time_step_rank) do not divide"),
    "a width of no ratio": ("mamba2", {"ssm.inner_size": 204}, "ssm.inner_size is 204"),
    "no shared expert": (
        "granitehybrid",
        {"expert_shared_feed_forward_length": 0},
        "it must be at least 1",
    ),
    "other experts": ("granitehybrid", {"expert_feed_forward_length": 64}, "expert_feed_forward_length is 64"),
    "two widths": ("nemotron_h", {"feed_forward_length": [0, 128, 0, 0, 96]}, "feed_forward_length is [96, 128]"),
    "widths of four layers": ("nemotron_h", {"feed_forward_length": [0, 128, 0, 0]}, "a number, or 5 of them"),
    "another router": ("nemotron_h_moe", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    "groups without a number": ("nemotron_h_moe", {"expert_group_used_count": None}, "lacks the field"),
    "a part of a head": ("falcon-h1", {"rope.dimension_count": 8}, "rope.dimension_count is 8"),
    "positions that are not used": ("nemotron_h", {"rope.scaling.factor": 4.0}, "rope.scaling.factor is 4"),
}


def write(case: str, tmp_path: Path, keys: dict[str, Any]) -> Path:
    """Write a file with other values of keys, without those that are ``None``."""
    checkpoint, file = make(case, tmp_path)

    def change(writer: GGUFWriter) -> None:
        fields, new = writer.kv_data[0], {}
        for name, value in keys.items():
            key = f"{writer.arch}.{name}"
            if value is None:
                del fields[key]
            elif isinstance(value, list) or key not in fields:
                fields.pop(key, None)
                new[name] = value
            else:
                fields[key].value = value
        add_keys(new)(writer)

    write_gguf(checkpoint, file, CASES[case][0], change=change)
    return file


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, keys, message = REFUSED[case]
    with pytest.raises(EngineError) as refusal:
        open_gguf_folder(write(kind, tmp_path, keys))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("divisors", [[2.0] * 16, [1e30] * 8 + [1.0] * 8, [1.0] * 15 + [4.0]])
def test_divisors_that_scale_positions_are_refused_for_gemma_4(divisors: list[float], tmp_path: Path) -> None:
    checkpoint, file = make("gemma4", tmp_path)

    def change(writer: GGUFWriter) -> None:
        del writer.tensors[0]["rope_freqs.weight"]
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))

    write_gguf(checkpoint, file, "gemma4", change=change)
    with pytest.raises(EngineError, match=r"'rope_freqs\.weight' must be ones, then 1e\+20 or more"):
        open_gguf_folder(file)


def test_nemotron_h_may_name_the_epsilon_of_its_norms_otherwise(tmp_path: Path) -> None:
    file = write("nemotron_h", tmp_path, {"attention.layer_norm_rms_epsilon": None})
    fields = json.loads((open_gguf_folder(file) / "config.json").read_text())
    assert fields["rms_norm_eps"] == fields["layer_norm_epsilon"] == 1e-5


def test_keys_of_positions_have_no_influence_without_positions(tmp_path: Path) -> None:
    file = write("nemotron_h", tmp_path, {"rope.freq_base": 500.0, "rope.dimension_count": 8})
    assert "rope_theta" not in json.loads((open_gguf_folder(file) / "config.json").read_text())
