"""Random DFlash heads in the public format, and their forward pass by its published definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.speculation.heads import EPS, HIDDEN, INNER, THETA, VOCAB, Floats, Target
from tests.seeds import shift

Parts = tuple[dict[str, Any], dict[str, Tensor]]
MASK = 11
"""The token of the positions to predict."""
GROUP, RANK, TOP_K = 8, 6, 12
"""Sizes of the convolutions and the selector."""


def dflash_parts(
    *,
    layers: Sequence[int] = (0,),
    kinds: Sequence[str] = ("full_attention", "full_attention"),
    heads: tuple[int, int, int] = (6, 2, 16),
    has_selector: bool = False,
    has_bias: bool = False,
    **own: object,
) -> Parts:
    """Return config and weights of a head.

    ``layers``: indices of the target's layers whose outputs are read. ``kinds``: of the head's own layers. ``heads``:
    numbers of query and of key-value heads, and their size. ``own``: more fields of ``dflash_config``.
    """
    if has_selector:
        own |= {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP_K}
    config = {
        "architectures": ["DFlash2DraftModel" if has_selector else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "attention_bias": has_bias,
        "layer_types": list(kinds),
        "sliding_window": 9,
        "num_target_layers": 8,
        "dtype": "bfloat16",
        "dflash_config": {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": list(layers), **own},
    }
    return config, _tensors(config, has_bias=has_bias)


def _tensors(config: dict[str, Any], *, has_bias: bool) -> dict[str, Tensor]:
    generator, own = torch.Generator().manual_seed(shift(0)), config["dflash_config"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, len(own["target_layer_ids"]) * HIDDEN)}
    norms = {"hidden_norm.weight": HIDDEN, "norm.weight": HIDDEN}
    for layer in (f"layers.{index}." for index in range(config["num_hidden_layers"])):
        for name, rows, columns in (
            *(("q", queries, HIDDEN), ("k", keys, HIDDEN), ("v", keys, HIDDEN)),
            ("o", HIDDEN, queries),
        ):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = rows, columns
            if has_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = HIDDEN, INNER
        norms |= {f"{layer}{name}_layernorm.weight": HIDDEN for name in ("input", "post_attention")}
        norms |= {f"{layer}self_attn.{name}_norm.weight": config["head_dim"] for name in "qk"}
        if "selector_rank" in own:
            for name in ("attention", "mlp"):
                shapes[f"{layer}{name}_conv.base_kernel"] = 2, own["conv_kernel_size"], HIDDEN
                rows = 2 * own["conv_kernel_size"] * HIDDEN // own["conv_group_size"]
                shapes[f"{layer}{name}_conv.kernel_projection.weight"] = rows, HIDDEN
    if "selector_rank" in own:
        rank = own["selector_rank"]
        shapes |= {f"candidate_selector.{name}_codebook": (VOCAB, rank) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = rank, HIDDEN
    tensors = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return tensors | {name: 0.5 + torch.rand(size, generator=generator) for name, size in norms.items()}


class DFlashReference:
    """A DFlash head over a whole text at once, without a cache."""

    def __init__(self, folder: Path, parts: Parts, depth: int) -> None:
        """``depth``: positions that a block predicts."""
        self._config, tensors = parts
        self._own: dict[str, Any] = self._config["dflash_config"]
        self._target, self._depth = Target(folder), depth
        self._weights = {name.removesuffix(".weight"): tensor.double() for name, tensor in tensors.items()}
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        """Return the logits of the token after ``tokens``, all but the last of which have hidden states of the target,
        and the draft tokens."""
        key = tuple(tokens)
        if key not in self._known:
            layers = [index + 1 for index in self._own["target_layer_ids"]]
            self._known = {key: self._compute(self._target.states(tokens[:-1], layers), tokens[-1])}
        hidden = self._known[key][len(guessed) + 1]
        logits = torch.from_numpy(self._target.read_normalized(hidden)) * self._own.get("output_multiplier", 1.0)
        if cap := self._own.get("final_logit_softcapping"):
            logits = (logits / cap).tanh() * cap
        if "selector_rank" in self._own:
            before = (tokens[-1], *guessed)[len(guessed)]
            vector = self._weights["candidate_selector.predecessor_codebook"][before] * (
                self._weights["candidate_selector.hidden_projection"] @ hidden
            )
            chosen = logits.topk(self._own["selector_top_k"]).indices
            scores = logits[chosen] + self._weights["candidate_selector.successor_codebook"][chosen] @ vector
            logits = torch.full_like(logits, -torch.inf).scatter(0, chosen, scores)
        result: Floats = logits.numpy()
        return result

    def _compute(self, states: Tensor, last: int) -> Tensor:
        """Return the final hidden states of the block after positions with these states."""
        features = self._norm("hidden_norm", states @ self._weights["fc"].T)
        hidden = self._target.embedding[[last] + [MASK] * self._depth].double()
        hidden = hidden * self._own.get("input_embedding_scale", 1.0)
        for index, kind in enumerate(self._config["layer_types"]):
            layer = f"layers.{index}."
            normed = self._norm(f"{layer}input_layernorm", hidden)
            normed, filters = self._convolve_before(f"{layer}attention_conv", normed)
            mixed = self._attend(f"{layer}self_attn.", features, normed, kind)
            hidden = hidden + self._convolve_after(f"{layer}attention_conv", mixed, filters)
            normed = self._norm(f"{layer}post_attention_layernorm", hidden)
            normed, filters = self._convolve_before(f"{layer}mlp_conv", normed)
            inner = F.silu(self._linear(f"{layer}mlp.gate_proj", normed)) * self._linear(f"{layer}mlp.up_proj", normed)
            mixed = self._linear(f"{layer}mlp.down_proj", inner)
            hidden = hidden + self._convolve_after(f"{layer}mlp_conv", mixed, filters)
        return self._norm("norm", hidden)

    def _attend(self, prefix: str, features: Tensor, normed: Tensor, kind: str) -> Tensor:
        config, both = self._config, torch.cat((features, normed))
        heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        count, start = len(both), len(features)
        q = self._linear(f"{prefix}q_proj", normed).view(-1, heads, dim)
        k, v = (self._linear(f"{prefix}{name}_proj", both).view(-1, kv_heads, dim) for name in "kv")
        q = _rotate(self._norm(f"{prefix}q_norm", q), torch.arange(start, count))
        k = _rotate(self._norm(f"{prefix}k_norm", k), torch.arange(count))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        distance = torch.arange(start, count)[:, None] - torch.arange(count)
        causal = self._own.get("causal", config.get("is_causal"))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal or (causal is None and kind == "sliding_attention"):
            hidden |= distance < 0
        if kind == "sliding_attention":
            hidden |= distance.abs() >= config["sliding_window"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return self._linear(f"{prefix}o_proj", torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1))

    def _convolve_before(self, name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if f"{name}.base_kernel" not in self._weights:
            return x, None
        filters = self._linear(f"{name}.kernel_projection", x).view(len(x), 2, -1, HIDDEN // GROUP)
        return self._convolve(name, 0, x, filters), filters

    def _convolve_after(self, name: str, x: Tensor, filters: Tensor | None) -> Tensor:
        return x if filters is None else self._convolve(name, 1, x, filters)

    def _convolve(self, name: str, which: int, x: Tensor, filters: Tensor) -> Tensor:
        constants, out = self._weights[f"{name}.base_kernel"][which], []
        for place in range(len(x)):
            total = torch.zeros_like(x[0])
            for distance in range(min(len(constants), place + 1)):
                factors = constants[distance] + filters[place, which, distance].repeat_interleave(GROUP)
                total = total + factors * x[place - distance]
            out.append(total)
        return torch.stack(out)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * self._weights[name]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        out = x @ self._weights[name].T
        return out if bias is None else out + bias


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE to ``x`` ``[tokens, heads, head_dim]``, whose coordinates i and i + head_dim / 2 are a pair."""
    dim = x.shape[-1]
    angles = positions[:, None] * THETA ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
