"""The Llama-family decoder: one definition for every architecture in ``families``, generating or classifying tokens.

Weights are fused where transformers keeps them apart (query-key-value, gate-up), and queries and keys are normalised
and rotated together, since on small models the number of operations costs more than their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.device import CPU, DeviceConfig, to_device
from engine.models.families import DecoderConfig
from engine.models.feed_forward import Experts, GatedMlp
from engine.models.interface import Batch
from engine.weights.formats.registry import MatrixReader
from engine.weights.matmul import product
from engine.weights.safetensors import Weights
from kernels.cpu.runtime.recorder import end_layer
from kernels.layers.activation import gelu_tanh_mul, silu_mul
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Linear, Product

_ACTIVATIONS = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Product
    """``[(heads + 2 kv_heads) * head_dim, hidden]``."""
    qk_norm: Tensor | None
    """``[heads + kv_heads, head_dim]``: the query weight for each head, then the key weight."""
    output: Product
    output_norm: Tensor | None
    mlp_norm: Tensor
    mlp: GatedMlp | Experts
    mlp_output_norm: Tensor | None


class Decoder:
    """A checkpoint's weights and the forward pass over paged keys and values. A ``Model``."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        context: int,
        read: MatrixReader,
        device_config: DeviceConfig = CPU,
    ) -> None:
        """Takes the weights. Raises ``EngineError`` when they are missing, unreadable or do not fit the config.

        ``context``: most tokens of one sequence that will be served. ``read``: how the checkpoint holds its matrices.
        ``device_config``: where it is computed.
        """
        self.config = config
        self._device_config = device_config
        builder = LayerBuilder(config, weights, read, device_config)
        self._embedding = device_config.convert(
            weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        )
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = builder.norm("model.norm")
        tied = config.tied and not config.num_labels
        if tied or config.head.beside:
            weights.drop("lm_head.weight")
        self._head: list[Product] = [Linear(self._embedding)] if tied else builder.head()
        weights.finish()
        self._parameters = weights.parameters
        tables = {rope: rope.tables(context) for rope in set(config.ropes)}
        self._ropes = [(cos.to(device_config.device), sin.to(device_config.device)) for cos, sin in tables.values()]
        self._rope_of = [list(tables).index(rope) for rope in config.ropes]

    @property
    def device_config(self) -> DeviceConfig:
        """See ``Model``."""
        return self._device_config

    @property
    def embedding(self) -> Tensor:
        """The embedding table ``[vocab, hidden]``, as the checkpoint has it."""
        return self._embedding

    @property
    def rope_tables(self) -> list[Tensor]:
        """Of each kind of rotation the cosines and the sines of all positions, ``[positions, dim]`` each."""
        return [table for tables in self._ropes for table in tables]

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        return self._parameters

    @property
    def is_recordable(self) -> bool:
        """Whether ``layers`` does nothing but launch kernels that a ``KernelGraph`` records."""
        return all(
            layer.output_norm is None
            and layer.mlp_output_norm is None
            and isinstance(layer.mlp, GatedMlp)
            and all(one.is_kernel for one in (layer.qkv, layer.output, *layer.mlp.products))
            for layer in self._layers
        )

    @property
    def is_head_recordable(self) -> bool:
        """Whether ``read`` does nothing but launch kernels that a ``KernelGraph`` records."""
        return len(self._head) == 1 and self._head[0].is_kernel and self.config.logit_softcap is None

    def forward(self, batch: Batch, attend: FusedAttentionBackend) -> Tensor:
        """See ``Model``."""
        return self.forward_layers(*self.embed_inputs(batch), attend)

    def embed_inputs(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """What the layers take: hidden states ``[tokens, hidden]``, and for each kind of rotation the cosines and the
        sines of the tokens' positions, ``[tokens, dim]`` each."""
        hidden = scaled_embedding(self.config, self._embedding[batch.tokens])
        return hidden, [table[batch.positions] for table in self.rope_tables]

    def forward_layers(self, hidden: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend) -> Tensor:
        """The final hidden states ``[tokens, hidden]``, of ``inputs``."""
        hidden = self.forward_last_mlp(*self.forward_until_last_attention(hidden, angles, attend))
        end_layer()
        return hidden

    def forward_until_last_attention(
        self, hidden: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """The part of ``layers`` that other tokens need: what the last layer takes ``[tokens, hidden]``, and what it
        attended to ``[tokens, heads * head_dim]``. All keys and values are written then."""
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rope = 2 * self._rope_of[index]
            mixed = forward_attention(self.config, layer, index, hidden, (angles[rope], angles[rope + 1]), attend)
            if index < last:
                hidden = forward_mlp(self.config, layer, hidden, mixed)
                end_layer()
        return hidden, mixed

    def forward_last_mlp(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The final hidden states ``[rows, hidden]`` of those tokens whose rows of ``begun`` these are."""
        return forward_mlp(self.config, self._layers[-1], hidden, mixed)

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``Model``."""
        return self._embedding[tokens]

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """See ``Model``."""
        logits = self._head[0](rms_norm(hidden, self._norm, self.config.norm_eps))
        for matrix in self._head[1:]:
            logits = matrix(torch.relu(logits))
        logits = logits.float()
        if token_ids:
            logits = logits[:, to_device(torch.tensor(token_ids), logits.device)]
        if self.config.logit_softcap is not None and not self.config.num_labels:
            if logits.device.type != "cpu":
                return torch.tanh(logits / self.config.logit_softcap) * self.config.logit_softcap
            # numpy's tanh, for torch's depends on where in memory a logit stands, and so on the number of rows.
            capped = np.tanh((logits / self.config.logit_softcap).numpy()) * np.float32(self.config.logit_softcap)
            logits = torch.from_numpy(capped)
        return logits


def scaled_embedding(config: DecoderConfig, embedded: Tensor) -> Tensor:
    """What the first layer takes, of rows of the embedding table."""
    return embedded if config.embedding_scale == 1 else embedded * config.embedding_scale


def layer_forward(
    config: DecoderConfig,
    layer: Layer,
    index: int,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    attend: FusedAttentionBackend,
) -> Tensor:
    """The hidden states ``[tokens, hidden]`` after a layer. ``angles``: cosines and sines of the tokens' positions."""
    return forward_mlp(config, layer, hidden, forward_attention(config, layer, index, hidden, angles, attend))


def forward_attention(
    config: DecoderConfig,
    layer: Layer,
    index: int,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    attend: FusedAttentionBackend,
) -> Tensor:
    """What a layer attends to, ``[tokens, heads * head_dim]``."""
    normal = rms_norm(hidden, layer.input_norm, config.norm_eps)
    qkv = layer.qkv(normal).view(len(hidden), -1, config.head_dim)
    return attend.forward_qkv(index, qkv, layer.qk_norm, config.norm_eps, *angles)


def forward_mlp(config: DecoderConfig, layer: Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
    """The rest of a layer, in which no token needs another."""
    if layer.output_norm is None:
        hidden = layer.output.add(mixed, hidden)
    else:
        hidden = hidden + rms_norm(layer.output(mixed), layer.output_norm, config.norm_eps)
    normal = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
    if layer.mlp_output_norm is None:
        return layer.mlp.add(normal, hidden)
    return hidden + rms_norm(layer.mlp(normal), layer.mlp_output_norm, config.norm_eps)


class LayerBuilder:
    """Takes a checkpoint's tensors and fuses them. No source tensor outlives the part that it is fused into."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig = CPU
    ) -> None:
        self._config = config
        self._weights = weights
        self._read = read
        self._device_config = device_config
        self._activation = _ACTIVATIONS[config.activation]

    def layer(self, index: int) -> Layer:
        """A layer's weights."""
        config, prefix = self._config, f"model.layers.{index}."
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, output_norm, mlp_output_norm = f"{prefix}self_attn.", None, None
        mlp_norm = "post_attention_layernorm"
        if config.post_norms:
            output_norm = self.norm(f"{prefix}post_attention_layernorm")
            mlp_output_norm = self.norm(f"{prefix}post_feedforward_layernorm")
            mlp_norm = "pre_feedforward_layernorm"
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        return Layer(
            input_norm=self.norm(f"{prefix}input_layernorm"),
            qkv=self._fused(attention, "qkv_proj", parts, bias=config.qkv_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=self.linear(f"{attention}o_proj", config.hidden_size, query, bias=config.output_bias),
            output_norm=output_norm,
            mlp_norm=self.norm(prefix + mlp_norm),
            mlp=self._experts(prefix) if config.experts and index in config.experts.layers else self._mlp(prefix),
            mlp_output_norm=mlp_output_norm,
        )

    def head(self) -> list[Product]:
        """What makes logits of final hidden states, to be multiplied one after the other."""
        config, matrices = self._config, self._config.head.matrices
        rows = [config.hidden_size] * (len(matrices) - 1) + [config.num_labels or config.vocab_size]
        return [
            self.linear(name, count, config.hidden_size, bias=config.head.bias)
            for name, count in zip(matrices, rows, strict=True)
        ]

    def norm(self, name: str, size: int | None = None) -> Tensor:
        """A norm's weights as they are multiplied."""
        weight = self._weights.take(f"{name}.weight", self._config.hidden_size if size is None else size)
        weight = weight + self._config.norm_offset if self._config.norm_offset else weight
        return weight.to(self._device_config.device)  # in float32 everywhere, since it costs next to nothing

    def linear(self, name: str, rows: int, columns: int, *, bias: bool) -> Product:
        """The product with one matrix."""
        return self.product({name: rows}, columns, bias=bias)

    def _fused(self, prefix: str, name: str, parts: dict[str, int], *, bias: bool) -> Product:
        """Several products of the same input as one, whether the checkpoint keeps them apart or not."""
        if self._config.fused:
            parts = {name: sum(parts.values())}
        return self.product({prefix + part: rows for part, rows in parts.items()}, self._config.hidden_size, bias=bias)

    def product(self, parts: dict[str, int], columns: int, *, bias: bool) -> Product:
        """The matrices of those names and rows, one below the other."""
        matrices = [self._read(self._weights, name, rows, columns) for name, rows in parts.items()]
        added = torch.cat([self._weights.take(f"{name}.bias", rows) for name, rows in parts.items()]) if bias else None
        return product(matrices, added, self._device_config)

    def _qk_norm(self, attention: str) -> Tensor:
        config = self._config
        per_query, per_key = (self.norm(f"{attention}{one}_norm", config.head_dim) for one in ("q", "k"))
        return torch.stack([per_query] * config.heads + [per_key] * config.kv_heads)

    def _mlp(self, prefix: str) -> GatedMlp:
        config = self._config
        parts = {"gate_proj": config.intermediate, "up_proj": config.intermediate}
        gate_up = self._fused(f"{prefix}mlp.", "gate_up_proj", parts, bias=config.mlp_bias)
        down = self.linear(f"{prefix}mlp.down_proj", config.hidden_size, config.intermediate, bias=config.mlp_bias)
        return GatedMlp(gate_up, down, self._activation)

    def _experts(self, prefix: str) -> Experts:
        """Experts one by one, as on the hub, or stacked, as transformers holds them."""
        assert self._config.experts is not None
        about, hidden = self._config.experts, self._config.hidden_size
        stacked = f"{prefix}mlp.experts."
        if self._weights.has(f"{stacked}gate_up_proj"):
            both = self._weights.take(f"{stacked}gate_up_proj", about.experts, 2 * about.intermediate, hidden)
            downs = self._weights.take(f"{stacked}down_proj", about.experts, hidden, about.intermediate)
            pairs: list[tuple[Product, Product]] = [
                (Linear(self._device_config.convert(gate_up)), Linear(self._device_config.convert(down)))
                for gate_up, down in zip(both, downs, strict=True)
            ]
            router = "mlp"
        else:
            router = about.router
            pairs = [self._expert(f"{prefix}{router}.experts.{index}.") for index in range(about.experts)]
        return Experts(
            self.linear(f"{prefix}{router}.gate", about.experts, hidden, bias=False),
            [GatedMlp(gate_up, down, self._activation) for gate_up, down in pairs],
            about.chosen,
            normalised=about.normalised,
        )

    def _expert(self, prefix: str) -> tuple[Product, Product]:
        assert self._config.experts is not None
        about, hidden = self._config.experts, self._config.hidden_size
        gate, up, down = about.names
        gate_up = self.product(dict.fromkeys((prefix + gate, prefix + up), about.intermediate), hidden, bias=False)
        return gate_up, self.linear(f"{prefix}{down}", hidden, about.intermediate, bias=False)
