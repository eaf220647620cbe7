"""Drafts of a checkpoint's layer for multi-token prediction equal those of its definition, computed by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.reference import float64
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError
from engine.scheduler.draft import EMPTY_DRAFT
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters import tree_draft
from engine.speculation.drafters.mtp import load_mtp
from engine.speculation.load import list_key_shapes
from tests.engine.conftest import MODELS, Checkpoints, save_random_model
from tests.engine.exact import exact_reference
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.heads import HIDDEN, Asked, Floats, Recorder, Target, check_drafts
from tests.engine.speculation.test_exact import PROMPTS, answers, requests
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long_grid
from tests.seeds import shift

ONE_LAYER = {
    "qwen3_5": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3_next": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4_moe_lite": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
}
"""Options of a model whose one layer is like the layer for multi-token prediction."""
SHAPES = {"chain": (3, 3), "tree": (2, 6)}
NORMS_OF_ONE = "qwen"
"""Beginning of the kinds whose norms add 1 to their weights."""


class Parts:
    """The layer, as a model of one layer, and what is before it."""

    def __init__(self, kind: str, folder: Path) -> None:
        architecture, options = MODELS[kind]
        save_random_model(architecture, {"initializer_range": 0.3} | options | ONE_LAYER[kind], folder)
        generator = torch.Generator().manual_seed(shift(3))
        self.folder, self.offset = folder, float(kind.startswith(NORMS_OF_ONE))
        self.embedding_norm, self.hidden_norm = (0.5 + torch.rand(HIDDEN, generator=generator) for _ in range(2))
        self.fuse = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.3

    def name_tensors(self, kind: str, num_layers: int) -> dict[str, Tensor]:
        """Return the tensors as a checkpoint has them."""
        own = load_file(self.folder / "model.safetensors")
        inner = {
            name.removeprefix("model.layers.0."): tensor
            for name, tensor in own.items()
            if name.startswith("model.layers.0.")
        }
        norms = self.embedding_norm - self.offset, self.hidden_norm - self.offset
        if kind.startswith(NORMS_OF_ONE):
            around = dict(zip(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), norms, strict=True))
            named = {f"mtp.{name}.weight": norm for name, norm in around.items()}
            named |= {"mtp.fc.weight": self.fuse, "mtp.norm.weight": own["model.norm.weight"]}
            return named | {f"mtp.layers.0.{name}": tensor for name, tensor in inner.items()}
        prefix = f"model.layers.{num_layers}."
        around = dict(zip(("enorm", "hnorm"), norms, strict=True))
        named = {f"{prefix}{name}.weight": norm for name, norm in around.items()}
        named |= {f"{prefix}eh_proj.weight": self.fuse, f"{prefix}shared_head.norm.weight": own["model.norm.weight"]}
        return named | {prefix + name: tensor for name, tensor in inner.items()}


class Reference:
    """The layer over a whole text at once, without a cache."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self._target, self._parts, self._model = Target(folder), parts, exact_reference(parts.folder)
        self._whole = exact_reference(folder)
        self._features: dict[tuple[int, ...], Tensor] = {}
        self._eps: float = self._whole.config.rms_norm_eps

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        """Return the logits of the token after the draft tokens.

        All tokens but the last have the target's hidden states; from there on the layer's own results are used."""
        key = tuple(tokens)
        with float64():
            if key not in self._features:
                self._features = {key: self._whole.model.norm(self._target.features(tokens[:-1]))}
            features, text = self._features[key], [*tokens, *guessed]
            for _ in range(len(guessed) + 1):
                embedded = self._target.embedding[text[1 : len(features) + 1]]
                pairs = (embedded, self._parts.embedding_norm), (features, self._parts.hidden_norm)
                normed = tuple(_normalize(x, weight, self._eps) for x, weight in pairs)
                inputs = torch.cat(normed, dim=1) @ self._parts.fuse.double().T.to(features.dtype)
                result = self._model.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
                features = torch.cat((features, result[-1:]))
            logits: Floats = self._whole.lm_head(features[-1]).double().numpy()
        return logits


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)


def save_with_layer(kind: str, source: Path, parts: Parts, folder: Path) -> Path:
    """Save the checkpoint in ``source`` again, with a layer for multi-token prediction."""
    shutil.copytree(source, folder)
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors") | parts.name_tensors(kind, num_layers)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _everything_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow all draft tokens, since random weights give each a low probability."""
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)


def draft(
    kind: str, checkpoints: Checkpoints, tmp_path: Path, shape: tuple[int, int], options: EngineOptions
) -> tuple[Harness, Recorder, tuple[Reference, Reference]]:
    parts = Parts(kind, tmp_path / "layer")
    folder = save_with_layer(kind, checkpoints(kind), parts, tmp_path / "model")
    harness = Harness(folder, options)
    recorder = Recorder(load_mtp(folder, harness.core.model.decoder))
    harness.core.start_speculation(recorder, FixedController(*shape))
    return harness, recorder, (Reference(folder, parts), Reference(folder, parts))


@pytest.mark.parametrize(("shape", "kind"), mostly_long_grid(list(SHAPES), list(ONE_LAYER), every=3))
def test_drafts_equal_those_of_the_layer_over_the_whole_text(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, shape: str
) -> None:
    """Several branches at once, whose prompts are prefilled in chunks; what they sample is what they sample alone."""
    options = replace(SMALL, step_tokens=32, page_size=8)
    harness, recorder, references = draft(kind, checkpoints, tmp_path, SHAPES[shape], options)
    asked = [
        replace(request, branches=request.branches[:1], cache_salt=request.request_id)
        for request in requests("plain", 12)
    ]
    ours, plain = (
        [event.token_ids for events in answers(each, asked) for event in events if isinstance(event, Completion)]
        for each in (harness, Harness(checkpoints(kind), SMALL))
    )
    assert_same_tokens(checkpoints(kind), asked, ours, plain)
    made: list[Asked] = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made) > 0.9 * len(recorder.asked) > 10
    check_drafts(*references, made[::5])


@pytest.mark.parametrize(("shape", "kind"), mostly_long_grid(list(SHAPES), ["qwen3_5", "deepseek_v3"], every=4))
def test_drafts_on_a_gpu_equal_those_of_the_layer_over_the_whole_text(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch)
    test_drafts_equal_those_of_the_layer_over_the_whole_text(checkpoints, tmp_path, kind, shape)


@pytest.mark.parametrize("kind", ["qwen3_5", "glm4_moe_lite"])
def test_a_continued_branch_reuses_the_layers_cached_keys(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    harness, recorder, references = draft(kind, checkpoints, tmp_path, (3, 3), replace(SMALL, page_size=8))
    first = harness.complete(generate(PROMPTS[2], [Branch(5, 0, 21)], ignore_eos=True))[0]
    recorder.asked.clear()
    again = harness.complete(generate(PROMPTS[2], [Branch(6, 0, 9, first.token_ids[:12])], ignore_eos=True))[0]
    assert again.cached_tokens >= len(PROMPTS[2]) - 1
    made = [one for one in recorder.asked if one.draft != EMPTY_DRAFT]
    assert len(made) >= 2
    check_drafts(*references, made)


def test_the_option_takes_the_layer_of_the_checkpoint_and_room_for_its_keys(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    kind = "qwen3_5"
    folder = save_with_layer(kind, checkpoints(kind), Parts(kind, tmp_path / "layer"), tmp_path / "model")
    harness = Harness(folder, replace(SMALL, draft="mtp"))
    plain = Harness(checkpoints(kind), SMALL)
    [shape] = list_key_shapes("mtp", folder, harness.core.model.decoder.config)
    assert harness.core.cache.pools[0].shape == shape
    assert len(harness.core.cache.data) == len(plain.core.cache.data) + 1
    prompt = generate(PROMPTS[1], [Branch(1, 1, 12)], ignore_eos=True)
    assert harness.complete(prompt)[0].token_ids == plain.complete(prompt)[0].token_ids


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gpt2"])
def test_a_checkpoint_without_such_a_layer_is_refused_by_name(checkpoints: Checkpoints, kind: str) -> None:
    with pytest.raises(EngineError, match="multi-token prediction") as refusal:
        Harness(checkpoints(kind), replace(SMALL, draft="mtp"))
    assert str(checkpoints(kind)) in str(refusal.value)


def test_the_layer_of_a_multimodal_checkpoint_is_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Its names do not begin like those of the language model."""
    kind = "qwen3_5"
    folder = save_with_layer(kind, checkpoints(kind), Parts(kind, tmp_path / "layer"), tmp_path / "model")
    prompt = generate(PROMPTS[1], [Branch(1, 1, 12)], ignore_eos=True)
    plain = Harness(folder, replace(SMALL, draft="mtp")).complete(prompt)[0]
    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    wrapper = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    wrapped = Harness(folder, replace(SMALL, draft="mtp")).complete(prompt)[0]
    assert (wrapped.token_ids, wrapped.drafted_tokens) == (plain.token_ids, plain.drafted_tokens)


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_a_layer_that_lacks_a_tensor_is_refused_by_its_name(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    folder = save_with_layer(kind, checkpoints(kind), Parts(kind, tmp_path / "layer"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    missing = next(name for name in tensors if name.endswith(("mtp.fc.weight", "eh_proj.weight")))
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / "model.safetensors")
    Harness(folder, SMALL)  # the model itself does not read it
    with pytest.raises(EngineError, match=f"lacks the tensor '{missing}'"):
        Harness(folder, replace(SMALL, draft="mtp"))
