"""The interface of an EAGLE head's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.attention.layer import LayerAttentionConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention function from queries, keys and values ``[tokens, heads, head_dim]`` to ``[tokens, heads * head_dim]``."""


class DraftLayer(Protocol):
    """A head's weights, and its forward pass around any attention."""

    kind: str
    """Kind of the drafter."""
    layer_config: LayerAttentionConfig
    state_size: int
    """Size of the state that it reads of each of the target's positions."""
    observed_layers: tuple[int, ...]
    """The same as those of ``Drafter``."""

    def create_rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the ``rotary_tables`` of its attention."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[tokens, hidden]`` of tokens on the host."""
        ...

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features ``[tokens, hidden]`` of positions from the target's states ``[tokens, state_size]``."""
        ...

    def __call__(self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the next features, from those at some positions and the embeddings of the tokens after them,
        ``[tokens, hidden]`` each."""
        ...

    def compute_logits(self, features: Tensor) -> Tensor:
        """Return float32 logits ``[rows, vocab]`` of the target's vocabulary from predicted features."""
        ...
