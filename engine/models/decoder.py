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
from torch.nn import functional as F

from engine.models.config import ModelConfig
from engine.models.weights import Weights
from kernels.activation import silu_mul
from kernels.attention import RowGroup, Workspace, paged_attention
from kernels.norm import rms_norm
from kernels.rotary import rotary, rotary_tables


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, rows one after the other."""

    tokens: Tensor
    """``[tokens]`` token ids."""
    positions: Tensor
    """``[tokens]`` positions within their sequences."""
    slots: Tensor
    """``[tokens]`` where their keys and values go: page * page_size + offset."""
    rows: Sequence[RowGroup]
    """How they attend."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    """``[(heads + 2 kv_heads) * head_dim, hidden]``."""
    qk_norm: Tensor | None
    """``[heads + kv_heads, head_dim]``: the query weight for each head, then the key weight."""
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """``[2 * intermediate, hidden]``."""
    down: Tensor


class Decoder:
    """A checkpoint's weights and the forward pass over paged keys and values. float32, CPU."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """Loads the weights. Raises ``EngineError`` when they are missing, unreadable or do not fit the config."""
        self.config = config
        weights = Weights(folder)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [_layer(config, weights, f"model.layers.{index}.") for index in range(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden)
        self._bias: Tensor | None = None
        if config.labels:
            self._head = weights.take("score.weight", config.labels, config.hidden)
            if weights.has("score.bias"):
                self._bias = weights.take("score.bias", config.labels)
        elif config.tied:
            weights.drop("lm_head.weight")
            self._head = self._embedding
        else:
            self._head = weights.take("lm_head.weight", config.vocab, config.hidden)
        weights.finish()
        self._cos, self._sin = rotary_tables(config.head_dim, config.rope_theta, config.context)
        self._workspace = Workspace()

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        tensors = {id(self._embedding): self._embedding, id(self._head): self._head}
        for layer in self._layers:
            for tensor in (layer.input_norm, layer.qkv, layer.output, layer.mlp_norm, layer.gate_up, layer.down):
                tensors[id(tensor)] = tensor
        heads = 2 * self.config.head_dim * self.config.layers if self.config.qk_norm else 0
        bias = 0 if self._bias is None else self._bias.numel()
        return sum(tensor.numel() for tensor in tensors.values()) + self._norm.numel() + heads + bias

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Writes the batch's keys and values into ``kv`` and returns the final hidden states ``[tokens, hidden]``.

        ``kv``: ``[layers, pages, page_size, 2 * kv_heads, head_dim]``. All earlier tokens of each row must be in it.
        """
        config = self.config
        turning = config.heads + config.kv_heads
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = self._embedding[batch.tokens]
        for layer, pool in zip(self._layers, kv, strict=True):
            normal = rms_norm(hidden, layer.input_norm, config.norm_eps)
            qkv = F.linear(normal, layer.qkv).view(len(hidden), turning + config.kv_heads, config.head_dim)
            qk = qkv[:, :turning]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, config.norm_eps)
            qk = rotary(qk, cos, sin)
            written = torch.cat((qk[:, config.heads :], qkv[:, turning:]), dim=1)
            pool.flatten(0, 1).index_copy_(0, batch.slots, written)
            mixed = paged_attention(qk[:, : config.heads], pool, batch.rows, self._workspace)
            hidden = torch.addmm(hidden, mixed, layer.output)
            normal = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
            hidden = torch.addmm(hidden, silu_mul(F.linear(normal, layer.gate_up)), layer.down)
        return hidden

    def read(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """Logits ``[rows, vocab]`` (``[rows, labels]`` of a classifier) of chosen rows of ``forward``'s result.

        With ``token_ids`` only their columns are computed, in their order.
        """
        head = self._head[list(token_ids)] if token_ids else self._head
        return F.linear(rms_norm(hidden, self._norm, self.config.norm_eps), head, self._bias)


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
        qkv=torch.cat(qkv),
        qk_norm=qk_norm,
        # Transposed views: these two are added to the residual stream in the same call (addmm).
        output=take("self_attn.o_proj", config.hidden, query).t(),
        mlp_norm=take("post_attention_layernorm", config.hidden),
        gate_up=torch.cat(gate_up),
        down=take("mlp.down_proj", config.hidden, config.intermediate).t(),
    )
