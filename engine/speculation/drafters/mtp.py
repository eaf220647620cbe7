"""Drafter: the checkpoint's own layer for multi-token prediction, see ``engine.models.prediction``.

It drafts as an EAGLE layer does (``eagle``), whose entries lie in the target's pages. To draft further the layer reads
its own result in place of the target's hidden state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.models.decoder import Decoder
from engine.models.interface import Model
from engine.models.prediction import PredictionLayer, open_prediction_layer
from engine.protocol.types import EngineError
from engine.speculation.drafters.draft_layer import Attend
from engine.speculation.drafters.eagle import EagleDrafter
from kernels.common.rotary import rotary
from kernels.layers.norm import rms_norm

KIND = "mtp"


def load_mtp(folder: Path, model: Model) -> EagleDrafter:
    """Load the layer of the checkpoint in ``folder``, from which ``model`` was loaded. Raises ``EngineError``."""
    if not isinstance(model, Decoder):
        raise EngineError(f"{folder}: layers for multi-token prediction are not read for {model.config.architecture}")
    return EagleDrafter(_Layer(open_prediction_layer(folder, model), model), model)


class _Layer:
    """The ``DraftLayer`` of multi-token prediction. Features are hidden states after a last norm."""

    kind = KIND
    observed_layers: tuple[int, ...] = ()

    def __init__(self, parts: PredictionLayer, model: Decoder) -> None:
        self._parts, self._model = parts, model
        self.layer_config = model.config.first_attention
        self.state_size = model.config.hidden_size
        self.embed, self.fuse, self.compute_logits = model.embed, model.normalize, model.read_logits

    def create_rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._model.config.ropes[-1].tables(positions)
        return cos, sin

    def __call__(self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        parts, eps = self._parts, self._model.config.norm_eps
        normed = rms_norm(embedded, parts.embedding_norm, eps), rms_norm(features, parts.hidden_norm, eps)
        hidden = parts.fuse(torch.cat(normed, dim=1))
        attention = _FusedAttention(self.layer_config, attend)
        mixed = parts.layer.attend(parts.layer.project(hidden), angles, attention)
        hidden, _ = parts.layer.forward_mlp(hidden, mixed)
        return rms_norm(hidden, parts.final_norm, eps)


class _FusedAttention:
    """A ``FusedAttentionBackend`` of one layer around any attention."""

    def __init__(self, config: LayerAttentionConfig, attend: Attend) -> None:
        self._config, self._attend = config, attend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert layer == 0
        return self._attend(q, k, v)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        assert layer == 0
        heads, both = self._config.heads, self._config.heads + self._config.kv_heads
        qk = qkv[:, :both].contiguous()
        qk = rotary(qk if norm is None else rms_norm(qk, norm, eps), cos, sin).to(qkv.dtype)
        keys = qk[:, heads:]
        return self._attend(qk[:, :heads], keys, qkv[:, both:] if self._config.shape.has_values else keys)
