"""The interface between the step loop and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.device import DeviceConfig
from engine.models.config import ModelConfig

KeepState = Callable[[int, Tensor], None]
"""Function that receives the number of a layer, from 1, and a step's hidden states ``[tokens, hidden]`` after it.

They must be copied if kernels are recorded, which may overwrite them.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, rows one after the other."""

    tokens: Tensor
    """``[tokens]`` token ids."""
    positions: Tensor
    """``[tokens]`` positions in their sequences."""


class Model(Protocol):
    """Weights and a forward pass over the paged KV cache."""

    device_config: DeviceConfig
    """Device and dtype of weights, hidden states and logits."""
    parameters: int
    """Number of weights; tied ones count once."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and limits of the model."""
        ...

    def forward(self, batch: Batch, attend: FusedAttentionBackend, keep: KeepState | None = None) -> Tensor:
        """Return the final hidden states ``[tokens, hidden]``. All earlier tokens of each row must be in the cache.

        ``keep`` receives the hidden states after each layer but the last.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows ``[tokens, hidden]`` of the embedding table, unscaled."""
        ...

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        """Return logits ``[rows, vocab]`` (a classifier: ``[rows, labels]``) of some rows of ``forward``'s result.

        With ``token_ids``, return only their columns, in their order.
        """
        ...
