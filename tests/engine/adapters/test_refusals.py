"""Adapters that are damaged, of another base or not supported are refused in one line before anything is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters.judge import JUDGE_FILE
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from tests.engine.adapters.lora import create_harness, save_adapter
from tests.engine.conftest import Checkpoints

Change = Callable[[Path], None]
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def setting(**fields: Any) -> Change:
    """Return a change of fields of the config."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Return a change of the tensors."""

    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        held = load_file(path)
        edit(held)
        save_file(held, path)

    return change


def judge(text: str) -> Change:
    """Return a change that writes the file of an adapter that was trained to judge."""
    return lambda folder: (folder / JUDGE_FILE).write_text(text).__str__()


REFUSALS: list[tuple[Change, str]] = [
    (setting(use_dora=True), r"use_dora is True: adapters with a decomposition of the weights \(DoRA\) are not"),
    (setting(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]: adapters with whole modules"),
    (setting(bias="all"), "bias is 'all': .* train with bias none"),
    (setting(peft_type="LOHA"), "peft_type is 'LOHA'; LORA is supported"),
    (setting(r=0), "a rank is 0; it must be a whole number from 1 to 256"),
    (setting(r=4000), "a rank is 4000"),
    (setting(rank_pattern={"q_proj": "x"}), "a rank is 'x'"),
    (setting(r=5), r"have shapes \(4, \d+\) and \(\d+, 4\); its adapter_config.json says rank 5"),
    (setting(lora_alpha="much"), "lora_alpha is 'much'; it must be a number"),
    (setting(init_lora_weights="pissa_niter_4"), "which changes the base's weights: save the adapter with PEFT's"),
    (setting(fan_in_fan_out=True), "transposed weights"),
    (setting(use_something_new=True), "use_something_new is True, which is not supported"),
    (setting(target_modules=None), "target_modules names no module"),
    (setting(target_modules="(q_proj"), "adapter_config.json: "),
    (setting(target_modules=3), "target_modules is 3; it must be a list of names"),
    (setting(layers_to_transform="all"), "layers_to_transform is 'all'"),
    (setting(alora_invocation_tokens=[]), r"alora_invocation_tokens is \[\]; it must be a list of token ids"),
    (setting(alora_invocation_tokens=[7, 400]), r"of another base: its alora_invocation_tokens \[7, 400\]"),
    (tensors(lambda held: held.pop(QUERY)), "lacks lora_A of model.layers.0.self_attn.q_proj"),
    (
        tensors(lambda held: [held.pop(name) for name in list(held) if ".1.mlp.up_proj." in name]),
        "lacks the matrices of model.layers.1.mlp.up_proj",
    ),
    (
        tensors(lambda held: held.update({name.replace("q_proj", "x_proj"): held[name].clone() for name in [*held]})),
        "changes model.layers.0.self_attn.x_proj, which this model does not have",
    ),
    (
        tensors(lambda held: held.update({QUERY: torch.ones(4, 50)})),
        "of another base, some/base: model.layers.0.self_attn.q_proj has weights of 96 by 50 there, and 96 by 48",
    ),
    (tensors(lambda held: held.update({QUERY: torch.full((4, 48), torch.inf)})), "are not finite"),
    (tensors(lambda held: held.update({QUERY: torch.ones(4, 48, dtype=torch.int8)})), "is torch.int8; supported are"),
    (tensors(lambda held: held.update({"base_model.model.score.weight": torch.ones(4, 48)})), "is no matrix of LoRA"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "an adapter is a folder that PEFT has saved"),
    (lambda folder: (folder / "adapter_config.json").write_text("[]").__str__(), "must be an object"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is not a readable safetensors file"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 90).__str__(), "is not a readable"),
    (judge("{"), "reasoner_judge.json is not readable: .* train the adapter again, or remove the file"),
    (judge('{"invocation": [7], "positive": 5}'), "is not readable: KeyError"),
    (judge('{"invocation": [], "positive": 5, "negative": 6}'), "must have the token ids invocation"),
    (judge('{"invocation": [7], "positive": true, "negative": 6}'), "must have the token ids invocation"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSALS)
def test_a_wrong_adapter_is_refused_in_one_line(
    change: Change, reason: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("qwen3")
    folder = save_adapter(tmp_path / "a", base)
    change(folder)
    with pytest.raises(EngineError, match=reason) as refusal:
        create_harness(base, {"a": folder})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "modules", "reason"),
    [
        ("qwen3_moe", ("gate_proj",), r"changes model.layers.0.mlp.experts.0.gate_proj.*cannot be adapted"),
        ("llama4", ("q_proj",), "adapters are not supported"),
        ("deepseek_v2", ("o_proj",), "DeepseekV2ForCausalLM, whose modules are not those of its checkpoint"),
    ],
)
def test_models_and_modules_that_cannot_be_adapted_are_named(
    kind: str, modules: tuple[str, ...], reason: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(kind)
    folder = save_adapter(tmp_path / "a", base, modules=modules)
    with pytest.raises(EngineError, match=reason):
        create_harness(base, {"a": folder})


def test_names_are_unique_and_adapters_are_few(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3")
    folder = save_adapter(tmp_path / "a", base, modules=("q_proj",))
    with pytest.raises(EngineError, match="'m' names a model and an adapter"):
        LocalEngine({"m": base}, EngineOptions(kv_tokens=256), adapters={"m": folder})
    with pytest.raises(EngineError, match="33 adapters are given; at most 32"):
        create_harness(base, {f"a{index}": folder for index in range(33)})
