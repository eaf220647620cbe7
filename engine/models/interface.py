"""What the step loop asks of a model, whoever defines its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.device import DeviceConfig
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, rows one after the other."""

    tokens: Tensor
    """``[tokens]`` token ids."""
    positions: Tensor
    """``[tokens]`` positions within their sequences."""


class Model(Protocol):
    """Weights and a forward pass over paged keys and values."""

    @property
    def config(self) -> ModelConfig:
        """What the engine needs to know of the model."""
        ...

    @property
    def device_config(self) -> DeviceConfig:
        """Where it is computed, and so where hidden states and logits lie."""
        ...

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        ...

    def forward(self, batch: Batch, attend: FusedAttentionBackend) -> Tensor:
        """The final hidden states ``[tokens, hidden]``. All earlier tokens of each row must be in the cache."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """The rows ``[tokens, hidden]`` of the embedding table, as the checkpoint has them."""
        ...

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """Logits ``[rows, vocab]`` (``[rows, labels]`` of a classifier) of chosen rows of ``forward``'s result.

        With ``token_ids`` only their columns, in their order.
        """
        ...
