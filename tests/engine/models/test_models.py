"""Decoders compared with transformers, for prefills, chunks, cached prefixes and preemption."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.models.decoder import Decoder
from engine.models.families.read import is_defined, known_fields
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineError, ScoreItem
from engine.weights.safetensors import Weights
from kernels.cpu.linear.half import is_supported
from tests.closeness import assert_rounded
from tests.engine.conftest import MODELS, Checkpoints, list_corrections, save_random_model
from tests.engine.exact import assert_equal_logits, exact_logits, float32_loss, reference
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.long import mostly_long
from tests.seeds import shift

KINDS = list(MODELS)
GENERATING = [kind for kind in KINDS if "classify" not in kind]


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(shift(seed)).choices(range(3, 360), k=count))


def engine_logits(harness: Harness, tokens: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """Return the logits at every position from ``start`` on."""
    vocab = harness.core.model.info.vocab_size
    ids = () if harness.core.model.info.kind == "classify" else range(vocab)
    parts = (tokens[: start + 1], *((token,) for token in tokens[start + 1 :]))
    [result] = harness.score(score(ScoreItem(parts, tuple(range(len(parts)))), token_ids=ids))
    assert result.values is not None
    return torch.tensor(result.values)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=6))
def test_logits_of_a_full_prefill_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 1)
    ours = engine_logits(Harness(checkpoints(kind)), tokens)
    assert_equal_logits(ours, checkpoints(kind), tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_chunked_prefill_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 2)
    harness = Harness(checkpoints(kind), EngineOptions(kv_tokens=512, max_running=8, step_tokens=13))
    ours = engine_logits(harness, tokens)
    assert_equal_logits(ours, checkpoints(kind), tokens)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=6))
def test_logits_after_a_cached_prefix_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    tokens = random_tokens(70, 3)
    harness = Harness(checkpoints(kind))
    engine_logits(harness, tokens[:41])
    [result] = harness.score(score(ScoreItem((tokens,), (0,)), token_ids=() if "classify" in kind else (0,)))
    assert (result.cached_tokens, result.computed_tokens) == (41, 29)
    harness.core.cache.check()
    ours = engine_logits(harness, tokens[:50] + tokens[50:], start=45)
    assert_equal_logits(ours, checkpoints(kind), tokens, start=45)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=7))
def test_logits_of_texts_with_a_shared_prefix_equal_transformers(checkpoints: Checkpoints, kind: str) -> None:
    """Four texts share 37 tokens (two pages and a part of a third) and are computed in one batch."""
    common = random_tokens(37, 4)
    texts = [common + random_tokens(20 + 5 * seed, seed) for seed in range(5, 9)]
    harness = Harness(checkpoints(kind))
    ids = () if "classify" in kind else range(harness.core.model.info.vocab_size)
    results = harness.score(
        score(*(ScoreItem((t[:37], *((one,) for one in t[37:])), range(1, len(t) - 36)) for t in texts), token_ids=ids)
    )
    assert sum(result.cached_tokens for result in results) == 3 * 37
    for text, result in zip(texts, results, strict=True):
        assert_equal_logits(torch.tensor(result.values), checkpoints(kind), text, start=37)


@pytest.mark.parametrize("kind", mostly_long(GENERATING, every=6))
def test_logits_of_preempted_branches_equal_transformers(
    checkpoints: Checkpoints, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three branches, one with tokens of its own, run in memory for about two; every row from which a token was sampled
    counts.
    """
    harness = Harness(checkpoints(kind), EngineOptions(kv_tokens=160, max_running=8, step_tokens=24))
    drawn: list[torch.Tensor] = []
    read, fused_sampler = harness.core.model.decoder.compute_logits, harness.core.runner.forward.fused_sampler
    sample_fused = None if fused_sampler is None else fused_sampler.sample

    def recording(hidden: torch.Tensor, token_ids: Sequence[int] = ()) -> torch.Tensor:
        drawn.append(read(hidden, token_ids).clone())
        return read(hidden, token_ids)

    def drawing(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(harness.core.model.decoder, "compute_logits", read)
            found = sample_fused(*arguments) if sample_fused else None
        if found is not None:
            drawn.append(found[0].clone())
        return found

    monkeypatch.setattr(harness.core.model.decoder, "compute_logits", recording)
    if fused_sampler is not None:
        monkeypatch.setattr(fused_sampler, "sample", drawing)
    prompt = random_tokens(41, 9)
    branches = [Branch(seed, 0, 60, generated=random_tokens(11 * seed, 10 + seed)) for seed in range(3)]
    completions = harness.complete(generate(prompt, branches, temperature=1.0, ignore_eos=True))
    assert harness.core.stats.preemptions > 0
    rows = torch.cat(drawn)
    assert len(rows) == 3 * 60
    for branch, completion in zip(branches, completions, strict=True):
        text = (*prompt, *branch.generated, *completion.token_ids)
        expected = exact_logits(checkpoints(kind), text)[-61:-1]
        nearest = rows[(expected[:, None] - rows).abs().amax(-1).argmin(1)]
        assert_rounded(nearest, expected, float32_loss(checkpoints(kind)).logit)


@pytest.mark.parametrize("kind", mostly_long(GENERATING, every=6))
def test_greedy_tokens_equal_transformers_generate(checkpoints: Checkpoints, kind: str) -> None:
    """Either of two tokens that are equally likely up to the error of float32 is accepted, and the comparison ends."""
    model, loss = reference(checkpoints(kind)), float32_loss(checkpoints(kind)).logit
    harness = Harness(checkpoints(kind))
    # Over its cache transformers ignores the range of step sizes, which it computes prompts with.
    options: dict[str, Any] = (
        {"use_cache": False} if kind in ("falcon_h1_norm", "granite_hybrid_dense", "nemotron_h") else {}
    )
    # With longrope, generate computes all keys again when a text exceeds the original context.
    for seed in range(3, 6) if kind == "phi3_longrope" else range(0, 6, 2):
        prompt = random_tokens(5 + 11 * seed, seed)
        [ours] = harness.complete(generate(prompt, [Branch(0, 0, 40)], temperature=0.0))
        inputs = torch.tensor([prompt])
        theirs = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        pairs = list(zip_longest(ours.token_ids, theirs[0, len(prompt) :].tolist()))
        parted = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if parted is not None:
            law = exact_logits(checkpoints(kind), (*prompt, *ours.token_ids[:parted]))[-1]
            assert (law.max() - law[list(pairs[parted])]).max() <= 2 * loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", mostly_long(KINDS, every=8))
def test_half_precision_weights_give_the_logits_of_float32_to_the_bit(
    kind: str, checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype
) -> None:
    """They stay in 16 bits in memory, which changes nothing."""
    folders = [copy_checkpoint(checkpoints(kind), tmp_path / name) for name in ("half", "float32")]
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folders[0] / "model.safetensors").items()}
    save_file(weights, folders[0] / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in weights.items()}, folders[1] / "model.safetensors")
    tokens = random_tokens(20, 4)
    half, right = (Harness(folder) for folder in folders)
    assert engine_logits(half, tokens).equal(engine_logits(right, tokens))
    decoder = half.core.model.decoder
    if isinstance(decoder, Decoder) and is_supported(dtype):
        assert decoder.layouts.keys() == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_in_float32(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = copy_checkpoint(checkpoints("llama"), tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "model.safetensors")
    tokens = random_tokens(20, 4)
    ours = engine_logits(Harness(folder), tokens)
    assert_equal_logits(ours, folder, tokens)


def test_sharded_weights_load_as_the_same_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path / "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokens = random_tokens(20, 5)
    ours = engine_logits(Harness(folder), tokens)
    assert_equal_logits(ours, checkpoints("qwen3"), tokens)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe_mixed"])
def test_stacked_experts_load_as_the_same_model(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    """Checkpoints on the hub have a tensor for each expert; transformers stacks them in one."""
    folder = copy_checkpoint(checkpoints(kind), tmp_path / kind)
    assert any(".experts.0." in name for name in load_file(folder / "model.safetensors"))
    stacked = reference(checkpoints(kind)).state_dict()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked)
    save_file(stacked, folder / "model.safetensors")
    tokens = random_tokens(20, 5)
    assert engine_logits(Harness(folder), tokens).equal(engine_logits(Harness(checkpoints(kind)), tokens))


def test_loading_keeps_no_second_copy_of_the_weights(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those tensors of the files that the model uses unchanged outlive loading."""
    taken: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    take = Weights.take_floats

    def watched(weights: Weights, name: str, *shape: int) -> torch.Tensor:
        tensor = take(weights, name, *shape)
        taken.append((name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(Weights, "take_floats", watched)
    harness = Harness(checkpoints("llama"))
    kept = {name for name, tensor in taken if tensor() is not None and "norm" not in name}
    assert harness.core.model.decoder.parameters > 0
    assert kept == {"model.embed_tokens.weight"}


def test_the_model_info_has_the_parameter_count_of_transformers(checkpoints: Checkpoints) -> None:
    for kind in KINDS:
        info = Harness(checkpoints(kind)).core.model.info
        model = reference(checkpoints(kind))
        corrections = sum(buffer.numel() for _, buffer in list_corrections(model))  # no parameters for transformers
        assert info.parameters == model.num_parameters() + corrections
        assert info.kind == ("classify" if "classify" in kind else "generate")
        assert info.extra == {"reasoner_prm": {"kind": "test"}}
        assert (info.context, info.vocab_size) == (256, 400)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"attention_bias": True}, "self_attn.q_proj.bias"),
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 4}, "heads"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        ({"hidden_size": None}, "wrong type"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"num_hidden_layers": 3, "layer_types": None}, "model.layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "model.safetensors has tensors .* does not use"),
        ({"vocab_size": 300}, "embed_tokens.* has shape"),
    ],
)
def test_an_unsupported_checkpoint_is_refused_by_name(
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


_REFUSED = {
    "Lfm2": {"conv_bias"},
    "NemotronH": {"attention_bias", "sliding_window"},
    "FalconH1": {"attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"},
}
"""Fields that leave a model to transformers' code."""


@pytest.mark.parametrize("architecture", sorted({one for one, _ in MODELS.values() if is_defined(one)}))
def test_every_config_field_of_transformers_is_supported_or_refused(architecture: str) -> None:
    """Every feature of the installed transformers is computed here, or refused if a config enables it."""
    declared = {field.name for field in dataclasses.fields(getattr(transformers, architecture).config_class)}
    refused = {"is_encoder_decoder", "use_bidirectional_attention"}
    if architecture.startswith("Gemma3"):
        refused.add("attn_logit_softcapping")  # which transformers does not compute there either
    refused |= _REFUSED.get(architecture.removesuffix("ForCausalLM"), set())
    assert declared <= known_fields(architecture) | refused


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    save_random_model("LlamaForCausalLM", {"vocab_size": 300}, tmp_path)
    with pytest.raises(EngineError, match=r"token id \d+, .* vocab_size is 300"):
        Harness(tmp_path)


def test_a_missing_or_damaged_shard_is_refused_by_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    reference(checkpoints("qwen3")).save_pretrained(folder, max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / index["model.norm.weight"]
    whole = shard.read_bytes()
    for content in (None, b"", whole[: len(whole) // 2], whole + b"0"):
        if content is None:
            shard.unlink()
        else:
            shard.write_bytes(content)
        with pytest.raises(EngineError, match=shard.name):
            Harness(folder)
    shard.write_bytes(whole)
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(EngineError, match=rf"{shard.name} lacks 'model.norm.weight'"):
        Harness(folder)


def test_a_tensor_of_another_shape_or_kind_is_refused_with_its_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoints("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for tensor, named in ((torch.ones(49), "has shape"), (torch.ones(48, dtype=torch.int8), "int8")):
        save_file(weights | {"model.norm.weight": tensor}, folder / "model.safetensors")
        with pytest.raises(EngineError, match=rf"model.safetensors: 'model.norm.weight' .*{named}"):
            Harness(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not a folder"):
        Harness(tmp_path / "nothing", SMALL)


def copy_checkpoint(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
