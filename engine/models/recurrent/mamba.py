"""The decoder of models that have layers with Mamba-2: Nemotron-H, Granite 4, Bamba, Falcon-H1, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import NUM_FIELDS, LayerStates
from engine.device import DeviceConfig
from engine.models.decoder import Decoder, Layer, LayerBuilder
from engine.models.families.config import DecoderConfig
from engine.models.families.mamba import ATTENTION, BOTH, MAMBA, MambaConfig
from engine.models.feed_forward import (
    Activation,
    Experts,
    FeedForward,
    GatedMlp,
    SharedExperts,
    can_capture,
    has_grouped_products,
    stack_experts,
)
from engine.models.interface import KeepState
from engine.models.recurrent.blocks import AttentionPart, Block, FeedForwardPart, MambaPart, ParallelPart, Part, Step
from engine.models.routing import Router
from engine.weights.formats.registry import MatrixReader
from engine.weights.matmul import create_product
from engine.weights.safetensors import Weights
from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.cpu.runtime.recorder import end_layer
from kernels.layers.activation import relu_squared, silu_mul
from kernels.layers.elementwise import scale
from kernels.linear.fp32 import Product
from kernels.quantize import quantize_rows
from kernels.recurrent.mamba2 import HeadConstants

_BEGINNINGS = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}
"""Beginnings of names of tensors in checkpoints of Nemotron-H and Mamba-2, and those that other decoders have."""


class MambaBuilder(LayerBuilder):
    """Builds the layers of Bamba and Falcon-H1: a part with Mamba-2 or attention, then a feed-forward part."""

    final_norm = "model.final_layernorm"
    mamba_name, attention_name = "mamba", "self_attn"
    norm_names: tuple[str, str] = ("input_layernorm", "pre_ff_layernorm")

    def blocks(self, index: int) -> list[Block]:
        """Return the blocks of a layer by its index."""
        prefix = f"model.layers.{index}."
        first, second = (prefix + name for name in self.norm_names)
        return [
            Block(self.norm(first), self._config.norm_eps, self._mixer(prefix, index)),
            Block(self.norm(second), self._config.norm_eps, FeedForwardPart(self._second_part(prefix))),
        ]

    @property
    def sizes(self) -> MambaConfig:
        assert self._config.mamba is not None
        return self._config.mamba

    def _mixer(self, prefix: str, index: int) -> Part:
        kind = self.sizes.kinds[index]
        if kind == MAMBA:
            return self._mamba(f"{prefix}{self.mamba_name}.", index)
        attention = self._attention(f"{prefix}{self.attention_name}.", index)
        return ParallelPart(self._mamba(f"{prefix}{self.mamba_name}.", index), attention) if kind == BOTH else attention

    def _attention(self, prefix: str, index: int) -> AttentionPart:
        config = self._config
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        return AttentionPart(
            index=sum(kind in (ATTENTION, BOTH) for kind in self.sizes.kinds[:index]),
            head_dim=config.head_dim,
            factor=self._read_factor(self.sizes.attention_factor),
            qkv=self.product(
                {prefix + name: rows for name, rows in parts.items()}, config.hidden_size, bias=config.qkv_bias
            ),
            output=self.linear(f"{prefix}o_proj", config.hidden_size, query, bias=config.output_bias),
        )

    def _mamba(self, prefix: str, index: int) -> MambaPart:
        sizes, hidden, device = self.sizes, self._config.hidden_size, self._device_config.device
        factors = None
        if sizes.factors is not None:
            parts = zip(sizes.projections, sizes.factors, strict=True)
            factors = torch.cat([torch.full((1, rows), factor, device=device) for rows, factor in parts], dim=1)
        filters = self.constant(f"{prefix}conv1d.weight", sizes.channels, 1, sizes.width)
        filter_bias = self.constant(f"{prefix}conv1d.bias", sizes.channels) if sizes.has_convolution_bias else None
        if self._weights.has(f"{prefix}A"):  # in a GGUF file
            rates = self.constant(f"{prefix}A", sizes.heads)
        else:
            rates = -self.constant(f"{prefix}A_log", sizes.heads).exp()
        constants = HeadConstants(
            rates,
            self.constant(f"{prefix}dt_bias", sizes.heads),
            self.constant(f"{prefix}D", sizes.heads),
            *sizes.step_sizes,
        )
        return MambaPart(
            index=sum(other in sizes.state_layers for other in range(index)),
            sizes=sizes,
            projection=self.linear(f"{prefix}in_proj", sum(sizes.projections), hidden, bias=sizes.has_bias),
            factors=factors,
            filters=filters[:, 0].T.contiguous(),
            filter_bias=filter_bias,
            heads=constants,
            norm=self.norm(f"{prefix}norm", sizes.inner).view(sizes.groups, -1) if sizes.has_norm else None,
            output_factor=self._read_factor(sizes.output_factor),
            output=self.linear(f"{prefix}out_proj", hidden, sizes.inner, bias=sizes.has_bias),
        )

    def _read_factor(self, factor: float) -> Tensor | None:
        return None if factor == 1 else torch.tensor([[factor]], device=self._device_config.device)

    def _create_experts(
        self,
        router: Router,
        pairs: Sequence[tuple[Product, Product]],
        activation: Activation,
        prepare: Product | None = None,
        finish: Product | None = None,
    ) -> Experts:
        """Return experts from the two products of each, stacked where they can be multiplied together."""
        device_config = self._device_config
        stacked = stack_experts(pairs, activation) if has_grouped_products(device_config) else None
        return Experts(
            router,
            stacked or [GatedMlp(*pair, activation) for pair in pairs],
            is_batch_invariant=device_config.is_batch_invariant,
            prepare=prepare,
            finish=finish,
        )

    def _second_part(self, prefix: str) -> FeedForward:
        config, names = self._config, f"{prefix}feed_forward."
        gate_up = self.product(
            {f"{names}gate_proj": config.intermediate, f"{names}up_proj": config.intermediate},
            config.hidden_size,
            bias=config.mlp_bias,
        )
        down = self.linear(f"{names}down_proj", config.hidden_size, config.intermediate, bias=config.mlp_bias)
        factors = self.sizes.mlp_factors
        if factors is None:
            return GatedMlp(gate_up, down, self._activation)
        gate, result = factors
        return GatedMlp(gate_up, down, _ScaledActivation(gate, result, config.intermediate, self._device_config.device))


class GraniteBuilder(MambaBuilder):
    """Builds the layers of Granite 4, in which experts are added to a feed-forward part that is always there."""

    final_norm = "model.norm"
    norm_names = "input_layernorm", "post_attention_layernorm"

    def _second_part(self, prefix: str) -> FeedForward:
        config, names = self._config, f"{prefix}shared_mlp."
        parts = {f"{names}input_linear": 2 * config.intermediate}
        if self._weights.has(f"{names}gate_proj.weight"):  # in a GGUF file
            parts = dict.fromkeys((f"{names}gate_proj", f"{names}up_proj"), config.intermediate)
        shared = GatedMlp(
            self.product(parts, config.hidden_size, bias=False),
            self.linear(f"{names}output_linear", config.hidden_size, config.intermediate, bias=False),
            self._activation,
        )
        return shared if config.experts is None else SharedExperts(self._experts(prefix), shared, None)

    def _experts(self, prefix: str) -> Experts:
        moe, hidden = self._config.experts, self._config.hidden_size
        assert moe is not None
        names, count, width = f"{prefix}{moe.router}.", moe.num_experts, moe.intermediate
        if self._weights.has(f"{names}experts.0.gate_proj.weight"):  # in a GGUF file
            pairs = [self._expert_products(f"{names}experts.{index}.", width) for index in range(count)]
        else:
            gate_ups = self._weights.take_floats(f"{names}input_linear.weight", count, 2 * width, hidden)
            downs = self._weights.take_floats(f"{names}output_linear.weight", count, hidden, width)
            pairs = [
                (
                    create_product([gate_up], None, self._device_config),
                    create_product([down], None, self._device_config),
                )
                for gate_up, down in zip(gate_ups, downs, strict=True)
            ]
        router = Router(moe.routing, self.linear(f"{names}router.layer", count, hidden, bias=False))
        return self._create_experts(router, pairs, self._activation)

    def _expert_products(self, prefix: str, width: int) -> tuple[Product, Product]:
        hidden = self._config.hidden_size
        gate_up = self.product(dict.fromkeys((f"{prefix}gate_proj", f"{prefix}up_proj"), width), hidden, bias=False)
        return gate_up, self.linear(f"{prefix}down_proj", hidden, width, bias=False)


class SinglePartBuilder(MambaBuilder):
    """Builds the layers of Nemotron-H and Mamba-2, each of which is one part alone."""

    final_norm = "model.norm"
    mamba_name = attention_name = "mixer"

    def blocks(self, index: int) -> list[Block]:
        prefix = f"model.layers.{index}."
        is_mixer = self.sizes.kinds[index] in (MAMBA, ATTENTION)
        part = self._mixer(prefix, index) if is_mixer else FeedForwardPart(self.feed_forward(prefix, index))
        return [Block(self.norm(f"{prefix}norm"), self._config.norm_eps, part)]

    def feed_forward(self, prefix: str, index: int) -> FeedForward:
        moe, names = self._config.experts, f"{prefix}mixer."
        if moe is None or index not in moe.layers:
            return self._ungated(names, self._config.intermediate, bias=self._config.mlp_bias)
        shared = self._ungated(f"{names}{moe.shared_name}.", moe.shared_intermediate, bias=self._config.mlp_bias)
        return SharedExperts(self._experts(prefix), shared, None)

    def _ungated(self, prefix: str, width: int, *, bias: bool) -> GatedMlp:
        hidden = self._config.hidden_size
        up = self.linear(f"{prefix}up_proj", width, hidden, bias=bias)
        return GatedMlp(up, self.linear(f"{prefix}down_proj", hidden, width, bias=bias), relu_squared)

    def _experts(self, prefix: str) -> Experts:
        config, moe, names = self._config, self._config.experts, f"{prefix}mixer."
        assert moe is not None
        size = moe.latent or config.hidden_size
        pairs = [
            (
                self.linear(f"{names}experts.{index}.up_proj", moe.intermediate, size, bias=False),
                self.linear(f"{names}experts.{index}.down_proj", size, moe.intermediate, bias=False),
            )
            for index in range(moe.num_experts)
        ]
        prepare = finish = None
        if moe.latent is not None:
            prepare = self.linear(f"{names}fc1_latent_proj", size, config.hidden_size, bias=config.mlp_bias)
            finish = self.linear(f"{names}fc2_latent_proj", config.hidden_size, size, bias=config.mlp_bias)
        correction = self.constant(f"{names}gate.e_score_correction_bias", moe.num_experts)
        gate = self.linear(f"{names}gate", moe.num_experts, config.hidden_size, bias=False)
        return self._create_experts(
            Router(moe.routing, gate, correction), pairs, relu_squared, prepare=prepare, finish=finish
        )


class MambaDecoder(Decoder):
    """A ``Model`` whose layers consist of blocks."""

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> MambaBuilder:
        if config.mamba_names != "single":
            kind = GraniteBuilder if config.mamba_names == "granite" else MambaBuilder
            return kind(config, weights, read, device_config)
        weights.rename(_BEGINNINGS)
        weights.drop_all("mtp.")  # layers for multi-token prediction
        return SinglePartBuilder(config, weights, read, device_config)

    def _create_layers(self, builder: LayerBuilder) -> list[Layer]:
        assert isinstance(builder, MambaBuilder)
        self._blocks = [builder.blocks(index) for index in range(self.config.num_layers)]
        return []

    @property
    def products(self) -> list[Product]:
        return [product for blocks in self._blocks for block in blocks for product in block.part.products]

    @property
    def is_recordable(self) -> bool:
        return super().is_recordable and all(block.part.is_recordable for blocks in self._blocks for block in blocks)

    @property
    def is_capturable(self) -> bool:
        parts = (block.part for blocks in self._blocks for block in blocks)
        return all(can_capture(part.feed_forward) for part in parts if isinstance(part, FeedForwardPart))

    def project_first(self, hidden: Tensor) -> Tensor:
        return self._blocks[0][0].project(hidden)

    def attend(
        self,
        index: int,
        qkv: Tensor,
        angles: Sequence[Tensor],
        attend: FusedAttentionBackend,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Return what the first part of a layer, by its index, mixes, and write its keys, values and states."""
        states = states or LayerStates((), torch.empty(0, NUM_FIELDS, dtype=torch.int64))
        return self._blocks[index][0].part.mix(qkv, Step(attend, angles, states))

    def forward_between(
        self,
        index: int,
        hidden: Tensor,
        attn_out: Tensor,
        keep: KeepState | None = None,
        by_layer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        hidden = self._finish_layer(index, hidden, attn_out)
        if keep is not None:
            keep(index + 1, hidden)
        end_layer()
        return hidden, self._blocks[index + 1][0].project(hidden)

    def forward_last_mlp(self, hidden: Tensor, attn_out: Tensor, by_layer: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self._finish_layer(self.config.num_layers - 1, hidden, attn_out)

    def _finish_layer(self, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return the hidden states after a layer, by its index, from those before it and what its first part mixed."""
        first, *others = self._blocks[index]
        hidden = first.part.finish(mixed, hidden)
        for block in others:
            hidden = block.part.finish(block.project(hidden), hidden)
        return hidden


class _ScaledActivation:
    """An ``Activation``: ``silu(gate * gate_factor) * up * result_factor``, which overwrites ``gate_up``."""

    def __init__(self, gate_factor: float, result_factor: float, width: int, device: torch.device) -> None:
        factors = torch.tensor([[gate_factor, result_factor]], device=device)
        self._factors = factors.repeat_interleave(width, dim=1)

    @overload
    def __call__(self, gate_up: Tensor, quantization: None = None) -> Tensor: ...
    @overload
    def __call__(self, gate_up: Tensor, quantization: Quantization) -> QuantizedRows: ...
    def __call__(self, gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
        scale(gate_up, self._factors)
        result = silu_mul(gate_up)
        return result if quantization is None else quantize_rows(result, quantization)
