"""Draft heads for training: ``medusa`` and ``eagle`` of ``engine.speculation.drafters``, computed over whole texts.

Level ``k`` of a head predicts, at every position ``t`` of a text at once, the token at ``t + 2 + k`` from the hidden
state at ``t`` and the tokens up to ``t + 1 + k``: a drafter's input there if its earlier draft tokens are accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.speculation.target import Target


class Medusa(nn.Module):
    """Medusa: independent heads on a shared hidden layer, which reads the token of the first level only."""

    def __init__(self, target: Target, levels: int) -> None:
        super().__init__()
        hidden, inner = target.config.hidden_size, 3 * target.config.hidden_size
        self.gate = nn.Parameter(random_matrix(inner, 2 * hidden))
        self.up = nn.Parameter(random_matrix(inner, 2 * hidden))
        self.heads = nn.Parameter(random_matrix(levels * hidden, inner) * 0.5)
        self.bias = nn.Parameter(torch.zeros(levels * hidden))
        self._levels, self._embedding_scale = levels, target.embedding_scale

    def inputs(self, _target: Target, features: Tensor) -> Tensor:
        """Return what the head reads of the texts whose features the target computed last."""
        return features

    def read(self, target: Target, state: Tensor) -> Tensor:
        """Return the float32 logits of outputs."""
        return target.read(state)

    def forward(self, features: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of the target's output projection for each level: ``[texts, positions, hidden]``.

        ``features`` and ``embedded``: ``[texts, tokens, hidden]``. Each level has one position less."""
        tokens = features.shape[1]
        normal = _normal(features[:, :-1])
        both = torch.cat((normal, embedded[:, 1:]), dim=-1)
        inner = F.silu(F.linear(both, self.gate)) * F.linear(both, self.up)
        heads = zip(self.heads.chunk(self._levels), self.bias.chunk(self._levels), strict=True)
        for level, (weight, bias) in enumerate(heads):
            some = slice(0, tokens - 1 - level)
            yield normal[:, some] + F.linear(inner[:, some], weight, bias)

    def save(self, folder: Path, target: Target) -> None:
        """Write the checkpoint for ``engine.speculation.drafters.medusa``."""
        sizes = {"heads": self._levels, "intermediate_size": len(self.gate)}
        tensors = {
            "trunk.gate_proj.weight": _scaled(self.gate, self._embedding_scale),
            "trunk.up_proj.weight": _scaled(self.up, self._embedding_scale),
            "heads.weight": self.heads,
            "heads.bias": self.bias,
        }
        save_head(folder, {"kind": "medusa", **target_sizes(target), **sizes}, tensors)


class Eagle(nn.Module):
    """EAGLE: one decoder layer, unrolled over its own predictions as in drafting.

    Its keys and values are those of true hidden states up to ``t``, then of predicted ones ("training-time test", Li et
    al. 2025, "EAGLE-3", https://arxiv.org/abs/2503.01840)."""

    def __init__(self, target: Target, levels: int) -> None:
        super().__init__()
        config = target.config
        hidden, inner = config.hidden_size, config.intermediate
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        # The layer is initialised to the identity of the hidden state.
        repeat = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        self.fc = nn.Parameter(repeat + 0.3 * random_matrix(hidden, 2 * hidden))
        self.q, self.k = nn.Parameter(random_matrix(queries, hidden)), nn.Parameter(random_matrix(keys, hidden))
        self.v, self.o = nn.Parameter(random_matrix(keys, hidden)), nn.Parameter(random_matrix(hidden, queries) * 0.5)
        self.gate, self.up = nn.Parameter(random_matrix(inner, hidden)), nn.Parameter(random_matrix(inner, hidden))
        self.down = nn.Parameter(random_matrix(hidden, inner) * 0.5)
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self._levels, self._config, self._embedding_scale = levels, config, target.embedding_scale
        self._theta = config.ropes[0].parameters["rope_theta"]

    def inputs(self, _target: Target, features: Tensor) -> Tensor:
        """Return what the head reads of the texts whose features the target computed last."""
        return features

    def read(self, target: Target, state: Tensor) -> Tensor:
        """Return the float32 logits of outputs."""
        return target.read(state)

    def forward(self, features: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of the target's output projection for each level, as ``Medusa.forward``."""
        config, tokens = self._config, features.shape[1]
        groups = config.heads // config.kv_heads
        before = torch.ones(tokens - 1, tokens - 1, dtype=torch.bool, device=features.device).tril()
        entries: list[tuple[Tensor, Tensor]] = []
        state = features
        for level in range(self._levels):
            count = tokens - 1 - level
            normal = F.layer_norm(state[:, :count], state.shape[2:], self.hidden_norm, None, EPS)
            hidden = F.linear(torch.cat((normal, embedded[:, 1 + level : 1 + level + count]), -1), self.fc)
            q, k, v = (
                F.linear(hidden, weight).view(*hidden.shape[:2], -1, config.head_dim).transpose(1, 2)
                for weight in (self.q, self.k, self.v)
            )
            q, k = rotate(q, level, self._theta), rotate(k, level, self._theta)
            entries.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
            mixed = attend(q * config.head_dim**-0.5, entries, before[:count])
            inner = F.silu(F.linear(hidden, self.gate)) * F.linear(hidden, self.up)
            state = hidden + F.linear(mixed.transpose(1, 2).flatten(2), self.o) + F.linear(inner, self.down)
            yield state

    def save(self, folder: Path, target: Target) -> None:
        """Write the checkpoint for ``engine.speculation.drafters.eagle``."""
        config = {
            "kind": "eagle",
            **target_sizes(target),
            "intermediate_size": target.config.intermediate,
            "num_attention_heads": target.config.heads,
            "num_key_value_heads": target.config.kv_heads,
            "head_dim": target.config.head_dim,
            "layer_norm_eps": EPS,
            "rope_theta": self._theta,
        }
        names = {
            **{name: f"layer.self_attn.{name}_proj" for name in "qkvo"},
            **{name: f"layer.mlp.{name}_proj" for name in ("gate", "up", "down")},
            "hidden_norm": "hidden_norm",
        }
        tensors = {f"{public}.weight": getattr(self, name) for name, public in names.items()}
        save_head(folder, config, tensors | {"fc.weight": _scaled(self.fc, self._embedding_scale)})


EPS = 1e-6


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """Apply RoPE to ``x`` ``[texts, heads, positions, head_dim]`` at the positions from ``first`` on."""
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(first, first + x.shape[2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def attend(q: Tensor, entries: list[tuple[Tensor, Tensor]], before: Tensor) -> Tensor:
    """Compute the attention of each query ``t`` over keys and values of all levels.

    It attends to those of the first level up to ``t`` (mask ``before`` ``[positions, tokens]``), and to its own of each
    later level."""
    (keys, values), own = entries[0], entries[1:]
    count = q.shape[2]
    scores = (q @ keys.transpose(2, 3)).masked_fill(~before, -torch.inf)
    scores = torch.cat([scores, *((q * k[:, :, :count]).sum(-1, keepdim=True) for k, _ in own)], -1)
    weights = scores.softmax(-1)
    mixed: Tensor = weights[..., : keys.shape[2]] @ values
    for place, (_, v) in enumerate(own, keys.shape[2]):
        mixed = mixed + weights[..., place, None] * v[:, :, :count]
    return mixed


def _normal(x: Tensor) -> Tensor:
    normal: Tensor = F.rms_norm(x, (x.shape[-1],), None, EPS)
    return normal


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) / math.sqrt(columns)


def _scaled(weight: Tensor, embedding_scale: float) -> Tensor:
    """Return weights for (hidden state, scaled embedding) converted for (hidden state, embedding)."""
    states, embeddings = weight.chunk(2, dim=1)
    return torch.cat((states, embeddings * embedding_scale), dim=1)


def target_sizes(target: Target) -> dict[str, int]:
    return {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    halves = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
