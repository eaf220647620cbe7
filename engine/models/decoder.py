"""The Llama-family decoder: Llama and Qwen3, for language modelling and token classification, as one definition.

Weights are fused where transformers keeps them apart (query-key-value, gate-up), and queries and keys are normalised
and rotated together, since on small models the number of operations costs more than their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.attention import Attend
from engine.models.config import ModelConfig
from engine.models.weights import Weights
from kernels.activation import silu_mul
from kernels.linear import Linear
from kernels.norm import rms_norm
from kernels.rotary import rotary, rotary_tables


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, rows one after the other."""

    tokens: Tensor
    """``[tokens]`` token ids."""
    positions: Tensor
    """``[tokens]`` positions within their sequences."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    """``[(heads + 2 kv_heads) * head_dim, hidden]``."""
    qk_norm: Tensor | None
    """``[heads + kv_heads, head_dim]``: the query weight for each head, then the key weight."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    """``[2 * intermediate, hidden]``."""
    down: Linear


class Decoder:
    """A checkpoint's weights and the forward pass over paged keys and values. float32, CPU."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """Loads the weights. Raises ``EngineError`` when they are missing, unreadable or do not fit the config."""
        self.config = config
        weights = Weights(folder)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [_layer(config, weights, f"model.layers.{index}.") for index in range(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden)
        if config.labels:
            bias = weights.take("score.bias", config.labels) if weights.has("score.bias") else None
            self._head = Linear(weights.take("score.weight", config.labels, config.hidden), bias)
        elif config.tied:
            weights.drop("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(weights.take("lm_head.weight", config.vocab, config.hidden))
        weights.finish()
        self._cos, self._sin = rotary_tables(config.head_dim, config.rope_theta, config.context)

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        config = self.config
        tied = config.tied and not config.labels
        per_layer = sum(
            part.parameters for layer in self._layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        norms = config.hidden * (2 * config.layers + 1) + (2 * config.head_dim * config.layers if config.qk_norm else 0)
        return self._embedding.numel() + (0 if tied else self._head.parameters) + per_layer + norms

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """The final hidden states ``[tokens, hidden]``. All earlier tokens of each row must be in the cache."""
        config = self.config
        turning = config.heads + config.kv_heads
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = self._embedding[batch.tokens]
        for index, layer in enumerate(self._layers):
            normal = rms_norm(hidden, layer.input_norm, config.norm_eps)
            qkv = layer.qkv(normal).view(len(hidden), turning + config.kv_heads, config.head_dim)
            qk = qkv[:, :turning]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, config.norm_eps)
            qk = rotary(qk, cos, sin)
            mixed = attend(index, qk[:, : config.heads], qk[:, config.heads :], qkv[:, turning:])
            hidden = layer.output.add(mixed, hidden)
            normal = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
            hidden = layer.down.add(silu_mul(layer.gate_up(normal)), hidden)
        return hidden

    def read(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """Logits ``[rows, vocab]`` (``[rows, labels]`` of a classifier) of chosen rows of ``forward``'s result.

        With ``token_ids`` only their columns, in their order.
        """
        logits = self._head(rms_norm(hidden, self._norm, self.config.norm_eps))
        return logits[:, list(token_ids)] if token_ids else logits


def _layer(config: ModelConfig, weights: Weights, prefix: str) -> _Layer:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def take(name: str, *shape: int) -> Tensor:
        return weights.take(f"{prefix}{name}.weight", *shape)

    qk_norm = None
    if config.qk_norm:
        per_query, per_key = take("self_attn.q_norm", config.head_dim), take("self_attn.k_norm", config.head_dim)
        qk_norm = torch.stack([per_query] * config.heads + [per_key] * config.kv_heads)
    qkv = [
        take("self_attn.q_proj", query, config.hidden),
        take("self_attn.k_proj", key, config.hidden),
        take("self_attn.v_proj", key, config.hidden),
    ]
    gate_up = [take(f"mlp.{name}_proj", config.intermediate, config.hidden) for name in ("gate", "up")]
    return _Layer(
        input_norm=take("input_layernorm", config.hidden),
        qkv=Linear(torch.cat(qkv)),
        qk_norm=qk_norm,
        output=Linear(take("self_attn.o_proj", config.hidden, query)),
        mlp_norm=take("post_attention_layernorm", config.hidden),
        gate_up=Linear(torch.cat(gate_up)),
        down=Linear(take("mlp.down_proj", config.hidden, config.intermediate)),
    )
