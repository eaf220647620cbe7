"""Adapters that PEFT itself has saved, beside its own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.adapters.lora import INVOCATION, assert_adapted, create_harness
from tests.engine.adapters.test_adapters import TEXT, read_logits
from tests.engine.conftest import Checkpoints
from tests.long import mostly_long_grid
from tests.seeds import shift

peft: Any = pytest.importorskip("peft", reason="the package peft is not installed")

SETTINGS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"v_proj": 3, "layers.1.mlp.up_proj": 5}},
    {"target_modules": r".*\.1\..*(q|down)_proj", "alpha_pattern": {"q_proj": 7}},
    {"target_modules": ["o_proj"], "layers_to_transform": [0]},
    {"target_modules": ["q_proj", "k_proj", "v_proj"], "alora_invocation_tokens": list(INVOCATION)},
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks for
@pytest.mark.parametrize(("kind", "index"), mostly_long_grid(["qwen3", "llama"], range(len(SETTINGS)), every=3))
def test_an_adapter_that_peft_saved_has_pefts_logits(
    kind: str, index: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base, start = checkpoints(kind), 40 if index == 4 else 0
    tokens = (*TEXT[:40], *INVOCATION, *TEXT[43:])
    torch.manual_seed(shift(index))
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **SETTINGS[index])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    model.save_pretrained(tmp_path)
    ours = read_logits(create_harness(base, {"a": tmp_path}), "a", tokens)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([tokens])).logits[0]
    for logits in (ours, theirs):  # both err by no more than float32 does, so both compute the same function
        assert_adapted(logits, base, tmp_path, tokens, start=start)
