"""Multi-token prediction: a layer of a checkpoint's own that predicts the token after the next one.

DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.2. From the final hidden state at a position and the token
that follows it, one more layer predicts a hidden state of the next position, which the model's own head reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.models.config import read_raw_config
from engine.models.decoder import Decoder, Layer
from engine.models.load import open_weights
from engine.protocol.types import EngineError
from engine.weights.safetensors import Weights
from kernels.linear.fp32 import Product


@dataclass(frozen=True, slots=True)
class PredictionLayer:
    """The layer and what is around it."""

    embedding_norm: Tensor
    """``[hidden]``, of the next token's embedding."""
    hidden_norm: Tensor
    """``[hidden]``, of the hidden state, whose final norm was applied before."""
    fuse: Product
    """``[hidden, 2 * hidden]``: of the normalised embedding, then the normalised hidden state."""
    layer: Layer
    final_norm: Tensor
    """``[hidden]``, in place of the model's own before the head."""


def open_prediction_layer(folder: Path, model: Decoder) -> PredictionLayer:
    """Read the layer in the checkpoint of ``model``.

    A checkpoint with several has one for each further token; the first one is read. Raises ``EngineError`` if there is
    none, or a tensor is missing or does not fit.
    """
    raw = read_raw_config(folder)
    weights, read = open_weights(raw)
    builder = model.create_builder(model.config, weights, read, model.device_config)
    names = builder.prediction_names
    if names is None or not (weights.has(f"{names.fuse}.weight") or _has_any(weights, names.layer)):
        raise EngineError(f"{folder} has no layer for multi-token prediction; choose another drafter than mtp")
    hidden = model.config.hidden_size
    return PredictionLayer(
        embedding_norm=builder.norm(names.embedding_norm),
        hidden_norm=builder.norm(names.hidden_norm),
        fuse=builder.linear(names.fuse, hidden, 2 * hidden, bias=False),
        layer=builder.prediction_layer(names.layer),
        final_norm=builder.norm(names.final_norm),
    )


def _has_any(weights: Weights, beginning: str) -> bool:
    return any(name.startswith(beginning) for name in weights.names())
