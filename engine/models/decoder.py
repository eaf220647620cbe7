"""The Llama-family decoder: one definition for every architecture in ``families``, generating or classifying tokens.

Weights are fused that transformers keeps apart (query-key-value, gate-up), and queries and keys are normalised and
rotated together, since in small models the number of operations costs more than their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.adapters.products import AdapterSet, get_base
from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import LayerStates, StateStep
from engine.device import CPU, DeviceConfig, to_device
from engine.models.families.config import DecoderConfig
from engine.models.feed_forward import (
    Experts,
    FeedForward,
    GatedMlp,
    SharedExperts,
    can_capture,
    has_grouped_products,
    stack_4_bit_experts,
    stack_experts,
)
from engine.models.interface import Batch, KeepState
from engine.models.rope import Rope
from engine.models.routing import Router
from engine.protocol.types import EngineError
from engine.weights.formats.registry import MatrixReader
from engine.weights.matmul import create_embedding, create_product
from engine.weights.safetensors import Weights
from kernels.common.quantization import Quantization, Rows
from kernels.cpu.runtime.recorder import end_layer
from kernels.layers.activation import gelu_tanh_mul, silu_mul
from kernels.layers.elementwise import add, concatenate, scale
from kernels.layers.norm import add_rms_norm, rms_norm
from kernels.linear.fp32 import Product, WeightProduct

_ACTIVATIONS = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its weights and its computation."""

    config: DecoderConfig
    index: int
    input_norm: Tensor | None
    qkv: Product
    """``[(heads + 2 kv_heads) * head_dim, hidden]``."""
    qk_norm: Tensor | None
    """``[heads + kv_heads, head_dim]``: the weights of every query head, then of every key head."""
    projection_norms: tuple[Tensor, Tensor] | None
    """Weights of norms over a token's queries, and over its keys, of all heads together."""
    output: Product
    output_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: FeedForward
    mlp_output_norm: Tensor | None
    fuses_norms: bool
    """True if a sum and its norm are one kernel, so that a layer also normalises the next one's input."""

    @property
    def products(self) -> tuple[Product, ...]:
        """All matrix products."""
        return self.qkv, self.output, *self.mlp.products

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return queries, keys and values ``[tokens, heads + 2 * kv_heads, head_dim]``.

        ``normed``: the layer's normalised input, if it was computed with ``hidden``.
        """
        eps, heads = self.config.norm_eps, self.config.heads
        qkv = self._project(hidden, normed).view(len(hidden), -1, self.config.head_dim)
        if self.projection_norms is None:
            return qkv
        q, k, v = (part.flatten(1) for part in torch.split(qkv, [heads, self.config.kv_heads, self.config.kv_heads], 1))
        q, k = (rms_norm(part, weight, eps) for part, weight in zip((q, k), self.projection_norms, strict=True))
        return concatenate((q, k, v)).view(qkv.shape)

    def _project(self, hidden: Tensor, normed: Rows | None) -> Tensor:
        """Return the product ``qkv`` of the layer's input. ``normed``: see ``project``."""
        return self.qkv(self._normalize(hidden, self.input_norm, self.qkv.quantization) if normed is None else normed)

    def attend(self, qkv: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend) -> Tensor:
        """Return the attention output ``[tokens, heads * head_dim]``. ``angles``: the layer's ``Rope.tables``."""
        cos, sin, *query_factors = angles
        for factors in query_factors:
            scale(qkv[:, : self.config.heads], factors[:, None])
        return attend.forward_qkv(self.index, qkv, norm=self.qk_norm, eps=self.config.norm_eps, cos=cos, sin=sin)

    def forward_mlp(
        self, hidden: Tensor, attn_out: Tensor, following: Layer | None = None
    ) -> tuple[Tensor, Rows | None]:
        """Return the hidden states after the layer, from those before it. No token depends on another.

        ``following``: the next layer. Also returns its normalised input if it is given and the layer ``fuses_norms``.
        """
        read = None if self.mlp_norm is None else (self.mlp_norm, self.mlp.quantization)
        hidden, normed = self._add(self.output, attn_out, residual=hidden, output_norm=self.output_norm, read=read)
        read_next = None
        if following is not None and self.fuses_norms and following.input_norm is not None:
            read_next = following.input_norm, following.qkv.quantization
        return self._add(
            self.mlp,
            hidden if normed is None else normed,
            residual=hidden,
            output_norm=self.mlp_output_norm,
            read=read_next,
        )

    def _normalize(self, x: Tensor, weight: Tensor | None, quantization: Quantization | None) -> Rows:
        return x if weight is None else rms_norm(x, weight, self.config.norm_eps, quantization)

    def _add(
        self,
        product: Product | FeedForward,
        x: Rows,
        residual: Tensor,
        output_norm: Tensor | None,
        read: tuple[Tensor, Quantization | None] | None,
    ) -> tuple[Tensor, Rows | None]:
        """Return ``residual`` plus the product of ``x``, and with ``read`` also that sum as the next product reads it:
        normalised with these weights, and quantized.

        The product is normalised before, if there is an ``output_norm``. The sum is rounded to the dtype of
        ``residual`` before it is normalised, in one kernel or in two: both give the same numbers.
        """
        eps = self.config.norm_eps
        if output_norm is None and (read is None or not self.fuses_norms):
            total = product.add(x, residual)
            return total, None if read is None else rms_norm(total, read[0], eps, read[1])
        added = product(x) if output_norm is None else rms_norm(product(x), output_norm, eps)
        if read is None:
            return add(residual, added), None
        normed, total = add_rms_norm(added, residual, weight=read[0], eps=eps, quantization=read[1])
        return total, normed


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the first layer, and what all layers read."""

    hidden: Tensor
    """``[tokens, hidden]``."""
    angles: Sequence[Tensor]
    """The rows of ``Decoder.rope_tables`` at the tokens' positions, ``[tokens, dim]`` each."""
    states: LayerStates | None = None
    """The states that the step reads and writes, of a model that has layers with states."""
    by_layer: Tensor | None = None
    """Inputs that each layer has from the tokens, ``[layers, tokens, input]`` (Gemma 4)."""


class Decoder:
    """A ``Model`` whose layers are defined here."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        context: int,
        read: MatrixReader,
        device_config: DeviceConfig = CPU,
        adapters: AdapterSet | None = None,
    ) -> None:
        """Take the weights. Raises ``EngineError`` if they are missing, unreadable or do not fit the config.

        ``context``: maximum number of tokens of one sequence. ``read``: reads a matrix in the checkpoint's format.
        ``adapters``: those whose updates the products add to the rows that have one.
        """
        self.config = config
        self.device_config = device_config
        self.adapters = adapters
        builder = self.create_builder(config, weights, read, device_config)
        builder.adapters = adapters
        if builder.prediction_names is not None:
            weights.drop_all(builder.prediction_names.beginning)
        shape = config.vocab_size, config.hidden_size
        tied = config.tied and not config.num_labels
        if tied:
            tied = _tie_head(weights)
        embedding = "lm_head" if tied and weights.has("lm_head.weight") else "model.embed_tokens"
        self.embedding = create_embedding(weights.take_matrix(embedding, *shape), device_config)
        self._layers = self._create_layers(builder)
        self._norm = builder.norm(builder.final_norm) * config.logit_scale
        if config.head.may_have_lm_head:
            weights.drop("lm_head.weight")
        self._head: list[Product] = [self.embedding.create_product()] if tied else builder.head()
        weights.finish()
        if adapters is not None:
            adapters.finish()
        self.parameters = weights.parameters
        self.rope_tables: list[Tensor] = []
        """Tables of all positions for each rotary embedding, ``[positions, dim]`` each (``Rope.tables``)."""
        places: dict[Rope, slice] = {}
        for rope in config.ropes:
            if rope not in places:
                tables = [table.to(device_config.device) for table in rope.tables(context)]
                places[rope] = slice(len(self.rope_tables), len(self.rope_tables) + len(tables))
                self.rope_tables += tables
        self._tables_of = [places[rope] for rope in config.ropes]

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LayerBuilder:
        """Return the builder of the family's layers from a checkpoint's tensors."""
        return LayerBuilder(config, weights, read, device_config)

    def _create_layers(self, builder: LayerBuilder) -> list[Layer]:
        return [builder.layer(index) for index in range(self.config.num_layers)]

    @property
    def products(self) -> list[Product]:
        """The products of all layers."""
        return [product for layer in self._layers for product in layer.products]

    @property
    def is_recordable(self) -> bool:
        """True if ``forward_layers`` only launches kernels that a ``KernelGraph`` records."""
        return all(layer.mlp.is_recordable for layer in self._layers) and all(
            product.is_kernel for product in self.products
        )

    @property
    def is_capturable(self) -> bool:
        """True if the host waits for nothing in ``forward``, so that a CUDA graph can be captured."""
        return self.config.cpu_only_part is None and all(can_capture(layer.mlp) for layer in self._layers)

    @property
    def layouts(self) -> dict[str, int]:
        """Number of products in each layout by its name, such as ``float32`` or ``int8``."""
        return dict(Counter(_name_layout(get_base(product)) for product in self.products))

    @property
    def is_head_recordable(self) -> bool:
        """True if ``compute_logits`` only launches kernels that a ``KernelGraph`` records."""
        return len(self._head) == 1 and self._head[0].is_kernel and self.config.logit_softcap is None

    def forward(self, batch: Batch, attend: FusedAttentionBackend, keep: KeepState | None = None) -> Tensor:
        return self.forward_layers(self.embed_inputs(batch), attend, keep)

    def embed_inputs(self, batch: Batch) -> StepInputs:
        """Return the layers' inputs."""
        hidden = self.embedding(batch.tokens, self.config.embedding_scale)
        states = None if batch.states is None else self.place_states(batch.states)
        by_layer = self.compute_layer_inputs(batch.tokens, hidden)
        return StepInputs(hidden, [table[batch.positions] for table in self.rope_tables], states, by_layer)

    def compute_layer_inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return ``StepInputs.by_layer`` of tokens and their embeddings, ``None`` if the layers have no such inputs."""
        return None

    def place_states(self, step: StateStep) -> LayerStates:
        """Return the states of a step with its segments on the device."""
        if step.table is not None:
            return LayerStates(step.layers, step.table)
        config = self.device_config
        in_chunks = config.uses_gpu_kernels and not config.is_batch_invariant
        return LayerStates(step.layers, to_device(step.list_segments(), config.device), in_chunks)

    def forward_layers(
        self, inputs: StepInputs, attend: FusedAttentionBackend, keep: KeepState | None = None
    ) -> Tensor:
        """Return the final hidden states ``[tokens, hidden]`` from ``embed_inputs``."""
        hidden = self.forward_last_mlp(*self.forward_until_last_attention(inputs, attend, keep), inputs.by_layer)
        end_layer()
        return hidden

    def forward_until_last_attention(
        self, inputs: StepInputs, attend: FusedAttentionBackend, keep: KeepState | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the layers up to the last one's attention, after which all keys, values and states are written.

        Returns the last layer's input ``[tokens, hidden]`` and attention output ``[tokens, heads * head_dim]``.
        """
        hidden = inputs.hidden
        qkv = self.project_first(hidden)
        for index in range(self.config.num_layers):
            attn_out = self.attend(index, qkv, inputs.angles, attend, inputs.states)
            if index < self.config.num_layers - 1:
                hidden, qkv = self.forward_between(index, hidden, attn_out, keep=keep, by_layer=inputs.by_layer)
        return hidden, attn_out

    def project_first(self, hidden: Tensor) -> Tensor:
        """Return the first layer's queries, keys and values ``[tokens, heads + 2 * kv_heads, head_dim]``."""
        return self._layers[0].project(hidden)

    def attend(
        self,
        index: int,
        qkv: Tensor,
        angles: Sequence[Tensor],
        attend: FusedAttentionBackend,
        states: LayerStates | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Return the attention output ``[tokens, heads * head_dim]`` of a layer, by its index."""
        return self._layers[index].attend(qkv, angles[self._tables_of[index]], attend)

    def forward_between(
        self,
        index: int,
        hidden: Tensor,
        attn_out: Tensor,
        keep: KeepState | None = None,
        by_layer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Compute what lies between the attention of a layer, by its index, and that of the next. No token depends on
        another. ``by_layer``: see ``StepInputs``.

        Returns the hidden states after the layer, and the next layer's queries, keys and values.
        """
        following = self._layers[index + 1]
        hidden, normed = self._layers[index].forward_mlp(hidden, attn_out, following)
        if keep is not None:
            keep(index + 1, hidden)
        end_layer()
        return hidden, following.project(hidden, normed)

    def forward_last_mlp(self, hidden: Tensor, attn_out: Tensor, by_layer: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the final hidden states ``[rows, hidden]`` from some rows of ``forward_until_last_attention``.

        ``by_layer``: the same rows of ``StepInputs.by_layer``; only the last layer's are read.
        """
        return self._layers[-1].forward_mlp(hidden, attn_out)[0]

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        return self.read_logits(self.normalize(hidden), token_ids)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return final hidden states after the last norm, as the head reads them."""
        return rms_norm(hidden, self._norm, self.config.norm_eps)

    def read_logits(self, read: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """Return logits as ``compute_logits`` does, from hidden states after the last norm."""
        for matrix in self._head[:-1]:
            read = torch.relu(matrix(read))
        # Rounded to bfloat16, every logit near 20 would be a multiple of an eighth: many ties, and seeds of no use.
        logits = self._head[-1].to_float32(read)
        if token_ids:
            logits = logits[:, to_device(torch.tensor(token_ids), logits.device)]
        if self.config.logit_softcap is not None and not self.config.num_labels:
            if logits.device.type != "cpu":
                return torch.tanh(logits / self.config.logit_softcap) * self.config.logit_softcap
            # NumPy's tanh: the result of torch's depends on a logit's address, and so on the number of rows.
            capped = np.tanh((logits / self.config.logit_softcap).numpy()) * np.float32(self.config.logit_softcap)
            logits = torch.from_numpy(capped)
        return logits


def _name_layout(product: Product) -> str:
    if isinstance(product, WeightProduct) and product.packed is not None:
        return product.packed.type_name
    return type(product).__name__.removesuffix("Linear").lower() or "float32"


def _tie_head(weights: Weights) -> bool:
    """Return True if the embedding table is the head, and leave one of two equal tensors.

    As in transformers: a head that differs from the table is the head although the config ties them, and where only one
    of them is there it is both.
    """
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if any(name.startswith("lm_head.") and name != head for name in weights.names()):
        return False  # quantised
    if not (weights.has(head) and weights.has(table)):
        return True
    if not weights.are_equal(head, table):
        return False
    weights.drop(head)
    return True


def scaled_embedding(config: DecoderConfig, embedded: Tensor) -> Tensor:
    """Return the first layer's input for rows of the embedding table."""
    return embedded if config.embedding_scale == 1 else embedded * config.embedding_scale


class PredictionNames(NamedTuple):
    """Names of the tensors of a layer for multi-token prediction, see ``engine.models.prediction``."""

    beginning: str
    """Beginning of the names of all such layers."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    layer: str
    """Beginning of the names of the first layer."""
    final_norm: str


class LayerBuilder:
    """Build layers from a checkpoint's tensors, fusing them. No source tensor outlives the part it is fused into."""

    final_norm = "model.norm"
    """Name of the norm of the final hidden states."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig = CPU
    ) -> None:
        self._config = config
        self._weights = weights
        self._read = read
        self._device_config = device_config
        self._activation = _ACTIVATIONS[config.activation]
        self.adapters: AdapterSet | None = None

    def layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, output_norm, mlp_output_norm = f"{prefix}self_attn.", None, None
        input_norm = self.norm(f"{prefix}input_layernorm") if config.pre_norms else None
        mlp_norm = "post_attention_layernorm"
        if config.post_norms:
            output_norm = self.norm(f"{prefix}post_attention_layernorm")
            mlp_output_norm = self.norm(f"{prefix}post_feedforward_layernorm")
            mlp_norm = "pre_feedforward_layernorm"
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        return Layer(
            config=config,
            index=index,
            input_norm=input_norm,
            qkv=self._fused(attention, "qkv_proj", parts, bias=config.qkv_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm == "head" else None,
            projection_norms=(
                (self.norm(f"{attention}q_norm", query), self.norm(f"{attention}k_norm", key))
                if config.qk_norm == "projection"
                else None
            ),
            output=self.linear(f"{attention}o_proj", config.hidden_size, query, bias=config.output_bias),
            output_norm=output_norm,
            mlp_norm=self.norm(prefix + mlp_norm) if config.pre_norms else None,
            mlp=self.feed_forward(prefix, index),
            mlp_output_norm=mlp_output_norm,
            fuses_norms=self._device_config.uses_gpu_kernels,
        )

    @property
    def prediction_names(self) -> PredictionNames | None:
        """Names of the family's layers for multi-token prediction, which the model itself does not read."""
        return None

    def prediction_layer(self, prefix: str) -> Layer:
        """Return a layer for multi-token prediction, which is like the last one with attention."""
        raise EngineError(f"{prefix}: layers for multi-token prediction are not read for {self._config.architecture}")

    def head(self) -> list[Product]:
        """Return the products that turn final hidden states into logits, applied one after the other."""
        config, matrices = self._config, self._config.head.matrices
        rows = [config.hidden_size] * (len(matrices) - 1) + [config.num_labels or config.vocab_size]
        return [
            self.linear(name, count, config.hidden_size, bias=config.head.bias)
            for name, count in zip(matrices, rows, strict=True)
        ]

    def norm(self, name: str, size: int | None = None) -> Tensor:
        weight = self._weights.take(f"{name}.weight", self._config.hidden_size if size is None else size)
        weight = weight + self._config.norm_offset if self._config.norm_offset else weight
        return weight.to(self._device_config.device)  # float32 on every device: it costs next to nothing

    def constant(self, name: str, *shape: int) -> Tensor:
        """Return a small tensor that is no matrix of a product: float32 on every device."""
        return self._weights.take(name, *shape).to(self._device_config.device)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool) -> Product:
        return self.product({name: rows}, columns, bias=bias)

    def _fused(self, prefix: str, name: str, parts: dict[str, int], *, bias: bool) -> Product:
        """Return several products of the same input as one, whether or not the checkpoint has them fused."""
        if self._config.fused:
            parts = {name: sum(parts.values())}
        return self.product({prefix + part: rows for part, rows in parts.items()}, self._config.hidden_size, bias=bias)

    def product(self, parts: dict[str, int], columns: int, *, bias: bool) -> Product:
        """Return the product with matrices of these names and numbers of rows, one below the other."""
        matrices = [self._read(self._weights, name, rows, columns) for name, rows in parts.items()]
        joined_bias = (
            torch.cat([self._weights.take(f"{name}.bias", rows) for name, rows in parts.items()]) if bias else None
        )
        product = create_product(matrices, joined_bias, self._device_config)
        return product if self.adapters is None else self.adapters.adapt(product, parts, columns)

    def _qk_norm(self, attention: str, name: str = "{}_norm") -> Tensor:
        config = self._config
        per_query, per_key = (self.norm(attention + name.format(part), config.head_dim) for part in ("q", "k"))
        return torch.stack([per_query] * config.heads + [per_key] * config.kv_heads)

    def feed_forward(self, prefix: str, index: int) -> FeedForward:
        """Return the feed-forward part of the layer with this prefix of names and index."""
        moe, hidden = self._config.experts, self._config.hidden_size
        if moe is None or index not in moe.layers:
            return self._mlp(prefix)
        if not moe.shared_intermediate:
            return self._experts(prefix)
        names = f"{prefix}mlp.{moe.shared_name}."
        parts = dict.fromkeys((f"{names}gate_proj", f"{names}up_proj"), moe.shared_intermediate)
        gate_up = self.product(parts, hidden, bias=self._config.mlp_bias)
        down = self.linear(f"{names}down_proj", hidden, moe.shared_intermediate, bias=self._config.mlp_bias)
        gate = self.linear(f"{prefix}mlp.shared_expert_gate", 1, hidden, bias=False) if moe.has_shared_gate else None
        return SharedExperts(self._experts(prefix), GatedMlp(gate_up, down, self._activation), gate)

    def _mlp(self, prefix: str) -> GatedMlp:
        config = self._config
        parts = {"gate_proj": config.intermediate, "up_proj": config.intermediate}
        gate_up = self._fused(f"{prefix}mlp.", "gate_up_proj", parts, bias=config.mlp_bias)
        down = self.linear(f"{prefix}mlp.down_proj", config.hidden_size, config.intermediate, bias=config.mlp_bias)
        return GatedMlp(gate_up, down, self._activation)

    def _experts(self, prefix: str) -> Experts:
        """Read experts one by one, as on the hub, or stacked, as transformers holds them."""
        assert self._config.experts is not None
        moe, hidden = self._config.experts, self._config.hidden_size
        stacked = f"{prefix}mlp.experts."
        if self._weights.has(f"{stacked}gate_up_proj"):
            gate_ups = self._take_stack(f"{stacked}gate_up_proj", moe.num_experts, 2 * moe.intermediate, hidden)
            downs = self._take_stack(f"{stacked}down_proj", moe.num_experts, hidden, moe.intermediate)
            pairs: list[tuple[Product, Product]] = [
                (
                    create_product([gate_up], None, self._device_config),
                    create_product([down], None, self._device_config),
                )
                for gate_up, down in zip(gate_ups, downs, strict=True)
            ]
            router = "mlp"
        else:
            router = moe.router
            pairs = [self._expert(f"{prefix}{router}.experts.{index}.") for index in range(moe.num_experts)]
        stacked_experts = stack_experts(pairs, self._activation) if has_grouped_products(self._device_config) else None
        stacked_experts = stacked_experts or stack_4_bit_experts(
            pairs, self._activation, is_batch_invariant=self._device_config.is_batch_invariant
        )
        gate = f"{prefix}{router}.gate"
        correction = None
        if moe.has_correction:
            correction = self.constant(f"{gate}.e_score_correction_bias", moe.num_experts)
        return Experts(
            Router(moe.routing, self.linear(gate, moe.num_experts, hidden, bias=False), correction),
            stacked_experts or [GatedMlp(gate_up, down, self._activation) for gate_up, down in pairs],
            is_batch_invariant=self._device_config.is_batch_invariant,
        )

    def _take_stack(self, name: str, count: int, rows: int, columns: int) -> Tensor:
        """Take the matrices ``[count, rows, columns]``, which Qwen3-VL's files have transposed."""
        if rows != columns and self._weights.get_shape(name) == (count, columns, rows):
            return self._weights.take_floats(name, count, columns, rows).transpose(1, 2).contiguous()
        return self._weights.take_floats(name, count, rows, columns)

    def _expert(self, prefix: str) -> tuple[Product, Product]:
        assert self._config.experts is not None
        moe, hidden = self._config.experts, self._config.hidden_size
        gate, up, down = moe.names
        gate_up = self.product(dict.fromkeys((prefix + gate, prefix + up), moe.intermediate), hidden, bias=False)
        return gate_up, self.linear(f"{prefix}{down}", hidden, moe.intermediate, bias=False)
