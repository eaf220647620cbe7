"""The decoder of gpt-oss: attention with sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from engine.device import DeviceConfig
from engine.models.decoder import Decoder, LayerBuilder
from engine.models.families.config import Clamp, DecoderConfig, ExpertsConfig
from engine.models.feed_forward import Experts, GatedMlp, has_grouped_products, stack_4_bit_experts, stack_experts
from engine.models.routing import Router
from engine.weights.formats import mxfp4
from engine.weights.formats.registry import MatrixReader
from engine.weights.matmul import create_product
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights
from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.layers.activation import clamped_silu_mul
from kernels.quantize import quantize_rows


class GptOssBuilder(LayerBuilder):
    """Builds layers whose experts are stacked, the rows of gate and up alternating."""

    def _experts(self, prefix: str) -> Experts:
        moe, hidden = self._config.experts, self._config.hidden_size
        assert moe is not None
        assert moe.clamp is not None
        names, count, width = f"{prefix}{moe.router}.experts.", moe.num_experts, moe.intermediate
        gate_ups, downs = self._matrices(names, moe)
        if self._weights.has(f"{names}gate_proj.bias"):  # in a GGUF file
            parts = [self._weights.take(f"{names}{part}_proj.bias", count, width) for part in ("gate", "up")]
            gate_up_biases = torch.cat(parts, dim=1)
            down_biases = self._weights.take(f"{names}down_proj.bias", count, hidden)
        else:
            biases = self._weights.take(f"{names}gate_up_proj_bias", count, 2 * width)
            gate_up_biases = torch.cat((biases[:, ::2], biases[:, 1::2]), dim=1)
            down_biases = self._weights.take(f"{names}down_proj_bias", count, hidden)
        activation = _ClampedActivation(moe.clamp)
        pairs = [
            (
                create_product(gate_up, gate_up_bias, self._device_config),
                create_product([down], down_bias, self._device_config),
            )
            for gate_up, gate_up_bias, down, down_bias in zip(gate_ups, gate_up_biases, downs, down_biases, strict=True)
        ]
        stacked = stack_experts(pairs, activation) if has_grouped_products(self._device_config) else None
        stacked = stacked or stack_4_bit_experts(
            pairs, activation, is_batch_invariant=self._device_config.is_batch_invariant
        )
        return Experts(
            Router(moe.routing, self.linear(f"{prefix}{moe.router}.router", count, hidden, bias=True)),
            stacked or [GatedMlp(gate_up, down, activation) for gate_up, down in pairs],
            is_batch_invariant=self._device_config.is_batch_invariant,
        )

    def _matrices(self, names: str, moe: ExpertsConfig) -> tuple[Sequence[Sequence[Matrix]], Sequence[Matrix]]:
        """Return each expert's matrices of gate and up, the rows of the gate first, and its matrix of down.

        A GGUF file has the gates and the others apart; elsewhere their rows alternate.
        """
        count, width, hidden = moe.num_experts, moe.intermediate, self._config.hidden_size
        if self._weights.has(f"{names}0.gate_proj.weight"):
            gates, ups = (
                [self._read(self._weights, f"{names}{index}.{part}_proj", width, hidden) for index in range(count)]
                for part in ("gate", "up")
            )
            downs = [self._read(self._weights, f"{names}{index}.down_proj", hidden, width) for index in range(count)]
            return list(zip(gates, ups, strict=True)), downs
        if mxfp4.has_stack(self._weights, f"{names}gate_up_proj"):
            order = _separate(torch.arange(2 * width))
            gate_ups = mxfp4.take_stack(self._weights, f"{names}gate_up_proj", (count, 2 * width, hidden), order)
            return [[one] for one in gate_ups], mxfp4.take_stack(
                self._weights, f"{names}down_proj", (count, hidden, width)
            )
        stacked = self._weights.take_floats(f"{names}gate_up_proj", count, hidden, 2 * width).transpose(1, 2)
        transposed = self._weights.take_floats(f"{names}down_proj", count, width, hidden).transpose(1, 2)
        return [[_separate(rows)] for rows in stacked], [down.contiguous() for down in transposed]


class GptOssDecoder(Decoder):
    """A ``Model`` with sinks in every layer."""

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LayerBuilder:
        _check_blocks(config, weights)
        attention = tuple(
            replace(
                layer,
                sinks=weights.take(f"model.layers.{index}.self_attn.sinks", layer.heads).to(device_config.device),
            )
            for index, layer in enumerate(config.attention)
        )
        self.config = replace(config, attention=attention)
        return GptOssBuilder(config, weights, read, device_config)


def _check_blocks(config: DecoderConfig, weights: Weights) -> None:
    """Raise ``EngineError`` if experts in MXFP4 do not fit the config, before gigabytes are read."""
    moe, hidden = config.experts, config.hidden_size
    assert moe is not None
    for index in range(config.num_layers):
        names = f"model.layers.{index}.{moe.router}.experts."
        for name, rows, columns in (("gate_up", 2 * moe.intermediate, hidden), ("down", hidden, moe.intermediate)):
            if mxfp4.has_stack(weights, f"{names}{name}_proj"):
                mxfp4.check_stack(weights, f"{names}{name}_proj", (moe.num_experts, rows, columns))


class _ClampedActivation:
    """An ``Activation``: ``clamped_silu_mul`` with the constants of a model."""

    def __init__(self, clamp: Clamp) -> None:
        self._clamp = clamp

    @overload
    def __call__(self, gate_up: Tensor, quantization: None = None) -> Tensor: ...
    @overload
    def __call__(self, gate_up: Tensor, quantization: Quantization) -> QuantizedRows: ...
    def __call__(self, gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
        result = clamped_silu_mul(gate_up, alpha=self._clamp.alpha, limit=self._clamp.limit)
        return result if quantization is None else quantize_rows(result, quantization)


def _separate(rows: Tensor) -> Tensor:
    """Return the rows of the gate, then those of up, of a tensor in which they alternate."""
    return torch.cat((rows[::2], rows[1::2]))
