"""Random EAGLE-3 heads in the public formats, and their forward pass by its published definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.speculation.heads import EPS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, THETA, VOCAB, Floats, Target
from tests.seeds import shift

Parts = tuple[dict[str, Any], dict[str, Tensor]]
DRAFT_IDS = torch.tensor([token for token in range(VOCAB) if token % 8 != 6])
"""The target's tokens that heads with a vocabulary of their own know."""


def eagle3_parts(
    form: str = "speculators",
    *,
    layers: Sequence[int] | None = (1,),
    num_states: int = 1,
    hidden: int = HIDDEN,
    layer_type: str = "llama",
    has_embedding: bool = False,
    has_bias: bool = False,
    **flags: bool,
) -> Parts:
    """Return config and weights of a head. ``form``: ``speculators``, ``safeai`` or ``modelopt``.

    ``layers``: numbers of the layers whose states are fused, ``None``: the default three; ``num_states``: how many.
    """
    tensors = _tensors(form, num_states, hidden, layer_type, flags, has_embedding=has_embedding, has_bias=has_bias)
    layer = {
        "model_type": layer_type,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "rope_theta": THETA,
        "torch_dtype": "bfloat16",
    }
    head = {"draft_vocab_size": len(tensors["lm_head.weight"]), **flags}
    if hidden != HIDDEN:
        head["target_hidden_size"] = HIDDEN
    if form == "modelopt":
        ids = None if layers is None else [number - 1 for number in layers]
        nested = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, "use_mtp_layernorm": False}
        return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested, **layer, **head}, tensors
    if layers is not None:
        head["eagle_aux_hidden_state_layer_ids"] = list(layers)
    if form == "safeai":
        return {"architectures": ["LlamaForCausalLM"], **layer, **head}, tensors
    verifier = {"name_or_path": "organisation/model", "architectures": ["LlamaForCausalLM"]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    speculators = {"algorithm": "eagle3", "proposal_methods": [proposal], "verifier": verifier}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": speculators,
        "transformer_layer_config": layer,
        **head,
    }
    return config, tensors


def _tensors(
    form: str,
    num_states: int,
    hidden: int,
    layer_type: str,
    flags: dict[str, bool],
    *,
    has_embedding: bool,
    has_bias: bool,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shift(0))
    queries, keys, states = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, num_states * HIDDEN
    layer = "midlayer." if form == "safeai" else "layers.0."
    with_bias = {
        f"{layer}self_attn.q_proj": (queries, 2 * hidden),
        f"{layer}self_attn.k_proj": (keys, 2 * hidden),
        f"{layer}self_attn.v_proj": (keys, 2 * hidden),
        f"{layer}self_attn.o_proj": (hidden, queries),
        f"{layer}mlp.gate_proj": (INNER, hidden),
        f"{layer}mlp.up_proj": (INNER, hidden),
        f"{layer}mlp.down_proj": (hidden, INNER),
    }
    vocab = VOCAB if form == "modelopt" else len(DRAFT_IDS)
    matrices = with_bias | {"fc": (hidden, states), "lm_head": (vocab, hidden)}
    norms = {f"{layer}{name}": hidden for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    norms["norm"] = hidden
    if layer_type == "qwen3":
        norms |= {f"{layer}self_attn.{name}_norm": HEAD_DIM for name in "qk"}
    if flags.get("norm_before_fc"):
        norms["input_norm"] = states
    if flags.get("fc_norm"):
        norms |= {f"fc_norm.{index}": HIDDEN for index in range(num_states)}
    tensors = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.3 for name, shape in matrices.items()}
    tensors |= {f"{name}.weight": 0.5 + torch.rand(size, generator=generator) for name, size in norms.items()}
    if has_bias:
        tensors |= {
            f"{name}.bias": torch.randn(rows, generator=generator) * 0.3 for name, (rows, _) in with_bias.items()
        }
    if has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, hidden, generator=generator)
    if vocab < VOCAB:
        tensors["d2t"] = DRAFT_IDS - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, DRAFT_IDS, True)
    return tensors


class Eagle3Reference:
    """An EAGLE-3 head over a whole text at once, without a cache."""

    def __init__(
        self,
        folder: Path,
        parts: Parts,
        layers: Sequence[int],
        bias: Sequence[tuple[int, float]] = (),
    ) -> None:
        """``layers``: numbers of the layers whose states are fused. ``bias``: added to logits of tokens."""
        config, tensors = parts
        self._target, self._layers, self._bias, self._flags = Target(folder), layers, bias, config
        self._weights = {
            name.removesuffix(".weight").removeprefix("midlayer.").removeprefix("layers.0."): tensor.double()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self._draft_ids = DRAFT_IDS if "d2t" in tensors else torch.arange(VOCAB)
        self._embedding = self._weights.get("embed_tokens", self._target.embedding)
        self._fused: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int], guessed: Sequence[int]) -> Floats:
        """Return the logits over the target's vocabulary after the draft tokens.

        All tokens but the last have fused states of the target; from there on the layer's own outputs are used."""
        key = tuple(tokens)
        if key not in self._fused:
            self._fused = {key: self._fuse(self._target.states(tokens[:-1], self._layers))}
        features, text = self._fused[key], [*tokens, *guessed]
        for _ in range(len(guessed) + 1):
            out = self._layer(features, self._embedding[text[1 : len(features) + 1]])
            features = torch.cat((features, out[-1:]))
        last = features[-1] if self._flags.get("norm_output") else self._norm("norm", features[-1])
        logits = np.full(VOCAB, -np.inf)
        logits[self._draft_ids.numpy()] = (self._weights["lm_head"] @ last).double().numpy()
        for token, value in self._bias:
            logits[token] += value
        return logits

    def _fuse(self, states: Tensor) -> Tensor:
        if self._flags.get("norm_before_fc"):
            states = self._norm("input_norm", states)
        if self._flags.get("fc_norm"):
            parts = states.split(HIDDEN, dim=1)
            states = torch.cat([self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=1)
        return states @ self._weights["fc"].T

    def _layer(self, features: Tensor, embedded: Tensor) -> Tensor:
        n = len(features)
        normed = self._norm("hidden_norm", features)
        inputs = torch.cat((self._norm("input_layernorm", embedded), normed), dim=1)
        q, k, v = (
            self._linear(f"self_attn.{name}_proj", inputs).view(n, heads, HEAD_DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        if "self_attn.q_norm" in self._weights:
            q, k = self._norm("self_attn.q_norm", q), self._norm("self_attn.k_norm", k)
        q, k = _rotate(q), _rotate(k)
        # Query head h attends with the keys of head h // (heads per key-value head).
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        residual = normed if self._flags.get("norm_before_residual") else features
        hidden = residual + self._linear("self_attn.o_proj", mixed)
        inner = self._norm("post_attention_layernorm", hidden)
        inner = F.silu(self._linear("mlp.gate_proj", inner)) * self._linear("mlp.up_proj", inner)
        hidden = hidden + self._linear("mlp.down_proj", inner)
        return self._norm("norm", hidden) if self._flags.get("norm_output") else hidden

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * self._weights[name]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        out = x @ self._weights[name].T
        return out if bias is None else out + bias


def _rotate(x: Tensor) -> Tensor:
    """Apply RoPE to ``x`` ``[tokens, heads, head_dim]``, whose coordinates i and i + head_dim / 2 are a pair."""
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
