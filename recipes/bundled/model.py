"""A lean Qwen3 for training: the arithmetic of ``transformers``' Qwen3 in plain functions of PyTorch.

``export`` writes an ordinary Hugging Face folder; the parameters carry the same names, and a test holds the logits to
transformers' own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 0
    head_width: int = 32
    theta: float = 10000.0
    epsilon: float = 1e-6
    positions: int = 512
    """Maximum number of tokens of a sequence."""


SHAPES = {
    "policy": Shape(width=128, layers=4, heads=4, kv_heads=2, inner=256),
    "policy-large": Shape(width=128, layers=12, heads=4, kv_heads=2, inner=1536),
    "policy-thinking": Shape(width=128, layers=8, heads=4, kv_heads=2, inner=256, positions=2048),
    "policy-python": Shape(width=128, layers=6, heads=4, kv_heads=2, inner=256),
    "checker": Shape(width=128, layers=8, heads=4, kv_heads=2, inner=256, positions=1024),
    "draft": Shape(width=64, layers=1, heads=2, kv_heads=1, inner=128),
    "prm": Shape(width=128, layers=5, heads=4, kv_heads=2, inner=320),
}


class Layer(nn.Module):
    """One decoder layer; all activations are (batch, positions, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head = shape.width, shape.head_width
        self.shape = shape
        self.input_norm = nn.Parameter(torch.ones(width))
        self.q = nn.Parameter(torch.empty(shape.heads * head, width))
        self.k = nn.Parameter(torch.empty(shape.kv_heads * head, width))
        self.v = nn.Parameter(torch.empty(shape.kv_heads * head, width))
        self.o = nn.Parameter(torch.empty(width, shape.heads * head))
        self.q_norm = nn.Parameter(torch.ones(head))
        self.k_norm = nn.Parameter(torch.ones(head))
        self.post_norm = nn.Parameter(torch.ones(width))
        self.gate = nn.Parameter(torch.empty(shape.inner, width))
        self.up = nn.Parameter(torch.empty(shape.inner, width))
        self.down = nn.Parameter(torch.empty(width, shape.inner))

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (batch, heads, positions, head), and keys and values with ``kv_heads``."""
        shape = self.shape
        batch, length, _ = x.shape
        h = F.rms_norm(x, (shape.width,), self.input_norm, shape.epsilon)
        q = F.linear(h, self.q).view(batch, length, shape.heads, shape.head_width)
        k = F.linear(h, self.k).view(batch, length, shape.kv_heads, shape.head_width)
        v = F.linear(h, self.v).view(batch, length, shape.kv_heads, shape.head_width)
        q = F.rms_norm(q, (shape.head_width,), self.q_norm, shape.epsilon).transpose(1, 2)
        k = F.rms_norm(k, (shape.head_width,), self.k_norm, shape.epsilon).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, given attention's output (batch, heads, positions, head)."""
        batch, length, _ = x.shape
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), self.o)
        h = F.rms_norm(x, (self.shape.width,), self.post_norm, self.shape.epsilon)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x, cos, sin)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
        return self.finish(x, attended)


class Backbone(nn.Module):
    """Token ids (batch, positions), padded on the right, to final hidden states (batch, positions, width)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        cos, sin = rotary(shape.positions, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """With ``segments`` and ``positions``, branches share a trunk: a token attends to segment 0 and its own."""
        x = F.embedding(ids, self.embedding)
        length = ids.shape[1]
        allowed = None
        cos, sin = self.cos[:length], self.sin[:length]
        if positions is not None and segments is not None:
            own, other = segments[:, :, None], segments[:, None, :]
            before = torch.ones(length, length, dtype=torch.bool).tril()
            allowed = (before & ((own == other) | (other == 0)))[:, None]
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, allowed)
        return F.rms_norm(x, (self.shape.width,), self.norm, self.shape.epsilon)


def rotary(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, head) of the rotary embedding, in Hugging Face's half-split layout."""
    steps = torch.arange(0, shape.head_width, 2, dtype=torch.float64) / shape.head_width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / shape.theta**steps
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def initialise(model: Backbone, numbers: dict[int, int], seed: int) -> None:
    """Random matrices; embeddings of numbers (token id -> number) from waves of many periods (Fourier features)."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and name != "embedding":
                nn.init.normal_(p, std=0.7 / math.sqrt(p.shape[1]), generator=random)
            if name.endswith((".o", ".down")):
                p.mul_(1 / math.sqrt(2 * model.shape.layers))
        nn.init.normal_(model.embedding, std=0.05, generator=random)
        periods = (2, 3, 4, 5, 7, 8, 10, 20, 25, 50, 100, 200, 400, 500, 1000, 2000)
        table = torch.tensor(
            [[f(2 * math.pi * n / p) for p in periods for f in (math.cos, math.sin)] for n in range(1000)]
        )
        mix = torch.randn(table.shape[1], model.shape.width, generator=random) * 0.05 / math.sqrt(len(periods))
        for token, number in numbers.items():
            model.embedding[token] = table[number] @ mix + 0.3 * model.embedding[token]


def grow(small: Backbone, large: Backbone) -> None:
    """Make an initialised larger model compute exactly what a smaller one of equal width does (Net2Net: Chen 2016).

    The small model's layers are spread evenly over the large one's; the layers between add nothing yet, and neither do
    the new inner units. Tokens that the small model does not have keep their initial embeddings.
    """
    every = large.shape.layers // small.shape.layers
    source = dict(small.named_parameters())
    with torch.no_grad():
        for name, p in large.named_parameters():
            head, *rest = name.split(".")
            if head != "layers":
                p[: len(source[name])] = source[name]
                continue
            index, part = int(rest[0]), rest[1]
            if index % every:
                if part in ("o", "down"):
                    p.zero_()
                continue
            old = source[f"layers.{index // every}.{part}"]
            if part in ("gate", "up"):
                p[: old.shape[0]] = old
            elif part == "down":
                p.zero_()
                p[:, : old.shape[1]] = old
            else:
                p.copy_(old)


# Hugging Face folders

NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def public_name(name: str) -> str:
    if name == "embedding":
        return "model.embed_tokens.weight"
    if name == "norm":
        return "model.norm.weight"
    _, layer, rest = name.split(".")
    return f"model.layers.{layer}.{NAMES[rest]}"


def export(
    model: Backbone,
    folder: Path,
    *,
    score: tuple[Tensor, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors (fp16); with ``score`` (weight, bias) as a token classifier.

    ``notes`` are further entries of config.json.
    """
    shape = model.shape
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForTokenClassification" if score else "Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "pad_token_id": 0,
        "eos_token_id": 3,
        "bos_token_id": None,
        "dtype": "float16",
    }
    tensors = {public_name(name): p.detach() for name, p in model.named_parameters()}
    if score:
        config |= {
            "id2label": {"0": "bad", "1": "good"},
            "label2id": {"bad": 0, "good": 1},
            "classifier_dropout": 0.0,
            "reasoner_prm": {"format": "token_classification", "separator": "\n\n", "positive_label": 1},
        }
        tensors |= {"score.weight": score[0].detach(), "score.bias": score[1].detach()}
    else:
        generation = {"eos_token_id": 3, "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config | dict(notes or {}), indent=2) + "\n")
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[Backbone, tuple[Tensor, Tensor] | None]:
    """Load a shipped folder as a float32 backbone and, for a PRM, its score head."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        inner=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        head_width=config["head_dim"],
        positions=config["max_position_embeddings"],
    )
    model = Backbone(shape)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[public_name(name)])
    score = (tensors["score.weight"], tensors["score.bias"]) if "score.weight" in tensors else None
    return model.eval(), score


def shape_of(kind: str, vocabulary: int) -> Shape:
    return replace(SHAPES[kind], vocabulary=vocabulary)


def describe(shape: Shape) -> dict[str, Any]:
    return asdict(shape)
