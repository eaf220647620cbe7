"""The decoder of Gemma 4: heads that differ by layer, shared keys and values, and inputs for each layer.

A layer that shares the keys and values of an earlier one calls the same attention again, with queries alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.device import DeviceConfig
from engine.models.decoder import Decoder, Layer, LayerBuilder
from engine.models.families.config import DecoderConfig, ExpertsConfig
from engine.models.families.gemma4 import Gemma4Config
from engine.models.feed_forward import Experts, FeedForward, GatedMlp, can_capture, has_grouped_products, stack_experts
from engine.models.interface import KeepState
from engine.models.routing import Router, RoutingConfig
from engine.weights.formats.registry import MatrixReader
from engine.weights.matmul import create_embedding, create_product
from engine.weights.safetensors import Weights
from kernels.common.quantization import Rows
from kernels.cpu.runtime.recorder import end_layer
from kernels.layers.activation import gelu_tanh_mul
from kernels.layers.elementwise import add, concatenate, contiguous, scale
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Product

_SHARED_TENSORS = "k_proj", "v_proj", "k_norm"
"""Tensors that a checkpoint may have although the layer reads the keys and values of another."""


@dataclass(frozen=True, slots=True)
class TokenInput:
    """The part of a layer that adds what the layer has from the tokens."""

    gate: Product
    """``[input, hidden]``."""
    projection: Product
    """``[hidden, input]``."""
    norm: Tensor

    def add(self, hidden: Tensor, inputs: Tensor, eps: float) -> Tensor:
        """Return the hidden states with the ``inputs`` ``[tokens, input]``."""
        gated = gelu_tanh_mul(concatenate((self.gate(hidden), inputs)))
        return add(hidden, rms_norm(self.projection(gated), self.norm, eps))


@dataclass(frozen=True, slots=True)
class Gemma4Layer(Layer):
    """A layer. ``qkv`` lacks keys and values that are those of another layer, and values that are the keys."""

    attention: LayerAttentionConfig
    has_keys: bool
    """False if it reads the keys and values of an earlier layer, which has the same ``index``."""
    value_norm: Tensor
    """``[head_dim]``, ones."""
    token_input: TokenInput | None
    factor: Tensor
    """``[1, 1]``, of the hidden states after the layer."""

    @property
    def products(self) -> tuple[Product, ...]:
        own = () if self.token_input is None else (self.token_input.gate, self.token_input.projection)
        return self.qkv, self.output, *self.mlp.products, *own

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return queries, and keys and values if the layer has its own, ``[tokens, vectors, head_dim]``."""
        heads, kv_heads, dim, _ = self.attention.shape
        rows = self._project(hidden, normed).view(len(hidden), -1, dim)
        if not self.has_keys:
            return rows
        values = rms_norm(contiguous(rows[:, -kv_heads:]), self.value_norm, self.config.norm_eps)
        return concatenate((rows[:, : heads + kv_heads], values))

    def finish(self, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the hidden states after the layer, from those after its feed-forward part."""
        if self.token_input is not None:
            assert inputs is not None
            hidden = self.token_input.add(hidden, inputs, self.config.norm_eps)
        scale(hidden, self.factor)
        return hidden


class Gemma4Builder(LayerBuilder):
    """Builds the layers."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> None:
        super().__init__(config, weights, read, device_config)
        self._key_norms: dict[int, Tensor] = {}
        """Weights of the norm of the keys of each attention."""

    def layer(self, index: int) -> Gemma4Layer:
        config, prefix, own = self._config, f"model.layers.{index}.", self._config.gemma4
        assert own is not None
        call, has_keys = own.calls[index], own.sources[index] is None
        heads, kv_heads, dim, _ = config.attention[call].shape
        attention, hidden = f"{prefix}self_attn.", config.hidden_size
        parts = {"q_proj": heads * dim}
        if has_keys:
            own_parts = ("k_proj",) if index in own.keys_are_values else ("k_proj", "v_proj")
            parts |= dict.fromkeys(own_parts, kv_heads * dim)
        else:
            for name in _SHARED_TENSORS:
                self._weights.drop(f"{attention}{name}.weight")
        query_norm = self.norm(f"{attention}q_norm", dim)
        factor = self._weights.take_raw(f"{prefix}layer_scalar", None, 1)  # no parameter
        return Gemma4Layer(
            config=config,
            index=call,
            input_norm=self.norm(f"{prefix}input_layernorm"),
            qkv=self.product({attention + name: rows for name, rows in parts.items()}, hidden, bias=config.qkv_bias),
            qk_norm=torch.stack([query_norm] * heads + [self._key_norm(attention, call, dim)] * kv_heads),
            projection_norms=None,
            output=self.linear(f"{attention}o_proj", hidden, heads * dim, bias=config.output_bias),
            output_norm=self.norm(f"{prefix}post_attention_layernorm"),
            mlp_norm=None if config.experts else self.norm(f"{prefix}pre_feedforward_layernorm"),
            mlp=self._feed_forward(prefix, own.intermediate[index]),
            mlp_output_norm=self.norm(f"{prefix}post_feedforward_layernorm"),
            fuses_norms=False,
            attention=config.attention[call],
            has_keys=has_keys,
            value_norm=torch.ones(dim, device=self._device_config.device),
            token_input=self._token_input(prefix, own) if own.input_size else None,
            factor=factor.float()[None].to(self._device_config.device),
        )

    def _key_norm(self, prefix: str, call: int, dim: int) -> Tensor:
        if call not in self._key_norms:
            self._key_norms[call] = self.norm(f"{prefix}k_norm", dim)
        return self._key_norms[call]

    def _feed_forward(self, prefix: str, width: int) -> FeedForward:
        dense = self._gated_mlp(f"{prefix}mlp.", width)
        if self._config.experts is None:
            return dense
        return ExpertsBesideMlp(
            dense,
            (self.norm(f"{prefix}pre_feedforward_layernorm"), self.norm(f"{prefix}post_feedforward_layernorm_1")),
            self._experts(prefix),
            self._config.norm_eps,
        )

    def _experts(self, prefix: str) -> Experts:
        """Read experts that normalise their inputs and results, as the router does its own inputs."""
        config, moe = self._config, self._config.experts
        assert moe is not None
        hidden, count, eps, router = config.hidden_size, moe.num_experts, config.norm_eps, f"{prefix}{moe.router}."
        pairs = self._expert_products(f"{prefix}experts.", moe)
        before, after = (self.norm(f"{prefix}{name}_feedforward_layernorm_2") for name in ("pre", "post"))
        stacked = stack_experts(pairs, self._activation) if has_grouped_products(self._device_config) else None
        return Experts(
            ScaledRouter(
                moe.routing,
                self.linear(f"{router}proj", count, hidden, bias=False),
                norm=self.constant(f"{router}scale", hidden) * hidden**-0.5,
                eps=eps,
                expert_scales=self.constant(f"{router}per_expert_scale", count),
            ),
            stacked or [GatedMlp(gate_up, down, self._activation) for gate_up, down in pairs],
            is_batch_invariant=self._device_config.is_batch_invariant,
            prepare=lambda x: rms_norm(x, before, eps),
            finish=lambda x: rms_norm(x, after, eps),
        )

    def _expert_products(self, prefix: str, moe: ExpertsConfig) -> list[tuple[Product, Product]]:
        """Return each expert's product of gate and up, and of down."""
        hidden, count, width = self._config.hidden_size, moe.num_experts, moe.intermediate
        if self._weights.has(f"{prefix}0.gate_up_proj.weight"):  # in a GGUF file
            return [
                (
                    self.linear(f"{prefix}{index}.gate_up_proj", 2 * width, hidden, bias=False),
                    self.linear(f"{prefix}{index}.down_proj", hidden, width, bias=False),
                )
                for index in range(count)
            ]
        gate_ups = self._weights.take_floats(f"{prefix}gate_up_proj", count, 2 * width, hidden)
        downs = self._weights.take_floats(f"{prefix}down_proj", count, hidden, width)
        return [
            (create_product([gate_up], None, self._device_config), create_product([down], None, self._device_config))
            for gate_up, down in zip(gate_ups, downs, strict=True)
        ]

    def _gated_mlp(self, prefix: str, width: int) -> GatedMlp:
        hidden = self._config.hidden_size
        gate_up = self.product(dict.fromkeys((f"{prefix}gate_proj", f"{prefix}up_proj"), width), hidden, bias=False)
        return GatedMlp(gate_up, self.linear(f"{prefix}down_proj", hidden, width, bias=False), self._activation)

    def _token_input(self, prefix: str, own: Gemma4Config) -> TokenInput:
        hidden = self._config.hidden_size
        return TokenInput(
            gate=self.linear(f"{prefix}per_layer_input_gate", own.input_size, hidden, bias=False),
            projection=self.linear(f"{prefix}per_layer_projection", hidden, own.input_size, bias=False),
            norm=self.norm(f"{prefix}post_per_layer_input_norm"),
        )


class ScaledRouter(Router):
    """A router that normalises its inputs, and weights the experts that it chooses by a number of each."""

    def __init__(
        self, config: RoutingConfig, product: Product, norm: Tensor, eps: float, expert_scales: Tensor
    ) -> None:
        """``norm``: ``[hidden]``. ``expert_scales``: ``[experts]``."""
        super().__init__(config, product)
        self._norm, self._eps, self._expert_scales = norm, eps, expert_scales

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().__call__(rms_norm(x, self._norm, self._eps))
        return weights * self._expert_scales[chosen], chosen


class ExpertsBesideMlp:
    """A dense feed-forward part plus experts, each with norms of its own. It reads hidden states as they are."""

    quantization = None
    is_recordable = False

    def __init__(self, dense: GatedMlp, norms: tuple[Tensor, Tensor], experts: Experts, eps: float) -> None:
        """``norms``: weights of the norms before and after the dense part."""
        self.products = (*dense.products, *experts.products)
        self.is_stacked = experts.is_stacked
        self._dense, self._norms, self._experts, self._eps = dense, norms, experts, eps

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        before, after = self._norms
        return rms_norm(self._dense(rms_norm(x, before, self._eps)), after, self._eps) + self._experts(x)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return residual + self(x)


class TokenInputs:
    """The inputs of all layers, from the tokens and their embeddings."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, builder: LayerBuilder, device_config: DeviceConfig
    ) -> None:
        """Take the weights."""
        own = config.gemma4
        assert own is not None
        width = config.num_layers * own.input_size
        # A larger ``eps`` of the norm stands for the factor of the projection, ``hidden_size ** -0.5``.
        self._size, self._eps = own.input_size, config.norm_eps * config.hidden_size
        table = weights.take_matrix("model.embed_tokens_per_layer", own.input_vocab_size, width)
        self._table = create_embedding(table, device_config)
        self._projection = builder.linear("model.per_layer_model_projection", width, config.hidden_size, bias=False)
        self._norm = builder.norm("model.per_layer_projection_norm", own.input_size)
        self._half = torch.full((1, 1, 1), 2**-0.5, device=device_config.device)
        self.is_recordable = self._projection.is_kernel
        """True if it only launches kernels that a ``KernelGraph`` records."""

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return ``[layers, tokens, input]``. ``hidden``: the embeddings of the tokens."""
        embedded = self._table(tokens, self._size**0.5)
        projected = rms_norm(self._projection(hidden).view(len(hidden), -1, self._size), self._norm, self._eps)
        total = add(projected, embedded.view(projected.shape))
        scale(total, self._half)
        return total.transpose(0, 1)


class Gemma4Decoder(Decoder):
    """A ``Model`` with such layers."""

    @property
    def is_recordable(self) -> bool:
        return super().is_recordable and (self._token_inputs is None or self._token_inputs.is_recordable)

    @property
    def is_capturable(self) -> bool:
        return all(
            layer.mlp.is_stacked if isinstance(layer.mlp, ExpertsBesideMlp) else can_capture(layer.mlp)
            for layer in self._layers
        )

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LayerBuilder:
        builder = Gemma4Builder(config, weights, read, device_config)
        has_inputs = config.gemma4 is not None and config.gemma4.input_size > 0
        self._token_inputs = TokenInputs(config, weights, builder, device_config) if has_inputs else None
        return builder

    def compute_layer_inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        return None if self._token_inputs is None else self._token_inputs(tokens, hidden)

    def forward_between(
        self,
        index: int,
        hidden: Tensor,
        attn_out: Tensor,
        keep: KeepState | None = None,
        by_layer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = self._finish(index, hidden, attn_out, None if by_layer is None else by_layer[index])
        if keep is not None:
            keep(index + 1, hidden)
        end_layer()
        return hidden, self._layers[index + 1].project(hidden)

    def forward_last_mlp(self, hidden: Tensor, attn_out: Tensor, by_layer: Tensor | None = None) -> Tensor:
        return self._finish(-1, hidden, attn_out, None if by_layer is None else by_layer[-1])

    def _finish(self, index: int, hidden: Tensor, attn_out: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the hidden states after a layer, by its index, from those before it, its attention and ``inputs``."""
        layer = self._layers[index]
        assert isinstance(layer, Gemma4Layer)
        hidden, _ = layer.forward_mlp(hidden, attn_out)
        return layer.finish(hidden, inputs)
