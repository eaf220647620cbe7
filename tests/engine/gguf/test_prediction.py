"""A GGUF file's layer for multi-token prediction computes what that of the checkpoint computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.gguf.folder import open_gguf_folder
from engine.models.decoder import Decoder
from engine.models.prediction import open_prediction_layer
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError
from tests.engine.gguf.files import write_gguf
from tests.engine.gguf.test_models import make
from tests.engine.helpers import SMALL, Harness, generate
from tests.seeds import shift

KINDS = {"qwen35": "qwen35", "qwen35moe": "qwen35moe", "qwen3next": "qwen3next"}
KINDS |= dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), "deepseek2")
"""Architectures of the files, by case."""
HIDDEN = 96


def add_layer(checkpoint: Path, case: str) -> None:
    """Give a checkpoint a layer for multi-token prediction, which is like its last one."""
    tensors = load_file(checkpoint / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    generator = torch.Generator().manual_seed(shift(5))
    copies = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{last}.")}
    is_qwen = case.startswith("qwen")
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{last + 1}."
    around = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
    if not is_qwen:
        around = tuple(f"{prefix}{name}" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
    for name, tensor in copies.items():
        tensors[prefix + name.removeprefix(f"model.layers.{last}.")] = tensor + 0.1 * torch.rand(
            tensor.shape, generator=generator
        )
    for name in around[:3]:
        tensors[f"{name}.weight"] = torch.rand(HIDDEN, generator=generator)
    tensors[f"{around[3]}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def compute(folder: Path) -> list[Tensor]:
    """Return what each part of the layer makes of the same input."""
    decoder = Harness(folder).core.model.decoder
    assert isinstance(decoder, Decoder)
    parts = open_prediction_layer(folder, decoder)
    x = torch.randn(7, 2 * HIDDEN, generator=torch.Generator().manual_seed(shift(6)))
    hidden = parts.fuse(x)
    return [
        *(parts.embedding_norm, parts.hidden_norm, parts.final_norm, hidden),
        *(parts.layer.project(hidden), parts.layer.mlp(hidden)),
    ]


@pytest.mark.parametrize("case", KINDS)
def test_the_layer_of_a_file_is_that_of_its_checkpoint(case: str, tmp_path: Path) -> None:
    checkpoint, file = make(case, tmp_path)
    add_layer(checkpoint, case)
    write_gguf(checkpoint, file, KINDS[case])
    for ours, expected in zip(compute(open_gguf_folder(file)), compute(checkpoint), strict=True):
        assert torch.equal(ours, expected)


def test_it_drafts_and_changes_no_text(tmp_path: Path) -> None:
    checkpoint, file = make("qwen35", tmp_path)
    add_layer(checkpoint, "qwen35")
    write_gguf(checkpoint, file, "qwen35")
    texts = []
    for folder, drafter in ((open_gguf_folder(file), "mtp"), (checkpoint, "mtp"), (checkpoint, "off")):
        options = EngineOptions(kv_tokens=SMALL.kv_tokens, max_running=4, draft=drafter)
        request = generate(tuple(range(3, 40)), [Branch(1, 1, 20)], temperature=0.0)
        (completion,) = Harness(folder, options).complete(request)
        assert isinstance(completion, Completion)
        texts.append(completion.token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_file_without_the_layer_is_refused_by_name(tmp_path: Path) -> None:
    _, file = make("qwen35", tmp_path)
    folder = open_gguf_folder(file)
    decoder = Harness(folder).core.model.decoder
    assert isinstance(decoder, Decoder)
    with pytest.raises(EngineError, match="has no layer for multi-token prediction; choose another drafter than mtp"):
        open_prediction_layer(folder, decoder)
