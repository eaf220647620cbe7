"""AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): scale columns with large inputs up before rounding, and what
produces those inputs down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.families.config import DecoderConfig
from engine.quantization.calibration import Observed
from engine.quantization.options import Options, resolve_group_size
from engine.quantization.rounding import round_asymmetric, round_clipped
from engine.weights.formats import awq
from engine.weights.safetensors import Weights

_STEPS = 20
"""Exponents between 0 and 1 that are tried (section 3.2)."""


def search_scales(weights: Sequence[Tensor], gram: Tensor, magnitudes: Tensor, bits: int, group: int) -> Tensor:
    """Return factors ``[in]`` for the columns of matrices with the same inputs.

    They are powers of the inputs' mean magnitude, with the exponent at which rounding changes the products least.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs, which gives the exact squared change of the products.
    """
    best, least_change = torch.ones_like(magnitudes), float("inf")
    for step in range(_STEPS):
        scales = magnitudes.clamp(min=1e-4) ** (step / _STEPS)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        change = 0.0
        for weight in weights:
            error = round_asymmetric(weight * scales, bits, group).dense().div_(scales).sub_(weight)
            change += float(((error @ gram) * error).sum())
        if change < least_change:
            best, least_change = scales, change
    return best


def awq_layer(
    config: DecoderConfig, prefix: str, products: Sequence[Observed], others: Weights, options: Options
) -> dict[str, Tensor]:
    """Quantise the four products of a layer, which compute with the rounded weights from then on.

    Returns the matrices' tensors and, in float32, the norms and biases that are scaled down in return. ``others``: the
    reader to take the checkpoint's norms and biases from.
    """
    qkv, output, gate_up, down = products
    scale_up = [
        _search(qkv, options),
        _search(output, options, config),
        _search(gate_up, options),
        _search(down, options),
    ]
    """Factors of each product's columns."""
    scale_down: dict[str, Tensor] = {}
    """Divisors of a matrix's rows, whose results are the inputs of scaled columns."""
    tensors: dict[str, Tensor] = {}
    value, up = list(qkv.matrices)[2], list(gate_up.matrices)[1]
    scale_down[value] = scale_up[1].view(config.kv_heads, -1, config.head_dim)[:, 0].flatten()
    scale_down[up] = scale_up[3]
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    for norm, factors in (("input_layernorm", scale_up[0]), (mlp_norm, scale_up[2])):
        weight = others.take(f"{prefix}{norm}.weight", config.hidden_size) + config.norm_offset
        tensors[f"{prefix}{norm}.weight"] = weight / factors - config.norm_offset
    for name, factors in scale_down.items():
        if others.has(f"{name}.bias"):
            tensors[f"{name}.bias"] = others.take(f"{name}.bias", len(factors)) / factors
    for index, product in enumerate(products):
        rounded = {}
        for name, weight in product.matrices.items():
            rows = scale_down.get(name, torch.ones(len(weight)))[:, None]
            gram = product.gram / scale_up[index] / scale_up[index][:, None]
            size = resolve_group_size(options, weight.shape[1])
            matrix = round_clipped(weight * scale_up[index] / rows, options.bits, size, gram)
            tensors |= awq.pack_matrix(name, matrix)
            rounded[name] = matrix.dense() / scale_up[index] * rows
        product.replace(rounded)
    return tensors


def _search(product: Observed, options: Options, shared: DecoderConfig | None = None) -> Tensor:
    """Search a product's factors. ``shared``: columns from the same value head get the same factors."""
    weights, magnitudes = list(product.matrices.values()), product.input_sums / product.num_inputs
    if shared is not None:
        heads = magnitudes.view(shared.kv_heads, -1, shared.head_dim)
        magnitudes = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    return search_scales(
        weights,
        product.gram,
        magnitudes=magnitudes,
        bits=options.bits,
        group=resolve_group_size(options, len(magnitudes)),
    )
