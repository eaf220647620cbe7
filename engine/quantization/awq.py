"""AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): columns with large inputs are made larger before rounding,
and whatever gives those inputs smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.families import DecoderConfig
from engine.quantization.calibration import Observed
from engine.quantization.options import Options, group
from engine.quantization.rounding import asymmetric, clipped
from engine.weights.formats import awq
from engine.weights.safetensors import Weights

_STEPS = 20
"""Of the exponent between 0 and 1 (section 3.2)."""


def search_scales(weights: Sequence[Tensor], gram: Tensor, size: Tensor, bits: int, group: int) -> Tensor:
    """Factors ``[in]`` for the columns of matrices with the same inputs: powers of the inputs' mean size ``size``, with
    the exponent at which rounding changes the products least.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs, which gives the exact squared change of the products.
    """
    best, least = torch.ones_like(size), float("inf")
    for step in range(_STEPS):
        scales = size.clamp(min=1e-4) ** (step / _STEPS)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        change = 0.0
        for weight in weights:
            wrong = asymmetric(weight * scales, bits, group).dense().div_(scales).sub_(weight)
            change += float(((wrong @ gram) * wrong).sum())
        if change < least:
            best, least = scales, change
    return best


def awq_layer(
    config: DecoderConfig, prefix: str, products: Sequence[Observed], others: Weights, options: Options
) -> dict[str, Tensor]:
    """Quantises the four products of a layer, which compute with the rounded weights from then on.

    Returns the matrices' tensors, and those that have to change with them, float32: the norms and the biases of what
    the columns were made larger against. ``others``: where the checkpoint's own are taken.
    """
    qkv, output, gate_up, down = products
    larger = [
        _search(qkv, options),
        _search(output, options, config),
        _search(gate_up, options),
        _search(down, options),
    ]
    """The factors of each product's columns."""
    smaller: dict[str, Tensor] = {}
    """What the rows of a matrix are divided by, because its results are the inputs of such columns."""
    tensors: dict[str, Tensor] = {}
    value, up = list(qkv.matrices)[2], list(gate_up.matrices)[1]
    smaller[value] = larger[1].view(config.kv_heads, -1, config.head_dim)[:, 0].flatten()
    smaller[up] = larger[3]
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    for norm, factors in (("input_layernorm", larger[0]), (mlp_norm, larger[2])):
        weight = others.take(f"{prefix}{norm}.weight", config.hidden_size) + config.norm_offset
        tensors[f"{prefix}{norm}.weight"] = weight / factors - config.norm_offset
    for name, factors in smaller.items():
        if others.has(f"{name}.bias"):
            tensors[f"{name}.bias"] = others.take(f"{name}.bias", len(factors)) / factors
    for index, product in enumerate(products):
        rounded = {}
        for name, weight in product.matrices.items():
            rows = smaller.get(name, torch.ones(len(weight)))[:, None]
            gram = product.gram / larger[index] / larger[index][:, None]
            size = group(options, weight.shape[1])
            matrix = clipped(weight * larger[index] / rows, options.bits, size, gram)
            tensors |= awq.pack_matrix(name, matrix)
            rounded[name] = matrix.dense() / larger[index] * rows
        product.replace(rounded)
    return tensors


def _search(product: Observed, options: Options, shared: DecoderConfig | None = None) -> Tensor:
    """``shared``: columns that come from the same value head get the same factors."""
    weights, sizes = list(product.matrices.values()), product.sizes / product.rows
    if shared is not None:
        heads = sizes.view(shared.kv_heads, -1, shared.head_dim)
        sizes = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    return search_scales(weights, product.gram, sizes, options.bits, group(options, len(sizes)))
