"""The decoders compute what transformers computes, however the work is cut."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engine.core import CoreOptions
from engine.types import Branch, EngineError, ScoreItem
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness, generate, score

KINDS = ["llama", "qwen3", "llama_classify", "qwen3_classify"]
TOLERANCE = 1e-4


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(3, 360) for _ in range(count))


def reference_logits(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    loader = AutoModelForTokenClassification if "classify" in folder.name else AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def engine_logits(harness: Harness, tokens: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """Logits at every position from ``start`` on."""
    vocab = harness.core.model.info.vocab_size
    ids = () if harness.core.model.info.kind == "classify" else range(vocab)
    parts = (tokens[: start + 1], *((token,) for token in tokens[start + 1 :]))
    [result] = harness.score(score(ScoreItem(parts, tuple(range(len(parts)))), token_ids=ids))
    assert result.values is not None
    return torch.tensor(result.values)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_full_prefill_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 1)
    ours = engine_logits(Harness(checkpoints(kind)), tokens)
    torch.testing.assert_close(ours, reference_logits(checkpoints(kind), tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_chunked_prefill_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 2)
    harness = Harness(checkpoints(kind), CoreOptions(kv_tokens=512, max_running=8, step_tokens=13))
    ours = engine_logits(harness, tokens)
    torch.testing.assert_close(ours, reference_logits(checkpoints(kind), tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_a_cached_prefix_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 3)
    harness = Harness(checkpoints(kind))
    engine_logits(harness, tokens[:41])
    [result] = harness.score(score(ScoreItem((tokens,), (0,)), token_ids=() if "classify" in kind else (0,)))
    assert (result.cached_tokens, result.computed_tokens) == (41, 29)
    harness.core.cache.check()
    ours = engine_logits(harness, tokens[:50] + tokens[50:], start=45)
    torch.testing.assert_close(ours, reference_logits(checkpoints(kind), tokens)[45:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers_generate(checkpoints: Checkpoints, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints(kind), dtype=torch.float32).eval()
    harness = Harness(checkpoints(kind))
    for seed in range(6):
        prompt = random_tokens(5 + 11 * seed, seed)
        [ours] = harness.complete(generate(prompt, [Branch(0, 0, 40)], temperature=0.0))
        inputs = torch.tensor([prompt])
        theirs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert list(ours.token_ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_in_float32(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = copy_checkpoint(checkpoints("llama"), tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "model.safetensors")
    tokens = random_tokens(20, 4)
    ours = engine_logits(Harness(folder), tokens)
    torch.testing.assert_close(ours, reference_logits(folder, tokens), atol=TOLERANCE, rtol=0)


def test_sharded_weights_are_the_same_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path / "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokens = random_tokens(20, 5)
    ours = engine_logits(Harness(folder), tokens)
    torch.testing.assert_close(ours, reference_logits(checkpoints("qwen3"), tokens), atol=TOLERANCE, rtol=0)


def test_the_model_info_counts_parameters_as_transformers_does(checkpoints: Checkpoints) -> None:
    for kind in KINDS:
        info = Harness(checkpoints(kind)).core.model.info
        loader = AutoModelForTokenClassification if "classify" in kind else AutoModelForCausalLM
        assert info.parameters == loader.from_pretrained(checkpoints(kind)).num_parameters()
        assert info.kind == ("classify" if "classify" in kind else "generate")
        assert info.extra == {"reasoner_prm": {"kind": "test"}}
        assert (info.context, info.vocab_size) == (256, 400)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "wrong kind"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "does not use"),
        ({"vocab_size": 300}, "vocab_size"),
    ],
)
def test_a_checkpoint_that_is_not_supported_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=named):
        Harness(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", b"not what it should be"])
def test_a_missing_or_corrupt_file_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, file: str, content: bytes | None
) -> None:
    folder = copy_checkpoint(checkpoints("llama"), tmp_path / "model")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(EngineError, match=file.partition(".")[0]):
        Harness(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not a folder"):
        Harness(tmp_path / "nothing", SMALL)


def copy_checkpoint(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
