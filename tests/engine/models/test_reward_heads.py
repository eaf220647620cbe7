"""Heads of reward models: their outputs at every token equal those of a torch head on transformers' model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.reference import float64
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError, ScoreItem
from tests.closeness import assert_rounded
from tests.engine.helpers import Harness, score
from tests.prm.checkpoints import label_logits, save_checkpoint
from tests.rounding import float32_bound
from tests.seeds import shift

TOKENS = tuple(random.Random(shift(1)).choices(range(10, 380), k=70))


@pytest.mark.parametrize(("kind", "labels"), [("qwen_math", 2), ("skywork", 1), ("outcome_two", 2)])
@pytest.mark.parametrize("step_tokens", [512, 13])
def test_labels_at_every_token_equal_those_of_a_head_on_transformers(
    tmp_path: Path, kind: str, labels: int, step_tokens: int
) -> None:
    folder = save_checkpoint(kind, tmp_path / kind)
    harness = Harness(folder, EngineOptions(kv_tokens=512, max_running=8, step_tokens=step_tokens))
    info = harness.core.model.info
    assert info.kind == "classify"
    assert info.architecture == json.loads((folder / "config.json").read_text())["architectures"][0]
    [result] = harness.score(score(ScoreItem(tuple((token,) for token in TOKENS), tuple(range(70)))))
    assert result.values is not None
    with float64():
        exact = label_logits(kind, folder, TOKENS)
    assert exact.shape == (70, labels)
    bound = float32_bound(lambda: label_logits(kind, folder, TOKENS))
    assert_rounded(torch.tensor(result.values), exact, bound)


@pytest.mark.parametrize(
    ("kind", "tensor", "shape"),
    [
        ("qwen_math", "score.0.weight", (48, 47)),
        ("qwen_math", "score.2.bias", (3,)),
        ("skywork", "v_head.summary.weight", (2, 48)),
    ],
)
def test_a_head_of_another_shape_is_refused_by_its_name(
    tmp_path: Path, kind: str, tensor: str, shape: tuple[int, ...]
) -> None:
    folder = save_checkpoint(kind, tmp_path / kind)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {tensor: torch.zeros(shape)}, folder / "model.safetensors")
    with pytest.raises(EngineError, match=f"{tensor.removesuffix('.weight')}.*has shape"):
        Harness(folder)


def test_a_head_of_an_unknown_kind_is_refused_with_its_architecture(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen_math", tmp_path / "prm")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForOtherRewardModel"]}))
    with pytest.raises(EngineError, match="Qwen2ForOtherRewardModel is not supported"):
        Harness(folder)
