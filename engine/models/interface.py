"""The interface between the step loop and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import StateStep
from engine.device import DeviceConfig, to_device
from engine.models.config import ModelConfig

KeepState = Callable[[int, Tensor], None]
"""Function that receives the number of a layer, from 1, and a step's hidden states ``[tokens, hidden]`` after it.

They must be copied if kernels are recorded, which may overwrite them.
"""


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Tokens of a batch that the step before it has sampled on the device, and that the host has not read."""

    sampled: Tensor
    """``[samples]`` all tokens that the step before has sampled; -1 where logits were not finite."""
    sources: tuple[Sequence[int], Sequence[int]] | None = None
    """Indices in the batch, and the index in ``sampled`` for each of them; ``None``: all, in their order."""

    def fill(self, tokens: Tensor) -> None:
        """Write them to their places among the tokens ``[tokens or more]`` of the batch on the device."""
        # The host finds out about logits that are not finite later; -1 must not be looked up in the embedding table.
        if self.sources is None:
            torch.clamp(self.sampled, min=0, out=tokens[: len(self.sampled)])
        else:
            rows, indices = to_device(torch.tensor(self.sources, dtype=torch.int64), tokens.device)
            tokens[rows] = self.sampled[indices].clamp_(min=0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, rows one after the other."""

    tokens: Tensor
    """``[tokens]`` token ids."""
    positions: Tensor
    """``[tokens]`` positions in their sequences."""
    unread: UnreadTokens | None = None
    """Tokens to write over those of a batch on the host, once it is on the device."""
    states: StateStep | None = None
    """The states that the step reads and writes, of a model that has layers with states."""
    adapters: Tensor | None = None
    """int64 ``[tokens]`` on the host: the index of each token's adapter, -1 for none; ``None`` if no token has one."""


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
