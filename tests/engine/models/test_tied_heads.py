"""A checkpoint whose config ties the head to the embedding computes what transformers makes of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.core.check import check_model
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.protocol.types import EngineError
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.weights.safetensors import Weights
from tests.closeness import EPS
from tests.engine.conftest import save_random_model
from tests.seeds import shift

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM")
OTHERS = ("Gemma3ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM")


def save(folder: Path, class_name: str, case: str) -> dict[str, Tensor]:
    """Save a checkpoint that ties its head, with the tensors of a case. Returns them."""
    options = {"tie_word_embeddings": True, "initializer_range": 0.3}
    if class_name.startswith("Phi3"):
        options |= {"head_dim": None}
    save_random_model(class_name, options, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(shift(0))
    if case == "another head":
        tensors[HEAD] = tensors[TABLE] + 0.1 * torch.randn(tensors[TABLE].shape, generator=generator)
    elif case == "one row differs":
        tensors[HEAD] = tensors[TABLE].clone()
        tensors[HEAD][-1, -1] += 0.5
    elif case == "equal":
        tensors[HEAD] = tensors[TABLE].clone()
    elif case == "the head alone":
        tensors[HEAD] = tensors.pop(TABLE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def load(folder: Path) -> Decoder:
    decoder = load_model(folder, lambda config: config.max_context)
    assert isinstance(decoder, Decoder)
    return decoder


def assert_equal_logits(decoder: Decoder, peer: Any, hidden: Tensor) -> None:
    """Compare logits; each is a sum that both sides round in their own order, after a norm of as many numbers."""
    normed = peer.model.norm(hidden)
    expected, ours = peer.lm_head(normed), decoder.compute_logits(hidden)
    bound = 4 * hidden.shape[-1] * EPS * (normed.abs() @ peer.lm_head.weight.abs().T)
    if cap := decoder.config.logit_softcap:
        expected = torch.tanh(expected / cap) * cap
        bound += 8 * EPS * cap
    assert bool(((ours - expected).abs() <= bound).all())


@pytest.mark.parametrize("case", ["another head", "one row differs", "equal", "the head alone", "no head"])
@pytest.mark.parametrize("class_name", [*CLASSES, *OTHERS])
def test_a_tied_head_is_the_one_of_transformers(class_name: str, case: str, tmp_path: Path) -> None:
    save(tmp_path, class_name, case)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    decoder = load(tmp_path)
    hidden = torch.randn(3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(shift(1)))
    assert_equal_logits(decoder, peer, hidden)
    token = torch.tensor([7])
    torch.testing.assert_close(decoder.embed(token), peer.model.embed_tokens.weight[token], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["another head", "no head"])
def test_the_check_finds_it_close(case: str, tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM", case)
    assert check_model(tmp_path, lambda done, total, next_part: None).is_close


def test_heads_in_shards_are_compared(tmp_path: Path) -> None:
    tensors = save(tmp_path, "LlamaForCausalLM", "another head")
    (tmp_path / "model.safetensors").unlink()
    head = {HEAD: tensors.pop(HEAD)}
    names = {"a.safetensors": tensors, "b.safetensors": head}
    for name, part in names.items():
        save_file(part, tmp_path / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, part in names.items() for tensor in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal_logits(load(tmp_path), peer, torch.randn(2, 48))


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = save(tmp_path, "LlamaForCausalLM", "no head")
    tensors[HEAD] = torch.zeros(401, 48)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        EngineError, match=r"'lm_head\.weight' has shape \(401, 48\), its config\.json says \(400, 48\)"
    ):
        load(tmp_path)


def test_a_head_that_is_missing_without_the_flag_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM", "no head")
    fields = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineError, match=r"lacks the tensor 'lm_head\.weight'"):
        load(tmp_path)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (8, None)])
def test_a_quantised_head_is_used_although_the_flag_ties_it(bits: int, group_size: int | None, tmp_path: Path) -> None:
    """Its tensors say that it is a head of its own."""
    save_random_model("LlamaForCausalLM", {"tie_word_embeddings": False, "initializer_range": 0.3}, tmp_path / "model")
    options = create_options("rtn", bits, group_size, None)
    quantize(tmp_path / "model", tmp_path / "out", options, lambda done, total, next_part: None)
    expected = load(tmp_path / "out").compute_logits(hidden := torch.randn(2, 48))
    fields = json.loads((tmp_path / "out" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "out" / "config.json").write_text(json.dumps(fields))
    assert torch.equal(load(tmp_path / "out").compute_logits(hidden), expected)


def test_rows_beyond_the_first_thousands_are_compared(tmp_path: Path) -> None:
    table = torch.randn(9000, 4)
    for row, is_equal in ((None, True), (0, False), (4096, False), (8999, False)):
        head = table.clone()
        if row is not None:
            head[row, 1] += 1
        save_file({HEAD: head.half(), TABLE: table.half()}, tmp_path / "model.safetensors")
        assert Weights(tmp_path).are_equal(HEAD, TABLE) == is_equal
